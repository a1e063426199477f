# SPDX-License-Identifier: Apache-2.0
"""The process in which rows run for the first time: ``python -m tunekit.measure.child FD PARENT``.

Requests come as JSON lines on standard input, answers go as JSON lines to descriptor FD. Both are moved out of
the way before any kernel runs: a kernel that prints, or reads, meets the log and the null device.

    parent -> child   {"load": "module:function", "args": [...], "memory": bytes | null, "timeout": seconds}
    child  -> parent  {"ready": true} | {"error": text}
    parent -> child   {"row": suffix}
    child  -> parent  {"row": suffix, "case": name} ... {"row": suffix, "verdict": null | reason}

``module:function(*args)`` returns the rows by suffix and the family's fixtures. End of input ends the process. It
does not outlive its parent: the kernel kills it when the parent dies (Linux), and an alarm of its own ends a row that
hangs while nobody watches (everywhere).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from tunekit.errors import told
from tunekit.measure.fixtures import BoundRow, GateCase, Regime

PR_SET_PDEATHSIG = 1
_FILE_LIMIT = 64 << 20  # bytes that a kernel gone wild may write to a file


def run_gates(
    row: BoundRow,
    cases: Sequence[GateCase],
    regimes: Sequence[Regime],
    begin: Callable[[str], None],
    caught: type[BaseException] = Exception,
) -> str | None:
    """Run a row's gates, then one call of each regime, so that nothing is timed that never ran before.

    Args:
        row: the row.
        cases, regimes: the family's.
        begin: told the name of each check before it runs.
        caught: BaseException where Ctrl-C is the row's fault, too: in a child, which nobody sends one.

    Returns:
        None when the row passed, else the reason of its rejection.
    """
    for case in cases:
        begin(case.name)
        try:
            reason: Any = case.run(row)
        except BaseException as error:
            if not isinstance(error, caught) and isinstance(error, KeyboardInterrupt):
                raise
            return f"{case.name}: {_describe(error)}"
        if reason is not None:
            if not isinstance(reason, str):
                reason = f"the gate returned {reason!r:.60} (it must return None or a reason)"
            return f"{case.name}: {reason or 'failed without a reason'}"
    for regime in regimes:
        name = f"first call at {regime.name}"
        begin(name)
        try:
            regime.prepare(row)()
        except BaseException as error:
            if not isinstance(error, caught) and isinstance(error, KeyboardInterrupt):
                raise
            return f"{name}: {_describe(error)}"
    return None


def _describe(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"raised {told(error)}"


def load(where: str, args: Sequence[str]) -> Any:
    """What ``module:function(*args)`` returns: rows by suffix and fixtures, or what an arm is to run."""
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once where that has happened already."""
    if sys.platform == "linux":
        import ctypes

        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        except (OSError, AttributeError):  # a libc without it: the alarm remains
            pass
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Channel:
    """A child's side of its :class:`tunekit.measure.gate.Process`.

    Attributes:
        requests: yields the parent's lines.
        answers: takes ours.
        also: the further descriptors that the parent gave.
        pid: whose channel it is.
    """

    requests: TextIO
    answers: TextIO
    also: tuple[int, ...]
    pid: int = field(default_factory=os.getpid)

    def end_a_copy(self) -> None:
        """End this process where a row forked and this is its copy of us: the parent hears one of us only."""
        if os.getpid() != self.pid:
            os._exit(1)

    def answer(self, **message: Any) -> None:
        """Tell the parent something."""
        self.end_a_copy()
        self.answers.write(json.dumps(message) + "\n")
        self.answers.flush()


@contextlib.contextmanager
def channel(argv: Sequence[str]) -> Iterator[Channel]:
    """Become a child of :class:`tunekit.measure.gate.Process`, whose arguments are in ``argv``.

    The standard input and the channel are moved out of the way of whatever runs here. The process ends with its parent.
    """
    number, parent, *also = (int(text) for text in argv)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends this process itself
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    for descriptor in (number, *also):
        os.set_inheritable(descriptor, False)
    try:
        with requests, os.fdopen(number, "w", encoding="utf-8") as answers:
            yield Channel(requests, answers, tuple(also))
    except BrokenPipeError:
        os._exit(1)  # the parent is gone; nobody is left to tell


def set_alarm(timeout: float) -> None:
    """End this process if a row takes much longer than ``timeout`` seconds.

    Later than the parent's own timeout: it matters only when the parent no longer looks.
    """
    signal.alarm(math.ceil(timeout) + 5)


def limit_memory(extra: int | None) -> None:
    """Allow ``extra`` bytes of address space beyond what is mapped now; no core dumps, no huge files."""
    try:
        import resource
    except ImportError:
        return

    def lower(which: int, value: int) -> None:
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(which, (value, hard))
        except (OSError, ValueError):
            pass

    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, _FILE_LIMIT)
    if extra is None:
        return
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return  # without knowing what is mapped a limit could only be wrong
    lower(resource.RLIMIT_AS, mapped + extra)


def serve(parent: Channel) -> None:
    """Answer requests until they end."""
    setup = json.loads(parent.requests.readline() or "{}")
    if "load" not in setup:
        return
    try:
        rows, fixtures = load(setup["load"], setup["args"])
        cases, regimes = list(fixtures.gates()), list(fixtures.regimes())
    except BaseException as error:
        parent.answer(error=told(error))
        return
    limit_memory(setup["memory"])
    parent.answer(ready=True)
    for line in parent.requests:
        suffix = json.loads(line)["row"]
        row = rows.get(suffix)
        if row is None:
            parent.answer(row=suffix, verdict="the child process did not find this row")
            continue

        def begin(case: str, suffix: str = suffix) -> None:
            set_alarm(setup["timeout"])
            parent.answer(row=suffix, case=case)

        verdict = run_gates(row, cases, regimes, begin, BaseException)
        signal.alarm(0)
        parent.answer(row=suffix, verdict=verdict)


def main(argv: Sequence[str]) -> int:
    """Run the process; see the module."""
    with channel(argv) as parent:
        serve(parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
