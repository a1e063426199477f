# SPDX-License-Identifier: Apache-2.0
"""Races in a child: whatever a row does there, the others' race goes on, and the row that did it is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunekit.measure import gate, race, racing
from tunekit.measure.race import Deadline, Plan

JOB = gate.Job("measure_late:load")
LIMITS = gate.Limits(row=3.0)
PLAN = Plan(window=0.002, screening_rounds=3, final_rounds=(3, 3))


def hold(
    course: racing.Course, *rows: str, regime: str = "tile", seconds: float | None = None, plan: Plan = PLAN
) -> race.RaceResult:
    order = racing.Order(regime, ["good", *rows], "good", ["good"], plan=plan)
    return course.hold(order, Deadline(seconds), lambda *words: None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("exits", r"exit status 0 before the end of the race while it was timed \(turn \d+, .*\)"),
        ("exits_in_c", r"exit status 0 before the end of the race.*"),
        ("segfaults", r"killed by SIGSEGV while it was timed.*"),
        ("illegal", r"killed by SIGILL.*"),
        ("sleeps_with_the_lock", r"no answer in 3 s while it was timed.*"),
        ("ignores_and_spins", r"no answer in 3 s while it was timed.*"),
        ("alarms", r"killed by SIGALRM.*"),
        ("closes", r".*"),
        ("forges", r".*"),
    ],
)
def test_a_row_that_ends_the_process_later_is_out_and_the_others_race(row: str, reason: str) -> None:
    with racing.Course(JOB, LIMITS) as course:
        found = hold(course, row, "good2")
        assert found.complete and set(found.final) == {"good", "good#2", "good2"}, found
        assert len(found.final["good2"]) == 3 and row not in found.screening
        assert set(found.failed) == set(course.lost) == {row}
        assert re.fullmatch(reason, found.failed[row]), found.failed


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("raises_without_words", "raised while it was timed: Mute"),
        ("exits_in_python", "raised while it was timed: SystemExit: 0"),
        ("interrupts", "raised while it was timed: KeyboardInterrupt"),
    ],
)
def test_a_row_that_raises_later_is_out_and_the_race_goes_on_where_it_was(row: str, reason: str) -> None:
    with racing.Course(JOB, LIMITS) as course:
        found = hold(course, row, "good2")
    assert found.complete and found.failed == {row: reason} and not course.lost


def test_a_copy_of_the_process_that_a_row_forks_does_not_race() -> None:
    with racing.Course(JOB, LIMITS) as course:
        found = hold(course, "forks")
    assert found.complete and not found.failed and len(found.screening["forks"]) == 3


def test_damage_is_blamed_on_who_did_it() -> None:
    with racing.Course(JOB, LIMITS) as course:
        # Alone the victim survives, and the other one leaves a process that does not end in order.
        found = hold(course, "plants_for_the_end", "victim")
        assert found.complete and set(found.failed) == {"plants_for_the_end"}, found.failed
        assert "the process was damaged: at its end killed by SIGABRT" in found.failed["plants_for_the_end"]
    with racing.Course(JOB, LIMITS) as course:
        # Alone both survive: the one whose turn it was is all that is left to blame.
        found = hold(course, "plants", "victim")
        assert found.complete and set(found.failed) == {"victim"}, found.failed


def test_the_base_that_ends_the_process_ends_the_race() -> None:
    order = racing.Order("tile", ["exits", "good"], "exits", plan=PLAN)
    with racing.Course(JOB, LIMITS) as course:
        found = course.hold(order, Deadline(None), lambda *words: None)
    assert not found.complete and set(found.failed) == {"exits"} and not found.screening


def test_one_child_serves_several_races_and_ends_with_them() -> None:
    with racing.Course(JOB, LIMITS) as course:
        hold(course, "good2")
        child = course._child
        assert hold(course, "good2", regime="other").complete and course._child is child
        assert child is not None and child._process is not None
        pid = child._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_time_limit_keeps_the_rounds_that_are_whole() -> None:
    plan = Plan(window=0.002, screening_rounds=5, final_rounds=(100_000, 100_000))
    with racing.Course(JOB, LIMITS) as course:
        start = time.monotonic()
        found = hold(course, "good2", seconds=2.0, plan=plan)
        assert time.monotonic() - start < 60
    assert not found.complete and not found.failed and len(found.final["good2"]) > 3


def test_a_row_that_hangs_when_the_time_is_up_is_named() -> None:
    with racing.Course(JOB, gate.Limits(row=1000.0)) as course:
        found = hold(course, "sleeps_with_the_lock", "good2", seconds=4.0)
    assert "no answer in 2 s while it was timed" in found.failed["sleeps_with_the_lock"]
    assert course.slow == {"sleeps_with_the_lock"}  # with so little patience nothing is held against it later


def test_a_family_that_cannot_be_loaded_is_an_error() -> None:
    from tunekit.errors import FamilyError

    with (
        racing.Course(gate.Job("measure_hostile:load_not"), LIMITS) as course,
        pytest.raises(FamilyError, match="no such luck"),
    ):
        hold(course)
    with racing.Course(JOB, LIMITS) as course, pytest.raises(FamilyError, match="did not find the row nobody"):
        hold(course, "nobody")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_child(tmp_path: Path, number: signal.Signals) -> None:
    """A row that hangs does not keep the run from ending, and the child does not outlive it."""
    script = (
        "from tunekit.retune import interruptible\n"
        "import test_measure_racing as t\n"
        "from tunekit.measure import racing\n"
        "with interruptible(), racing.Course(t.JOB, t.gate.Limits(row=600.0)) as course:\n"
        "    t.hold(course, 'says_where')\n"
    )
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "HOSTILE_PID_FILE": str(pid_file)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=Path(__file__).parent)
    end = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_what_a_row_started_in_a_session_of_its_own_ends_with_the_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("HOSTILE_PID_FILE", str(pid_file))
    with racing.Course(JOB, LIMITS) as course:
        assert hold(course, "starts_another_session").complete
        pid = int(pid_file.read_text())
        os.kill(pid, 0)
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie has none
        assert time.monotonic() < end, "it outlived the race"
        time.sleep(0.05)
