# SPDX-License-Identifier: Apache-2.0
"""The manifest file: where it is, what a bad one does, and that saving never loses or tears anything."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python

import tunekit as tk
from tunekit import _manifest, cpu


def test_the_file_lies_in_the_state_folder_under_the_box(toy: Any, tmp_path: Path) -> None:
    path = toy.toy.manifest_set("k2")
    assert path == tmp_path / "state" / cpu.this_box().key / "toyscope.tune.json"
    assert json.loads(path.read_text()) == {"toy": "k2"}
    assert toy.toy.manifest_get() == "k2"


def test_a_row_outside_the_grid_is_refused(toy: Any) -> None:
    with pytest.raises(tk.ManifestError, match="kernel 'toy' has no row 'k77'"):
        toy.toy.manifest_set("k77")


def test_unknown_keys_stay_on_save(toy: Any) -> None:
    path = _manifest.user_path("toyscope")
    path.parent.mkdir(parents=True)
    path.write_text('{"somebody_else": "x", "future": {"nested": [1]}, "toy": "k1"}')
    toy.toy.manifest_set("k2")
    assert json.loads(path.read_text()) == {"somebody_else": "x", "future": {"nested": [1]}, "toy": "k2"}


@pytest.mark.parametrize("bad", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000])
def test_a_bad_file_is_kept_beside_the_new_one(toy: Any, bad: bytes) -> None:
    path = _manifest.user_path("toyscope")
    path.parent.mkdir(parents=True)
    path.write_bytes(bad)
    toy.toy.manifest_set("k2")
    assert json.loads(path.read_text()) == {"toy": "k2"}
    assert path.with_name(path.name + ".bad").read_bytes() == bad


def test_the_environment_names_the_one_file(toy: Any, environ: Callable[..., None], tmp_path: Path) -> None:
    environ(MANIFEST=str(tmp_path / "own.json"))
    assert toy.toy.manifest_set("k2") == tmp_path / "own.json"
    assert toy.toy.choice().suffix == "k2"


def test_an_empty_variable_means_no_manifest(toy: Any, environ: Callable[..., None]) -> None:
    toy.toy.manifest_set("k2")
    environ(MANIFEST="")
    assert toy.toy.choice().source == "fallback"
    with pytest.raises(tk.ManifestError, match="TUNEKIT_MANIFEST is empty"):
        toy.toy.manifest_set("k2")


def test_a_named_file_that_is_missing_or_a_folder_is_said(
    toy: Any, environ: Callable[..., None], tmp_path: Path
) -> None:
    environ(MANIFEST=str(tmp_path / "nowhere.json"))
    assert "TUNEKIT_MANIFEST names it and it does not exist" in toy.toy.choice().reason
    environ(MANIFEST=str(tmp_path))
    assert "cannot be read" in toy.toy.choice().reason
    with pytest.raises(tk.ManifestError, match="is a folder; name a file"):
        toy.toy.manifest_set("k2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_said(toy: Any) -> None:
    path = toy.toy.manifest_set("k2")
    path.chmod(0)
    assert "cannot be read" in toy.toy.choice().reason


def test_the_machine_wide_file_sits_under_the_users(
    toy: Any, monkeypatch: pytest.MonkeyPatch, environ: Callable[..., None], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    site = tmp_path / "etc" / "tunekit" / cpu.this_box().key / "toyscope.tune.json"
    site.parent.mkdir(parents=True)
    site.write_text('{"toy": "k2"}')
    environ()
    assert (toy.toy.choice().suffix, toy.toy.choice().source) == ("k2", "manifest")
    assert toy.toy.manifest_set("k4") != site
    assert toy.toy.choice().suffix == "k4"
    assert json.loads(site.read_text()) == {"toy": "k2"}


def test_a_folder_that_cannot_be_made_is_a_clear_error(toy: Any, environ: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ(HOME=str(tmp_path / "file" / "below"))
    with pytest.raises(tk.TunekitError, match="cannot write .* TUNEKIT_HOME"):
        toy.toy.manifest_set("k2")
    environ(HOME=str(tmp_path / "file"))
    with pytest.raises(tk.TunekitError, match="TUNEKIT_HOME=.* is not a folder"):
        toy.toy.manifest_set("k2")


def test_a_full_disk_leaves_the_old_file(toy: Any) -> None:
    path = toy.toy.manifest_set("k1")
    code = (
        "import resource, signal, toy.kernels as t, tunekit as tk\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))\n"
        "try:\n    t.toy.manifest_set('k2')\nexcept tk.ManifestError as e:\n    print('refused:', e)\n"
    )
    done = run_python(code)
    assert "refused: cannot write" in done.stdout, done.stderr
    assert json.loads(path.read_text()) == {"toy": "k1"}
    assert [p.name for p in path.parent.iterdir() if p.name.endswith(".new")] == []


def test_writers_at_once_lose_nothing(toy: Any, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tunekit._manifest import save; save(Path(sys.argv[1]), {sys.argv[2]: 'k'})"
    path = tmp_path / "shared.tune.json"
    from conftest import ROOT

    children = [
        subprocess.Popen([sys.executable, "-c", code, str(path), f"kernel{i}"], cwd=ROOT / "tests") for i in range(8)
    ]
    assert [child.wait(60) for child in children] == [0] * 8
    assert json.loads(path.read_text()) == {f"kernel{i}": "k" for i in range(8)}


def test_the_record_is_written_with_the_manifest(toy: Any) -> None:
    path = _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k2"}, {"box": cpu.this_box().to_json()})
    assert path.with_name("toyscope.tune.run.json").is_file()
    record = _manifest.read_record(path)
    assert record is not None
    assert record["box"] == cpu.this_box().to_json()


def test_every_bad_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.tune.json"
    for text in ("first", "second", "third"):
        path.write_text(text)
        _manifest.save(path, {"toy": "k1"})
    kept = [(tmp_path / f"x.tune.json.bad{number}").read_text() for number in ("", "2", "3")]
    assert kept == ["first", "second", "third"]


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), NotImplementedError("no flock here")])
def test_a_turn_without_a_lock_is_said_and_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import filelock

    def refuse(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    said: list[object] = []
    with _manifest.turn(tmp_path / "lock", lambda: False, lambda: said.append("waiting"), said.append) as got:
        assert got
    assert said == [error]


def test_a_turn_that_another_has_is_waited_for_and_given_up(tmp_path: Path) -> None:
    said: list[object] = []

    def turn(over: bool) -> contextlib.AbstractContextManager[bool]:
        return _manifest.turn(tmp_path / "lock", lambda: over, lambda: said.append("waiting"), said.append)

    with turn(over=False) as first, turn(over=True) as second:
        assert (first, second, said) == (True, False, ["waiting"])
    with turn(over=False) as third:
        assert third and said == ["waiting"]
