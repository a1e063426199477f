# SPDX-License-Identifier: Apache-2.0
"""The tuner and ``retune`` in a house of plain data, and their end by signals in real processes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python
from measure_fakes import FakeFixtures, FakeHouse, FakeRow, SimulatedBox

from tunekit import retune, tuner
from tunekit.console import Console
from tunekit.errors import ManifestError, PolicyError, TunekitError
from tunekit.kernel import Kernel
from tunekit.measure.race import Deadline
from tunekit.measure.record import KernelRecord, RunRecord
from tunekit.rows import Row, perm
from tunekit.tuner import Built, Options

REGIMES: dict[str, str | tuple[str, ...]] = {"gemv": ("g",), "tile": "*", "streamed": ()}


def silent() -> Console:
    return Console(io.StringIO(), io.StringIO(), quiet=True, environ={})


def times(tile: float, gemv: float = 1e-4, streamed: float = 1e-3) -> dict[str, float]:
    return {"tile": tile, "gemv": gemv, "streamed": streamed}


ROWS = [perm(k=1), perm(k=2), perm(k=2, g=2), perm(k=4), perm(k=8), perm(k=16)]


def toy(
    box: SimulatedBox,
    changes: Mapping[str, Any] | None = None,
    fallback: str = "k1",
    regimes: Mapping[str, str | tuple[str, ...]] = REGIMES,
) -> FakeHouse:
    """A house with one kernel: k2 and k2_g2 lead by 25 % on the tile, g2 by 20 % on GEMV; k8 and k16 cannot run."""
    bound = {
        "reference": FakeRow("reference", times(9e-3, 9e-4)),
        "k1": FakeRow("k1", times(1e-3)),
        "k2": FakeRow("k2", times(0.8e-3)),
        "k2_g2": FakeRow("k2_g2", times(0.8e-3, 0.83e-4)),
        "k4": FakeRow("k4", times(0.99e-3)),
    }
    for suffix, row in (changes or {}).items():
        if row is None:
            del bound[suffix]
        else:
            bound[suffix] = row
    house = FakeHouse()
    why = {"k8": "this CPU lacks avx512f", "k16": "declined: too wide"}
    house.add("gemm", ROWS, fallback, list(bound.values()), FakeFixtures(box, regimes), why)
    return house


def run(house: FakeHouse, box: SimulatedBox, **options: Any) -> tuple[int, KernelRecord, tuner.ScopeResult]:
    asked = Options(**{"in_process": True, **options})
    [result] = tuner.tune((), asked, silent(), house, box.clock)
    return result.status, result.record.kernels["gemm"], result


def test_a_whole_run() -> None:
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    status, kernel, result = run(house, box)
    assert status == 0
    assert house.manifest == {"gemm": "k2_g2"}
    assert house.events == ["build", "write", "stamp"]
    assert result.manifest == "/state/toy.tune.json"
    assert (kernel.winner, kernel.previous, kernel.fallback) == ("k2_g2", None, "k1")
    assert kernel.picks == {"tile": "k2", "gemv": "k2_g2"}
    assert list(kernel.regimes) == ["tile", "gemv", "streamed"]
    assert list(kernel.rows) == ["reference", "k1", "k2", "k2_g2", "k4", "k8", "k16"]
    assert {s: r.verdict for s, r in kernel.rows.items()} == {
        "reference": "slower", "k1": "slower", "k2": "slower", "k2_g2": "winner", "k4": "slower",
        "k8": "unavailable", "k16": "unavailable",
    }  # fmt: skip
    assert kernel.rows["k8"].reason == "this CPU lacks avx512f"
    assert "% time at gemv" in kernel.rows["k2"].reason
    assert "% time at tile" in kernel.rows["k4"].reason
    assert kernel.complete and kernel.compiler == "cc 1.0" and kernel.hashes == {"grid": "abc"}
    tile = kernel.regimes["tile"]
    assert tile.margin == 0.03 and tile.floor is not None and tile.floor < 0.03
    # One of the two that the tile cannot tell apart is in its final; everyone was screened, the fallback twice.
    assert set(tile.finalists) == {"k1", "k2"}
    assert set(tile.screening) == {"reference", "k1", "k1#2", "k2", "k2_g2", "k4"}
    assert set(kernel.regimes["gemv"].finalists) == {"k1", "k2", "k2_g2"}
    assert kernel.regimes["streamed"].final == {} and "k4" in kernel.regimes["streamed"].centres
    assert tile.centres["k1"] == pytest.approx(1e-3, rel=0.02)
    assert result.record.digests == {"toy.gemm": "abc"} and result.record.brand == "PDP-11/70"
    assert RunRecord.from_json(house.last).kernels["gemm"] == kernel


def test_rows_race_on_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    import tunekit

    seen: list[int] = []
    race = tuner.race.race

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(tunekit.lanes())
        return race(*arguments, **named)

    monkeypatch.setattr(tuner.race, "race", watched)
    box = SimulatedBox(1)
    before = tunekit.lanes()
    assert run(toy(box), box)[0] == 0
    assert seen == [1, 1, 1] and tunekit.lanes() == before


def test_a_second_run_keeps_the_incumbent_and_fresh_forgets_it() -> None:
    box = SimulatedBox(2, noise=0.005)
    house = toy(box, {"k4": FakeRow("k4", times(0.81e-3))})
    house.manifest["gemm"] = "k4"
    assert run(house, box)[1].winner == "k4"
    kernel = run(house, box)[1]
    assert kernel.reason.startswith("the incumbent")
    assert retune.change("gemm", kernel) == "gemm: unchanged, k4"
    assert run(house, box, fresh=True)[1].winner == "k2_g2"


def test_nothing_better_writes_the_fallback_explicitly() -> None:
    box = SimulatedBox(3, noise=0.005)
    slow = {s: FakeRow(s, times(1.01e-3)) for s in ("k2", "k2_g2", "k4")}
    house = toy(box, slow)
    status, kernel, _ = run(house, box)
    assert status == 0 and house.manifest == {"gemm": "k1"}
    assert kernel.rows["k4"].verdict == "tied"
    assert retune.change("gemm", kernel) == "gemm: unchanged, fallback k1 (now explicit)"


def test_an_incumbent_that_cannot_run_or_fails_counts_for_nothing() -> None:
    for row in (None, FakeRow("k4", times(0.5e-3), "wrong at -128")):
        box = SimulatedBox(4, noise=0.005)
        house = toy(box, {"k4": row})
        house.manifest["gemm"] = "k4"
        status, kernel, _ = run(house, box)
        assert status == 0 and house.manifest["gemm"] == "k2_g2" and kernel.previous == "k4"


def test_a_rejected_challenger_is_no_failure() -> None:
    box = SimulatedBox(5, noise=0.005)
    house = toy(box, {"k2": FakeRow("k2", times(0.1e-3), "wrong at -128")})
    status, kernel, _ = run(house, box)
    assert status == 0
    assert (kernel.rows["k2"].verdict, kernel.rows["k2"].reason) == ("rejected", "exact: wrong at -128")
    assert "k2" not in kernel.regimes["tile"].centres


def test_a_fallback_that_fails_gives_its_place_to_the_next_of_the_chain() -> None:
    box = SimulatedBox(6, noise=0.005)
    house = toy(box, {"k1": FakeRow("k1", times(1e-5), "off by one")}, fallback="k1;k4")
    status, kernel, _ = run(house, box)
    assert status == 1 and kernel.fallback == "k4" and kernel.rows["k1"].verdict == "rejected"
    assert kernel.winner is not None and house.manifest["gemm"] == kernel.winner != "k1"
    assert house.verdicts["k1", ()] == "exact: off by one" and house.verdicts["k4", ()] is None
    assert "k1 failed a check and is no fallback: exact: off by one" in kernel.notes


def test_what_failed_is_not_kept_of_a_dry_run_nor_what_was_not_asked() -> None:
    box = SimulatedBox(6)
    house = toy(box, {"k1": FakeRow("k1", times(1e-5), "off by one")})
    run(house, box, dry_run=True)
    assert house.verdicts == {}


def test_a_reference_that_fails_chooses_nothing() -> None:
    box = SimulatedBox(6)
    house = toy(box, {"reference": FakeRow("reference", times(1e-3), "off by one")})
    house.manifest["gemm"] = "k4"
    status, kernel, result = run(house, box)
    assert status == 1 and kernel.winner is None and result.manifest is None
    assert house.manifest == {"gemm": "k4"} and "write" not in house.events
    assert "off by one" in kernel.reason


def test_the_fallback_is_the_first_of_the_chain_that_runs_else_the_reference() -> None:
    box = SimulatedBox(7, noise=0.005)
    house = toy(box, {"k1": None}, fallback="k16;k1;k4")
    assert run(house, box)[1].fallback == "k4"
    house = toy(box, fallback="k16")
    assert run(house, box)[1].fallback == "reference"


def test_no_row_that_runs_is_status_3_with_the_reasons() -> None:
    box = SimulatedBox(8)
    house = toy(box, dict.fromkeys(("k1", "k2", "k2_g2", "k4")))
    house.built = Built(problem="no C compiler: cc, gcc and clang are not here")
    status, kernel, result = run(house, box)
    assert status == 3 and result.manifest is None and "write" not in house.events
    assert "this CPU lacks avx512f" in kernel.reason
    assert result.notes == ("the grid was not built: no C compiler: cc, gcc and clang are not here",)


def test_nothing_to_compare_with_is_status_3() -> None:
    box = SimulatedBox(8)
    house = toy(box, {"k1": None, "reference": None})
    status, kernel, _ = run(house, box)
    assert status == 3 and "nothing to compare with" in kernel.reason


def test_no_compiler_still_races_what_the_install_built() -> None:
    box = SimulatedBox(9, noise=0.005)
    house = toy(box)
    house.built = Built(problem="no C compiler")
    assert run(house, box)[0] == 0 and house.manifest == {"gemm": "k2_g2"}


def test_a_dry_run_writes_nothing() -> None:
    box = SimulatedBox(10, noise=0.005)
    house = toy(box)
    house.refusal = "pinned"
    status, kernel, result = run(house, box, dry_run=True)
    assert status == 0 and kernel.winner == "k2_g2" and result.manifest is None
    assert house.manifest == {} and house.events == ["build"]


def test_a_bent_process_refuses_before_any_work() -> None:
    box = SimulatedBox(10)
    house = toy(box)
    house.refusal = "TUNEKIT_PIN is set"
    with pytest.raises(PolicyError, match="TUNEKIT_PIN"):
        run(house, box)
    assert house.events == []


def test_broken_fixtures_fail_their_kernel_only() -> None:
    box = SimulatedBox(11, noise=0.005)
    house = toy(box)
    house.add("odd", [perm(k=1)], "k1", [FakeRow("k1", times(1e-3))], FakeFixtures(box, {"a": (), "b": ()}))
    [result] = tuner.tune((), Options(in_process=True), silent(), house, box.clock)
    assert result.status == 1
    assert "exactly one regime" in result.record.kernels["odd"].reason
    assert house.manifest == {"gemm": "k2_g2"}


class Fragile(FakeRow):
    """A row that passes its gates and the warm-up and then raises in one regime."""


class FragileFixtures(FakeFixtures):
    def regimes(self) -> list[Any]:
        found = super().regimes()
        for regime in found:
            prepare = regime.prepare

            def careful(row: Any, prepare: Any = prepare, name: str = regime.name) -> Any:
                call = prepare(row)
                left = [1000]

                def fragile() -> None:
                    left[0] -= 1
                    if isinstance(row, Fragile) and name == "gemv" and left[0] < 0:
                        raise RuntimeError("broke")
                    call()

                return fragile

            object.__setattr__(regime, "prepare", careful)
        return found


def test_a_row_that_breaks_in_a_later_race_does_not_win() -> None:
    box = SimulatedBox(12, noise=0.005)
    house = FakeHouse()
    bound = [FakeRow("reference", times(9e-3)), FakeRow("k1", times(1e-3)), Fragile("k2", times(0.5e-3))]
    house.add("gemm", [perm(k=1), perm(k=2)], "k1", bound, FragileFixtures(box, REGIMES))
    status, kernel, _ = run(house, box)
    assert status == 0 and kernel.winner == "k1"
    assert kernel.rows["k2"].verdict == "rejected" and "RuntimeError" in kernel.rows["k2"].reason


@pytest.mark.parametrize("limit", [0.05, 0.3, 1.0, 2.0, 4.0])
def test_a_time_limit_ends_on_time_with_a_usable_result(limit: float) -> None:
    box = SimulatedBox(13, noise=0.005)
    house = toy(box)
    house.manifest["gemm"] = "k4"
    status, kernel, _ = run(house, box, time_limit=limit)
    assert status == 0 and kernel.winner in ("k4", "k2", "k2_g2")
    assert house.manifest["gemm"] == kernel.winner
    assert box.now < limit + 0.5
    assert not kernel.complete
    if limit < 0.1:
        # Gates and first calls alone took most of it.
        assert kernel.winner == "k4" and "too little was measured" in kernel.reason
    if limit > 3:
        assert kernel.winner != "k4"
    assert any("time limit" in note for note in kernel.notes) or "time limit" in kernel.reason


def test_a_turn_that_never_comes_measures_and_changes_nothing() -> None:
    box = SimulatedBox(13, noise=0.005)
    house = toy(box)
    house.turn, house.manifest["gemm"] = False, "k4"
    with_limit = Options(in_process=True, time_limit=1e-9)
    box.clock = lambda: setattr(box, "now", box.now + 1e-3) or box.now  # type: ignore[func-returns-value, method-assign]
    [result] = tuner.tune((), with_limit, silent(), house, box.clock)
    assert result.status == 3 and house.events == [] and house.manifest == {"gemm": "k4"}
    assert "another retune" in result.notes[0]


_HOLDER = """
import sys, time
from tunekit.measure.race import Deadline
from tunekit.tuner import House
with House().alone(Deadline(None), print) as got:
    print("held", got, flush=True)
    sys.stdin.read()
"""


def test_two_retunes_take_turns(private_folders: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(e for e in sys.path if e)}
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"held True\n"
        with tuner.House().alone(Deadline(0.3), said.append) as got:
            assert not got  # waited for its whole limit
        assert len(said) == 1 and said[0].startswith("another retune is at work on this box")
        threading.Timer(0.5, other.stdin.close).start()
        with tuner.House().alone(Deadline(None), said.append) as got:
            assert got and len(said) == 2
        other.wait(timeout=20)
    with tuner.House().alone(Deadline(0.3), said.append) as got:
        assert got and len(said) == 2


def test_an_unwritable_manifest_is_found_out_before_any_work(tmp_path: Path) -> None:
    box = SimulatedBox(10)
    house = toy(box)
    house.unwritable = "no room"
    assert command(house, box=box)[0::2] == (3, "tunekit: no room\n")
    assert house.events == []
    assert command(house, "--dry-run", box=box)[0] == 0


@pytest.mark.parametrize("where", ["MANIFEST", "HOME"])
def test_the_manifests_folder_is_tried(where: str, tmp_path: Path, environ: Callable[..., None]) -> None:
    (tmp_path / "file").write_text("not a folder")
    environ(**{where: str(tmp_path / "file" / "m.json")})
    with pytest.raises(ManifestError, match="TUNEKIT_HOME to a folder.*nothing was measured"):
        tuner.House().can_write("toy")
    environ(MANIFEST=None, HOME=str(tmp_path / "new"))
    tuner.House().can_write("toy")
    assert (tmp_path / "new").is_dir() and not [p for p in (tmp_path / "new").rglob("*") if p.is_file()]


def test_a_cache_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tools:
        class Runner:
            def stop(self) -> None:
                pass

        def build_cached(self, *args: Any, **options: Any) -> None:
            raise TunekitError("cannot write the cache /c: Read-only file system")

    monkeypatch.setattr(tuner, "_build_tools", Tools)
    built = tuner.House().build([], lambda done, of, label: None)
    assert built.problem == "cannot write the cache /c: Read-only file system"


@pytest.mark.parametrize("missing", [True, False])
def test_a_recorded_winner_that_is_only_not_built_keeps_its_entry(missing: bool) -> None:
    box = SimulatedBox(4, noise=0.005)
    house = toy(box, {"k4": None})
    house.manifest["gemm"] = "k4"
    house.reasons["gemm"] = {"k4": "not built yet"}
    house.missing = {"k4"} if missing else set()
    house.built = Built(problem="no C compiler")
    status, kernel, _ = run(house, box)
    assert status == 0
    if not missing:
        assert kernel.winner == "k2_g2"
        return
    assert house.manifest["gemm"] == kernel.winner == "k4" and kernel.rows["k4"].verdict == "winner"
    assert kernel.rows["k2_g2"].verdict == "tied" and "k4 was not" in kernel.rows["k2_g2"].reason
    assert any(note.startswith("k4 keeps its entry") for note in kernel.notes)
    assert retune.change("gemm", kernel) == "gemm: unchanged, k4"
    assert run(house, box, fresh=True)[1].winner == "k2_g2"


class Bare(FakeHouse):
    def fixtures(self, kernel: Kernel) -> Any:
        return tuner.fixtures_of(kernel) if kernel.name == "bare" else super().fixtures(kernel)


def test_a_kernel_without_fixtures_is_no_failure() -> None:
    box = SimulatedBox(11, noise=0.005)
    house = Bare()
    house.add("bare", [perm(k=1)], "k1", [FakeRow("k1", times(1e-3))], FakeFixtures(box, REGIMES))
    status, out, _ = command(house, box=box)
    assert status == 3 and "time limit" not in out
    assert out.count("not raced: the kernel declares no fixtures=") == 2  # the row's, and the kernel's
    assert "toy.bare: nothing chosen" in out
    house.add("gemm", [perm(k=1)], "k1", [FakeRow("k1", times(1e-3))], FakeFixtures(box, REGIMES))
    assert command(house, box=box)[0] == 0 and house.manifest == {"gemm": "k1"}


class SlowBuild(FakeHouse):
    def build(self, kernels: Any, progress: Any, compiler: str) -> Built:
        self.events.append("build")
        for done in range(100):
            self.box_.now += 1.0
            progress(done, 100, "a row")
        return self.built

    box_: SimulatedBox


def test_the_time_limit_ends_a_build_too() -> None:
    box = SimulatedBox(14)
    house = SlowBuild()
    house.box_ = box
    house.add("gemm", ROWS, "k1", [FakeRow("k1", times(1e-3))], FakeFixtures(box, REGIMES))
    [result] = tuner.tune((), Options(in_process=True, time_limit=5.0), silent(), house, box.clock)
    assert box.now < 7
    assert "the build used up its share of the time limit (2 of 100 objects)" in result.notes[0]
    # The other half was for the rows that the install built: a fresh box gets an answer all the same.
    assert result.status == 0 and house.manifest == {"gemm": "k1"}
    kernel = result.record.kernels["gemm"]
    assert kernel.rows["k1"].verdict == "winner" and len(kernel.regimes["tile"].screening["k1"]) == 5


def test_an_hour_of_building_leaves_time_to_race_the_installed_rows() -> None:
    box = SimulatedBox(14, noise=0.005)
    house = SlowBuild()
    house.box_ = box
    bound = [FakeRow(s, times(t)) for s, t in (("reference", 9e-3), ("k1", 1e-3), ("k2", 0.8e-3))]
    house.add("gemm", ROWS, "k1", bound, FakeFixtures(box, REGIMES))
    [result] = tuner.tune((), Options(in_process=True, time_limit=20.0), silent(), house, box.clock)
    assert box.now < 20.5 and result.status == 0 and house.manifest == {"gemm": "k2"}
    assert result.record.stages["build"] <= 11


def test_selection_by_scope_and_kernel() -> None:
    box = SimulatedBox(15, noise=0.005)
    house = toy(box)
    house.add("other", [perm(k=1)], "k1", [FakeRow("k1", times(1e-3))], FakeFixtures(box, REGIMES))
    [result] = tuner.tune(("toy",), Options(kernels=("toy.gemm",), in_process=True), silent(), house, box.clock)
    assert list(result.record.kernels) == ["gemm"] and house.manifest == {"gemm": "k2_g2"}
    [result] = tuner.tune((), Options(kernels=("other",), in_process=True), silent(), house, box.clock)
    assert house.manifest == {"gemm": "k2_g2", "other": "k1"}
    # The file keeps the record of the kernel that this run did not cover; the result speaks of this run.
    assert list(RunRecord.from_json(house.last).kernels) == ["gemm", "other"]
    assert list(result.record.kernels) == ["other"]
    with pytest.raises(TunekitError, match=r"no scope 'no'.*installed: toy"):
        tuner.tune(("no",), Options(), silent(), house, box.clock)
    with pytest.raises(TunekitError, match=r"no kernel is called 'no'; there are: toy.gemm, toy.other"):
        tuner.tune((), Options(kernels=("no",)), silent(), house, box.clock)


def test_a_noisy_box_says_so_and_keeps_the_fallback() -> None:
    box = SimulatedBox(16, noise=0.3, bursts=0.4)
    house = toy(box, {s: FakeRow(s, times(0.97e-3)) for s in ("k2", "k2_g2", "k4")})
    status, kernel, _ = run(house, box)
    assert status == 0 and kernel.winner == "k1"
    assert any(note.startswith("noisy at tile") for note in kernel.notes)


@pytest.mark.parametrize("incumbent", [None, "k4"])
def test_above_the_ceiling_nothing_dethrones_what_ran_before(incumbent: str | None) -> None:
    box = SimulatedBox(17, noise=1.0, bursts=0.5)
    house = toy(box, {s: FakeRow(s, times(0.2e-3, 0.2e-4)) for s in ("k2", "k2_g2")})
    if incumbent:
        house.manifest["gemm"] = incumbent
    status, kernel, _ = run(house, box)
    margin = kernel.regimes["tile"].margin
    assert margin is not None and margin > 0.25  # and yet k2 is seen five times as fast
    assert kernel.regimes["tile"].centres["k2"] < kernel.regimes["tile"].centres["k1"] / (1 + margin)
    assert status == 0 and house.manifest == {"gemm": incumbent or "k1"}
    assert kernel.reason.startswith("too noisy at tile") and "what ran before is kept" in kernel.reason
    assert kernel.rows["k2"].verdict == "tied" and kernel.rows["k2"].reason.startswith("too noisy at tile to tell")
    assert any(note.startswith("too noisy at tile") for note in kernel.notes)


# --- the command ---------------------------------------------------------------------------------------------


def command(house: FakeHouse, *words: str, box: SimulatedBox | None = None) -> tuple[int, str, str]:
    """Run ``retune`` in this process; its exit status, stdout and stderr."""
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    retune.add_arguments(parser)
    arguments = parser.parse_args([*words, "--in-process"])
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, quiet=arguments.quiet or arguments.json, environ={})
    clock = (box or SimulatedBox()).clock
    return retune.run(arguments, console, house, clock), out.getvalue(), err.getvalue()


def test_the_table_and_what_changed() -> None:
    box = SimulatedBox(20, noise=0.005)
    status, out, err = command(toy(box), box=box)
    assert status == 0
    assert err.splitlines() == [  # no terminal: a line a stage, none a row
        "build toy: 2 objects",
        "check toy.gemm: 5 rows",
        "race toy.gemm, tile (1 of 3): 5 rows",
        "race toy.gemm, gemv (2 of 3): 5 rows",
        "race toy.gemm, streamed (3 of 3): 5 rows",
        "confirm toy.gemm, app: 8 pairs at most",
        "stamp toy",
    ]
    lines = out.splitlines()
    assert lines[0] == "toy.gemm on PDP-11/70"
    assert lines[1].split() == [
        "row",
        "tile",
        "GMAC/s",
        "gemv",
        "GMAC/s",
        "streamed",
        "GMAC/s",
        "ratio",
        "verdict",
        "reason",
    ]
    by_row = {line.split()[0]: line for line in lines[3:10]}
    assert set(by_row) == {"reference", "k1", "k2", "k2_g2", "k4", "k8", "k16"}
    assert "slower (fallback)" in by_row["k1"] and " 1.00x" in by_row["k1"]
    assert by_row["k8"].split()[1:5] == ["-", "-", "-", "-"] and by_row["k8"].endswith("this CPU lacks avx512f")
    text = "\n".join(lines)
    assert "noise floor: tile " in text and "manifest: /state/toy.tune.json" in text and "time: build " in text
    assert "toy.gemm: fallback k1 -> k2" in text


def test_json_is_one_document_with_everything_in_it() -> None:
    box = SimulatedBox(20, noise=0.005)
    status, out, err = command(toy(box), "--json", "--seed", "5", "--dry-run", box=box)
    document = json.loads(out)
    assert status == document["status"] == 0 and err == ""
    [scope] = document["scopes"]
    assert scope["manifest"] is None
    record = RunRecord.from_json(scope["record"])
    assert record.seed == 5 and record.kernels["gemm"].regimes["tile"].seed == 5
    assert scope["changes"]["gemm"].startswith("gemm: fallback k1 -> ")


def test_quiet_prints_only_what_changed() -> None:
    box = SimulatedBox(20, noise=0.005)
    status, out, err = command(toy(box), "--quiet", box=box)
    assert status == 0 and err == ""
    assert len(out.splitlines()) == 1 and out.startswith("toy.gemm: fallback k1 -> ")


def test_usage_errors_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--time-limit", "0"], ["--time-limit", "soon"], ["--time-limit", "nan"], ["--dry"], ["extra"]):
        with pytest.raises(SystemExit) as stop:
            retune.main(words)
        assert stop.value.code == 2
    capsys.readouterr()
    house = toy(SimulatedBox())
    assert command(house, "--kernel", "no")[0] == 2
    house.refusal = "TUNEKIT_PIN is set; use --dry-run"
    status, out, err = command(house)
    assert (status, out, err) == (2, "", "tunekit: TUNEKIT_PIN is set; use --dry-run\n")


def test_no_family_at_all_is_status_3() -> None:
    status, _, err = command(FakeHouse())
    assert status == 3 and "nothing to tune" in err


SCRIPT = """
import sys, time, argparse
from measure_fakes import FakeFixtures, FakeHouse, FakeRow
from measure_hostile import ROWS as HOSTILE, Family
from tunekit import retune
from tunekit.measure import gate
from tunekit.rows import perm

class House(FakeHouse):
    def job(self, kernel):
        return gate.Job("measure_hostile:load")
    def write(self, winners, record, seats):
        path = super().write(winners, record, seats)
        print("written", file=sys.stderr, flush=True)
        return path

house = House()
names = sys.argv[1].split(",")
house.add("gemm", [perm(suffix=n, k=i) for i, n in enumerate(names)], names[0], [HOSTILE[n] for n in names], Family())
parser = argparse.ArgumentParser()
retune.add_arguments(parser)
sys.exit(retune.run(parser.parse_args(sys.argv[2:]), house=house))
"""


def start(*words: str, **streams: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    env.update(streams.pop("env", {}))
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *words], env=env, **streams)


def test_a_family_with_hostile_rows_ends_with_status_0() -> None:
    rows = "good,aborts,exits,segfaults,wrong,sleeps,forges,good2"
    with start(rows, "--row-timeout", "1", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    text = out.decode()
    for reason in (
        "killed by SIGABRT",
        "exit status 0 before the verdict",
        "killed by SIGSEGV",
        "no answer in 1 s",
        "not 42",
    ):
        assert reason in text
    assert b"written" in err and b"Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("times_sent", [1, 2])
def test_interrupted_by_a_signal(number: signal.Signals, times_sent: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    env = {"HOSTILE_PID_FILE": str(note)}
    with start("good,says_where", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        end = time.monotonic() + 30
        while not (note.exists() and note.read_text(encoding="ascii")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        began = time.monotonic()
        for _ in range(times_sent):
            process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert time.monotonic() - began < 2
    assert process.returncode == 130
    assert out == b"" and b"interrupted by " + number.name.encode() in err and b"Traceback" not in err
    assert b"written" not in err
    child = Path(f"/proc/{note.read_text(encoding='ascii')}/stat")
    assert not child.exists() or child.read_text(encoding="ascii").rpartition(")")[2].split()[0] in "ZX"


def test_a_closed_stdout_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with start("good,good2", stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and b"written" in err.splitlines() and b"Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_a_complaint_and_status_1() -> None:
    with open("/dev/full", "wb") as full, start("good,good2", stdout=full, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and b"Traceback" not in err
    assert b"the result could not be written to standard output: No space left on device" in err


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_no_standard_streams_at_all(closed: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("print(", "open(sys.argv[0] + '.done', 'w') and print("))
    shell = f'exec "$0" "$1" good,good2 {closed}'
    done = subprocess.run(["sh", "-c", shell, sys.executable, str(script)], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert (tmp_path / "script.py.done").exists()


def test_after_a_signal_no_other_counts() -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def work() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    try:
        assert retune._guarded(work) == 130
        assert all(signal.getsignal(n) is signal.SIG_IGN for n in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert retune._guarded(lambda: 7) == 7
    assert {n: signal.getsignal(n) for n in before} == before


def test_signals_during_the_write_wait_for_its_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), tuner.undisturbed():
        signal.raise_signal(signal.SIGINT)
        done.append("written")
    assert done == ["written"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_rows_of_a_kernel_without_fixtures() -> None:
    from measure_fakes import WORLDS

    kernel = toy(SimulatedBox()).declared[0]
    with pytest.raises(TunekitError, match="declares no fixtures"):
        tuner.fixtures_of(kernel)
    assert isinstance(ROWS[0], Row) and "gemm" in WORLDS


def test_a_row_that_was_not_built_says_the_cause() -> None:
    box = SimulatedBox(1)
    house = toy(box, dict.fromkeys(("reference", "k1", "k2", "k2_g2", "k4")))
    house.missing = {"k1", "k2"}
    house.built = Built(problem="the cache is read-only")
    _, kernel, _ = run(house, box)
    assert kernel.rows["k1"].reason == "not built: the cache is read-only" and "read-only" in kernel.reason
    assert kernel.rows["k8"].reason == "this CPU lacks avx512f"


def test_a_row_that_there_was_no_time_to_build_says_so() -> None:
    box = SimulatedBox(1)

    class Slow(FakeHouse):
        def build(self, kernels: Any, progress: Any, compiler: str) -> Built:
            box.now += 1000
            return super().build(kernels, progress, compiler)

    house = Slow()
    house.add("gemm", ROWS, "k1", [], FakeFixtures(box, REGIMES))
    house.missing = {"k1"}
    _, kernel, _ = run(house, box, time_limit=1.0)
    assert kernel.rows["k1"].reason.startswith("not built: the time limit came first")


@pytest.mark.build
@pytest.mark.parametrize("fault", ["refused", "damaged"])
def test_a_cache_that_cannot_be_used_is_the_reason_in_the_table(fault: str, tmp_path: Path) -> None:
    """And a row that this CPU lacks says that; no warning shows a line of our source."""
    cache = tmp_path / "cache"
    words = "retune --module toy.kernels --scope toyscope --dry-run --quiet --json".split()
    environment = {"TUNEKIT_CACHE": str(cache), "TUNEKIT_HOME": str(tmp_path / "home")}
    code = "import sys, tunekit.__main__ as m; from tunekit import dispatch, module\n"
    if fault == "refused":
        cache.mkdir(mode=0o777)
        cache.chmod(0o777)
    else:
        code += (
            "def damaged(path, kernels): raise module.DamagedModule(f'{path}: it cannot be loaded (on purpose)')\n"
            "module.load = damaged\n"
        )
    done = run_python(f"{code}sys.exit(m.main({words!r}))", environment, timeout=200)
    rows = json.loads(done.stdout)["scopes"][0]["record"]["kernels"]["toy"]["rows"]
    why = "can be written to by others" if fault == "refused" else "it cannot be loaded (on purpose)"
    assert why in rows["k1"]["reason"] and "tunekit build" not in rows["k1"]["reason"], rows
    assert rows["k3"]["reason"].startswith("this CPU lacks "), rows
    assert "TunekitWarning" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_row_that_ended_a_race_is_met_again_only_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunekit.measure import racing

    hold = racing.Here.hold
    entered: list[list[str]] = []

    def lose_k4(self: racing.Here, order: racing.Order, deadline: Deadline, say: racing.Say) -> Any:
        entered.append(order.rows)
        if "k4" not in order.rows:
            return hold(self, order, deadline, say)
        found = hold(self, dataclasses.replace(order, rows=[r for r in order.rows if r != "k4"]), deadline, say)
        self.lost["k4"] = "exit status 0 before the end of the race"
        return dataclasses.replace(found, failed={"k4": self.lost["k4"]})

    monkeypatch.setattr(racing.Here, "hold", lose_k4)
    box = SimulatedBox(1, noise=0.005)
    house = toy(box)
    house.journals = tmp_path
    status, kernel, _ = run(house, box)
    assert status == 0 and kernel.winner == "k2_g2" and kernel.complete
    assert kernel.rows["k4"].verdict == "rejected" and "tile: exit status 0" in kernel.rows["k4"].reason
    assert "tile: exit status 0" in str(house.verdicts["k4", ()])  # nor is it chosen without a manifest
    assert [("k4" in rows) for rows in entered] == [True, False, False]
    entered.clear()
    _, kernel, _ = run(house, box)
    assert kernel.winner == "k2_g2" and not any("k4" in rows for rows in entered)
    assert kernel.rows["k4"].reason.endswith("(in an earlier run; --fresh asks again)")
    _, kernel, _ = run(house, box, fresh=True)
    assert any("k4" in rows for rows in entered)
