# SPDX-License-Identifier: Apache-2.0
"""Where rows are raced: ``python -m tunekit.measure.racing FD PARENT WORD``, a process that a bad row may end.

A row that passed its checks may still die, hang or exit on a later call. So all rows of a race take turns in one child,
and the parent looks on. Requests come as JSON lines on standard input, answers go as JSON lines to descriptor FD:

    parent -> child   {"load": "module:function", "args": [...], "timeout": seconds}
    child  -> parent  {"ready": true} | {"error": text}
    parent -> child   {"race": the fields of an Order}
    child  -> parent  {"say": [stage, done, of, what]} | {"round": stage, "times": {...}, "calls": {...}} ...
    child  -> parent  {"result": the fields of a RaceResult} | {"error": text}

Which row is having its turn stands in the file WORD: two 64-bit numbers, how many turns there were and whose this one
is. It is written before the clock is read, and the parent looks at it a few times a second, so no turn is disturbed.
When the child ends, is silent for too long or the time is up, that row is the one to blame.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from tunekit.environment import for_child
from tunekit.errors import FamilyError, MalformedManifest, told
from tunekit.measure import gate, race
from tunekit.measure.child import Channel, channel, limit_memory, load, set_alarm
from tunekit.measure.fixtures import BoundRow, Regime
from tunekit.measure.race import Deadline, Plan, RaceResult, twin_of
from tunekit.measure.record import read_as
from tunekit.team import threads

_WORD = struct.Struct("<qq")
_LOOK = 0.25  # seconds between two looks at the word
_GRACE = 1.0  # seconds after the deadline in which a child ends by itself
_SILENT = 50  # turns of the planned length: who takes so long for one, and then the time is up, does not come back

PREPARING, ALONE = "preparing", "alone"

Say = Callable[[str, int, int, str], None]
"""Told of progress: stage, how many of how many, and of what."""


@dataclass(frozen=True)
class Order:
    """A race to be held.

    Attributes:
        regime: its name.
        rows: who enters.
        base: the one that enters twice; it stands first.
        keep, among, final, seed, plan: see :func:`tunekit.measure.race.race`.
        groups: which rows do the same work here: a name for each; None: each does its own.
        seconds: until the deadline, or None.
    """

    regime: str
    rows: list[str]
    base: str
    keep: list[str] = field(default_factory=list)
    among: list[str] | None = None
    groups: dict[str, str] | None = None
    final: bool = True
    seed: int = 0
    plan: Plan = field(default_factory=Plan)
    seconds: float | None = None


def race_rows(
    order: Order,
    bound: Mapping[str, BoundRow],
    regime: Regime,
    deadline: Deadline,
    clock: race.Clock,
    say: Say,
    watch: race.Watch | None = None,
) -> RaceResult:
    """Prepare everybody's operands and race, in this process.

    On one lane: a race ranks kernels, and other lanes would bring their neighbours' noise into it.
    """
    seen = watch or race.Watch()
    base = order.base
    entries: dict[str, race.Call] = {}
    failed: dict[str, str] = {}
    twin: race.Call | None = None
    with threads(1):
        for done, suffix in enumerate(order.rows):
            say(PREPARING, done, len(order.rows), suffix)
            if deadline.over():
                break
            seen.turn(suffix)
            try:
                entries[suffix] = regime.prepare(bound[suffix])
                if suffix == base:
                    twin = regime.prepare(bound[suffix])
            except BaseException as error:  # an author's own code, which may even exit
                if isinstance(error, KeyboardInterrupt) and not seen.alone:
                    raise
                failed[suffix] = f"raised while it was prepared: {told(error)}"
        if base not in entries or twin is None:
            # Before the limit only a base that cannot be prepared comes here, and then it is in ``failed``.
            return RaceResult(order.seed, base, failed=failed, complete=False)

        def progress(stage: str, done: int, of: int) -> None:
            if of > 1:  # the final's later rounds come one by one, each inside a count of its own
                say(stage, done, of, f"{len(entries)} rows in turns")

        groups = order.groups
        raced = race.race(
            entries,
            twin,
            base,
            keep=set(order.keep) & set(entries),
            among=None if order.among is None else set(order.among),
            group=None if groups is None else lambda name: groups.get(name, name),
            final=order.final,
            seed=order.seed,
            plan=order.plan,
            clock=clock,
            deadline=deadline,
            progress=progress,
            watch=seen,
        )
    short = len(entries) + len(failed) < len(order.rows)
    return dataclasses.replace(raced, failed={**failed, **raced.failed}, complete=raced.complete and not short)


class Here:
    """Races in this process: on request, where no child can be had. A bad row ends it.

    Args:
        bound: rows by suffix.
        regimes: by which orders name them.
        clock: seconds; may be a simulated one.
    """

    def __init__(self, bound: Mapping[str, BoundRow], regimes: Sequence[Regime], clock: race.Clock) -> None:
        self.bound, self.clock = bound, clock
        self.regimes = {regime.name: regime for regime in regimes}
        self.lost: dict[str, str] = {}
        self.slow: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def hold(self, order: Order, deadline: Deadline, say: Say) -> RaceResult:
        """Hold a race."""
        return race_rows(order, self.bound, self.regimes[order.regime], deadline, self.clock, say)


# --- the parent's side -----------------------------------------------------------------------------------


class _Lost(Exception):
    """A race ended before its result; the text is the reason.

    Attributes:
        row: whose turn it was, or None.
        how: ``ended`` (the process did), ``hung``, ``slow`` (as hung, but with less patience than the limits say, since
            the time was short), or ``time`` (the deadline came, and it did not end by itself).
        seen: the rounds that were whole by then.
    """

    def __init__(self, reason: str, row: str | None, how: str, seen: RaceResult) -> None:
        super().__init__(reason)
        self.row, self.how, self.seen = row, how, seen


class _Child(gate.Process):
    """One child process in which races are held.

    Raises:
        GateError: no child can be started on this system.
        FamilyError: it cannot load the family.
    """

    does, awaits = "races rows", "the end of the race"

    def __init__(self, job: gate.Job, limits: gate.Limits) -> None:
        self.job, self.limits = job, limits
        self.turns: dict[str, int] = {}  # rounds that each row had here
        self._word: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._word.write(_WORD.pack(0, -1))
        self._word.flush()
        variables = {**for_child(), "TUNEKIT_MODE": "tune"}
        super().__init__("tunekit.measure.racing", variables, (self._word.fileno(),))
        self.load(job, limits)

    def kill(self) -> None:
        super().kill()
        self._word.close()

    def _look(self) -> tuple[int, int]:
        """How many turns there were, and the number of the row whose turn it is."""
        data = os.pread(self._word.fileno(), _WORD.size, 0)
        return _WORD.unpack(data) if len(data) == _WORD.size else (-1, -1)

    def race(self, order: Order, deadline: Deadline, say: Say) -> RaceResult:
        """Hold a race. Raises :class:`_Lost`."""
        left = deadline.left()
        order = dataclasses.replace(order, seconds=None if left == math.inf else left)
        names = [*order.rows, twin_of(order.base)]
        screening: dict[str, list[float]] = {}
        final: dict[str, list[float]] = {}
        calls: dict[str, int] = {}
        stage, last = "", self._look()
        first = last[0]
        since = time.monotonic()
        # With little time left one hung row must not use it all up; a call as long as this could not be raced in it.
        patience = min(self.limits.row, max(2.0, left / 3))

        def lost(why: str, how: str) -> _Lost:
            turn, number = self._look()
            row = names[number] if turn != first and 0 <= number < len(names) else None
            seen = RaceResult(order.seed, order.base, calls, screening, final, {}, False)
            return _Lost(f"{why} (turn {turn}, {stage})" if stage else why, row, how, seen)

        try:
            self.send({"race": dataclasses.asdict(order)})
            while True:
                try:
                    message = self.receive(_LOOK, Deadline(None))
                except gate.ChildHung:
                    message = {}
                now, word = time.monotonic(), self._look()
                if message or word != last:
                    last, since = word, now
                if "result" in message:
                    return _result(message["result"])
                if "error" in message:
                    raise FamilyError(f"the race {order.regime} cannot be held: {message['error']}")
                if "say" in message:
                    stage, done, of, what = message["say"]
                    say(stage, done, of, what)
                elif "round" in message:
                    stage = message["round"]
                    calls = dict(message["calls"])
                    race.append({"screening": screening, "final": final}[stage], message["times"])
                    for name in message["times"]:
                        self.turns[name] = self.turns.get(name, 0) + 1
                silent = now - since
                if silent >= patience:
                    how = "hung" if patience >= self.limits.row else "slow"
                    raise lost(f"no answer in {patience:.3g} s while it was timed", how)
                if deadline.over() and deadline.past() >= _GRACE:
                    sized = stage in ("screening", "final")
                    if sized and silent >= max(_GRACE, _SILENT * order.plan.window):
                        took = f"no answer in {silent:.1f} s to a turn of {order.plan.window:g} s"
                        raise lost(f"{took}, when the time limit came", "hung")
                    raise lost("the time limit came during its turn", "time")
        except gate.ChildDied as error:
            raise lost(f"{error} while it was timed", "ended") from None
        except (KeyError, TypeError, ValueError, MalformedManifest):
            raise lost("wrote into the channel of the times", "ended") from None


def _result(data: Any) -> RaceResult:
    found: RaceResult = read_as(RaceResult, data, "race")
    return found


class Course:
    """Children in which the races of a kernel are held, one after the other while they last. A context manager.

    Args:
        job: where a child finds rows and fixtures.
        limits: of a row.

    Attributes:
        lost: rows that ended a child or hung, with the reason. They are not raced again.
        slow: those of them that are only known to have taken too long for the time that was left.
    """

    def __init__(self, job: gate.Job, limits: gate.Limits) -> None:
        self.job, self.limits = job, limits
        self.lost: dict[str, str] = {}
        self.slow: set[str] = set()
        self._child: _Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def hold(self, order: Order, deadline: Deadline, say: Say) -> RaceResult:
        """Hold a race; a row that ends it is out, and the others race again from the start, in a new child.

        What was measured before stays only where the time limit leaves the new race fewer rounds.

        Raises:
            GateError: no child can be started.
            FamilyError: it cannot load the family.
        """
        out: dict[str, str] = {}
        best: RaceResult | None = None
        nobody = 0
        while True:
            rows = [row for row in order.rows if row not in out]
            if order.base not in rows:
                return RaceResult(order.seed, order.base, failed=out, complete=False)
            if best is not None and deadline.over():
                break
            try:
                if self._child is None:
                    self._child = _Child(self.job, self.limits)
                found = self._child.race(dataclasses.replace(order, rows=rows), deadline, say)
                best = _longer(found, best)
                break
            except _Lost as lost:
                ran = dict(self._child.turns) if self._child is not None else {}
                self._end()
                best = _longer(lost.seen, best)
                if lost.how == "time":
                    break
                if lost.row is None:  # it ended between two races, and nobody knows by whom
                    nobody += 1
                    if nobody == 3:
                        raise FamilyError(f"the child process that races rows ends by itself: {lost}") from None
                    continue
                entered = dataclasses.replace(order, rows=rows)
                out.update(self._blame(entered, lost, ran, deadline, say))
            except BaseException:
                self._end()
                raise
        return _without(best, out)

    def _blame(self, order: Order, lost: _Lost, ran: Mapping[str, int], deadline: Deadline, say: Say) -> dict[str, str]:
        """Who ended a race: the row whose turn it was, unless alone it does not, and another one does.

        A row may leave damage behind that kills a later, innocent one.
        """
        row = str(lost.row).removesuffix(race.TWIN)
        guilty = {row: str(lost)}
        others = [name for name in order.rows if name != row]
        if lost.how == "ended" and others and not deadline.over():
            why = self._alone(order, row, ran.get(row, 0), deadline, say)
            if why is None:
                found = {name: self._alone(order, name, ran.get(name, 0), deadline, say) for name in others}
                guilty = {name: reason for name, reason in found.items() if reason is not None} or guilty
        self.lost.update(guilty)
        if lost.how == "slow":
            self.slow.update(guilty)
        return guilty

    def _alone(self, order: Order, row: str, turns: int, deadline: Deadline, say: Say) -> str | None:
        """Run a row in a child of its own, for as many turns as it had; None, or how it ended that child."""
        say(ALONE, 0, 1, row)
        plan = dataclasses.replace(order.plan, screening_rounds=turns + 2)
        trial = Order(order.regime, [row], row, final=False, seed=order.seed, plan=plan)
        with _Child(self.job, self.limits) as child:
            try:
                child.race(trial, deadline, lambda *words: None)
                child.finish(self.limits.row)
            except _Lost as lost:
                return None if lost.how == "time" else str(lost)
            except gate.ChildDied as error:
                return str(error)
        return None


def _longer(new: RaceResult, old: RaceResult | None) -> RaceResult:
    """The race that saw more, the new one where both saw as much."""

    def length(result: RaceResult) -> tuple[bool, int, int]:
        def rounds(samples: Mapping[str, list[float]]) -> int:
            return min((len(times) for times in samples.values()), default=0)

        return result.complete, rounds(result.final), rounds(result.screening)

    return new if old is None or length(new) >= length(old) else old


def _without(result: RaceResult, out: Mapping[str, str]) -> RaceResult:
    """A race without rows that are out, which are its failures."""

    def left(samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
        return {name: times for name, times in samples.items() if name not in out}

    return dataclasses.replace(
        result,
        screening=left(result.screening),
        final=left(result.final),
        failed={**result.failed, **out},
    )


# --- the child's side ------------------------------------------------------------------------------------


class _Teller(race.Watch):
    """Writes down whose turn it is, and tells of every round."""

    alone = True  # SIGINT is ignored here: a KeyboardInterrupt is a row's own

    def __init__(self, parent: Channel, timeout: float) -> None:
        self.parent, self.timeout = parent, timeout
        (self.word,) = parent.also
        self.count = 0
        self.numbers: dict[str, int] = {}

    def turn(self, name: str) -> None:
        self.parent.end_a_copy()
        self.count += 1
        os.pwrite(self.word, _WORD.pack(self.count, self.numbers.get(name, -1)), 0)
        set_alarm(self.timeout)

    def round(self, stage: str, times: Mapping[str, float], calls: Mapping[str, int]) -> None:
        self.parent.answer(round=stage, times=dict(times), calls=dict(calls))


def _order(data: Mapping[str, Any]) -> Order:
    plan = Plan(**{**data["plan"], "final_rounds": tuple(data["plan"]["final_rounds"])})
    return Order(**{**data, "plan": plan})


def serve(parent: Channel) -> None:
    """Hold races until requests end."""
    setup = json.loads(parent.requests.readline() or "{}")
    if "load" not in setup:
        return
    try:
        rows, fixtures = load(setup["load"], setup["args"])
        regimes = {regime.name: regime for regime in fixtures.regimes()}
    except BaseException as error:
        parent.answer(error=told(error))
        return
    limit_memory(None)
    teller = _Teller(parent, setup["timeout"])
    parent.answer(ready=True)
    for line in parent.requests:
        order = _order(json.loads(line)["race"])
        absent = [row for row in order.rows if row not in rows]
        if absent or order.regime not in regimes:
            what = f"the row {absent[0]}" if absent else f"the regime {order.regime}"
            parent.answer(error=f"the child process did not find {what}")
            continue
        teller.numbers = {name: number for number, name in enumerate([*order.rows, twin_of(order.base)])}
        deadline = Deadline(order.seconds)
        raced = race_rows(
            order,
            rows,
            regimes[order.regime],
            deadline,
            time.perf_counter,
            lambda *words: parent.answer(say=words),
            teller,
        )
        signal.alarm(0)
        parent.answer(result=dataclasses.asdict(raced))


def main(argv: Sequence[str]) -> int:
    """Run the process; see the module."""
    with channel(argv) as parent:
        serve(parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
