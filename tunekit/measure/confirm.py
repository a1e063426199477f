# SPDX-License-Identifier: Apache-2.0
"""Confirming a winner where it will be used: chains of work, in fresh processes, on all lanes, against the fallback.

A race ranks rows on one lane, on operands of its own. Whoever wins it is then asked for what an application does. Each
arm is a process of its own in which the row is pinned, nothing else is known and the calls are those of the family's
users (:mod:`tunekit.measure.arm`). Arms take turns, in the order F C C F F C ..., so that drift meets both alike. An
arm's score is the least of its passes (interruptions only add time), a pair's ratio the fallback's score over the
challenger's. The challenger is confirmed where the median ratio is above ``1 + max(2 %, twice its standard error)``.

An arm proves what it ran over the channel that carries its times: the row, the tier and the seats in force after the
last pass. One that dies, says nothing or ran something else scores nothing. Pure but for the arms, which are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tunekit.measure import stats
from tunekit.measure.fixtures import EVERYTHING, Chain
from tunekit.measure.race import Deadline
from tunekit.measure.record import ConfirmRecord

LEAST_GAIN = 0.02
FEW, ENOUGH, MANY = 3, 5, 8
"""Pairs before a challenger may be sent away, before one may be crowned, and at most.

Simulated with passes that spread by 3 %, 300 challengers each: one that is no faster is crowned in 5 of 100, one that
is faster by 5 % in 99. With 4 pairs instead of 5 it is 7 of 100.
"""

BUDGET = 240.0
"""Seconds after which no new pair begins on a chain; on a box so busy that it is too few, what is known decides."""

CONFIRMED, REJECTED, OPEN = "confirmed", "rejected", "open"
UNUSABLE, UNFINISHED = "unusable", "unfinished"


@dataclass(frozen=True)
class Arm:
    """What runs in one process: a row of the kernel, and rows of its seats where they are others."""

    row: str
    seats: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How records and messages name it."""
        return " ".join([self.row, *(f"{seat}={row}" for seat, row in self.seats.items())])


class ArmFailed(Exception):
    """An arm scored nothing; the text is the reason."""


Times = Mapping[str, Sequence[float]]
"""Seconds of each pass, by part."""

Run = Callable[[Arm, Chain], Times]


@dataclass(frozen=True)
class Verdict:
    """What the pairs so far say: ``confirmed``, ``rejected`` or ``open``; the median ratio and the lead that counts."""

    state: str
    ratio: float
    margin: float


def judge(ratios: Sequence[float], more: bool) -> Verdict:
    """Judge pairs.

    Args:
        ratios: how many times as fast as the fallback the challenger was, one a pair; at least one.
        more: whether another pair may be run; without it the answer is never ``open``.
    """
    found = stats.estimate(ratios)
    margin = max(LEAST_GAIN, 2 * found.error)
    if len(ratios) >= ENOUGH and found.centre > 1 + margin:
        return Verdict(CONFIRMED, found.centre, margin)
    if not more or (len(ratios) >= FEW and max(ratios) <= 1 + LEAST_GAIN):
        return Verdict(REJECTED, found.centre, margin)
    return Verdict(OPEN, found.centre, margin)


def score(times: Times, chain: Chain, what: str) -> float:
    """Seconds of an arm: over the parts that decide ``what``, the least pass of each.

    Raises:
        ArmFailed: a part is missing or its times are none.
    """
    total = 0.0
    for part in chain.parts:
        if what not in part.decides:
            continue
        passes = times.get(part.name, ())
        if not passes or not all(t > 0 for t in passes):
            raise ArmFailed(f"it gave no times of {part.name}")
        total += min(passes)
    return total


def decides(chain: Chain, what: str) -> bool:
    """Whether a chain has a say about the kernel's row (``"*"``) or a seat."""
    return any(what in part.decides for part in chain.parts)


def confirm(
    challenger: Arm,
    base: Arm,
    what: str,
    chains: Sequence[Chain],
    run: Run,
    deadline: Deadline | None = None,
    progress: Callable[[str, str, int, int], None] | None = None,
) -> list[ConfirmRecord]:
    """Put a challenger to every chain that decides ``what``; the first that it does not win ends the matter.

    Args:
        challenger: who won the race.
        base: what it must beat: the fallback, or for a seat the row without it.
        what: ``"*"`` for the kernel's row, or the seat's name.
        chains: the family's, in order.
        run: starts one arm; raises ArmFailed where it scored nothing.
        deadline: no arm begins after it.
        progress: called with (chain, arm, pairs done, pairs at most).

    Returns:
        One record a chain that was tried; see :func:`confirmed`.
    """
    found = []
    for chain in chains:
        if decides(chain, what):
            found.append(_one(challenger, base, what, chain, run, deadline or Deadline(None), progress))
            if found[-1].verdict in (REJECTED, UNFINISHED):
                break
    return found


def confirmed(records: Sequence[ConfirmRecord]) -> bool:
    """Whether a challenger passed: it won at least one chain, and every one on which the base could be timed."""
    return {record.verdict for record in records} - {UNUSABLE} == {CONFIRMED}


def settled(record: ConfirmRecord) -> bool:
    """Whether a later run need not ask again: crowned, never ahead, or judged by enough pairs on a quiet box."""
    if record.verdict not in (CONFIRMED, REJECTED) or not record.ratios or record.margin is None:
        return False
    quiet = len(record.ratios) >= ENOUGH and record.margin <= LEAST_GAIN
    return record.verdict == CONFIRMED or quiet or max(record.ratios) <= 1 + LEAST_GAIN


@dataclass(frozen=True)
class Crown:
    """Who runs from now on: the row, rows of seats where they are others, and the records that say why."""

    row: str
    seats: dict[str, str]
    records: list[ConfirmRecord]


def crown(
    row: str,
    base: str,
    picks: Callable[[str], Mapping[str, str]],
    put: Callable[[Arm, Arm, str], list[ConfirmRecord]],
) -> Crown:
    """Confirm a race's winner, and then what won in its seats, each against the same without it.

    Args:
        row: who won.
        base: who stays where it is not confirmed.
        picks: for the row that stays, the rows that won its seats.
        put: as :func:`confirm`, with everything but challenger, base and what in question filled in.
    """
    records: list[ConfirmRecord] = []
    if row != base:
        records += put(Arm(row), Arm(base), EVERYTHING)
        row = row if confirmed(records) else base
    seats: dict[str, str] = {}
    for seat, other in picks(row).items():
        found = put(Arm(row, {**seats, seat: other}), Arm(row, dict(seats)), seat)
        records += found
        if confirmed(found):
            seats[seat] = other
    return Crown(row, seats, records)


def _one(
    challenger: Arm,
    base: Arm,
    what: str,
    chain: Chain,
    run: Run,
    deadline: Deadline,
    progress: Callable[[str, str, int, int], None] | None,
) -> ConfirmRecord:
    budget = Deadline(BUDGET)
    samples: dict[str, dict[str, list[float]]] = {"challenger": {}, "base": {}}
    ratios: list[float] = []
    seen = Verdict(OPEN, 0.0, LEAST_GAIN)

    def record(verdict: str, reason: str) -> ConfirmRecord:
        return ConfirmRecord(
            chain.name,
            what,
            challenger.label,
            base.label,
            verdict,
            reason,
            ratio=seen.ratio if ratios else None,
            margin=seen.margin if ratios else None,
            ratios=list(ratios),
            parts=_parts(samples),
            samples=samples,
        )

    def timed(name: str, arm: Arm) -> float:
        if progress is not None:
            progress(chain.name, arm.label, len(ratios), MANY)
        for last in (False, True):
            try:
                times = run(arm, chain)
                got = score(times, chain, what)
                break
            except ArmFailed:
                if last or deadline.over():
                    raise
        for part in chain.parts:
            samples[name].setdefault(part.name, []).append(min(times[part.name]))
        return got

    while seen.state == OPEN:
        if deadline.over():
            return record(UNFINISHED, "the time limit came before it was confirmed")
        order = [("base", base), ("challenger", challenger)]
        scores: dict[str, float] = {}
        for name, arm in order if len(ratios) % 2 == 0 else reversed(order):
            try:
                scores[name] = timed(name, arm)
            except ArmFailed as error:
                if deadline.over():
                    return record(UNFINISHED, "the time limit came before it was confirmed")
                if name == "challenger":
                    return record(REJECTED, f"it scored nothing: {error}")
                return record(UNUSABLE, f"{base.label} scored nothing, so there is nothing to compare with: {error}")
        ratios.append(scores["base"] / scores["challenger"])
        seen = judge(ratios, len(ratios) < MANY and not budget.over())
    lead = f"{100 * (seen.ratio - 1):+.1f} %"
    # Fewer pairs have an error beyond any margin; they were all below the least gain.
    need = f"more than {100 * (seen.margin if len(ratios) >= ENOUGH else LEAST_GAIN):.1f} %"
    reason = f"{lead} over {base.label} ({need} is a win)"
    if seen.state == REJECTED and len(ratios) < ENOUGH and max(ratios) > 1 + LEAST_GAIN:
        reason += f"; only {len(ratios)} pairs in {BUDGET:.0f} s, and {ENOUGH} are wanted: retune when the box is quiet"
    return record(seen.state, reason)


def _parts(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The ratio of each part alone, from the medians of both arms."""
    both = set(samples["challenger"]) & set(samples["base"])
    return {p: median(samples["base"][p]) / median(samples["challenger"][p]) for p in sorted(both)}
