# SPDX-License-Identifier: Apache-2.0
"""From races and picks to sentences: every row's verdict with its reason, and what a reader should know beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tunekit.measure import race, stats
from tunekit.measure.fixtures import Regime
from tunekit.measure.record import RegimeRecord, RowRecord


def regime_record(regime: Regime, result: race.RaceResult, reading: race.Reading) -> RegimeRecord:
    """What is kept of one regime's race."""
    best = {**reading.screened, **reading.final}
    measured = bool(reading.final)
    return RegimeRecord(
        unit=regime.unit,
        work=regime.work,
        decides=list(regime.decides),
        seed=result.seed,
        complete=result.complete,
        floor=reading.floor if measured else None,
        margin=reading.margin if measured else None,
        calls=dict(result.calls),
        centres={n: e.centre for n, e in best.items()},
        errors={n: e.error for n, e in best.items()},
        spreads={n: e.spread for n, e in best.items()},
        finalists=sorted(n for n in result.final if not n.endswith(race.TWIN)),
        screening={n: list(t) for n, t in result.screening.items()},
        final={n: list(t) for n, t in result.final.items()},
        traffic=regime.traffic,
        seat=regime.seat,
    )


def percent(ratio: float) -> str:
    """``+9.1 %`` for 1.091; ``-0.0`` is not a number that people want to read."""
    value = round(100 * (ratio - 1), 1)
    return f"{value if value else 0.0:+.1f} %"


def judge(
    rows: dict[str, RowRecord],
    fallback: str,
    standings: Sequence[stats.Standing],
    decision: stats.Decision,
    incumbent: str | None,
    args: Mapping[str, Mapping[str, object]],
    chooses: set[str],
) -> str:
    """Give every measured row its verdict; the reason why the winner won."""
    by_name = {standing.regime: standing for standing in standings}
    for name in standings[0].screened:
        kin = [n for n in stats.equals_without(args, name, chooses) if n in decision.picks[0].among]
        verdict, reason = _verdict(name, kin, by_name, standings[0], decision)
        rows[name] = dataclasses.replace(rows[name], verdict=verdict, reason=reason)
    winner, last = decision.winner, decision.picks[-1]
    margin = f"{100 * by_name[last.regime].margin:.1f} %"
    if last.held == stats.NOISE:
        reason = f"too noisy at {last.regime} (margin {margin}): what ran before is kept"
    elif last.held == stats.BEST:
        reason = f"what ran before is kept: no lead over it at {last.regime} shows in the best samples"
    elif winner == fallback == decision.picks[0].winner:
        reason = f"the fallback; no row leads it by more than {100 * standings[0].margin:.1f} %"
    elif winner == incumbent and len(last.band) > 1:
        reason = f"the incumbent, within the margin of {margin} of the fastest"
    elif len(decision.picks) > 1:
        reason = f"of the rows that {decision.picks[0].regime} cannot tell apart, the one for {last.regime}"
    elif len(last.band) > 1:
        reason = f"leads the fallback; first by name of {len(last.band)} rows within the margin of {margin}"
    else:
        reason = f"leads every other row by more than {margin}"
    rows[winner] = dataclasses.replace(rows[winner], verdict="winner", reason=reason)
    return reason


def _verdict(
    name: str,
    kin: Sequence[str],
    by_name: Mapping[str, stats.Standing],
    primary: stats.Standing,
    decision: stats.Decision,
) -> tuple[str, str]:
    """What became of a measured row that did not win: by the last regime that had it in question.

    ``kin`` are the primary's finalists that do the same work there as this row.
    """
    for pick in reversed(decision.picks):
        if name in pick.among:
            standing = by_name[pick.regime]
            if pick.held == stats.NOISE:
                return "tied", f"too noisy at {pick.regime} to tell (margin {100 * standing.margin:.1f} %)"
            if name in pick.band:
                if pick.held == stats.BEST:
                    return "tied", f"its lead at {pick.regime} does not show in the best samples"
                return "tied", f"within the margin of {100 * standing.margin:.1f} % at {pick.regime}"
            fastest = min(standing.final[other].centre for other in pick.among)
            return "slower", f"{percent(standing.final[name].centre / fastest)} time at {pick.regime}"
    fastest = min(e.centre for e in primary.screened.values())
    behind = percent(primary.screened[name].centre / fastest)
    if decision.picks[0].held == stats.NOISE:
        return "tied", f"too noisy at {primary.regime} to tell (margin {100 * primary.margin:.1f} %)"
    tied = [other for other in kin if other in decision.picks[0].band]
    if tied:
        return "tied", f"does at {primary.regime} what {tied[0]} does"
    return "slower", f"{behind} time at {primary.regime} in the screening"


def comment(
    fallback: str,
    regimes: Sequence[Regime],
    readings: Mapping[str, race.Reading],
    winner: str,
    plan: race.Plan,
) -> list[str]:
    """Notes that a reader of the table should see beside it."""
    notes: list[str] = []
    for regime in regimes:
        reading = readings.get(regime.name)
        if reading is None or not reading.final:
            continue
        if regime.chooses and reading.margin > stats.CEILING:
            notes.append(
                f"too noisy at {regime.name}: the fallback differs from itself by up to {100 * reading.floor:.1f} %, "
                f"and above {100 * stats.CEILING:.0f} % no lead is believed; retune when the box is quiet"
            )
        elif regime.chooses and reading.floor > plan.least_margin:
            notes.append(
                f"noisy at {regime.name}: the fallback differs from itself by up to {100 * reading.floor:.1f} %, "
                f"so only a lead of more than that counts"
            )
        best = {**reading.screened, **reading.final}
        if winner != fallback and winner in best and fallback in best:
            ratio = best[fallback].centre / best[winner].centre
            if ratio < 1 - reading.margin:
                notes.append(f"the winner is slower than the fallback at {regime.name} ({percent(ratio)})")
    return notes
