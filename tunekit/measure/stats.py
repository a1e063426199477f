# SPDX-License-Identifier: Apache-2.0
"""From times to a winner. Pure functions: the same numbers give the same winner, in any order of rows.

**Centre.** The median of levelled samples. A round (every contestant once) shares its moment of the clock and its
neighbours, so :func:`level` first divides each round by its own pace, the median over the contestants of how slow
each was against its own median. Simulated with independent noise, common noise, drift, steps and bursts, this was
best or nearly so everywhere. The minimum picks the luckiest contestant; the mean and the trimmed mean follow
bursts; the half-sample mode is three times as uncertain and follows a drift wherever it lingers.

**Floor.** One contestant is entered twice. What the pair differs by, though it is one and the same, is noise; a pair
can agree by luck, so the floor is never below twice the standard error of the pair's difference.

**Margin.** ``max(3 %, floor)``. A contestant leads another only by more than the margin, and by more than twice the
standard error of their own difference, so that an erratic contestant needs a larger lead than a steady one.

**Two guards of what ran before.** On a box whose neighbours take the core away, one contestant's centre can be several
times its true time. So a challenger must also lead what ran before in the best samples of each, by 1.5 %: interruptions
only ever add time, and a lead that the best samples do not show is the other one's bad luck. And where the margin is
above :data:`CEILING`, nothing is judged.

**Tie band.** Whoever the fastest does not lead is in the band with it; there the incumbent stays, else the fallback,
else the first name. Speed does not break ties: inside the band it is noise, and would crown another row each time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

LEAST_MARGIN = 0.03

CEILING = 0.25
"""A margin above this decides nothing.

The rows of a sane grid that are worth choosing between lie a few to some tens of per cent apart. A box on which one
row differs from itself by a quarter cannot see that, and what it does see, a factor of several, is a neighbour.
"""

BEST_OF = 3
"""How many of the least samples are the best ones. The one least is a matter of luck: simulated with noise of 3 %, it
lost 14 of 100 true gains of 5 %, three lost 9. More of them would soon hold interrupted ones."""

LEAST_ROUNDS = 4
"""Fewer rounds than this decide nothing: :func:`estimate` gives them an error that is above any margin."""

BEST_LEAD = LEAST_MARGIN / 2
"""The lead in the best samples that a challenger must show. Simulated, 200 races each, this against the whole margin:
true gains of 5 % found under 3 % noise, 185 against 166 (90 % are wanted); a tied row crowned where the fallback alone
was interrupted in three of four windows, 11 against 0, and in nine of ten, 87 against 14; a row slower by 4 %, as often
with either: never at three of four, 11 times at nine of ten. So it buys true gains with changes among equals. Where the
fallback alone loses nearly every window no sample tells the truth, and nothing here helps.
"""

NOISE, BEST = "noise", "best samples"

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MEDIAN_TO_MEAN = 1.2533  # standard error of a median over that of a mean, likewise


@dataclass(frozen=True)
class Estimate:
    """What is known about one contestant's time.

    Attributes:
        centre: seconds a call.
        error: standard error of the centre, as a fraction of it.
        spread: robust standard deviation of the samples, as a fraction of the centre.
        count: samples.
        best: the mean of the :data:`BEST_OF` least samples as the clock gave them, or None where only the centre is
            known.
    """

    centre: float
    error: float
    spread: float
    count: int
    best: float | None = None

    @property
    def least(self) -> float:
        """The best samples' mean; the centre where it is not known."""
        return self.centre if self.best is None else self.best


def level(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Take each round's pace out of the samples; ``samples[name][round]`` in, the same shape out.

    Raises:
        ValueError: the contestants have different numbers of rounds, or a time is not positive.
    """
    counts = {len(times) for times in samples.values()}
    if len(counts) > 1:
        raise ValueError(f"contestants with different numbers of rounds: {sorted(counts)}")
    if any(not t > 0 or not math.isfinite(t) for times in samples.values() for t in times):
        raise ValueError("a time that is not a positive number")
    rounds = counts.pop() if counts else 0
    if rounds == 0:
        return {name: [] for name in samples}
    usual = {name: median(times) for name, times in samples.items()}
    pace = [median(times[r] / usual[name] for name, times in samples.items()) for r in range(rounds)]
    return {name: [t / p for t, p in zip(times, pace, strict=True)] for name, times in samples.items()}


def estimate(samples: Sequence[float]) -> Estimate:
    """Centre, error and spread of one contestant's (levelled) samples. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    count = len(ordered)
    centre = median(ordered)
    spread = _MAD_TO_SIGMA * median(abs(t - centre) for t in ordered) / centre
    # Two estimates of the error, the larger one counts: from the spread (fine where samples are bell-shaped), and
    # from the order statistics one standard deviation of rank either side of the median (fine where they are not).
    half = math.sqrt(count) / 2
    low = ordered[max(0, math.floor(count / 2 - half))]
    high = ordered[min(count - 1, math.ceil(count / 2 + half) - 1)]
    error = max(_MEDIAN_TO_MEAN * spread / math.sqrt(count), (high - low) / 2 / centre)
    # Two samples that agree by luck are not certainty; fewer than four say nothing about an error.
    return Estimate(centre, error if count > 3 else max(error, 0.5 / count), spread, count)


def estimates(samples: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Estimates of all contestants of a race, after :func:`level`; empty when there was no whole round."""
    # The best samples are taken before levelling: a round's pace is a guess, and dividing by it can make time less.
    return {
        name: dataclasses.replace(estimate(times), best=fmean(sorted(samples[name])[:BEST_OF]))
        for name, times in level(samples).items()
        if times
    }


def uncertainty(a: Estimate, b: Estimate) -> float:
    """Twice the standard error of the difference of two contestants, as a fraction."""
    return 2 * math.hypot(a.error, b.error)


def noise_floor(a: Estimate, b: Estimate) -> float:
    """The noise floor from one contestant that was entered twice, as a fraction."""
    return max(abs(a.centre - b.centre) / min(a.centre, b.centre), uncertainty(a, b))


def leads(a: Estimate, b: Estimate, margin: float) -> bool:
    """Whether ``a`` is faster than ``b`` by more than can be noise."""
    return b.centre > a.centre * (1 + max(margin, uncertainty(a, b)))


def tie_band(found: Mapping[str, Estimate], margin: float) -> list[str]:
    """The fastest contestant and those it does not lead, by name."""
    if not found:
        return []
    fastest = min(found, key=lambda name: (found[name].centre, name))
    return sorted(name for name in found if not leads(found[fastest], found[name], margin))


def pick(found: Mapping[str, Estimate], margin: float, incumbent: str | None, fallback: str | None) -> str:
    """The winner: of the tie band the incumbent, else the fallback, else the first name. Raises ValueError if empty."""
    return pick_with_reason(found, margin, incumbent, fallback)[0]


def pick_with_reason(
    found: Mapping[str, Estimate], margin: float, incumbent: str | None, fallback: str | None
) -> tuple[str, str]:
    """The winner, and why what ran before was held against the fastest: :data:`NOISE`, :data:`BEST`, or nothing.

    Raises:
        ValueError: nothing was measured.
    """
    band = tie_band(found, margin)
    if not band:
        raise ValueError("nothing to pick from")
    before = next((name for name in (incumbent, fallback) if name is not None and name in found), None)
    if before is None:
        return band[0], ""
    if margin > CEILING:
        return before, NOISE
    if before in band:
        return before, ""
    challengers = [name for name in band if found[before].least > found[name].least * (1 + BEST_LEAD)]
    if not challengers:
        return before, BEST
    return (fallback if fallback is not None and fallback in challengers else challengers[0]), ""


def finalists(
    found: Mapping[str, Estimate],
    *,
    cut: float,
    limit: int,
    keep: Collection[str] = (),
    group: Callable[[str], Hashable] | None = None,
) -> list[str]:
    """Who is raced again after the screening, by name.

    Args:
        found: the screening's estimates.
        cut: how far behind the fastest a contestant may be, as a fraction.
        limit: how many at most, beyond those in ``keep``.
        keep: who stays whatever it did (the fallback, its twin, the incumbent).
        group: contestants of one group do the same work in this regime, and N of them would be N tickets in the
            lottery; only one goes on: one of ``keep`` where there is one, else the first name.
    """
    key: Callable[[str], Hashable] = group or (lambda name: name)
    kept = sorted(name for name in found if name in keep)
    taken = {key(name) for name in kept}
    chosen: list[str] = []
    if found:
        best = min(e.centre for e in found.values())
        near: dict[Hashable, list[str]] = {}
        for name in sorted(found):
            # The error is subtracted: someone whom the screening measured badly is looked at again.
            if found[name].centre * (1 - min(found[name].error, 0.5)) <= best * (1 + cut):
                near.setdefault(key(name), []).append(name)
        leaders = sorted(near.items(), key=lambda item: (min(found[n].centre for n in item[1]), item[1][0]))
        chosen = [names[0] for which, names in leaders if which not in taken][:limit]
    return sorted({*kept, *chosen})


@dataclass(frozen=True)
class Standing:
    """One regime's result, as far as deciding needs it.

    Attributes:
        regime: its name.
        decides: ``"*"``, or the row arguments that this regime chooses.
        final: estimates of the finalists (of everyone from the screening, where there was no final).
        screened: estimates of everyone in the screening.
        margin: the margin of ``final``.
        cut: how far behind the fastest a contestant may be in the screening and still be in question.
    """

    regime: str
    decides: str | tuple[str, ...]
    final: Mapping[str, Estimate]
    screened: Mapping[str, Estimate]
    margin: float
    cut: float


@dataclass(frozen=True)
class Pick:
    """What one deciding regime said.

    Attributes:
        regime: its name.
        winner: its pick.
        band: the fastest and those that it does not lead.
        among: among whom it could choose.
        held: why what ran before stays though it is not in the band (see :func:`pick_with_reason`), or nothing.
    """

    regime: str
    winner: str
    band: tuple[str, ...]
    among: tuple[str, ...]
    held: str = ""


@dataclass(frozen=True)
class Decision:
    """Who won, and the picks that led there, the primary regime's first."""

    winner: str
    picks: tuple[Pick, ...]


def equals_without(args: Mapping[str, Mapping[str, object]], name: str, parameters: Collection[str]) -> list[str]:
    """Rows that equal ``name`` in every argument but ``parameters``, itself included.

    Rows are compared by their parsed arguments, defaults filled in: a prefix of the row's name would merge rows
    on different weight planes.
    """

    def rest(row: str) -> dict[str, object]:
        return {k: v for k, v in args[row].items() if k not in parameters}

    return sorted(row for row in args if rest(row) == rest(name))


def candidates_for(
    primary: Standing, winner: str, parameters: Collection[str], args: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """Among whom a secondary regime may choose, given the primary's winner.

    Rows that equal the winner but for ``parameters``, and that did not fall behind in the primary regime: they
    should do the same there, but a compiler may have made of one of them something else.
    """
    same = [name for name in equals_without(args, winner, parameters) if name in primary.screened]
    if winner not in same:
        same.append(winner)
    quickest = min((primary.screened[n].centre for n in same if n in primary.screened), default=math.inf)
    band = tie_band(primary.final, primary.margin)

    def holds(name: str) -> bool:
        if name == winner:
            return True
        if name in primary.final:
            return name in band
        seen = primary.screened[name]
        return seen.centre * (1 - min(seen.error, 0.5)) <= quickest * (1 + primary.cut)

    return sorted(name for name in same if holds(name))


def decide(
    standings: Sequence[Standing],
    args: Mapping[str, Mapping[str, object]],
    incumbent: str | None,
    fallback: str | None,
) -> Decision:
    """The winner of a kernel over all its regimes.

    Args:
        standings: the primary regime first; regimes that only report are skipped.
        args: every row's parsed arguments, defaults filled in.
        incumbent: the row that was the winner before, if any.
        fallback: the row that runs untuned.

    Raises:
        ValueError: the primary regime has no estimates.
    """
    primary, *others = standings

    def choose(standing: Standing, found: Mapping[str, Estimate], base: str | None) -> Pick:
        band = tuple(tie_band(found, standing.margin))
        winner, held = pick_with_reason(found, standing.margin, incumbent, base)
        return Pick(standing.regime, winner, band, tuple(sorted(found)), held)

    picks = [choose(primary, primary.final, fallback)]
    if picks[0].held == NOISE:
        # Who equals the winner in the primary regime is not known either, so no other regime may choose.
        return Decision(picks[0].winner, tuple(picks))
    for standing in others:
        winner = picks[-1].winner
        if standing.decides:
            among = candidates_for(primary, winner, standing.decides, args)
            found = {name: standing.final[name] for name in among if name in standing.final}
            if winner in found and len(found) > 1:
                # Where the fallback is not among them, what the primary picked stands in its place.
                picks.append(choose(standing, found, fallback if fallback in found else winner))
    return Decision(picks[-1].winner, tuple(picks))
