# SPDX-License-Identifier: Apache-2.0
"""Races on a simulated clock: who wins, how often, and in spite of what."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping

import pytest
from measure_fakes import SimulatedBox

from tunekit.measure import race, stats
from tunekit.measure.race import Deadline, Plan

PLAN = Plan()


def winner(box: SimulatedBox, times: Mapping[str, float], base: str, seed: int, incumbent: str | None = None) -> str:
    """Race kernels of these times and pick."""
    calls = {name: box.kernel(seconds) for name, seconds in times.items()}
    result = race.race(
        calls, box.kernel(times[base]), base, seed=seed, clock=box.clock, deadline=Deadline(None, box.clock)
    )
    assert result.complete
    reading = race.read(result, PLAN)
    assert race.twin_of(base) not in reading.final
    return stats.pick(reading.final, reading.margin, incumbent, base)


@pytest.mark.parametrize("base", ["a", "b"])
def test_tied_rows_pick_the_same_winner(base: str) -> None:
    picks = [winner(SimulatedBox(run, noise=0.03), {"a": 1e-3, "b": 1e-3}, base, run) for run in range(50)]
    assert picks.count(base) >= 48


def test_two_tied_rows_beyond_the_fallback_pick_the_same_winner() -> None:
    times = {"a": 1e-3, "b": 1e-3, "f": 1.5e-3}
    picks = [winner(SimulatedBox(run, noise=0.03), times, "f", run) for run in range(50)]
    assert picks.count("a") >= 48


def test_a_true_gain_of_five_percent_is_found() -> None:
    times = {"fallback": 1e-3, "gain": 1e-3 / 1.05, "other": 1.2e-3}
    picks = [winner(SimulatedBox(run, noise=0.03), times, "fallback", run) for run in range(50)]
    assert picks.count("gain") >= 45


class Lucky(SimulatedBox):
    """A box on which one kernel has one lucky window among dozens."""

    windows = 0

    def clock(self) -> float:
        self.windows += 1
        return super().clock()

    def lucky(self, which: int) -> Callable[[], None]:
        seen: dict[int, int] = {}

        def call() -> None:
            turn = seen.setdefault(self.windows, len(seen))
            self.now += (0.2e-3 if turn == which else 1.3e-3) * self.factor

        return call


def test_a_lucky_sample_does_not_win() -> None:
    lucky_seen = 0
    for run in range(20):
        box = Lucky(run, noise=0.01)
        result = race.race(
            {"steady": box.kernel(1e-3), "lucky": box.lucky(4 + run)},
            box.kernel(1e-3),
            "steady",
            seed=run,
            clock=box.clock,
            keep={"lucky"},
            deadline=Deadline(None, box.clock),
        )
        reading = race.read(result, PLAN)
        lucky_seen += min(result.screening["lucky"] + result.final["lucky"]) < 0.3e-3
        assert stats.pick(reading.final, reading.margin, None, "steady") == "steady"
    assert lucky_seen >= 15


DRIFTS: dict[str, Callable[[float], float]] = {
    "slowing": lambda now: 1 + 0.1 * now,
    "speeding up": lambda now: 1 / (1 + 0.1 * now),
    "a step": lambda now: 1.3 if now > 1.5 else 1.0,
    "throttled in turns": lambda now: 1.4 if int(now / 0.7) % 2 else 1.0,
}


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=list(DRIFTS))
def test_drift_and_the_order_of_rows_do_not_change_the_winner(drift: Callable[[float], float]) -> None:
    times = {"fast": 1.0e-3, "near": 1.05e-3, "fallback": 1.12e-3, "slow": 1.4e-3}
    for run, order in enumerate(itertools.permutations(times)):
        box = SimulatedBox(run, noise=0.005, drift=drift)
        assert winner(box, {name: times[name] for name in order}, "fallback", run) == "fast"


def test_a_noisy_box_finishes_widens_the_band_and_keeps_the_fallback() -> None:
    kept = 0
    for run in range(20):
        box = SimulatedBox(run, noise=0.25, bursts=0.3)
        calls = {"fallback": box.kernel(1e-3), "same": box.kernel(1e-3), "worse": box.kernel(1.05e-3)}
        result = race.race(
            calls, box.kernel(1e-3), "fallback", seed=run, clock=box.clock, deadline=Deadline(None, box.clock)
        )
        reading = race.read(result, PLAN)
        assert result.complete and reading.margin > 0.05
        kept += stats.pick(reading.final, reading.margin, None, "fallback") == "fallback"
    assert kept >= 19


def test_a_quiet_box_needs_only_the_least_rounds_and_a_noisy_one_more() -> None:
    def rounds(noise: float) -> int:
        box = SimulatedBox(1, noise=noise)
        calls = {"a": box.kernel(1e-3), "b": box.kernel(1e-3)}
        result = race.race(calls, box.kernel(1e-3), "a", clock=box.clock, deadline=Deadline(None, box.clock))
        return len(result.final["a"])

    assert rounds(0.002) == PLAN.final_rounds[0]
    assert PLAN.final_rounds[0] < rounds(0.03) <= PLAN.final_rounds[1]
    assert rounds(0.2) == PLAN.final_rounds[1]


def test_windows_are_sized_and_the_orders_are_shuffled_and_repeatable() -> None:
    def once(seed: int) -> tuple[race.RaceResult, list[str]]:
        box = SimulatedBox(0)
        calls = {name: box.kernel(seconds, name) for name, seconds in (("a", 1e-3), ("b", 5e-6), ("c", 0.1))}
        result = race.race(
            calls, box.kernel(1e-3, "twin"), "a", seed=seed, clock=box.clock, deadline=Deadline(None, box.clock)
        )
        return result, box.order

    result, order = once(3)
    assert result.calls == {"a": 20, "a#2": 20, "b": 4000, "c": 1}
    assert set(result.screening) == {"a", "a#2", "b", "c"}
    assert {len(times) for times in result.screening.values()} == {PLAN.screening_rounds}
    assert set(result.final) == {"a", "a#2", "b"}
    assert once(3) == (result, order)
    assert once(4)[1] != order
    assert result.seed == 3


def test_the_base_must_race() -> None:
    with pytest.raises(ValueError, match="twice"):
        race.race({"a": lambda: None}, lambda: None, "b")


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3, 0.7, 1.5, 3.0])
def test_a_deadline_ends_the_race_with_whole_rounds_only(seconds: float) -> None:
    box = SimulatedBox(1, noise=0.01)
    calls = {name: box.kernel(1e-3) for name in "abcdef"}
    result = race.race(calls, box.kernel(1e-3), "a", clock=box.clock, deadline=Deadline(seconds, box.clock))
    assert not result.complete
    assert box.now <= seconds + 0.1
    for samples in (result.screening, result.final):
        assert len({len(times) for times in samples.values()}) <= 1
    race.read(result, PLAN)


def test_a_contestant_that_raises_leaves_the_race() -> None:
    box = SimulatedBox(1)
    calls = itertools.count()

    def breaks() -> None:
        if next(calls) > 100:
            raise RuntimeError("enough")
        box.now += 1e-3

    result = race.race(
        {"a": box.kernel(1e-3), "breaks": breaks},
        box.kernel(1e-3),
        "a",
        clock=box.clock,
        deadline=Deadline(None, box.clock),
    )
    assert result.complete
    assert set(result.failed) == {"breaks"} and "RuntimeError" in result.failed["breaks"]
    assert "breaks" not in result.screening and "breaks" not in result.final


def test_a_clock_that_stands_still_is_survived() -> None:
    plan = Plan(screening_rounds=3, final_rounds=(3, 3))
    result = race.race({"a": lambda: None, "b": lambda: None}, lambda: None, "a", plan=plan, clock=lambda: 0.0)
    assert result.complete
    race.read(result, PLAN)


def test_the_collector_is_off_during_a_race_and_on_again_after_an_interrupt() -> None:
    seen: list[bool] = []

    def call() -> None:
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        race.race({"a": call}, call, "a")
    assert seen == [False] and gc.isenabled()


def test_deadlines() -> None:
    box = SimulatedBox()
    never = Deadline(None, box.clock)
    assert never.left() == float("inf") and not never.over() and never.share(0.5).left() == float("inf")
    some = Deadline(10, box.clock)
    box.now = 4
    assert some.left() == 6 and some.share(0.5).left() == 3
    box.now = 11
    assert some.over() and some.left() == 0 and some.share(0.5).over()
