# SPDX-License-Identifier: Apache-2.0
"""Timing contestants against each other in one process.

Contestants take turns: a round is every contestant once, in an order that is shuffled anew for each round from a
recorded seed, so that whatever the box does meanwhile it does to all of them. A turn is a window of about 20 ms, its
number of calls set by a warm pass. The fallback is entered twice, the second time with operands of its own.

A few screening rounds find who is in question; those few and the fallback are then raced again, on fresh samples
(a contestant is in the final because its screening was good, so the screening may not count), until the difference
of two of them is known to half of the least margin, or the plan's last round or the deadline has come.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field

from tunekit.errors import told
from tunekit.measure import stats

Clock = Callable[[], float]
Call = Callable[[], None]
Progress = Callable[[str, int, int], None]

TWIN = "#2"
_MOST_CALLS = 1 << 18  # a window, whatever a clock that hardly moves may say


def twin_of(name: str) -> str:
    """The name under which a contestant's second entry is kept. Row names hold no ``#``."""
    return name + TWIN


class Deadline:
    """A moment after which no new work begins; None seconds means never.

    Args:
        seconds: from now.
        clock: seconds that only grow.
    """

    def __init__(self, seconds: float | None, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.end = math.inf if seconds is None else clock() + seconds

    def left(self) -> float:
        """Seconds left; 0 when it has come, infinity when it never does."""
        return max(0.0, self.end - self.clock())

    def over(self) -> bool:
        """Whether it has come."""
        return self.clock() >= self.end

    def past(self) -> float:
        """Seconds since it came; 0 while it has not."""
        return max(0.0, self.clock() - self.end)

    def share(self, fraction: float) -> Deadline:
        """An earlier deadline: this fraction of what is left from now."""
        left = self.left()
        return Deadline(None if left == math.inf else left * fraction, self.clock)


@dataclass(frozen=True)
class Plan:
    """How a race is run; the defaults are what ``retune`` uses.

    Attributes:
        window: seconds of one turn.
        warm_rounds: whole rounds that are run and thrown away (a core takes several to reach its clock).
        screening_rounds: rounds with everyone.
        final_rounds: least and most rounds of the final.
        finalists: how many at most, beyond the fallback, its twin and the incumbent.
        cut: how far behind the fastest one may be after the screening, at least; the screening's own noise widens it.
        least_margin: the least lead that counts as a win.
    """

    window: float = 0.020
    warm_rounds: int = 1
    screening_rounds: int = 5
    final_rounds: tuple[int, int] = (15, 60)
    finalists: int = 8
    cut: float = 0.10
    least_margin: float = stats.LEAST_MARGIN


@dataclass(frozen=True)
class RaceResult:
    """Everything that a race saw. Times are seconds a call.

    Attributes:
        seed: of the orders.
        calls: calls a window, by contestant.
        screening, final: samples by contestant, one a round; only whole rounds are kept. The twin is among them.
        failed: contestants that raised, with the reason; they left the race.
        complete: whether it ended by its plan and not by the deadline.
        base: the contestant that was entered twice.
    """

    seed: int
    base: str
    calls: Mapping[str, int] = field(default_factory=dict)
    screening: Mapping[str, list[float]] = field(default_factory=dict)
    final: Mapping[str, list[float]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True)
class Reading:
    """A race's samples as estimates; the twin is taken out after it gave the floor.

    Attributes:
        screened, final: estimates; ``final`` is the screening's where no final was held.
        floor, margin: of ``final``.
        cut: how far behind the fastest of the screening one may be and still be in question.
    """

    screened: Mapping[str, stats.Estimate]
    final: Mapping[str, stats.Estimate]
    floor: float
    margin: float
    cut: float


def _floor(found: Mapping[str, stats.Estimate], base: str) -> float:
    a, b = found.get(base), found.get(twin_of(base))
    if a is not None and b is not None:
        return stats.noise_floor(a, b)
    return stats.uncertainty(a, a) if a is not None else math.inf


def _without_twin(found: Mapping[str, stats.Estimate], base: str) -> dict[str, stats.Estimate]:
    return {name: e for name, e in found.items() if name != twin_of(base)}


def read(result: RaceResult, plan: Plan) -> Reading:
    """Estimates, floor, margin and cut of a race. Pure."""
    screened = stats.estimates(result.screening)
    # Two or three rounds are no final: better the screening's five.
    final = stats.estimates(result.final) if _rounds(result.final) >= stats.LEAST_ROUNDS else screened
    floor = _floor(final, result.base)
    return Reading(
        _without_twin(screened, result.base),
        _without_twin(final, result.base),
        floor,
        max(plan.least_margin, floor),
        max(plan.cut, _floor(screened, result.base)),
    )


def _rounds(samples: Mapping[str, list[float]]) -> int:
    return min((len(times) for times in samples.values()), default=0)


class Watch:
    """Told of a race as it goes; this one does nothing.

    Attributes:
        alone: whether nobody sends this process a Ctrl-C, so that a KeyboardInterrupt is the contestant's own.
    """

    alone = False

    def turn(self, name: str) -> None:
        """A contestant's turn is about to begin; outside the time that is taken."""

    def round(self, stage: str, times: Mapping[str, float], calls: Mapping[str, int]) -> None:
        """A whole round of ``screening`` or ``final`` is over; seconds a call, and calls a window."""


class _Track:
    """The contestants of one race, with the number of calls that fills each one's window."""

    def __init__(self, entries: Mapping[str, Call], plan: Plan, clock: Clock, deadline: Deadline, watch: Watch) -> None:
        self.entries = dict(entries)
        self.plan, self.clock, self.deadline, self.watch = plan, clock, deadline, watch
        self.calls: dict[str, int] = {}
        self.failed: dict[str, str] = {}

    def time(self, name: str, calls: int) -> float | None:
        """Seconds of so many calls; None when the contestant raised, and it is out from then on."""
        call, clock = self.entries[name], self.clock
        self.watch.turn(name)
        try:
            start = clock()
            for _ in range(calls):
                call()
            return clock() - start
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self.watch.alone:
                raise
            self.failed[name] = f"raised while it was timed: {told(error)}"
            del self.entries[name]
            return None

    def warm(self, name: str) -> None:
        """First touch, then more and more calls until half a window is full; that sizes the window."""
        if self.time(name, 1) is None:
            return
        calls, window = 1, self.plan.window
        while True:
            taken = self.time(name, calls)
            if taken is None:
                return
            if taken >= window / 2 or calls >= _MOST_CALLS or self.deadline.over():
                break
            calls = min(_MOST_CALLS, max(2 * calls, math.ceil(calls * window / max(taken, window / 64))))
        self.calls[name] = min(_MOST_CALLS, max(1, round(calls * window / max(taken, 1e-9))))

    def round(self, order: list[str]) -> dict[str, float] | None:
        """One turn for each; None when the deadline came before the last of them."""
        times: dict[str, float] = {}
        for name in order:
            if self.deadline.over():
                return None
            if name not in self.entries:
                continue
            taken = self.time(name, self.calls[name])
            if taken is not None:
                # A clock that did not move between two readings is no proof of a kernel without cost.
                times[name] = max(taken, 1e-9) / self.calls[name]
        return times


def append(samples: dict[str, list[float]], times: Mapping[str, float]) -> None:
    """Add a round to samples: times by contestant."""
    for name in [n for n in samples if n not in times]:
        del samples[name]  # it raised: its earlier times count for nothing
    for name, taken in times.items():
        samples.setdefault(name, []).append(taken)


def _known_well_enough(samples: Mapping[str, list[float]], plan: Plan) -> bool:
    errors = sorted((e.error for e in stats.estimates(samples).values()), reverse=True)
    pair = math.hypot(*errors[:2]) if errors else 0.0
    return 2 * pair <= plan.least_margin / 2


def race(
    entries: Mapping[str, Call],
    twin: Call,
    base: str,
    *,
    keep: Collection[str] = (),
    among: Collection[str] | None = None,
    group: Callable[[str], Hashable] | None = None,
    final: bool = True,
    seed: int = 0,
    plan: Plan | None = None,
    clock: Clock = time.perf_counter,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> RaceResult:
    """Race contestants.

    Args:
        entries: the function to time, by contestant.
        twin: the base once more, with operands of its own.
        base: the contestant that is entered twice: the fallback.
        keep: who is in the final whatever the screening says; the base always is.
        among: who may be in the final beside them (None: anyone).
        group: contestants that do the same work here; see :func:`tunekit.measure.stats.finalists`.
        final: whether to hold one.
        seed: of the orders.
        plan: how it is run.
        clock: seconds; may be a simulated one.
        deadline: when to stop. What was measured by then is returned.
        progress: called with (stage, rounds done, rounds planned).
        watch: told of every turn and of every round.

    Raises:
        ValueError: the base is not among the entries.
    """
    if base not in entries:
        raise ValueError(f"{base!r} is to be entered twice but is not in the race")
    how = plan or Plan()
    limit = deadline or Deadline(None)
    rng = random.Random(seed)
    seen = watch or Watch()
    track = _Track({**entries, twin_of(base): twin}, how, clock, limit, seen)
    say: Progress = progress or (lambda stage, done, of: None)

    def shuffled(names: Collection[str]) -> list[str]:
        order = sorted(names)
        rng.shuffle(order)
        return order

    def run(stage: str, names: Collection[str], rounds: int, samples: dict[str, list[float]]) -> bool:
        for done in range(rounds):
            say(stage, done, rounds)
            times = track.round(shuffled(names))
            if times is None:
                return False
            append(samples, times)
            if stage != "warm-up":
                seen.round(stage, times, track.calls)
        return True

    screening: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in one window is a lie about one contestant
    try:
        # The base and its twin go first: a race that is cut short must at least know them.
        first = [base, twin_of(base)]
        for done, name in enumerate([*first, *shuffled([n for n in track.entries if n not in first])]):
            say("warm-up", done, len(entries) + 1)
            if limit.over():
                return RaceResult(seed, base, track.calls, {}, {}, track.failed, complete=False)
            track.warm(name)
        complete = run("warm-up", list(track.entries), how.warm_rounds, {})
        complete = complete and run("screening", list(track.entries), how.screening_rounds, screening)
        if complete and final and base in track.entries:
            chosen = _choose_finalists(track, screening, base, keep, among, group, how)
            least, most = how.final_rounds
            complete = run("final", chosen, least, last)
            for done in range(least, most):
                if not complete or _known_well_enough(last, how):
                    break
                say("final", done, most)
                complete = run("final", chosen, 1, last)
    finally:
        if collecting:
            gc.enable()
    return RaceResult(seed, base, track.calls, screening, last, track.failed, complete)


def _choose_finalists(
    track: _Track,
    screening: Mapping[str, list[float]],
    base: str,
    keep: Collection[str],
    among: Collection[str] | None,
    group: Callable[[str], Hashable] | None,
    plan: Plan,
) -> list[str]:
    found = stats.estimates(screening)
    kept = {base, *keep}
    single = _without_twin(found, base)
    if among is not None:
        single = {n: e for n, e in single.items() if n in among or n in kept}
    cut = max(plan.cut, _floor(found, base))
    chosen = stats.finalists(single, cut=cut, limit=plan.finalists, keep=kept, group=group)
    if twin_of(base) in track.entries:
        chosen.append(twin_of(base))
    return chosen
