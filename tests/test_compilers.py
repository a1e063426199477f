# SPDX-License-Identifier: Apache-2.0
"""The compiler as an axis: rows of two compilers race, the winner's compiler is on record, and its object runs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TOY_ENVIRONMENT, lacking, run_python
from measure_fakes import FakeRow, SimulatedBox
from test_measure_tuner import run, times
from test_measure_tuner import toy as gemm_house
from tunekit.build_tools import Runner, others
from tunekit.build_tools.cross import host, versioned
from tunekit.build_tools.toolchain import Toolchain

from tunekit import _manifest, dispatch, paths
from tunekit.choose import World, choose
from tunekit.environment import read_settings
from tunekit.errors import ToolchainError
from tunekit.kernel import Kernel, Scope
from tunekit.measure.family import row_digests
from tunekit.measure.journal import Journal
from tunekit.measure.record import RunRecord
from tunekit.rows import compilers_in, perm, split_name

KERNEL = Kernel("gemm", Scope("toy"), None, "t", (perm(k=1), perm(k=2)), ("k1",))  # type: ignore[arg-type]


# --- names -----------------------------------------------------------------------------------------------


def test_a_name_says_row_and_compiler() -> None:
    assert split_name("k2@clang-19") == ("k2", "clang-19")
    assert split_name("k2") == ("k2", "")
    assert compilers_in(["k1", "k2@clang", None, "k1@clang", "k1@gcc-14"]) == ("clang", "gcc-14")
    row = KERNEL.row("k2@clang")
    assert row is not None and row.suffix == "k2"


def test_a_compiler_that_could_leave_the_folder_is_none() -> None:
    assert compilers_in(["k2@../../etc/x", "k2@/usr/bin/clang", "k2@", "k2@clang@gcc"]) == ()


# --- manifest and choice ---------------------------------------------------------------------------------


def test_the_manifest_keeps_the_rows_name_and_says_the_compiler_beside_it(tmp_path: Path) -> None:
    path = _manifest.manifest_set_many(KERNEL.scope, {KERNEL: "k2@clang"})
    assert json.loads(path.read_text()) == {"gemm": "k2", "gemm@compiler": "clang"}
    assert _manifest.manifest_get(KERNEL) == "k2@clang"
    _manifest.manifest_set_many(KERNEL.scope, {KERNEL: "k1"})
    assert json.loads(path.read_text()) == {"gemm": "k1"}


def test_an_entry_that_is_written_over_takes_its_compiler_with_it(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"gemm": "k2", "gemm@compiler": "clang", "other": "x", "other@compiler": "clang"}')
    _manifest.save(path, {"gemm": "k1"})
    assert json.loads(path.read_text()) == {"gemm": "k1", "other": "x", "other@compiler": "clang"}


def test_the_compiler_is_that_of_the_entry_that_counts() -> None:
    text = '{"gemm": "k1", "gemm@compiler": "gcc-14", "toy.gemm": "k2", "toy.gemm@compiler": "clang"}'
    assert _manifest.parse_manifest(text).entry(KERNEL) == "k2@clang"
    assert _manifest.parse_manifest('{"gemm": "k1", "toy.gemm@compiler": "clang"}').entry(KERNEL) == "k1"


def chosen(manifest: str, built: Mapping[str, Any], **environ: str) -> Any:
    world = World(host(), frozenset(), built)
    return choose(KERNEL, manifest, world, read_settings(environ))


MANIFEST = '{"gemm": "k2", "gemm@compiler": "clang"}'
NONE = (frozenset[str](),)


def test_the_object_of_that_compiler_is_chosen() -> None:
    choice = chosen(MANIFEST, {"k1": NONE, "k2": NONE, "k2@clang": NONE})
    assert (choice.suffix, choice.compiler, choice.name, choice.source) == ("k2", "clang", "k2@clang", "manifest")
    assert choice.reason.endswith("names it, built by clang")


def test_without_it_the_usual_compilers_object_runs_and_the_reason_says_so() -> None:
    choice = chosen(MANIFEST, {"k1": NONE, "k2": NONE})
    assert (choice.name, choice.source, choice.warnings) == ("k2", "manifest", ())
    assert "built by clang, which is not to be had (not built yet" in choice.reason


def test_a_row_that_nobody_built_falls_back() -> None:
    choice = chosen(MANIFEST, {"k1": NONE})
    assert (choice.name, choice.source) == ("k1", "fallback")
    assert "names 'k2': not built yet" in choice.reason


def test_a_pin_may_name_the_compiler() -> None:
    choice = chosen("{}", {"k1": NONE, "k1@clang": NONE}, TUNEKIT_PIN="gemm=k1@clang")
    assert (choice.name, choice.source) == ("k1@clang", "pin")


# --- which compilers -------------------------------------------------------------------------------------


def both() -> None:
    """Both compilers are here."""
    for name in ("gcc", "clang"):
        if not versioned(name):
            lacking(name)


def test_the_usual_compiler_is_no_other_one_under_whatever_name() -> None:
    both()
    usual = shutil.which("gcc")
    assert usual
    assert others(Runner(), ["gcc"]) == {}
    [(name, clang)] = others(Runner(), ["gcc", "clang", "gcc"]).items()
    assert (name, clang.family) == ("clang", "clang")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["nosuchcc"], "no nosuchcc for .* is on PATH; install it, or name gcc or clang, or leave it out"),
        (["clang-1"], r"no clang-1 for .* is on PATH; install it \(Debian and Ubuntu: apt-get install clang-1\), or"),
        (["/usr/bin/clang"], "'/usr/bin/clang' is no name of a compiler; name it as it is called on PATH"),
    ],
)
def test_a_compiler_that_is_not_there_is_an_error_with_its_mend(names: list[str], text: str) -> None:
    with pytest.raises(ToolchainError, match=text):
        others(Runner(), names)


def test_one_compiler_by_two_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunekit.build_tools import cross

    def found(runner: Runner, name: str) -> Toolchain:
        return Toolchain((name,), (), f"{name} version 9", "", "clang", "t", host())

    monkeypatch.setattr(cross, "named", found)
    with pytest.raises(ToolchainError, match="clang and clang-9 are both 'clang-9 version 9'; name it once"):
        others(Runner(), ["clang", "clang-9"])


# --- the tuner in a house of plain data ------------------------------------------------------------------


def with_clang(box: SimulatedBox, tile: float) -> Any:
    """The usual house, in which clang built k2_g2, too, and could not build k4."""
    house = gemm_house(box, {"k2_g2@clang": FakeRow("k2_g2@clang", times(tile, 0.7e-4))})
    house.rows["gemm"]["k2_g2@clang"].compiler = "clang 9"
    house.reasons["gemm"] = {**house.reasons["gemm"], "k4@clang": "not built: clang said no"}
    return house


def test_pairs_race_and_the_record_says_whose_the_winner_is() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = with_clang(box, 0.6e-3)
    status, kernel, result = run(house, box, compilers=("clang",))
    assert status == 0
    assert house.events[:2] == ["build", "build clang"]
    assert (kernel.winner, kernel.compiler) == ("k2_g2@clang", "clang 9")
    assert (kernel.usual, kernel.compilers) == ("cc 1.0", {"clang": "clang 9"})
    assert (kernel.rows["k4@clang"].verdict, kernel.rows["k4@clang"].reason) == ("unavailable", "not built: clang said no")
    assert list(kernel.rows)[:3] == ["reference", "k1", "k1@clang"]
    assert RunRecord.from_json(json.loads(json.dumps(result.record.to_json()))) == result.record


def test_no_time_for_another_compiler_is_no_reason_of_the_usual_ones_rows() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = with_clang(box, 0.6e-3)
    house.missing = {"k1"}
    build = house.build

    def slow(*words: Any) -> Any:
        found = build(*words)
        box.now += 1000
        return found

    house.build = slow
    house.rows["gemm"] = {}
    _, kernel, _ = run(house, box, compilers=("clang",), time_limit=1.0)
    assert house.events.count("build") == 1 and "build clang" not in house.events
    assert "time limit" not in kernel.rows["k1"].reason


def test_without_the_option_nobody_elses_rows_enter() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = with_clang(box, 0.6e-3)
    _, kernel, _ = run(house, box)
    assert house.events[0] == "build" and "build clang" not in house.events
    assert (kernel.winner, kernel.compiler, kernel.compilers) == ("k2_g2", "cc 1.0", {})
    assert not any("@" in name for name in kernel.rows)


def test_a_winner_of_another_compiler_defends_itself_without_the_option_unless_fresh() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = with_clang(box, 0.6e-3)
    house.manifest["gemm"] = "k2_g2@clang"
    _, kernel, _ = run(house, box)
    assert (kernel.winner, kernel.previous, kernel.compiler) == ("k2_g2@clang", "k2_g2@clang", "clang 9")
    assert [name for name in kernel.rows if "@" in name] == ["k2_g2@clang"]
    _, kernel, _ = run(house, box, fresh=True)
    assert kernel.winner == "k2_g2"


def test_rows_that_differ_in_other_arguments_do_not_cross_compilers() -> None:
    """The GEMV's choice among rows that equal the tile's winner: clang's k2_g2 is no sister of the usual k2."""
    box = SimulatedBox(1, noise=0.005)
    house = with_clang(box, 0.85e-3)  # slower on the tile, the fastest on the GEMV
    _, kernel, _ = run(house, box, compilers=("clang",))
    assert kernel.winner == "k2_g2"


# --- the journal -----------------------------------------------------------------------------------------


def test_a_journal_keeps_rows_by_compiler_and_forgets_those_of_another_version(tmp_path: Path) -> None:
    def journal(compilers: Mapping[str, str], kernel: Kernel = KERNEL) -> Journal:
        return Journal(tmp_path / "j.json", {"box": 1}, row_digests(kernel, compilers))

    first = journal({"clang": "clang 9"})
    first.heard("k1", True, 1.0)
    first.heard("k2@clang", True, 2.0)
    plain = journal({})  # a run in which clang is not asked forgets nothing of it
    plain.heard("k2", True, 3.0)
    again = journal({"clang": "clang 9"})
    assert (again.passed("k1"), again.passed("k2"), again.passed("k2@clang")) == (1.0, 3.0, 2.0)
    newer = journal({"clang": "clang 10"})
    assert (newer.passed("k1"), newer.passed("k2@clang")) == (1.0, None)
    newer.heard("k2@clang", True, 2.0)
    changed = dataclasses.replace(KERNEL, rows=(perm(k=1), perm(k=2, requires="avx2")))
    journal({}, changed)._save()
    assert journal({"clang": "clang 10"}).passed("k2@clang") is None


# --- a family of two compilers, for real -----------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Callable[..., Any]]:
    """A box where the twins were tuned with both compilers: its folder, what retune said, and how to run code there."""
    both()
    folder = tmp_path_factory.mktemp("twins")
    variables = {"TUNEKIT_HOME": str(folder / "state"), "TUNEKIT_CACHE": str(folder / "cache")}
    words = ["--module", "twins.kernels", "--scope", "twins", "--compilers", "gcc,clang", "--json"]

    def retune(*more: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tunekit.retune", *words, *more],
            env={**os.environ, **TOY_ENVIRONMENT, **variables}, cwd=ROOT / "tests", capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        scope: dict[str, Any] = json.loads(done.stdout)["scopes"][0]
        return scope

    def inside(code: str, **more: str) -> Any:
        head = "import json, numpy as np, twins.kernels as t; from tunekit import dispatch; k = t.twins.kernel\n"
        done = run_python(head + code, {**variables, **more})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    inside.retune = retune  # type: ignore[attr-defined]
    return folder, retune(), inside


@pytest.mark.build
def test_the_winners_object_is_that_of_its_compiler(twins: Any) -> None:
    _, scope, inside = twins
    record = scope["record"]["kernels"]["twins"]
    assert record["winner"] == "k2@clang"
    assert "clang" in record["compiler"] and "clang" not in record["usual"]
    rows = record["rows"]
    assert rows["k3@clang"]["verdict"] == "unavailable" and "row k3 is for gcc" in rows["k3@clang"]["reason"]
    assert rows["k4@clang"]["verdict"] == "rejected" and rows["k4"]["verdict"] != "rejected"
    assert json.loads(Path(scope["manifest"]).read_text()) == {"twins": "k2", "twins@compiler": "clang"}
    ran = inside(
        "by = t.twins_by(); b = t.twins.bound()\n"
        "print(json.dumps([by, b.suffix, b.compiler, b.module.kind, t.twins.choice().name]))"
    )
    assert ran[0] == 2 and ran[1] == "k2" and "clang" in ran[2] and ran[3:] == ["stamped", "k2@clang"]


@pytest.mark.build
def test_the_plain_name_is_the_usual_compilers_and_a_pin_finds_either(twins: Any) -> None:
    _, _, inside = twins
    for pin, by in (("k2", 1), ("k2@clang", 2), ("k1@clang", 2)):
        assert inside("print(t.twins_by())", TUNEKIT_PIN=f"twins={pin}") == by, pin


@pytest.mark.build
def test_an_older_reader_sees_a_row_that_it_knows(twins: Any) -> None:
    """What a tunekit without the axis does: it reads text under the kernel's name, and passes over other keys."""
    _, scope, _ = twins
    entries = json.loads(Path(scope["manifest"]).read_text())
    assert entries["twins"] in ("k1", "k2", "k3", "k4")
    assert all(isinstance(value, str) for value in entries.values())


@pytest.mark.build
def test_a_second_run_measures_nothing_again_that_came_to_its_end(twins: Any) -> None:
    _, _, inside = twins
    again = inside.retune()["record"]["kernels"]["twins"]
    assert (again["winner"], again["previous"]) == ("k2@clang", "k2@clang")
    assert any(text.startswith("the checks of 6 rows") for text in again["reused"]), again["reused"]
    assert any("confirmation of k2@clang" in text for text in again["reused"]), again["reused"]


@pytest.mark.build
def test_build_makes_what_the_manifest_names_by_the_compiler_it_names(twins: Any, tmp_path: Path) -> None:
    _, _, inside = twins
    code = (
        "from tunekit.build_tools import build_named\n"
        "reports = build_named([k]); dispatch.forget_modules()\n"
        "print(json.dumps([[[r.compiler, r.built['twins.twins']] for r in reports], t.twins_by()]))"
    )
    fresh = {"TUNEKIT_CACHE": str(tmp_path / "cache")}
    [[[compiler, rows]], by] = inside(code, **fresh)
    assert "clang" in compiler and rows == ["k2"] and by == 2
    # On a box without that compiler the row is built all the same.
    other = tmp_path / "m.json"
    other.write_text('{"twins": "k2", "twins@compiler": "clang-999"}')
    [[[compiler, rows]], by] = inside(code, TUNEKIT_CACHE=str(tmp_path / "cache2"), TUNEKIT_MANIFEST=str(other))
    assert "clang" not in compiler and rows == ["k2"] and by == 1


def test_index_files_of_compilers_stand_apart() -> None:
    plain, clang = dispatch.index_path(KERNEL, "grid"), dispatch.index_path(KERNEL, "grid", "clang")
    assert plain != clang and plain.parent == clang.parent == paths.modules_folder(clang.parent.parent.name, "toy")
