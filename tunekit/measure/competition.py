# SPDX-License-Identifier: Apache-2.0
"""The races of one kernel: who enters, regime after regime, and who won. What was raced before is not raced again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tunekit._manifest import COMPILER
from tunekit.console import Step
from tunekit.kernel import Kernel
from tunekit.measure import race, racing, stats, verdicts
from tunekit.measure.fixtures import EVERYTHING, BoundRow, Regime
from tunekit.measure.journal import Journal
from tunekit.measure.race import Deadline
from tunekit.measure.record import RegimeRecord, RowRecord
from tunekit.rows import split_name


@dataclass
class Entrants:
    """A kernel's rows on their way through a run.

    Attributes:
        kernel: the declaration.
        bound: rows that can run here.
        fallback: what runs untuned.
        incumbent: what the manifest names, when it can run here and counts.
        previous: what the manifest names.
        rows: verdicts so far.
        alive: rows that passed the gates, in order of declaration.
        notes: for the reader.
        complete: whether every row was checked and raced to the end.
        unsound: rows of the fallback chain that failed theirs, and so are no fallback.
        seats: what the manifest names for seats, when it counts.
        reused: what the journal spared, in words.
    """

    kernel: Kernel
    bound: Mapping[str, BoundRow]
    fallback: str
    incumbent: str | None
    previous: str | None
    rows: dict[str, RowRecord]
    alive: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    unsound: list[str] = field(default_factory=list)
    seats: dict[str, str] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)


@dataclass
class Result:
    """How the races went.

    Attributes:
        standings: of the regimes that were measured, the primary's first.
        readings, regimes: by regime, as estimates and for the record.
        decision: who won, or None where too little was measured.
        broken: why nothing can be chosen (the fallback failed while it was timed), or empty.
        quiet: whether every regime that chooses ended by its plan, with no margin above the least.
    """

    standings: list[stats.Standing] = field(default_factory=list)
    readings: dict[str, race.Reading] = field(default_factory=dict)
    regimes: dict[str, RegimeRecord] = field(default_factory=dict)
    decision: stats.Decision | None = None
    broken: str = ""
    quiet: bool = True


class Competition:
    """The races of one kernel.

    Args:
        found: its rows; verdicts, notes and what is left alive are kept up to date there.
        regimes: the primary first.
        journal: what an earlier run found.
        plan, seed: of the races.
        course: where they are held.
        timed: gives a context that counts the time of a stage.
        say: told what goes on.
    """

    def __init__(
        self,
        found: Entrants,
        regimes: Sequence[Regime],
        journal: Journal,
        plan: race.Plan,
        seed: int,
        course: racing.Course | racing.Here,
        timed: Callable[[str], AbstractContextManager[None]],
        say: Callable[[Step], None],
    ) -> None:
        self.found, self.regimes, self.journal = found, list(regimes), journal
        self.plan, self.seed, self.course, self.timed, self.say = plan, seed, course, timed, say
        self.args = {s: _arguments(found.kernel, s) for s in found.bound}
        self.chooses = {p for r in regimes if r.decides != EVERYTHING for p in r.decides}
        self.result = Result()
        self.racers: list[str] = []
        self.part = ""  # how progress calls the race that is held

    @property
    def incumbent(self) -> str | None:
        """What ran before, while it is in the race."""
        return self.found.incumbent if self.found.incumbent in self.found.alive else None

    def run(self, deadline: Deadline) -> Result:
        """Race every regime and decide."""
        found, result = self.found, self.result
        self._enter()
        picked: str | None = None
        for done, regime in enumerate(self.regimes):
            # The primary's share is double: on it everything else rests.
            weights = len(self.regimes) - done + (1 if done == 0 else 0)
            share = deadline.share((2 if done == 0 else 1) / weights)
            with self.timed(f"race {regime.name}"):
                self.part = f"{regime.name} ({done + 1} of {len(self.regimes)})"
                raced = self._race(regime, share, picked)
            for suffix in set(self.course.lost) - self.course.slow:
                reason = self.course.lost[suffix]
                self.journal.late(suffix, f"{regime.name}: {reason}")
            for suffix, reason in raced.failed.items():
                name = suffix.removesuffix(race.TWIN)
                found.rows[name] = RowRecord("rejected", f"{regime.name}: {reason}", found.rows[name].seconds)
                if name in found.alive:
                    found.alive.remove(name)
            reading = race.read(raced, self.plan)
            result.readings[regime.name] = reading
            result.regimes[regime.name] = verdicts.regime_record(regime, raced, reading)
            found.complete = found.complete and raced.complete
            # The others raced again without a row that ended the process, as if it had never been there.
            clean = dataclasses.replace(
                raced, failed={s: why for s, why in raced.failed.items() if s not in self.course.lost}
            )
            whole = clean.complete and not clean.failed
            if whole and (reading.margin <= self.plan.least_margin or not regime.chooses):
                self.journal.keep_race(regime.name, clean)
            elif regime.chooses:
                result.quiet = False
            if found.fallback not in found.alive:
                why = found.rows[found.fallback].reason
                result.broken = f"the fallback {found.fallback} failed while it was timed: {why}"
                return result
            enough = reading.final.get(found.fallback, None)
            if enough is None or enough.count < stats.LEAST_ROUNDS:
                if done == 0:
                    break
                continue
            result.standings.append(
                stats.Standing(
                    regime.name,
                    regime.decides,
                    self._living(reading.final),
                    self._living(reading.screened),
                    reading.margin,
                    reading.cut,
                )
            )
            if done == 0:
                picked = stats.decide(result.standings, self.args, self.incumbent, found.fallback).winner
        # A row may have been rejected in a later regime than the first.
        result.standings = [
            dataclasses.replace(s, final=self._living(s.final), screened=self._living(s.screened))
            for s in result.standings
        ]
        if result.standings:
            result.decision = stats.decide(result.standings, self.args, self.incumbent, found.fallback)
        return result

    def judge(self) -> str:
        """Give every measured row its verdict; the reason why the winner won."""
        found, result = self.found, self.result
        if result.decision is None:
            raise ValueError("nothing was decided")
        found.notes += verdicts.comment(
            found.fallback, self.regimes, result.readings, result.decision.winner, self.plan
        )
        return verdicts.judge(
            found.rows, found.fallback, result.standings, result.decision, self.incumbent, self.args, self.chooses
        )

    def seats(self, row: str) -> dict[str, str]:
        """The rows that won the seats of a row, where they are others than it."""
        picks = {}
        standings = {standing.regime: standing for standing in self.result.standings}
        for regime in self.regimes:
            standing = standings.get(regime.name)
            if not regime.seat or standing is None:
                continue
            found = {n: e for n, e in standing.final.items() if self.found.kernel.same_layout(n, row)}
            if row in found and len(found) > 1:
                before = self.found.seats.get(regime.seat)
                winner, _ = stats.pick_with_reason(found, standing.margin, before if before in found else None, row)
                if winner != row:
                    picks[regime.seat] = winner
        return picks

    # --- who races

    def _living(self, found: Mapping[str, stats.Estimate]) -> dict[str, stats.Estimate]:
        return {name: e for name, e in found.items() if name in self.found.alive}

    def _enter(self) -> None:
        """Everyone; or, where an earlier run measured some to the end, only what is new and what it must beat."""
        found = self.found
        known = self.journal.known(found.alive)
        new = [s for s in found.alive if s not in known]
        last = [s for s in self.journal.pages.racers if s in found.alive]
        before = {found.fallback, found.incumbent, *found.seats.values()}
        before |= {s for s, row in known.items() if row.verdict == "winner"}
        if not known or found.fallback not in known:
            self.racers = list(found.alive)
        elif not new and len(last) == len(self.journal.pages.racers) and {*before} - {None} <= {*last}:
            self.racers = last
        else:
            self.racers = [s for s in found.alive if s in new or s in before]
        spared = [s for s in found.alive if s not in self.racers]
        for suffix in spared:
            kept = known[suffix]
            found.rows[suffix] = RowRecord(kept.verdict, kept.reason, found.rows[suffix].seconds)
        if spared:
            found.reused.append(f"the race verdicts of {len(spared)} rows")
        found.alive = [s for s in found.alive if s in self.racers]

    def _race(self, regime: Regime, deadline: Deadline, picked: str | None) -> race.RaceResult:
        """Race one regime, or find that it was raced already."""
        found, base = self.found, self.found.fallback
        among: set[str] | None = None
        final = regime.chooses
        group: Callable[[str], Hashable] | None = None
        if regime.decides == EVERYTHING:
            # Rows that differ only in what other regimes choose do the same work in this one.
            if self.chooses:
                group = self._grouping()
        elif final:
            among = set()
            if picked is not None and self.result.standings:
                primary = self.result.standings[0]
                if regime.decides:
                    among |= set(stats.candidates_for(primary, picked, regime.decides, self.args))
                if regime.seat:
                    among |= {s for s in found.alive if found.kernel.same_layout(s, picked)}
            final = len(among) > 1
        order = [base, *(s for s in found.alive if s != base)]
        keep = {s for s in (base, self.incumbent, *found.seats.values()) if s in order}
        if among is not None and not regime.seat:
            keep |= among & set(order)
        # Whoever does the same work may have stood for one that must be in the final.
        same = {s: [o for o in order if group(o) == group(s)] if group is not None else [s] for s in keep}
        needed = list(same.values()) if final else []
        known = self.journal.race(regime.name, order, needed, base)
        if known is not None and (not final or _rounds(known) >= stats.LEAST_ROUNDS):
            found.reused.append(f"the race {regime.name}")
            return known
        return self._hold(regime, deadline, order, keep, among, group, final)

    def _hold(
        self,
        regime: Regime,
        deadline: Deadline,
        order: Sequence[str],
        keep: set[str],
        among: set[str] | None,
        group: Callable[[str], Hashable] | None,
        final: bool,
    ) -> race.RaceResult:
        groups = None if group is None else {s: repr(group(s)) for s in order}
        asked = racing.Order(
            regime.name,
            list(order),
            self.found.fallback,
            sorted(keep),
            None if among is None else sorted(among),
            groups,
            final,
            self.seed,
            self.plan,
        )

        def say(stage: str, done: int, of: int, item: str) -> None:
            unit = "rounds" if stage not in (racing.PREPARING, racing.ALONE) else "rows"
            self.say(Step("race", self.found.kernel.key, self.part, stage, done, of, unit, item))

        return self.course.hold(asked, deadline, say)

    def _grouping(self) -> Callable[[str], Hashable]:
        def key(name: str) -> Hashable:
            return tuple(stats.equals_without(self.args, name, self.chooses))

        return key


def _arguments(kernel: Kernel, name: str) -> dict[str, Any]:
    """What a row differs by from others: its arguments, and who built it where that is not the usual compiler."""
    _, compiler = split_name(name)
    return {**kernel.full_args(kernel.row(name)), **({COMPILER: compiler} if compiler else {})}


def _rounds(result: race.RaceResult) -> int:
    return min((len(times) for times in result.final.values()), default=0)
