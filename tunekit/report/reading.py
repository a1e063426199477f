# SPDX-License-Identifier: Apache-2.0
"""A run record as the figures that are drawn: rates instead of times, in order, with their bands and roofs. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunekit.measure.fixtures import EVERYTHING
from tunekit.measure.record import KernelRecord, RegimeRecord, RunRecord

GMACS = "GMAC/s"
"""The unit that ceilings are measured in; a family that counts something else has none here."""

TAKEN = {"rejected": "failed a check", "unavailable": "cannot run on this box", "unmeasured": "not measured"}
"""Verdicts of rows that were not raced, in words."""

_LEAST_TIME = 1e-15
"""Seconds a call: below it, and above its inverse, a record's number is no time that a clock gave."""


@dataclass(frozen=True)
class Entry:
    """One row in one regime.

    Attributes:
        suffix: the row.
        rate: in the regime's unit.
        low, high: the rate two standard errors either side.
        spread: robust standard deviation of its samples, as a fraction.
        samples: how many rounds.
        final: whether it was raced again.
        role: ``winner``, ``fallback`` or empty.
        ratio: times as fast as the fallback, or None where that was not timed.
        tied: whether it is within the margin of the fastest.
    """

    suffix: str
    rate: float
    low: float
    high: float
    spread: float
    samples: int
    final: bool
    role: str
    ratio: float | None
    tied: bool


@dataclass(frozen=True)
class Race:
    """One regime.

    Attributes:
        name, unit, work, traffic: as the family declared them.
        decides: what it chooses, in words.
        floor, margin: fractions, or None where nothing was measured.
        complete: whether it ended by its plan.
        entries: the fastest first.
        band: the rates that count as tied with the fastest (low, high), or None.
        intensity: multiply-accumulates a byte, or None where it has no place on a roofline.
    """

    name: str
    unit: str
    work: float
    traffic: float
    decides: str
    floor: float | None
    margin: float | None
    complete: bool
    entries: tuple[Entry, ...]
    band: tuple[float, float] | None
    intensity: float | None

    def entry(self, suffix: str | None) -> Entry | None:
        """A row's entry, or None."""
        return next((entry for entry in self.entries if entry.suffix == suffix), None)


@dataclass(frozen=True)
class Roof:
    """What one regime could reach at most.

    Attributes:
        regime: its name.
        intensity: multiply-accumulates a byte.
        arithmetic: GMAC/s of the fastest instruction.
        size: bytes that the bandwidth was measured with, the least that holds what a call moves.
        bandwidth: GB/s.
        best: GMAC/s of the fastest row.
    """

    regime: str
    intensity: float
    arithmetic: float
    size: int
    bandwidth: float
    best: float

    @property
    def limit(self) -> float:
        """GMAC/s: the lower of the two ceilings."""
        return min(self.arithmetic, self.intensity * self.bandwidth)

    @property
    def bound(self) -> str:
        """Which of the two it is."""
        return "arithmetic" if self.arithmetic <= self.intensity * self.bandwidth else "reading"


def decides(regime: RegimeRecord) -> str:
    """What a regime chooses, in words."""
    if EVERYTHING in regime.decides:
        return "decides among all rows"
    return f"decides {', '.join(regime.decides)}" if regime.decides else "reported only"


def _entry(suffix: str, kernel: KernelRecord, regime: RegimeRecord, fastest: float) -> Entry:
    centre = regime.centres[suffix]
    error = min(2 * regime.errors.get(suffix, 0.0), 0.9)
    base = regime.centres.get(kernel.fallback or "")
    samples = regime.final.get(suffix) or regime.screening.get(suffix) or []
    role = "winner" if suffix == kernel.winner else "fallback" if suffix == kernel.fallback else ""
    rate = regime.work / centre / 1e9
    return Entry(
        suffix,
        rate,
        rate / (1 + error),
        rate / (1 - error),
        regime.spreads.get(suffix, 0.0),
        len(samples),
        suffix in regime.finalists,
        role,
        base / centre if base else None,
        regime.margin is not None and centre <= fastest * (1 + regime.margin),
    )


def race(name: str, kernel: KernelRecord, regime: RegimeRecord) -> Race:
    """One regime's figures."""
    times = {suffix: t for suffix, t in regime.centres.items() if _LEAST_TIME <= t <= 1 / _LEAST_TIME}
    fastest = min(times.values(), default=math.nan)
    order = sorted(times, key=lambda suffix: (times[suffix], suffix))
    entries = tuple(_entry(suffix, kernel, regime, fastest) for suffix in order)
    band = None
    if entries and regime.margin is not None:
        band = (entries[0].rate / (1 + regime.margin), entries[0].rate)
    placed = regime.unit == GMACS and regime.traffic > 0
    return Race(
        name,
        regime.unit,
        regime.work,
        regime.traffic,
        decides(regime),
        regime.floor,
        regime.margin,
        regime.complete,
        entries,
        band,
        regime.work / regime.traffic if placed else None,
    )


def races(kernel: KernelRecord) -> list[Race]:
    """All regimes of a kernel: the primary, then those that decide, then those that only report."""

    def weight(item: tuple[str, RegimeRecord]) -> tuple[int, str]:
        # The file keeps its keys in the order of the alphabet.
        return (0 if EVERYTHING in item[1].decides else 1 if item[1].decides else 2, item[0])

    return [race(name, kernel, regime) for name, regime in sorted(kernel.regimes.items(), key=weight)]


def rates(ceilings: Mapping[str, Any], name: str) -> dict[str, float]:
    """A table of ceilings that is what it should be: positive numbers by name; anything else is left out."""
    found = ceilings.get(name)
    if not isinstance(found, Mapping):
        return {}
    return {
        str(key): float(value)
        for key, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
    }


def reads(ceilings: Mapping[str, Any]) -> dict[int, float]:
    """GB/s by size in bytes, the smallest first."""
    return dict(sorted((int(k), v) for k, v in rates(ceilings, "read_gbs").items() if k.isdecimal()))


def roofs(found: Sequence[Race], ceilings: Mapping[str, Any]) -> list[Roof]:
    """The ceilings of the regimes that have a place on a roofline; empty where none were measured."""
    arithmetic = max(rates(ceilings, "gmacs").values(), default=0.0)
    bandwidths = reads(ceilings)
    if not arithmetic or not bandwidths:
        return []
    out = []
    for one in found:
        if one.intensity is None or not one.entries:
            continue
        size = next((size for size in bandwidths if size >= one.traffic), max(bandwidths))
        out.append(Roof(one.name, one.intensity, arithmetic, size, bandwidths[size], one.entries[0].rate))
    return out


def no_roof(found: Sequence[Race], ceilings: Mapping[str, Any], foreign: bool) -> str:
    """Why there is no roofline, and what mends it; empty where there is one."""
    timed = [one for one in found if one.entries]
    if not timed or roofs(found, ceilings):
        return ""
    if not any(one.unit == GMACS for one in timed):
        units = " and ".join(dict.fromkeys(one.unit for one in timed))
        return f"No roofline: this family counts {units}, and ceilings are measured in {GMACS}."
    if not any(one.intensity for one in timed):
        return "No roofline: the family's regimes do not say how many bytes a call moves (traffic=)."
    if foreign:
        return "No roofline: this is another box's record, and ceilings are measured on the box itself."
    why = ceilings.get("problem")
    because = f" ({why})" if why else ""
    return f"No roofline: the ceilings of this box were not measured{because}; to measure them: python -m tunekit probe"


def groups(kernel: KernelRecord, verdict: str) -> list[tuple[str, list[str]]]:
    """Rows of a verdict by reason, the commonest reason first."""
    found: dict[str, list[str]] = {}
    for suffix, row in kernel.rows.items():
        if row.verdict == verdict:
            found.setdefault(row.reason or "no reason is on record", []).append(suffix)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def confirmations(kernel: KernelRecord) -> list[dict[str, Any]]:
    """The end-to-end trials of a kernel's winner, a mapping each; empty where none were made."""
    lines = [dataclasses.asdict(entry) for entry in kernel.confirm]
    for line in lines:
        line.pop("samples")  # they stand in the record; the ratios say it
        line["parts"] = ", ".join(f"{name} {ratio:.3f}" for name, ratio in line["parts"].items())
    return lines


def stages(record: RunRecord) -> list[tuple[str, float]]:
    """Seconds by stage, in the order in which a run passes them."""
    order = ("build", "gate", "race", "confirm", "write", "stamp")

    def at(name: str) -> int:
        first = name.partition(" ")[0]
        return order.index(first) if first in order else len(order)

    return sorted(((name, taken) for name, taken in record.stages.items() if taken >= 0), key=lambda s: at(s[0]))


def as_json(path: str, record: RunRecord, foreign: Sequence[str], ceilings: Mapping[str, Any]) -> dict[str, Any]:
    """One scope's figures as JSON values."""
    kernels = {}
    for name, kernel in record.kernels.items():
        found = races(kernel)
        kernels[name] = {
            "winner": kernel.winner,
            "previous": kernel.previous,
            "fallback": kernel.fallback,
            "reason": kernel.reason,
            "races": [dataclasses.asdict(one) for one in found],
            "roofs": [
                {**dataclasses.asdict(roof), "limit": roof.limit, "bound": roof.bound}
                for roof in roofs(found, ceilings)
            ],
            "confirm": confirmations(kernel),
            "not_raced": {verdict: dict(groups(kernel, verdict)) for verdict in TAKEN},
        }
    return {
        "scope": record.scope,
        "record": path,
        "foreign": list(foreign),
        "box": record.box,
        "ended": record.ended,
        "stages": dict(stages(record)),
        "ceilings": dict(ceilings),
        "kernels": kernels,
    }
