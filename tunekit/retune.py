# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit.retune``: find this box's fastest rows and keep them.

Every installed family is tuned unless ``--scope`` or ``--kernel`` says otherwise. The result goes to stdout (one
table a kernel, or one JSON document with ``--json``), progress to stderr. Exit status: 0 done, 1 a reference or a
fallback failed a check or stdout could not be written, 2 usage, 3 no entry could be written, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tunekit import console as _console
from tunekit import dispatch
from tunekit.console import Console
from tunekit.errors import GateError, ManifestError, TunekitError, TunekitWarning
from tunekit.measure import gate
from tunekit.measure.record import KernelRecord, RegimeRecord, RunRecord
from tunekit.measure.verdicts import percent
from tunekit.tuner import DONE, FAILED, INTERRUPTED, NOTHING, USAGE, House, Options, ScopeResult, tune

_COLOURS = {"winner": "green", "rejected": "red"}
_PROBE_LIMIT = 120.0
_STAGES = ("build", "gate", "race", "confirm", "write", "stamp")


# --- what is shown ---------------------------------------------------------------------------------------


def ratio(regime: RegimeRecord, suffix: str, fallback: str) -> float | None:
    """How many times as fast as the fallback a row is in a regime, or None where one of them was not timed."""
    if suffix not in regime.centres or fallback not in regime.centres:
        return None
    return regime.centres[fallback] / regime.centres[suffix]


def kernel_table(record: KernelRecord) -> list[str]:
    """The table of one kernel: measured rows by speed, then those that were not measured, as declared."""
    regimes = list(record.regimes.items())
    first = regimes[0][1].centres if regimes else {}
    order = sorted(record.rows, key=lambda s: (s not in first, first.get(s, 0.0)))
    headers = ["row", *(f"{name} {regime.unit}" for name, regime in regimes), "ratio", "verdict", "reason"]
    lines = []
    for suffix in order:
        row = record.rows[suffix]
        rates = [
            f"{regime.work / regime.centres[suffix] / 1e9:.1f}" if suffix in regime.centres else "-"
            for _, regime in regimes
        ]
        times = ratio(regimes[0][1], suffix, record.fallback) if regimes and record.fallback else None
        verdict = row.verdict + (" (fallback)" if suffix == record.fallback else "")
        lines.append([suffix, *rates, f"{times:.2f}x" if times else "-", verdict, row.reason])
    return _console.table(headers, lines, "l" + "r" * (len(regimes) + 1))


def change(name: str, record: KernelRecord) -> str:
    """One line: what the manifest says from now on, against what ran before."""
    if record.winner is None:
        return f"{name}: nothing chosen: {record.reason}"
    before = record.previous or record.fallback
    label = "" if record.previous else "fallback "
    seats = "".join(f", {seat}: {row}" for seat, row in record.seats.items())
    if record.winner == before and not seats:
        return f"{name}: unchanged, {label}{record.winner}" + ("" if record.previous else " (now explicit)")
    gains = [
        f"{regime} {percent(times)}"
        for regime, data in record.regimes.items()
        if before is not None and (times := ratio(data, record.winner, before)) is not None
    ]
    return f"{name}: {label}{before} -> {record.winner}{seats}" + (f" ({', '.join(gains)})" if gains else "")


def stage_line(record: RunRecord) -> str:
    """Where the time went."""
    parts = []
    for stage in _STAGES:
        taken = [s for name, s in record.stages.items() if name.split()[0] == stage]
        if taken:
            parts.append(f"{stage} {_console.seconds(sum(taken))}")
    return "time: " + ", ".join(parts)


def noise_line(record: KernelRecord) -> str | None:
    """The noise floors and margins of the regimes, or None where nothing was timed."""
    parts = [
        f"{name} {100 * regime.floor:.1f} %"
        + (f" (margin {100 * regime.margin:.1f} %)" if regime.margin and (regime.decides or regime.seat) else "")
        for name, regime in record.regimes.items()
        if regime.floor is not None
    ]
    return "noise floor: " + ", ".join(parts) if parts else None


def confirm_lines(record: KernelRecord) -> list[str]:
    """What became of each confirmation, one line each."""
    lines = []
    for entry in record.confirm:
        parts = ", ".join(f"{name} {percent(times)}" for name, times in entry.parts.items())
        about = "" if entry.what == "*" else f" ({entry.what})"
        lines.append(
            f"confirm on {entry.chain}{about}: {entry.challenger} {entry.verdict}: {entry.reason}"
            + (f" ({parts})" if parts else "")
        )
    return lines


def show(result: ScopeResult, console: Console, quiet: bool) -> None:
    """Print one scope's result."""
    record = result.record
    if result.problem:
        console.complain(f"tunekit: nothing of {record.scope} was tuned: {result.problem}")
        return
    for name, kernel in record.kernels.items():
        if not quiet:
            console.say(console.style(f"{record.scope}.{name}", "bold") + f" on {record.brand}")
            for line in kernel_table(kernel):
                suffix = line.split(" ", 1)[0]
                colour = _COLOURS.get(kernel.rows[suffix].verdict) if suffix in kernel.rows else None
                console.say(console.style(line, colour) if colour else line)
            spared = f"not measured again: {', '.join(kernel.reused)} (--fresh does)" if kernel.reused else None
            notes = [f"note: {note}" for note in kernel.notes]
            notes += [f"@{name}: {label}; the others: {kernel.usual}" for name, label in kernel.compilers.items()]
            for text in (noise_line(kernel), *confirm_lines(kernel), spared, *notes):
                if text:
                    console.say(text)
        console.say(change(f"{record.scope}.{name}", kernel))
    for note in result.notes:
        console.complain(f"tunekit: {note}")
    if not quiet:
        console.say(f"manifest: {result.manifest}" if result.manifest else "manifest: not written")
        console.say(stage_line(record))
        console.say()


def as_json(results: Sequence[ScopeResult], status: int) -> dict[str, Any]:
    """The whole result as JSON values: ``{"status": n, "scopes": [...]}``, each scope with its run record."""
    scopes = [
        {
            "scope": r.record.scope,
            "manifest": r.manifest,
            "status": r.status,
            "notes": list(r.notes),
            "problem": r.problem,
            "changes": {name: change(name, kernel) for name, kernel in r.record.kernels.items()},
            "record": r.record.to_json(),
        }
        for r in results
    ]
    return {"status": status, "scopes": scopes}


# --- the command -----------------------------------------------------------------------------------------


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``retune``, for this module's own parser and for ``python -m tunekit retune``."""
    add = parser.add_argument
    add("--scope", action="append", default=[], metavar="S", help="tune this scope (may be repeated)")
    add("--all", action="store_true", help="every installed family, each into its own scope (what a plain retune does)")
    add("--kernel", action="append", default=[], metavar="K", help="tune this kernel (may be repeated)")
    add("--module", action="append", default=[], metavar="M", help="a declaring module without an entry point, too")
    add("--time-limit", type=_seconds, metavar="S", help="end after so many seconds, with what is known")
    add("--row-timeout", type=_seconds, default=20.0, metavar="S", help="seconds for one check of a row (20)")
    add("--model", metavar="FILE", help="confirm winners on this model (Q8: a GGUF file of a llama-like model)")
    add("--confirm", metavar="ROW", help="confirm this row as if it had won; races nothing and writes nothing")
    add("--compilers", metavar="LIST", help="race what each of these compilers makes of the rows (gcc,clang)")
    add("--no-probe", action="store_true", help="do not measure what dispatch costs (python -m tunekit probe)")
    add("--fresh", action="store_true", help="forget the present winners and what earlier runs measured")
    add("--dry-run", action="store_true", help="measure and report, write nothing")
    add("--in-process", action="store_true", help="check and race rows in this process, which a bad row can end")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order in which rows take turns (0)")
    add("--json", action="store_true", help="print the result as one JSON document")
    add("--quiet", action="store_true", help="no progress, no tables: what changed, and errors")
    add(
        "--progress",
        choices=_console.PROGRESS,
        default="auto",
        help="auto: a line on a terminal, few plain lines elsewhere; json: one object a line, on stderr",
    )


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP came."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP as Ctrl-C; a repeat is ignored while the first is being obeyed, for two seconds.

    Once one came, all stay ignored to the end of the process: it is about to exit with 130, and with the old handlers
    back in place a repeat would make a death by signal of that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def handle(number: int, frame: object) -> None:
        if first:
            if time.monotonic() - first[0] > 2:
                os._exit(INTERRUPTED)  # obeying takes longer than a person will wait
            return
        first.append(time.monotonic())
        raise Interrupted(signal.Signals(number).name)

    before: dict[int, Any] = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What was ignored stays ignored: nohup, and jobs that a shell put into the background.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_IGN if first else old if old is not None else signal.SIG_DFL)


def run(
    arguments: argparse.Namespace,
    console: Console | None = None,
    house: House | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Run with parsed arguments; the exit status. The rest is for tests: see :func:`tunekit.tuner.tune`."""
    return _guarded(lambda: _run(arguments, console, house, clock))


def _run(
    arguments: argparse.Namespace, console: Console | None, house: House | None, clock: Callable[[], float]
) -> int:
    options = Options(
        tuple(arguments.kernel),
        arguments.time_limit,
        arguments.dry_run,
        arguments.fresh,
        arguments.in_process,
        arguments.seed,
        gate.Limits(row=arguments.row_timeout),
        model=arguments.model,
        confirm=arguments.confirm,
        compilers=tuple(name.strip() for name in (arguments.compilers or "").split(",") if name.strip()),
    )
    with _console.apart(arguments.json), warnings.catch_warnings():
        talk = console or Console(quiet=arguments.quiet or arguments.json, progress=arguments.progress)
        warnings.showwarning = _plainly(talk, warnings.showwarning)
        return _obey(arguments, options, talk, house, clock)


def _plainly(talk: Console, others: Callable[..., None]) -> Callable[..., None]:
    """A way to show warnings in which tunekit's own are one line, without a line of its source."""

    def show_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, TunekitWarning):
            talk.complain(str(message))
        else:
            others(message, category, *where, **more)

    return show_warning


def _guarded(work: Callable[[], int]) -> int:
    """Run with the signals in hand, also in the moments before and after the work itself."""
    _fill_closed_streams()
    try:
        with interruptible():
            return work()
    except KeyboardInterrupt as error:
        _interrupted(Console(), error)
        return INTERRUPTED


def _interrupted(talk: Console, error: KeyboardInterrupt) -> None:
    by = f" by {error}" if str(error) else ""
    talk.complain(f"tunekit: interrupted{by}; scopes that were not finished keep their manifests")


def _fill_closed_streams() -> None:
    """Put the null device where a standard stream was closed: a pipe to a child must not get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _obey(
    arguments: argparse.Namespace, options: Options, talk: Console, house: House | None, clock: Callable[[], float]
) -> int:
    try:
        if arguments.all and (arguments.scope or arguments.kernel):
            raise TunekitError("--all tunes every family; leave out --scope and --kernel, or leave out --all")
        for name in arguments.module:
            dispatch.add_family(name)
        results = tune(arguments.scope, options, talk, house, clock)
        if not results:
            if not any(dispatch.frozen(kernel) for kernel in dispatch.kernels()):  # of those it is said already
                talk.complain("tunekit: there is nothing to tune: no installed family declares a kernel")
            return NOTHING
        profile = _probe(arguments, options, talk, house, results)
        statuses = [r.status for r in results]
        status = FAILED if FAILED in statuses else DONE if DONE in statuses else NOTHING
        if arguments.json:
            talk.document({**as_json(results, status), "profile": profile})
        else:
            for result in results:
                show(result, talk, arguments.quiet)
            if profile is not None:
                talk.say(f"box profile: {profile['path']}")
        if talk.lost is not None:
            talk.complain(f"tunekit: the result could not be written to standard output: {talk.lost}")
            return FAILED
        return status
    except KeyboardInterrupt as error:
        _interrupted(talk, error)
        return INTERRUPTED
    except (GateError, ManifestError) as error:
        talk.complain(f"tunekit: {error}")
        return NOTHING
    except TunekitError as error:
        talk.complain(f"tunekit: {error}")
        return USAGE


def _probe(
    arguments: argparse.Namespace, options: Options, talk: Console, house: House | None, results: Sequence[ScopeResult]
) -> dict[str, Any] | None:
    """Mint the box profile where the family that it is measured with was tuned; None where not, or where it failed.

    In a fresh process, which runs on the rows that were just chosen: this one has made its choice.
    """
    told = arguments.no_probe or options.dry_run or options.confirm or arguments.kernel
    told = told or options.time_limit is not None
    if house is not None or told or not any(r.record.scope == "tunekit" and r.status == DONE for r in results):
        return None
    talk.step(_console.Step("probe", "this box", item="what dispatch costs"))
    environment = {**os.environ, "TUNEKIT_MODE": "normal"}
    command = [sys.executable, "-m", "tunekit", "probe", "--json"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PROBE_LIMIT)
        why = done.stderr.strip()[-300:]
        found: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        found, why = None, str(error)
    talk.clear()
    if found is None:
        talk.complain(f"tunekit: no box profile was made, and the numbers in force stay: {why}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return _guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tunekit.retune",
        allow_abbrev=False,
        description="Build, check and time every row on this box, and keep the winners.",
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    _console.no_empty(parser, arguments)
    return _run(arguments, None, None, time.perf_counter)


if __name__ == "__main__":
    sys.exit(main())
