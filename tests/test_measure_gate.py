# SPDX-License-Identifier: Apache-2.0
"""Hostile rows in real child processes: each is rejected with its reason, the others go on, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunekit.errors import GateError
from tunekit.measure import gate
from tunekit.measure.gate import Job, Limits
from tunekit.measure.race import Deadline

JOB = Job("measure_hostile:load")
QUICK = Limits(row=1.0, memory=1 << 30)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are checked on Unix")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody reaps in a container does not count)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def reasons(*suffixes: str, job: Job = JOB, limits: Limits = QUICK) -> dict[str, str]:
    """State and reason of rows, each run between two good ones."""
    order = ["good", *suffixes, "good2"]
    verdicts = gate.gate_rows(job, order, limits=limits)
    assert list(verdicts) == order
    assert verdicts["good"].state == verdicts["good2"].state == gate.PASSED, verdicts
    assert verdicts["good"].reason == ""
    return {s: f"{verdicts[s].state}: {verdicts[s].reason}" for s in suffixes}


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        ("aborts", "answer: killed by SIGABRT"),
        ("prints_and_aborts", "answer: killed by SIGABRT (free(): invalid pointer)"),
        ("exits", "answer: exit status 0 before the verdict"),
        ("exits_in_c", "answer: exit status 0 before the verdict"),
        ("exits_in_python", "answer: raised SystemExit: 0"),
        ("segfaults", "answer: killed by SIGSEGV"),
        ("illegal", "answer: killed by SIGILL"),
        ("divides", "answer: killed by SIGFPE"),
        ("sleeps", "answer: no answer in 1 s"),
        ("sleeps_with_the_lock", "answer: no answer in 1 s"),
        ("ignores_and_sleeps", "answer: no answer in 1 s"),
        ("eats_memory", "answer: out of memory"),
        ("wrong", "answer: returned 41, not 42"),
        ("forges", "answer: wrote into the channel of the verdicts"),
        ("bad_at_the_regime", "first call at tile: raised ValueError: no operands"),
        ("missing", "the child process did not find this row"),
    ],
)
def test_a_hostile_row_is_rejected_with_its_reason(suffix: str, reason: str) -> None:
    assert reasons(suffix) == {suffix: f"rejected: {reason}"}


def test_a_row_that_prints_passes_and_forges_nothing() -> None:
    assert reasons("talks", "wrong") == {"talks": "passed: ", "wrong": "rejected: answer: returned 41, not 42"}


def test_many_hostile_rows_in_one_run() -> None:
    found = reasons("aborts", "exits", "wrong", "segfaults", "illegal")
    assert all(text.startswith("rejected") for text in found.values())


def test_the_first_row_may_be_the_wrong_one() -> None:
    verdicts = gate.gate_rows(JOB, ["wrong", "aborts", "good"], limits=QUICK)
    assert [v.state for v in verdicts.values()] == [gate.REJECTED, gate.REJECTED, gate.PASSED]


def test_an_innocent_row_is_not_blamed_for_what_an_earlier_one_left_behind() -> None:
    found = reasons("plants", "victim")
    assert found["victim"] == "passed: "
    assert found["plants"] == "passed: "  # nothing can be proven against it: its own process ends in order


def test_damage_that_shows_at_the_end_of_the_process_is_found() -> None:
    found = reasons("plants_for_the_end", "victim")
    assert found["victim"] == "passed: "
    assert found["plants_for_the_end"].startswith("rejected: the process was damaged: at its end killed by SIGABRT")


def test_what_a_kernel_forks_goes_down_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    monkeypatch.setenv("HOSTILE_PID_FILE", str(note))
    assert reasons("forks") == {"forks": "rejected: answer: exit status 3 before the verdict"}
    assert gone(int(note.read_text(encoding="ascii")))


def test_a_copy_of_the_process_that_a_kernel_forks_says_nothing() -> None:
    assert reasons("copies_itself", "wrong") == {
        "copies_itself": "passed: ",
        "wrong": "rejected: answer: returned 41, not 42",
    }


def test_a_gate_that_returns_neither_none_nor_text() -> None:
    verdicts = gate.gate_rows(Job("measure_hostile:load_odd"), ["good"], limits=QUICK)
    assert verdicts["good"].reason == "odd: the gate returned 7 (it must return None or a reason)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("load_not", "RuntimeError: no such luck"),
        ("load_and_die", "exit status 7"),
        ("nothing", "AttributeError"),
    ],
)
def test_a_family_that_cannot_be_loaded_is_an_error(name: str, text: str) -> None:
    with pytest.raises(GateError, match=text):
        gate.gate_rows(Job(f"measure_hostile:{name}"), ["good"], limits=QUICK)


def test_where_no_child_can_be_started_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GateError, match="--in-process"):
        gate.gate_rows(JOB, ["good"])
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(GateError, match="frozen"):
        gate.gate_rows(JOB, ["good"])


def test_in_process_on_request() -> None:
    verdicts = gate.gate_rows_here(JOB, ["good", "wrong", "bad_at_the_regime"])
    assert [v.state for v in verdicts.values()] == [gate.PASSED, gate.REJECTED, gate.REJECTED]
    verdicts = gate.gate_rows_here(JOB, ["good"], deadline=Deadline(0))
    assert verdicts["good"].state == gate.SKIPPED


def test_the_deadline_ends_a_row_that_hangs() -> None:
    start = time.monotonic()
    verdicts = gate.gate_rows(JOB, ["good", "sleeps", "good2"], limits=Limits(row=60), deadline=Deadline(2.0))
    assert time.monotonic() - start < 5
    assert [v.state for v in verdicts.values()] == [gate.PASSED, gate.SKIPPED, gate.SKIPPED]
    assert "time limit" in verdicts["sleeps"].reason


def test_progress_names_row_and_check() -> None:
    seen: list[tuple[str, str, int, int]] = []
    gate.gate_rows(JOB, ["good", "wrong"], limits=QUICK, progress=lambda *what: seen.append(what))
    assert ("good", "answer", 0, 2) in seen and ("good", "first call at tile", 0, 2) in seen
    assert ("wrong", "answer", 1, 2) in seen


PARENT = """
import sys
from tunekit.measure import gate
gate.gate_rows(gate.Job("measure_hostile:load"), ["says_where"], limits=gate.Limits(row=600))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_survives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "HOSTILE_PID_FILE": str(note), "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=env, stderr=subprocess.DEVNULL) as parent:
        end = time.monotonic() + 30
        while not (note.exists() and note.read_text(encoding="ascii")):
            assert parent.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        pid = int(note.read_text(encoding="ascii"))
        assert alive(pid)
        os.kill(parent.pid, number)
        assert parent.wait(10) != 0
    assert gone(pid)


def test_no_descriptor_and_no_process_is_left() -> None:
    def state() -> tuple[int, list[str]]:
        if not Path("/proc/self/fd").exists():
            return 0, []
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/thread-self/children").read_text(
            encoding="ascii"
        ).split()

    before = state()
    gate.gate_rows(JOB, ["good", "aborts", "exits", "good2"], limits=QUICK)
    assert state() == before
