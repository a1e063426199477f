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

import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunekit.errors import told
from tunekit.measure.fixtures import BoundRow, Fixtures, GateCase, Regime

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


def load(where: str, args: Sequence[str]) -> tuple[Mapping[str, BoundRow], Fixtures]:
    """Call ``module:function`` with ``args``."""
    module, _, function = where.partition(":")
    found: tuple[Mapping[str, BoundRow], Fixtures] = getattr(importlib.import_module(module), function)(*args)
    return found


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


def serve(requests: Any, answers: Any) -> None:
    """Answer requests until they end. ``requests`` yields lines, ``answers`` takes text."""

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    setup = json.loads(requests.readline() or "{}")
    if "load" not in setup:
        return
    try:
        rows, fixtures = load(setup["load"], setup["args"])
        cases, regimes = list(fixtures.gates()), list(fixtures.regimes())
    except BaseException as error:
        answer(error=told(error))
        return
    limit_memory(setup["memory"])
    answer(ready=True)
    for line in requests:
        suffix = json.loads(line)["row"]
        row = rows.get(suffix)
        if row is None:
            answer(row=suffix, verdict="the child process did not find this row")
            continue

        def begin(case: str, suffix: str = suffix) -> None:
            # Later than the parent's own timeout: it matters only when the parent no longer looks.
            signal.alarm(math.ceil(setup["timeout"]) + 5)
            answer(row=suffix, case=case)

        verdict = run_gates(row, cases, regimes, begin, BaseException)
        signal.alarm(0)
        answer(row=suffix, verdict=verdict)


def main(argv: Sequence[str]) -> int:
    """Run the process; see the module."""
    number, parent = int(argv[0]), int(argv[1])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends this process itself
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.set_inheritable(number, False)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as answers:
            serve(requests, answers)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone; nobody is left to tell
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
