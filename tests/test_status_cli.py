# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit``: status, why-not, list, build, show; exit statuses, JSON, streams."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, TOY_ENVIRONMENT, forget_everything

import tunekit as tk
from tunekit import _manifest, _proofs, _status, _verdicts, cpu, dispatch
from tunekit.__main__ import main


@pytest.fixture(autouse=True)
def toy_is_installed(monkeypatch: pytest.MonkeyPatch, toy: Any) -> None:
    """The toy family as if its package had an entry point."""
    monkeypatch.setattr(
        dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels", "tunekit": "tunekit.q8.kernels"}
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    status, out, _ = run(capsys, *words, "--json")
    assert status == 0
    return json.loads(out)


def test_status_names_row_source_and_reason(capsys: pytest.CaptureFixture[str], toy: Any) -> None:
    toy.toy.manifest_set("k2")
    status, out, err = run(capsys, "status", "--scope", "toyscope")
    assert (status, err) == (0, "")
    assert f"box: {cpu.this_box().key}" in out
    assert "1/1 kernels tuned for this box" in out
    assert "toyscope.toy" in out
    assert "k2" in out
    (row,) = as_json(capsys, "status", "--scope", "toyscope")["kernels"]
    assert (row["suffix"], row["source"], row["tier"], row["stale"]) == ("k2", "manifest", "c", [])
    assert row["manifest"].endswith("toyscope.tune.json")
    assert "_tk_toyscope_" in row["module"]


def test_status_says_lanes_and_whose_numbers_dispatch_goes_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, out, _ = run(capsys, "status", "--scope", "toyscope")
    assert "by the defaults (to measure: python -m tunekit probe)" in out
    path = tmp_path / "profile.json"
    path.write_text('{"version": 1, "knobs": {"dispatch_worker_limit": 0, "team_spin_us": 9}}')
    monkeypatch.setenv("TUNEKIT_BOX_PROFILE", str(path))
    forget_everything()
    _, out, _ = run(capsys, "status", "--scope", "toyscope")
    assert f"lanes: 1, dispatch by 2 numbers of {path}" in out
    found = as_json(capsys, "status", "--scope", "toyscope")
    assert (found["lanes"], found["box_profile"]) == (1, str(path))


def test_status_fixes_no_choice(capsys: pytest.CaptureFixture[str], toy: Any) -> None:
    assert as_json(capsys, "status", "--scope", "toyscope")["kernels"][0]["suffix"] == "k1"
    toy.toy.manifest_set("k2")
    assert as_json(capsys, "status", "--scope", "toyscope")["kernels"][0]["suffix"] == "k2"


def test_an_untuned_box_says_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "status", "--scope", "toyscope")
    assert "0/1 kernels tuned" in out
    assert "(not there yet)" in out
    assert "python -m tunekit.retune" in out


def test_why_not_answers_for_every_row(capsys: pytest.CaptureFixture[str], toy: Any) -> None:
    answers = as_json(capsys, "status", "--why-not", "toy")["rows"]
    assert set(answers) == {"reference", "k1", "k2", "k3", "k4", "k9"}
    assert answers["k1"].startswith("it runs (fallback)")
    assert "no race is on record" in answers["k2"]
    assert re.search("amx-tf32: .*(bit is clear|x86)", answers["k3"])
    assert answers["k9"] == "declined: k 9 is declined on purpose"
    _, out, _ = run(capsys, "status", "--why-not", "toyscope.toy", "k9")
    assert out == "toyscope.toy k9: declined: k 9 is declined on purpose\n"


def test_why_not_tells_a_disabled_feature_from_a_missing_one(
    capsys: pytest.CaptureFixture[str], environ: Callable[..., None]
) -> None:
    feature = "sse2" if cpu.this_cpu().arch == "x86_64" else "neon"
    environ(DISABLE_FEATURES=feature, CACHE=os.environ["TUNEKIT_CACHE"])
    _, out, _ = run(capsys, "status", "--why-not", "toy", "k4")
    assert f"{feature}: disabled by TUNEKIT_DISABLE_FEATURES" in out


def test_why_not_reads_the_record_of_the_race(capsys: pytest.CaptureFixture[str], toy: Any) -> None:
    record = {"kernels": {"toy": {"rows": {"k2": {"verdict": "slower", "reason": "+9 % at sum"}}}}}
    _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k1"}, record)
    _, out, _ = run(capsys, "status", "--why-not", "toy", "k2")
    assert "retune: slower: +9 % at sum; k1 runs (manifest)" in out


def test_a_manifest_of_another_box_or_grid_is_named_field_by_field(
    capsys: pytest.CaptureFixture[str], toy: Any
) -> None:
    box = {**cpu.this_box().to_json(), "model": 99}
    record = {"box": box, "digests": {"toyscope.toy": "0" * 16}}
    _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k2"}, record)
    (row,) = as_json(capsys, "status", "--scope", "toyscope")["kernels"]
    assert row["suffix"] == "k2"  # stale and still runnable: used
    assert any(field.startswith("box.model: 99 there") for field in row["stale"])
    assert any(field.startswith("grid of toy: 0000000000000000 there") for field in row["stale"])
    _, out, _ = run(capsys, "status", "--scope", "toyscope")
    assert "stale: toyscope.toy: box.model" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", "--scope", "nobody"), "no scope 'nobody' is installed; installed: toyscope, tunekit"),
        (("status", "--why-not", "nothing"), "no kernel is called 'nothing'; known: "),
        (("status", "--why-not", "toy", "k77"), "has no row 'k77'; its rows: k1, k2"),
        (("status", "--why-not", "toy", "k1", "k2"), "--why-not takes KERNEL, or KERNEL and ROW"),
        (("show", "toy", "k77"), "has no row 'k77'"),
        (("show", "toy", "k9"), "declined for"),
        (("show", "toy", "k1", "--alternative", "3"), "has 1 alternatives"),
    ],
)
def test_usage_errors_are_status_2_on_stderr(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("words", [["nothing"], [], ["status", "--js"], ["build", "--scop", "x"]])
def test_argparse_takes_no_abbreviations_and_exits_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    families = {f["scope"]: f for f in as_json(capsys, "list")}
    assert families["toyscope"]["kernel"] == "toy"
    assert families["toyscope"]["companions"] == ["toy_k", "toy_sum"]
    assert "tunekit" in families


def test_show_prints_c_and_assembly(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "toy", "k2")
    assert "int32_t tk_toyscope_toy__k2(int32_t a, int32_t b)" in out
    _, out, _ = run(capsys, "show", "toy", "reference")
    assert "tk_toyscope_toy__reference" in out
    _, out, _ = run(capsys, "show", "toy", "k2", "--assembly")
    assert "tk_toyscope_toy__k2:" in out


def test_show_of_a_q8_row_for_any_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    row = "dot_maddubs_width256_mr8_kstep2"
    _, out, _ = run(capsys, "show", "q8q8", row, "--arch", "x86_64")
    assert "maddubs" in out
    status, _, err = run(capsys, "show", "q8q8", row, "--arch", "aarch64")
    assert status == 2
    assert "declined for aarch64" in err


def test_build_stamps_what_the_manifest_names(
    capsys: pytest.CaptureFixture[str], toy: Any, environ: Callable[..., None], tmp_path: Path
) -> None:
    environ(CACHE=str(tmp_path / "own"))
    toy.toy.manifest_set("k2")
    reports = as_json(capsys, "build", "--scope", "toyscope")
    assert [r["kind"] for r in reports] == ["fat", "stamped"]
    assert reports[1]["built"] == {"toyscope.toy": ["k2"]}
    dispatch.forget_modules()
    assert toy.toy(2, 3) == 7
    assert toy.toy.bound().module.kind == "stamped"


def test_build_without_a_compiler_is_status_3(
    capsys: pytest.CaptureFixture[str], environ: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ(CACHE=str(tmp_path / "own"))
    monkeypatch.setenv("CC", "/nowhere/cc")
    status, out, err = run(capsys, "build", "--scope", "toyscope")
    assert (status, out) == (3, "")
    assert "/nowhere/cc" in err
    assert "apt-get install gcc" in err


def test_log_status(caplog: pytest.LogCaptureFixture, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_kernels", {"toyscope.toy": toy.toy.kernel})
    with caplog.at_level(logging.INFO, logger="tunekit"):
        _status.log_status("app")
    assert [r.message for r in caplog.records] == [
        "app: 0/1 kernels tuned for this box",
        "app: toyscope.toy: k1 (fallback)",
        "app: to tune this box: python -m tunekit.retune",
    ]
    caplog.clear()
    monkeypatch.setattr(dispatch, "_kernels", {})
    with caplog.at_level(logging.INFO, logger="tunekit"):
        _status.log_status("app")
    assert caplog.records == []


def test_each_choice_is_logged_in_its_stable_form(toy: Any) -> None:
    code = "import toy.kernels as t; t.toy(2, 3); t.toy(2, 3)"
    environment = {**os.environ, **TOY_ENVIRONMENT, "TUNEKIT_LOG": "choice"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stderr
        == "tunekit: toyscope.toy <- k1 (fallback, c): no manifest; first runnable row of the fallback chain\n"
    )


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m tunekit environment | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MODE", "tunes", "normal, tune, test"),
        ("POLICY", "Fallback", "fallback, warn, error, auto, restart, reference"),
        ("BUILD", "thin", "fat, grid, reference-only, standalone, none"),
        ("STRICT", "compilers", "compiler, features, manifest"),
        ("THREADS", "0", "a whole number of at least 1"),
        ("THREADS", "two", "a whole number of at least 1"),
        ("PIN", "q8q8", "kernel=suffix"),
        ("LOG", "everything", "choice, build, tune"),
        ("TEAM_PROF", "yes", "0 or 1"),
    ],
)
def test_an_unknown_value_names_the_legal_ones(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str], name: str, value: str, words: str
) -> None:
    environ(**{name: value})
    with pytest.raises(tk.SettingError, match=words):
        tk.environment.settings()  # type: ignore[attr-defined]
    status, _, err = run(capsys, "status")
    assert status == 2
    assert f"TUNEKIT_{name}" in err


def test_a_checkout_that_nobody_installed_says_so(tmp_path: Path) -> None:
    """Run from a clone, its tunekit hides the installed one; -S keeps every installed package out of sight."""
    import shutil

    shutil.copytree(ROOT / "tunekit", tmp_path / "tunekit", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*_build.json"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    packages = tmp_path / "packages"
    packages.mkdir()
    import numpy

    for name in ("numpy", "numpy.libs", "platformdirs"):
        source = Path(numpy.__file__).parent.parent / name
        if source.is_dir():
            (packages / name).symlink_to(source)
    code = "import toy.kernels as t; print(t.toy(2, 3))"
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT / 'tests'}", "TUNEKIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "5\n", done.stderr
    assert f"imported the checkout {tmp_path}, which holds no built module and hides the installed package" in done.stderr
    done = subprocess.run([sys.executable, "-S", "-m", "tunekit", "show", "q8q8", "reference"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run: pip install -e ." in done.stderr
    assert "Traceback" not in done.stderr


# --- proofs ----------------------------------------------------------------------------------------------


def proven(row: str, state: str, reason: str = "", how: str = "this CPU") -> SimpleNamespace:
    return SimpleNamespace(
        row=row, arch="x86_64", features=("avx2",), how=how if state != "unproven" else "", state=state, reason=reason
    )


def test_rows_are_marked_by_what_verify_found(capsys: pytest.CaptureFixture[str], toy: Any) -> None:
    kernel = toy.toy.kernel
    before = as_json(capsys, "status", "--why-not", "toy")["rows"]
    _proofs.save(kernel, [proven("k1", "passed"), proven("k2", "failed", "tile: 3 of 8 differ"), proven("k4", "passed")])
    _proofs.save(kernel, [proven("k4", "unproven", "this CPU lacks it")])  # asked again alone; the others stay
    after = as_json(capsys, "status", "--why-not", "toy")["rows"]
    assert after["k1"].startswith(f"{before['k1']}; proven by this CPU on 20")
    assert after["k2"] == f"{before['k2']}; FAILED its gates (x86_64: avx2: tile: 3 of 8 differ)"
    assert after["k4"] == f"{before['k4']}; unproven here (x86_64: avx2: this CPU lacks it)"
    assert after["k9"] == before["k9"]


def test_one_unproven_object_leaves_a_row_unproven(toy: Any) -> None:
    other = proven("k1", "unproven", "no emulator")
    other.features = ("avx512f",)
    _proofs.save(toy.toy.kernel, [proven("k1", "passed"), other])
    assert _proofs.mark(toy.toy.kernel, "k1") == "unproven here (x86_64: avx512f: no emulator)"


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "{}", '{"toy": 3}', '{"toy": {"code": "CODE", "rows": []}}', '{"toy": {"code": "CODE", "rows": {"k1": 3}}}', '{"toy": {"code": "CODE", "rows": {"k1": {"x": {}}}}}', '{"toy": {"code": "other", "rows": {"k1": {"x": {"state": "failed", "how": "", "reason": "", "date": ""}}}}}'])  # fmt: skip
def test_verdicts_that_are_torn_or_of_other_code_say_nothing(toy: Any, text: str) -> None:
    path = _verdicts.path_of("toyscope")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("CODE", _proofs._code(toy.toy.kernel)))
    assert _proofs.mark(toy.toy.kernel, "k1") is None
    _proofs.save(toy.toy.kernel, [proven("k1", "passed")])
    assert "proven by this CPU" in str(_proofs.mark(toy.toy.kernel, "k1"))


def test_a_family_that_cannot_be_imported_is_named_and_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    families = {"broken": "no_such_module_here", "misnamed": "toy.kernels", "toyscope": "toy.kernels"}
    monkeypatch.setattr(dispatch, "installed_scopes", lambda: families)
    with pytest.warns(tk.TunekitWarning) as caught:
        status, out, _ = run(capsys, "list", "--json")
    assert status == 1
    listed = {f["scope"]: f for f in json.loads(out)}
    assert [scope for scope, f in listed.items() if not f["problem"]] == ["toyscope"]
    assert "no_such_module_here cannot be imported" in listed["broken"]["problem"] and listed["broken"]["kernel"] is None
    said = [str(w.message) for w in caught]
    assert "tunekit: scope 'broken': its declaring module no_such_module_here cannot be imported (ModuleNotFoundError: No module named 'no_such_module_here'); reinstall or uninstall its package" in said
    assert any("scope 'misnamed': its entry point names toy.kernels, which declares no kernel of that scope" in s for s in said)
    status, out, err = run(capsys, "status", "--scope", "broken")
    assert (status, out) == (2, "")
    assert "no_such_module_here cannot be imported" in err


def test_retune_all_and_a_scope_together_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "retune", "--all", "--scope", "toyscope")
    assert (status, out) == (2, "")
    assert "--all tunes every family; leave out --scope and --kernel, or leave out --all" in err


def test_two_packages_of_one_scope_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    def point(module: str, package: str) -> Any:
        return SimpleNamespace(name="shared", value=module, dist=SimpleNamespace(name=package))

    points = [point("one.kernels", "one"), point("two.kernels:thing", "two")]
    monkeypatch.undo()
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    with pytest.warns(tk.TunekitWarning, match=r"declare the scope 'shared': one \(one.kernels\) and two \(two.kernels\); they would share one manifest"):
        assert dispatch.installed_scopes()["shared"] == "one.kernels"


def test_verdicts_that_cannot_be_kept_are_printed_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunekit import verify

    def full(*arguments: Any) -> None:
        raise tk.ManifestError("no space left")

    monkeypatch.setattr(_proofs, "save", full)
    item = verify.Executed("toyscope.toy", "k1", "x86_64", (), "this CPU", "passed")
    monkeypatch.setattr(verify, "execution", lambda *arguments: [item])
    status, out, err = run(capsys, "verify", "--execution", "--scope", "toyscope")
    assert status == 0
    assert "1 passed, 0 failed, 0 unproven" in out
    assert err == "tunekit: the status will not show what was proven: no space left\n"
