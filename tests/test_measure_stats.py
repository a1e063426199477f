# SPDX-License-Identifier: Apache-2.0
"""The decision, as arithmetic."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tunekit.measure import stats
from tunekit.measure.stats import Estimate, Standing


def sure(centre: float, error: float = 0.0) -> Estimate:
    return Estimate(centre, error, error, 20)


def test_level_takes_a_common_pace_out_exactly() -> None:
    pace = [1.0, 1.5, 0.8, 2.0, 1.1]
    samples = {name: [base * p for p in pace] for name, base in (("a", 1.0), ("b", 3.0), ("c", 0.5))}
    levelled = stats.level(samples)
    for times in levelled.values():
        assert max(times) / min(times) == pytest.approx(1.0)
    assert levelled["b"][0] / levelled["a"][0] == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_level_refuses_times_that_are_none(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        stats.level({"a": [1.0, bad]})


def test_level_refuses_uneven_rounds_and_accepts_none() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        stats.level({"a": [1.0], "b": [1.0, 2.0]})
    assert stats.level({}) == {}
    assert stats.estimates({"a": [], "b": []}) == {}


def test_one_lucky_sample_moves_nothing() -> None:
    steady = stats.estimate([1.0] * 15)
    lucky = stats.estimate([0.2] + [1.3] * 14)
    assert stats.leads(steady, lucky, 0.03)
    assert stats.pick({"steady": steady, "lucky": lucky}, 0.03, None, None) == "steady"


def test_the_error_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(5)
    inside = 0
    for _ in range(400):
        found = stats.estimate([math.exp(rng.gauss(0, 0.03)) for _ in range(20)])
        inside += abs(found.centre - 1) <= 2 * found.error
    assert inside >= 0.93 * 400


def test_few_samples_are_never_certain() -> None:
    assert stats.estimate([1.0, 1.0]).error >= 0.25
    with pytest.raises(ValueError, match="no samples"):
        stats.estimate([])


def test_floor_is_the_pairs_difference_but_not_less_than_its_uncertainty() -> None:
    assert stats.noise_floor(sure(1.0), sure(1.08)) == pytest.approx(0.08)
    assert stats.noise_floor(sure(1.0, 0.03), sure(1.0, 0.04)) == pytest.approx(0.10)


def test_band_order_is_incumbent_then_fallback_then_name() -> None:
    found = {"a": sure(1.02), "b": sure(1.0), "c": sure(1.01), "slow": sure(1.5)}
    assert stats.tie_band(found, 0.03) == ["a", "b", "c"]
    assert stats.pick(found, 0.03, "c", "b") == "c"
    assert stats.pick(found, 0.03, "slow", "b") == "b"
    assert stats.pick(found, 0.03, None, "slow") == "a"
    assert stats.pick(found, 0.03, "gone", None) == "a"
    with pytest.raises(ValueError):
        stats.pick({}, 0.03, None, None)


def test_a_lead_that_the_best_samples_do_not_show_is_not_believed() -> None:
    # Seen on a busy box: the fallback was interrupted in most of its windows, and everybody "led" it five times over.
    preempted = Estimate(5.0, 0.02, 0.1, 20, best=1.01)
    found = {"f": preempted, "a": Estimate(1.0, 0.01, 0.01, 20, best=1.0), "b": Estimate(1.0, 0.01, 0.01, 20, best=1)}
    assert stats.pick_with_reason(found, 0.03, None, "f") == ("f", stats.BEST)
    assert stats.pick_with_reason(found, 0.03, "f", "b") == ("f", stats.BEST)
    found["b"] = Estimate(1.0, 0.01, 0.01, 20, best=0.97)
    assert stats.pick_with_reason(found, 0.03, None, "f") == ("b", "")


def test_the_best_samples_are_those_of_the_clock() -> None:
    found = stats.estimates({"a": [2.0, 1.0, 4.0, 6.0, 9.0], "b": [1.0, 1.0, 1.0, 1.0, 1.0]})
    assert found["a"].best == pytest.approx(7 / 3) and found["b"].best == 1.0


def test_above_the_ceiling_nothing_is_judged() -> None:
    found = {"f": sure(7.0), "i": sure(8.0), "a": sure(1.0)}
    assert stats.pick_with_reason(found, 0.26, None, "f") == ("f", stats.NOISE)
    assert stats.pick_with_reason(found, 4.69, "i", "f") == ("i", stats.NOISE)
    assert stats.pick_with_reason(found, 0.25, "i", "f") == ("a", "")
    args = {n: {"k": 1, "g": j} for j, n in enumerate(found)}
    gemv = Standing("gemv", ("g",), found, found, 0.03, 0.1)
    # A quiet second regime does not choose for a primary that could not.
    assert stats.decide([Standing("tile", "*", found, found, 5.0, 5.0), gemv], args, None, "f").winner == "f"


def test_an_erratic_row_needs_a_larger_lead() -> None:
    assert stats.leads(sure(1.0), sure(1.05), 0.03)
    assert not stats.leads(sure(1.0, 0.04), sure(1.05), 0.03)


def test_pick_does_not_depend_on_the_order_of_rows() -> None:
    found = {"a": sure(1.0), "b": sure(1.02), "c": sure(1.031), "d": sure(0.99)}
    picks = {stats.pick({n: found[n] for n in order}, 0.03, None, "c") for order in itertools.permutations(found)}
    assert picks == {"a"}


def test_finalists_keep_the_fallback_and_one_of_each_kind() -> None:
    found = {"f": sure(2.0), "a1": sure(1.0), "a2": sure(0.99), "b": sure(1.05), "c": sure(1.3)}
    kinds = {"a1": "a", "a2": "a"}
    chosen = stats.finalists(found, cut=0.1, limit=8, keep={"f"}, group=lambda n: kinds.get(n, n))
    assert chosen == ["a1", "b", "f"]
    # One that is kept stands for its kind; the limit counts the others, fastest first.
    assert stats.finalists(found, cut=0.1, limit=1, keep={"f", "a2"}, group=lambda n: kinds.get(n, n)) == [
        "a2",
        "b",
        "f",
    ]
    assert stats.finalists(found, cut=10, limit=2, keep={"f"}) == ["a1", "a2", "f"]
    assert stats.finalists({}, cut=0.1, limit=8) == []


def test_finalists_look_again_at_what_was_measured_badly() -> None:
    found = {"a": sure(1.0), "b": sure(1.2, 0.1), "c": sure(1.2)}
    assert stats.finalists(found, cut=0.1, limit=8) == ["a", "b"]


# The seeds' trap: ..._gkstep2_bias128 has ..._kstep2 as a prefix of its name, and lives on another weight plane.
ARGS = {
    "kstep2": {"kstep": 2, "gkstep": 1, "bias": 0},
    "kstep2_gkstep2": {"kstep": 2, "gkstep": 2, "bias": 0},
    "kstep2_bias128": {"kstep": 2, "gkstep": 1, "bias": 128},
    "kstep2_gkstep2_bias128": {"kstep": 2, "gkstep": 2, "bias": 128},
}


def test_merging_goes_by_arguments_and_not_by_prefix() -> None:
    assert stats.equals_without(ARGS, "kstep2_gkstep2_bias128", ("gkstep",)) == [
        "kstep2_bias128",
        "kstep2_gkstep2_bias128",
    ]
    tile = {name: sure(1.0 if "bias128" in name else 1.2) for name in ARGS}
    # On GEMV the unbiased rows are much faster; they must not replace the winner of the tile.
    gemv = {
        "kstep2": sure(0.1),
        "kstep2_gkstep2": sure(0.1),
        "kstep2_bias128": sure(1.0),
        "kstep2_gkstep2_bias128": sure(0.8),
    }
    standings = [
        Standing("tile", "*", tile, tile, 0.03, 0.1),
        Standing("report only", (), gemv, gemv, 0.03, 0.1),
        Standing("gemv", ("gkstep",), gemv, gemv, 0.03, 0.1),
    ]
    decision = stats.decide(standings, ARGS, None, "kstep2")
    assert decision.winner == "kstep2_gkstep2_bias128"
    assert [(p.regime, p.winner) for p in decision.picks] == [
        ("tile", "kstep2_bias128"),
        ("gemv", "kstep2_gkstep2_bias128"),
    ]
    assert decision.picks[1].among == ("kstep2_bias128", "kstep2_gkstep2_bias128")


def test_a_secondary_regime_does_not_revive_what_fell_behind_in_the_primary() -> None:
    args = {"a": {"k": 1, "g": 1}, "b": {"k": 1, "g": 2}}
    tile = {"a": sure(1.0), "b": sure(1.5)}
    gemv = {"a": sure(1.0), "b": sure(0.5)}
    standings = [Standing("tile", "*", tile, tile, 0.03, 0.1), Standing("gemv", ("g",), gemv, gemv, 0.03, 0.1)]
    assert stats.decide(standings, args, None, "a").winner == "a"
    # The same when only the screening saw it: the final held one of each kind.
    standings[0] = Standing("tile", "*", {"a": sure(1.0)}, tile, 0.03, 0.1)
    assert stats.decide(standings, args, None, "a").winner == "a"
    standings[0] = Standing("tile", "*", {"a": sure(1.0)}, {**tile, "b": sure(1.05)}, 0.03, 0.1)
    assert stats.decide(standings, args, None, "a").winner == "b"


def test_secondary_ties_keep_incumbent_then_what_the_primary_picked() -> None:
    args = {"x": {"k": 1, "g": 1}, "y": {"k": 1, "g": 2}, "f": {"k": 2, "g": 1}}
    tile = {"x": sure(1.0), "y": sure(1.0), "f": sure(1.5)}
    standings = [Standing("tile", "*", tile, tile, 0.03, 0.1), Standing("gemv", ("g",), tile, tile, 0.03, 0.1)]
    assert stats.decide(standings, args, None, "f").winner == "x"
    assert stats.decide(standings, args, "y", "f").winner == "y"
