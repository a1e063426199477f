# SPDX-License-Identifier: Apache-2.0
"""The journal: an interrupted run goes on, a second one races only what is new, and a stale one counts for nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from measure_fakes import FakeFixtures, FakeHouse, FakeRow, SimulatedBox
from test_measure_tuner import REGIMES, ROWS, command, run, times, toy

from tunekit import tuner
from tunekit.measure import race
from tunekit.measure.journal import Journal
from tunekit.measure.race import RaceResult
from tunekit.measure.record import ConfirmRecord, RowRecord
from tunekit.rows import perm

KEY = {"box": {"arch": "pdp11"}, "compiler": "cc 1.0"}
DIGESTS = {"a": "1", "b": "2"}


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Who was in each race that was held."""
    seen: list[list[str]] = []
    real = race.race

    def watched(entries: Any, *words: Any, **named: Any) -> Any:
        seen.append(sorted(entries))
        return real(entries, *words, **named)

    monkeypatch.setattr(race, "race", watched)
    return seen


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which rows were checked."""
    seen: list[str] = []
    real = tuner.gate.gate_rows_here

    def watched(job: Any, suffixes: Any, **named: Any) -> Any:
        seen.extend(suffixes)
        return real(job, suffixes, **named)

    monkeypatch.setattr(tuner.gate, "gate_rows_here", watched)
    return seen


def remembering(box: SimulatedBox, folder: Path, **changes: Any) -> FakeHouse:
    house = toy(box, **changes)
    house.journals = folder
    return house


def test_a_second_run_measures_nothing_again(tmp_path: Path, raced: list[list[str]], gated: list[str]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    first = run(house, box)[1]
    assert len(raced) == 3 and len(gated) == 5 and house.arms
    raced.clear(), gated.clear(), house.arms.clear()
    second = run(house, box)[1]
    assert (raced, gated, house.arms) == ([], [], [])
    assert second.winner == first.winner == "k2_g2" and second.confirm == first.confirm
    assert {s: r.verdict for s, r in second.rows.items()} == {s: r.verdict for s, r in first.rows.items()}
    assert second.regimes == first.regimes and second.complete
    assert second.reused == ["the checks of 5 rows", "the race tile", "the race gemv", "the race streamed", "the confirmation of k2_g2 on app"]
    assert run(house, box)[1].winner == "k2_g2" and raced == []
    _, out, _ = command(house, box=box)
    assert "not measured again: " in out or "--fresh" in out


def test_fresh_forgets_it(tmp_path: Path, raced: list[list[str]], gated: list[str]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    run(house, box)
    assert run(house, box, fresh=True)[1].reused == []
    assert len(raced) == 6 and len(gated) == 10


@pytest.mark.parametrize("compiler", ["cc 2.0"])
def test_another_compiler_or_seed_measures_anew(compiler: str, tmp_path: Path, raced: list[list[str]]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    run(house, box)
    house.built = tuner.Built(compiler, 1, 1)
    run(house, box)
    assert len(raced) == 6
    run(house, box, seed=7)
    assert len(raced) == 9


def test_only_a_new_row_is_raced_against_what_it_must_beat(
    tmp_path: Path, raced: list[list[str]], gated: list[str]
) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    run(house, box)
    raced.clear(), gated.clear()
    house.rows["gemm"]["k8"] = FakeRow("k8", times(0.5e-3))  # type: ignore[index]
    kernel = run(house, box)[1]
    assert gated == ["k8"] and raced[0] == ["k1", "k2_g2", "k8"]
    assert kernel.winner == "k8" and kernel.rows["k8"].verdict == "winner"
    assert kernel.rows["k4"].verdict == "slower" and kernel.rows["reference"].verdict == "slower"
    assert "the race verdicts of 3 rows" in kernel.reused
    raced.clear()
    assert run(house, box)[1].winner == "k8" and raced == []  # and now that one is known, too


def test_a_row_that_was_put_into_the_manifest_by_hand_is_raced_again(tmp_path: Path, raced: list[list[str]]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    run(house, box)
    house.rows["gemm"]["k8"] = FakeRow("k8", times(0.5e-3))  # type: ignore[index]
    run(house, box)  # its races are those of k1, k2_g2 and k8
    raced.clear()
    house.manifest["gemm"] = "k4"
    assert run(house, box)[1].winner == "k8" and house.manifest == {"gemm": "k8"}
    assert raced[0] == ["k1", "k4", "k8"]


def test_a_row_whose_declaration_changed_is_new(tmp_path: Path, raced: list[list[str]], gated: list[str]) -> None:
    box = SimulatedBox(1, noise=0.005)
    run(remembering(box, tmp_path), box)
    raced.clear(), gated.clear()
    changed = FakeHouse()
    changed.journals = tmp_path
    rows = [perm(k=4, requires="sse2") if row.suffix == "k4" else row for row in ROWS]
    bound = [FakeRow(s, times(t)) for s, t in (("k1", 1e-3), ("k2", 0.8e-3), ("k4", 0.99e-3))]
    changed.add("gemm", rows, "k1", bound, FakeFixtures(box, REGIMES))
    run(changed, box)
    assert gated == ["k4"] and all("k4" in entrants for entrants in raced)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, raced: list[list[str]], gated: list[str]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    fixtures = house.fixture["gemm"]

    class Interrupted(FakeFixtures):
        def regimes(self) -> Any:
            found = super().regimes()

            def stop(row: Any) -> Callable[[], None]:
                raise KeyboardInterrupt

            import dataclasses

            return [dataclasses.replace(r, prepare=stop) if r.name == "gemv" else r for r in found]

    house.fixture["gemm"] = Interrupted(box, REGIMES)
    with pytest.raises(KeyboardInterrupt):
        run(house, box)
    assert house.manifest == {} and [len(r) for r in raced] == [5]  # the tile was over, nothing was written
    house.fixture["gemm"] = fixtures
    raced.clear(), gated.clear()
    kernel = run(house, box)[1]
    assert len(raced) == 2 and gated == [] and "the race tile" in kernel.reused
    assert kernel.winner == "k2_g2" and kernel.complete


def test_what_a_time_limit_left_out_is_raced_next_time(tmp_path: Path, raced: list[list[str]]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path)
    assert not run(house, box, time_limit=1.0)[1].complete
    raced.clear()
    kernel = run(house, box)[1]
    assert kernel.complete and kernel.winner == "k2_g2" and len(raced[0]) == 5


def test_a_noisy_box_is_measured_again(tmp_path: Path, raced: list[list[str]]) -> None:
    box = SimulatedBox(1, noise=0.3)
    house = remembering(box, tmp_path)
    run(house, box)
    before = len(raced)
    run(house, box)
    assert len(raced) >= before + 2  # the two regimes that choose


def test_a_rejected_row_is_asked_again(tmp_path: Path, gated: list[str]) -> None:
    box = SimulatedBox(1, noise=0.005)
    house = remembering(box, tmp_path, changes={"k4": FakeRow("k4", times(1e-3), "wrong")})
    run(house, box)
    gated.clear()
    assert run(house, box)[1].rows["k4"].reason == "exact: wrong" and gated == ["k4"]


def test_choosing_never_reads_it(tmp_path: Path) -> None:
    """The rooms that choose do not import the journal, and it is not in the state folder."""
    root = Path(tuner.__file__).parent
    for room in ("choose.py", "dispatch.py", "_manifest.py", "_status.py", "_policy.py"):
        assert "journal" not in (root / room).read_text(encoding="utf-8")


# --- the file --------------------------------------------------------------------------------------------


def filled(path: Path) -> Journal:
    journal = Journal(path, KEY, DIGESTS)
    journal.heard("a", True, 0.5)
    journal.keep_race("tile", RaceResult(0, "a", {"a": 3}, {"a": [1.0], "a#2": [1.0], "b": [2.0]}, {"a": [1.0], "b": [2.0]}))
    journal.keep_confirm("x", ConfirmRecord("app", "*", "b", "a", "confirmed", "yes", 1.5, 0.02, [1.5], {"p": 1.5}, {"base": {"p": [1.0]}}))
    journal.settle({"a": RowRecord("winner"), "b": RowRecord("slower", "by far")}, ["a", "b"])
    return journal


def test_it_is_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    assert Journal(path, KEY, DIGESTS).pages.gates == {}
    pages = filled(path).pages
    again = Journal(path, KEY, DIGESTS)
    assert again.pages == pages and again.passed("a") == 0.5 and again.passed("b") is None
    assert again.race("tile", ["a", "b"], [["a"]], "a") == pages.races["tile"]
    assert again.race("tile", ["a"], [], "a") is None and again.race("tile", ["a", "b"], [["c"]], "a") is None
    assert again.race("tile", ["a", "b"], [], "b") is None and again.race("gemv", ["a", "b"], [], "a") is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"seconds"', '"gone"').replace('"gates": {"a": 0.5}', '"gates": {"a": "x"}'),
        lambda text: text.replace("cc 1.0", "cc 1.1"),
    ],
)
def test_one_that_is_torn_or_stale_is_as_good_as_none(spoil: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    filled(path)
    spoilt = spoil(path.read_text())
    assert spoilt != path.read_text()
    path.write_text(spoilt)
    found = Journal(path, KEY, DIGESTS)
    assert found.pages.gates == {} and found.pages.races == {} and found.known(["a", "b"]) == {}


def test_one_that_is_no_file_is_as_good_as_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(1 << 40)
    for path in (tmp_path / "pipe", tmp_path / "endless", tmp_path):
        assert Journal(path, KEY, DIGESTS).pages.gates == {}


def test_a_row_that_changed_takes_with_it_what_was_said_of_it(tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    filled(path)
    found = Journal(path, KEY, {"a": "1", "b": "3"})
    assert found.passed("a") == 0.5 and set(found.known(["a", "b"])) == {"a"}
    assert found.pages.races == {} and found.pages.confirms == {} and found.pages.racers == []


def test_a_folder_that_cannot_be_written_is_said_and_no_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "no such folder" / "j.json", KEY, DIGESTS)
    journal.heard("a", True, 0.5)
    assert "cannot be written" in journal.problem and journal.passed("a") == 0.5
    assert json.dumps(KEY)
