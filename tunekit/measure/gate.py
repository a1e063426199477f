# SPDX-License-Identifier: Apache-2.0
"""Gates: what a row must pass before it may be timed, run where a bad row can take nothing down.

A child process (:mod:`tunekit.measure.child`) serves one row after the other. When it dies or does not answer, the
row in progress is rejected with that as its reason, and a new child goes on with the rest. A row may also leave
damage behind that kills a later, innocent one. So a row that dies in a child that had served others is asked again,
alone in a fresh one. When it passes there, the others are asked again too, each alone, and must also leave a process
that ends in order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from tunekit.environment import for_child
from tunekit.errors import FamilyError, GateError, told
from tunekit.measure.child import load, run_gates
from tunekit.measure.race import Deadline

PASSED, REJECTED, SKIPPED = "passed", "rejected", "skipped"


@dataclass(frozen=True)
class Job:
    """Where a child finds the rows: ``module:function(*args)``, which returns (rows by suffix, fixtures)."""

    load: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a row may use.

    Attributes:
        row: seconds for one check of a row (a gate, or the first call of a regime).
        start: seconds for a child to import the family and load the grid.
        memory: bytes of address space beyond what a child has after loading, or None.
    """

    row: float = 20.0
    start: float = 120.0
    memory: int | None = 4 << 30


@dataclass(frozen=True)
class Verdict:
    """What the gates said of a row: ``passed``, ``rejected`` (with the reason) or ``skipped`` (the time was up)."""

    suffix: str
    state: str
    reason: str = ""
    seconds: float = 0.0


def describe_end(status: int) -> str:
    """A process's return code in words: ``killed by SIGILL``, ``exit status 0``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class ChildDied(Exception):
    """The child ended, or had to be ended, before its answer; the text is the reason."""


class ChildHung(ChildDied):
    """The child did not answer in time."""


class OutOfTime(Exception):
    """The deadline came while a row ran."""


_MARK = "TUNEKIT_CHILD"
"""In the environment of each child and of whatever it starts: by this they are found at its end."""

_marks = itertools.count()


def _marked(mark: bytes) -> list[int]:
    """Processes that were started with a mark in their environment (Linux; elsewhere none is found)."""
    found = []
    try:
        names = [path.name for path in Path("/proc").iterdir()]
    except OSError:
        return []
    for name in names:
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # ended, or somebody else's
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def _end_marked(mark: bytes) -> None:
    """Kill what a child left behind in sessions of its own; again, since some may be forking meanwhile."""
    for _ in range(50):
        left = _marked(mark)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class Process:
    """One child process and the channel on which it answers. A context manager: leaving it kills the process.

    Args:
        module: what runs in it; it gets the channel's descriptor and our process number as arguments.
        variables: its environment.
        also: descriptors that it gets, too; their numbers are its further arguments.

    Attributes:
        does: what it is there for, in words.
        awaits: what its end comes before, in words.

    Raises:
        GateError: no child can be started on this system.
    """

    does, awaits = "checks rows", "the verdict"

    def __init__(self, module: str, variables: Mapping[str, str], also: Sequence[int] = ()) -> None:
        self._buffer = b""
        mark = f"{os.getpid()}.{next(_marks)}.{time.time_ns()}"
        self._mark = f"{_MARK}={mark}".encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._read, write = os.pipe()
        try:
            # A process group of its own: what a kernel forks goes down with it, and Ctrl-C reaches this process only.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(write), str(os.getpid()), *map(str, also)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(write, *also),
                env={**variables, _MARK: mark},
                process_group=0,
            )
        except (OSError, ValueError) as error:
            self.kill()
            raise GateError(_no_child(str(error))) from error
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(write)
        self._selector.register(self._read, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process and whatever it started, whatever state they are in. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            try:
                # The group while its leader is not reaped: until then nobody else can have its number.
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()
            process.wait()
            _end_marked(self._mark)
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:
                    pass
        self._selector.close()
        self._log.close()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def send(self, message: Mapping[str, Any]) -> None:
        """Put a request to it. Raises ChildDied."""
        process = self._process
        if process is None or process.stdin is None:
            raise ChildDied("it was ended before")
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise ChildDied(self._end()) from None

    def load(self, job: Job, limits: Limits, **more: Any) -> None:
        """Have it load the family; ``more`` goes with the request.

        Raises:
            FamilyError: it cannot; it was ended.
        """
        try:
            self.send({"load": job.load, "args": list(job.args), "timeout": limits.row, **more})
            first = self.receive(limits.start, Deadline(None))
        except ChildDied as error:
            self.kill()
            raise FamilyError(f"the child process that {self.does} did not start: {error}") from error
        except BaseException:
            self.kill()
            raise
        if "error" in first:
            self.kill()
            raise FamilyError(f"the child process that {self.does} cannot load {':'.join(job.args)}: {first['error']}")

    def receive(self, timeout: float, deadline: Deadline) -> dict[str, Any]:
        """Its next answer.

        Raises:
            ChildDied: it ended, took longer than ``timeout`` seconds, or spoke nonsense.
            OutOfTime: the deadline came first.
        """
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0:
                raise ChildHung(f"no answer in {timeout:g} s")
            if deadline.over():
                raise OutOfTime
            # In slices, since a process that the kernel forked may hold the pipe open after its parent's death.
            if self._selector.select(min(left, 0.25, deadline.left())):
                block = os.read(self._read, 1 << 16)
                if not block:
                    raise ChildDied(self._end())
                self._buffer += block
                if len(self._buffer) > 1 << 20:
                    raise ChildDied("wrote into the channel of the verdicts")
            elif self._status(0) is not None and not self._selector.select(0):
                raise ChildDied(self._end())  # dead, and the pipe holds no last words
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChildDied("wrote into the channel of the verdicts")
        return message

    def _status(self, timeout: float) -> int | None:
        """The process's return code, waited for but not reaped (see :meth:`kill`); None when it still runs."""
        process, end = self._process, time.monotonic() + timeout
        if process is None:
            return -signal.SIGKILL
        while True:
            status = _peek(process)
            if status is not None or time.monotonic() >= end:
                return status
            time.sleep(0.01)

    def _end(self) -> str:
        status = self._status(1.0)
        if status is None:
            return "closed the channel of the verdicts"
        return describe_end(status) + (f" before {self.awaits}" if status >= 0 else "") + self._last_words()

    def finish(self, seconds: float) -> None:
        """Let the process end by itself. Raises ChildDied when it does not do so in order."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        status = self._status(seconds)
        if status is None:
            raise ChildHung(f"the process hung at its end ({seconds:g} s)")
        if status != 0:
            raise ChildDied(f"the process was damaged: at its end {describe_end(status)}{self._last_words()}")

    def _last_words(self) -> str:
        """The last line that the process printed, such as the C library's complaint about its heap."""
        try:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 2000))
            lines = self._log.read().decode("utf-8", "replace").split("\n")
        except (OSError, ValueError):
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:120]})" if said else ""


class Child(Process):
    """One child process that answers for rows of one job.

    Raises:
        GateError: no child can be started on this system.
        FamilyError: it cannot load the family.
    """

    def __init__(self, job: Job, limits: Limits) -> None:
        self.limits = limits
        self.served = 0
        super().__init__("tunekit.measure.child", {**for_child(), "TUNEKIT_MODE": "tune"})
        self.load(job, limits, memory=limits.memory)

    def ask(self, suffix: str, deadline: Deadline, begin: Callable[[str], None]) -> str | None:
        """Run a row's gates; None or the reason of its rejection.

        Raises:
            ChildDied: the process ended, hung or spoke nonsense while the row was in progress.
            OutOfTime: the deadline came first.
        """
        case = ""
        try:
            self.send({"row": suffix})
            while True:
                message = self.receive(self.limits.row, deadline)
                if message.get("row") != suffix:
                    raise ChildDied("wrote into the channel of the verdicts")
                if "verdict" in message:
                    self.served += 1
                    return None if message["verdict"] is None else str(message["verdict"])
                case = str(message.get("case", ""))
                begin(case)
        except ChildDied as error:
            raise type(error)(f"{case}: {error}" if case else str(error)) from None


def _peek(process: subprocess.Popen[bytes]) -> int | None:
    """A process's return code without reaping it, or None; where the system cannot peek, it is reaped."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else reaped it
        return process.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _no_child(why: str) -> str:
    return (
        f"cannot start a child process to check rows in: {why}; "
        "with --in-process they are checked in this process, which a bad row can end"
    )


Progress = Callable[[str, str, int, int], None]


def gate_rows(
    job: Job,
    suffixes: Sequence[str],
    *,
    limits: Limits | None = None,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    heard: Callable[[Verdict], None] | None = None,
) -> dict[str, Verdict]:
    """Run the gates of rows in children, in the order given.

    Args:
        job: where a child finds them.
        suffixes: which ones; those that matter most first, in case the time runs out.
        limits: time and memory of a row.
        deadline: rows in progress or not yet begun by then are skipped.
        progress: called with (suffix, check, rows done, rows in all).
        heard: called with each verdict as it falls; a later call for the same row takes the earlier one back.

    Raises:
        GateError: no child can be started.
        FamilyError: it cannot load the family.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise GateError(_no_child("this Python is frozen or embedded"))
    gating = _Gating(job, limits or Limits(), deadline or Deadline(None), progress, len(suffixes))
    gating.heard = heard or gating.heard
    return gating.run(suffixes)


class _Gating:
    """The state of one :func:`gate_rows`."""

    def __init__(self, job: Job, limits: Limits, deadline: Deadline, progress: Progress | None, total: int) -> None:
        self.job, self.limits, self.deadline, self.total = job, limits, deadline, total
        self.progress: Progress = progress or (lambda suffix, case, done, of: None)
        self.verdicts: dict[str, Verdict] = {}
        self.heard: Callable[[Verdict], None] = lambda verdict: None

    def run(self, suffixes: Sequence[str]) -> dict[str, Verdict]:
        child: Child | None = None
        passed_here: list[str] = []
        try:
            for suffix in suffixes:
                if self.deadline.over():
                    self.verdicts[suffix] = Verdict(suffix, SKIPPED, "the time limit came before its gates")
                    continue
                if child is None:
                    child, passed_here = Child(self.job, self.limits), []
                first = child.served == 0
                verdict, died = self.one(child, suffix)
                if died:
                    child.kill()
                    child = None
                    if died == "ended" and not first:
                        verdict = self.second_chance(suffix, verdict, passed_here)
                elif verdict.state == PASSED:
                    passed_here.append(suffix)
                self.verdicts[suffix] = verdict
                self.heard(verdict)
        finally:
            if child is not None:
                child.kill()
        return self.verdicts

    def one(self, child: Child, suffix: str) -> tuple[Verdict, str]:
        """A row's verdict, and whether the child is still good: ``""``, ``ended``, or ``stopped`` by us."""
        start = time.monotonic()

        def begin(case: str) -> None:
            self.progress(suffix, case, len(self.verdicts), self.total)

        try:
            reason = child.ask(suffix, self.deadline, begin)
        except OutOfTime:
            return Verdict(suffix, SKIPPED, "the time limit came during its gates", time.monotonic() - start), "stopped"
        except ChildDied as error:
            end = "stopped" if isinstance(error, ChildHung) else "ended"
            return Verdict(suffix, REJECTED, str(error), time.monotonic() - start), end
        state = PASSED if reason is None else REJECTED
        return Verdict(suffix, state, reason or "", time.monotonic() - start), ""

    def second_chance(self, suffix: str, verdict: Verdict, before: Sequence[str]) -> Verdict:
        """A row died in a used child: was it the row, or what an earlier one left behind?"""
        again = self.alone(suffix)
        if again.state != PASSED:
            return verdict if again.state == SKIPPED else again
        for other in before:
            self.verdicts[other] = self.alone(other)
            self.heard(self.verdicts[other])
        return again

    def alone(self, suffix: str) -> Verdict:
        """A row in a child of its own, which must also end in order."""
        with Child(self.job, self.limits) as child:
            verdict, died = self.one(child, suffix)
            if died or verdict.state != PASSED:
                return verdict
            try:
                child.finish(self.limits.row)
            except ChildDied as error:
                return Verdict(suffix, REJECTED, str(error), verdict.seconds)
            return verdict


def gate_rows_here(
    job: Job,
    suffixes: Sequence[str],
    *,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    heard: Callable[[Verdict], None] | None = None,
) -> dict[str, Verdict]:
    """As :func:`gate_rows`, in this process: only on request, where no child can be had. A bad row ends it."""
    limit = deadline or Deadline(None)
    say: Progress = progress or (lambda suffix, case, done, of: None)
    try:
        rows, fixtures = load(job.load, job.args)
        cases, regimes = list(fixtures.gates()), list(fixtures.regimes())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an author's own code, which may even exit
        raise FamilyError(f"{':'.join(job.args)} cannot be loaded: {told(error)}") from error
    verdicts: dict[str, Verdict] = {}
    for suffix in suffixes:
        if limit.over():
            verdicts[suffix] = Verdict(suffix, SKIPPED, "the time limit came before its gates")
            continue
        start, done = time.monotonic(), len(verdicts)

        def begin(case: str, suffix: str = suffix, done: int = done) -> None:
            say(suffix, case, done, len(suffixes))

        reason = run_gates(rows[suffix], cases, regimes, begin)
        state = PASSED if reason is None else REJECTED
        verdicts[suffix] = Verdict(suffix, state, reason or "", time.monotonic() - start)
        if heard is not None:
            heard(verdicts[suffix])
    return verdicts
