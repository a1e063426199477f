# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit manifest``: show, diff, export, import."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunekit import _manifest, cpu, dispatch
from tunekit.__main__ import main

INSTALLED = dispatch.installed_scopes


@pytest.fixture(autouse=True)
def toy_is_installed(monkeypatch: pytest.MonkeyPatch, toy: Any) -> None:
    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels"})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*words: str) -> tuple[int, str, str]:
        status = main(["manifest", *words])
        return (status, *capsys.readouterr())

    return command


Run = Callable[..., tuple[int, str, str]]


def test_show_names_every_layer_in_order(
    run: Run, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    path = _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k2"}, {"schema": 1, "box": {"model": 99}, "ended": "2026-01-01"})
    status, out, _ = run("show")
    assert status == 0
    assert out.splitlines()[:3] == [f"toyscope (user): {path}", "  toy: k2", "  tuned 2026-01-01 on an unknown processor"]
    assert "  stale: box.model: 99 there" in out
    assert out.splitlines()[-1].startswith("toyscope (machine): ")
    assert out.splitlines()[-1].endswith(": not there")
    path.write_text('{"toy": 3}')
    user, machine = json.loads(run("show", "--json")[1])
    assert (user["layer"], user["faults"], machine["exists"]) == ("user", {"toy": "its value is 3, not the name of a row"}, False)
    path.write_text("{")
    assert "it is not JSON" in run("show")[1]


def test_diff_against_the_fallback_and_against_a_file(run: Run, toy: Any, tmp_path: Path) -> None:
    assert run("diff")[0:2] == (0, "no difference to the fallback\n")
    toy.toy.manifest_set("k2")
    status, out, _ = run("diff")
    assert status == 1
    assert out.splitlines()[-1].split() == ["toyscope.toy", "k2", "k1"]
    other = tmp_path / "toyscope.tune.json"
    other.write_text('{"toy": "k2"}')
    assert run("diff", str(other))[0] == 0
    other.write_text("{}")
    found = json.loads(run("diff", str(other), "--json")[1])["differences"]
    assert found == [{"kernel": "toyscope.toy", "here": "k2", "there": None}]


def test_export_and_import_carry_winners_to_another_box(
    run: Run, toy: Any, tmp_path: Path, environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("export")[0] == 3
    cache = str(dispatch.paths.cache_root())
    _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k2"}, {"schema": 1, "box": {**cpu.this_box().to_json(), "model": 99}, "seed": 7})
    file = tmp_path / "winners.json"
    assert run("export", "--output", str(file))[0:2] == (0, "")
    assert json.loads(run("export")[1]) == json.loads(file.read_text())

    environ(HOME=str(tmp_path / "another"), CACHE=cache)
    assert toy.toy.choice().suffix == "k1"
    status, out, _ = run("import", str(file), "--dry-run")
    assert (status, "toyscope.toy: k2 (new)" in out, "nothing was written" in out) == (0, True, True)
    assert toy.toy.choice().suffix == "k1"
    path = _manifest.user_path("toyscope")
    path.parent.mkdir(parents=True)
    path.write_text('{"kept": {"x": 1}, "toy": "k1"}')
    status, out, _ = run("import", str(file))
    assert "toyscope.toy: k2 (was k1)" in out
    assert json.loads(path.read_text()) == {"kept": {"x": 1}, "toy": "k2"}
    assert toy.toy.choice().suffix == "k2"
    main(["status"])
    assert "(unchanged)" in run("import", str(file))[1]
    assert any(line.startswith("box.model: 99 there") for line in json.loads(run("show", "--json")[1])[0]["stale"])
    # By a pipe, and into the machine's file.
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run("import", "-", "--machine")[0] == 0
    assert json.loads(_manifest.site_paths("toyscope")[0].read_text()) == {"toy": "k2"}
    assert _manifest.site_paths("toyscope")[0].is_relative_to(tmp_path / "etc")


def test_what_does_not_run_here_is_kept_and_said(run: Run, toy: Any, tmp_path: Path) -> None:
    file = tmp_path / "toyscope.tune.json"
    file.write_text('{"toy": "k77", "later": "x"}')
    status, out, _ = run("import", str(file))
    assert status == 0
    assert "toyscope.toy: k77 (new): its grid has no such row here; kept" in out
    assert "toyscope.later: x (new): no kernel of this version has that name; kept" in out
    assert json.loads(_manifest.user_path("toyscope").read_text()) == {"toy": "k77", "later": "x"}
    assert toy.toy.choice().suffix == "k1"
    file.write_text('{"toy": "k9"}')
    assert "declined: k 9 is declined on purpose" in run("import", str(file))[1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("toyscope.tune.json", b"", "it is empty"),
        ("toyscope.tune.json", b"{", "it is not JSON"),
        ("toyscope.tune.json", b"[]", "it holds JSON an array"),
        ("toyscope.tune.json", b"\xff\xfe", "it is not UTF-8 text"),
        ("toyscope.tune.json", b"[" * 100_000, "it is nested too deeply"),
        ("winners.json", b'{"toy": "k2"}', "does not say whose manifest it is; give --scope"),
        ("nobody.tune.json", b'{"toy": "k2"}', "no scope 'nobody' is installed"),
        ("x.json", b'{"format": "tunekit-manifests", "schema": 9, "scopes": {}}', "of schema 9; this tunekit reads 1"),
        ("x.json", b'{"format": "tunekit-manifests", "schema": 1, "scopes": 3}', "names no scopes"),
        ("x.json", b'{"format": "tunekit-manifests", "schema": 1, "scopes": {"toyscope": 3}}', "must hold a manifest object"),
        ("x.json", b'{"format": "tunekit-manifests", "schema": 1, "scopes": {"../x": {"manifest": {}, "record": null}}}', "no scope '../x' is installed"),
    ],
)
def test_a_bad_document_is_a_clear_error_and_changes_nothing(
    run: Run, toy: Any, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = toy.toy.manifest_set("k2")
    (tmp_path / name).write_bytes(content)
    for action in ("import", "diff"):
        if action == "diff" and "installed" in words:
            continue
        status, out, err = run(action, str(tmp_path / name))
        assert (status, out) == (2, "")
        assert words in err
    assert json.loads(path.read_text()) == {"toy": "k2"}
    for missing, what in ((tmp_path / "nowhere", "is not there"), (tmp_path, "is not a regular file")):
        status, _, err = run("import", str(missing))
        assert (status, what in err) == (2, True)


def test_a_family_without_an_entry_point(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dispatch, "installed_scopes", INSTALLED)
    for words in (("status", "--scope", "toyscope", "--module", "toy.kernels"), ("manifest", "show", "--scope", "toyscope", "--module", "toy.kernels")):
        assert main(list(words)) == 0
        assert "toyscope" in capsys.readouterr().out
    for name, what in (("no.such", "cannot be imported"), ("json", "declares no kernel")):
        assert main(["status", "--module", name]) == 2
        assert what in capsys.readouterr().err


def test_a_file_that_cannot_be_written(run: Run, toy: Any, tmp_path: Path, environ: Callable[..., None]) -> None:
    toy.toy.manifest_set("k2")
    status, _, err = run("export", "--output", str(tmp_path / "no" / "where.json"))
    assert (status, "name another file" in err) == (2, True)
    environ(MANIFEST="")
    assert "TUNEKIT_MANIFEST is empty" in run("show")[1]
    (tmp_path / "toyscope.tune.json").write_text('{"toy": "k1"}')
    assert "TUNEKIT_MANIFEST is empty" in run("import", str(tmp_path / "toyscope.tune.json"))[2]
