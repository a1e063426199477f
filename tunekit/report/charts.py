# SPDX-License-Identifier: Apache-2.0
"""The charts, as SVG.

Lengths across are percentages and lengths down are pixels, so a chart is as wide as its page and its text keeps its
size: nothing scrolls sideways on a telephone. Colours are the style sheet's (``style.css``), which knows light, dark
and paper; shapes say the same as colours, for those who see no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunekit.ceilings import size_name
from tunekit.report.markup import Markup, join, tag
from tunekit.report.reading import GMACS, Entry, Race, Roof, rates, reads

SHOWN = 20
"""Rows of a race chart; the table beside it has all of them."""

_ROW = 34  # pixels of one row of a race chart: a line of text and a track
_LEFT, _RIGHT = 2.0, 98.0  # per cent
_NARROW = 44  # characters of a name that leave room for its rate on a telephone


def figure(value: float) -> str:
    """A rate with three significant digits."""
    if value >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 0.01 else f"{value:.1e}"


def shorten(text: str, most: int) -> str:
    """Text with its middle left out where it is too long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1 - most // 2) :]}"


def _percent(value: float) -> str:
    return f"{value:.2f}%"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two numbers."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two positive numbers; powers alone over a wide range."""
    multiples = (1, 2, 5) if high / low < 2000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in multiples if low <= m * 10.0**p <= high]


def mark(role: str, final: bool, x: str, y: float) -> Markup:
    """The sign of a row: a diamond for the winner, a square for the fallback, else a circle (hollow: no finalist)."""
    kind = role or ("other" if final else "screened")
    if role == "winner":
        shape = tag("path", d="M0 -7 L7 0 L0 7 L-7 0 Z")
    elif role == "fallback":
        shape = tag("path", d="M-5 -5 H5 V5 H-5 Z")
    else:
        shape = tag("circle", r=4.5)
    # A nested svg takes percentages, which a transform does not.
    return tag("svg", tag("g", shape, class_=f"mark {kind}"), x=x, y=y, overflow="visible", width=1, height=1)


def shown(race: Race) -> list[Entry]:
    """The rows of a chart: the fastest, and the winner and the fallback wherever they are."""
    return [entry for at, entry in enumerate(race.entries) if at < SHOWN or entry.role]


def from_zero(race: Race) -> bool:
    """Whether a chart's axis begins at 0: where a third of its rows are slower than half of the fastest.

    Else it begins there, or below the slowest: a band of a few per cent must be seen.
    """
    rows = shown(race)
    return 3 * sum(entry.rate < 0.5 * race.entries[0].rate for entry in rows) > len(rows)


def race_chart(race: Race, name: str) -> Markup:
    """One regime's rows: a mark for each rate, a thick bar for two standard errors, a thin one for the spread.

    Args:
        race: the figures; at least one entry.
        name: unique in the page, for the ids.
    """
    rows = shown(race)
    best = race.entries[0].rate
    whole = from_zero(race)
    bottom = 0.0 if whole else max(min(min(e.low, e.rate * (1 - e.spread)) for e in rows), 0.5 * best)
    most = best * (1.5 if whole else 1.15)
    top = max(best * 1.02, min(max(max(e.high, e.rate * (1 + e.spread)) for e in rows), most))
    low = bottom - 0.04 * (top - bottom)

    def x(rate: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, (rate - low) / (top - low)))

    height = _ROW * len(rows) + 30
    parts: list[Markup] = []
    if race.band is not None:
        left = x(race.band[0])
        parts.append(
            tag(
                "rect", x=_percent(left), y=0, width=_percent(max(x(race.band[1]) - left, 0.3)), height=height - 28.0,
                class_="band",
            )
        )  # fmt: skip
    base = height - 28.0
    for value in ticks(low, top):
        at = _percent(x(value))
        parts.append(tag("line", x1=at, x2=at, y1=0, y2=base, class_="grid"))
        parts.append(tag("text", f"{value:g}", x=at, y=base + 15, class_="tick" if x(value) < 97 else "tick end"))
    for number, entry in enumerate(rows):
        y = number * _ROW
        track = y + 24.0
        unit = f" {race.unit}" + (f" · {entry.ratio:.2f}×" if entry.ratio else "")
        for text, width in ((entry.suffix, "wide"), (shorten(entry.suffix, _NARROW), "narrow")):
            style = f"row {width} {entry.role}".strip()
            parts.append(tag("text", text, x=_percent(_LEFT), y=y + 13, class_=style))
        more = tag("tspan", unit, class_="wide")
        parts.append(tag("text", figure(entry.rate), more, x=_percent(_RIGHT), y=y + 13, class_="value"))
        ends = [
            ("spread", entry.rate * (1 - entry.spread), entry.rate * (1 + entry.spread)),
            ("error", entry.low, entry.high),
        ]
        kind = entry.role or "other"
        if entry.rate < low:
            parts.append(tag("text", "◀ below this axis", x=_percent(_LEFT), y=track + 4, class_="beyond"))
            continue
        parts += [
            tag("line", x1=_percent(x(first)), x2=_percent(x(last)), y1=track, y2=track, class_=f"{style} {kind}")
            for style, first, last in ends
        ]
        parts.append(mark(entry.role, entry.final, _percent(x(entry.rate)), track))
    words = (
        f"{len(rows)} of {len(race.entries)} rows, the fastest first. The fastest is {race.entries[0].suffix} with "
        f"{figure(best)} {race.unit}. " + _roles(race)
    )
    return _svg(name, f"{race.name}: rows by {race.unit}", words, height, parts)


def _roles(race: Race) -> str:
    told = [
        f"The {entry.role} {entry.suffix} makes {figure(entry.rate)} {race.unit}."
        for entry in race.entries
        if entry.role
    ]
    return " ".join(told)


def _svg(name: str, title: str, words: str, height: float, parts: Sequence[Markup]) -> Markup:
    return tag(
        "svg",
        tag("title", title, id=f"{name}-t"),
        tag("desc", words, id=f"{name}-d"),
        join(parts),
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        width="100%",
        height=height,
        class_="chart",
    )


def roofline(races: Sequence[Race], roofs: Sequence[Roof], ceilings: Mapping[str, Any], name: str) -> Markup:
    """Rates over multiply-accumulates a byte, below the ceilings of this box; both axes logarithmic.

    Args:
        races: the regimes; those with an intensity are drawn.
        roofs: their ceilings; at least one.
        ceilings: as the probe measured them.
        name: unique in the page.
    """
    height, base = 400.0, 356.0
    bandwidths = reads(ceilings)
    arithmetic = rates(ceilings, "gmacs")
    placed = [race for race in races if race.intensity is not None and race.entries]
    used = sorted({roof.size for roof in roofs} | {min(bandwidths), max(bandwidths)})
    points = [race.intensity for race in placed if race.intensity]
    peak = max(arithmetic.values())
    ridge = peak / bandwidths[max(bandwidths)]
    left, right = min(points) / 4, max(*points, ridge) * 2.5
    slow = [min(max(e.rate, race.entries[0].rate / 20) for e in race.entries) for race in placed]
    low = min([*slow, left * min(bandwidths.values())]) / 1.5
    high = peak * 1.8

    def x(value: float) -> float:
        return 100 * math.log(value / left) / math.log(right / left)

    def y(value: float) -> float:
        return base - (base - 14) * math.log(value / low) / math.log(high / low)

    parts: list[Markup] = []
    for value in decades(left, right):
        at = _percent(x(value))
        parts.append(tag("line", x1=at, x2=at, y1=14, y2=base, class_="grid"))
        if 4 < x(value) < 96:
            parts.append(tag("text", f"{value:g}", x=at, y=base + 15, class_="tick"))
    for value in decades(low, high):
        parts.append(tag("line", x1="0%", x2="100%", y1=y(value), y2=y(value), class_="grid"))
        parts.append(tag("text", f"{value:g}", x="100%", y=y(value) - 3, class_="tick end"))
    parts.append(tag("text", "multiply-accumulates a byte →", x="50%", y=base + 34, class_="tick"))
    parts.append(tag("text", f"↑ {GMACS}", x="100%", y=11, class_="tick end"))
    for size in used:
        rate = bandwidths[size]
        end = min(peak / rate, right)
        begin = max(left, low / rate)
        parts.append(
            tag("line", x1=_percent(x(begin)), y1=y(begin * rate), x2=_percent(x(end)), y2=y(end * rate), class_="roof")
        )
    taken: list[float] = []
    for size in sorted(used, key=lambda s: -bandwidths[s]):
        rate = bandwidths[size]
        down = y(max(left * rate, low)) + 14  # below the line, which rises away from it
        down = max([down, *(t + 13 for t in taken if abs(t - down) < 13)])
        taken.append(down)
        parts.append(tag("text", f"{size_name(size)}: {figure(rate)} GB/s", x="0.5%", y=down, class_="roofname"))
    ordered = sorted(arithmetic.items(), key=lambda item: -item[1])
    clear = max((70, 45, 90, 25), key=lambda at: min(30, *(abs(at - x(point)) for point in points)))
    before = -math.inf
    for leg, rate in ordered:
        start = max(left, min(rate / max(bandwidths.values()), right))
        kind = "roof" if rate == peak else "roof lower"
        parts.append(tag("line", x1=_percent(x(start)), y1=y(rate), x2="100%", y2=y(rate), class_=kind))
        if y(rate) - before >= 13:  # a label that would cover another is left to the table
            parts.append(
                tag("text", f"{leg}: {figure(rate)} {GMACS}", x=f"{clear}%", y=y(rate) - 5, class_="roofname middle")
            )
            before = y(rate)
    for race in placed:
        at = _percent(x(race.intensity or 1))
        parts += [
            tag("circle", cx=at, cy=y(entry.rate), r=2.5, class_="cloud")
            for entry in race.entries
            if not entry.role and entry.rate >= low
        ]
        parts += [mark(e.role, True, at, y(e.rate)) for e in reversed(race.entries) if e.role and e.rate >= low]
    told: list[tuple[float, float]] = []
    for race in sorted(placed, key=lambda r: -r.entries[0].rate):
        across, down = x(race.intensity or 1), y(race.entries[0].rate) + 4
        while any(abs(a - across) < 25 and abs(d - down) < 14 for a, d in told):
            down += 14
        told.append((across, down))
        side = "end" if across > 75 else "start"
        shift = -11 if side == "end" else 11
        parts.append(tag("text", race.name, x=_percent(across), dx=shift, y=down, class_=f"regime {side}"))
    words = " ".join(
        f"{roof.regime}: {figure(roof.intensity)} multiply-accumulates a byte, the fastest row {figure(roof.best)} "
        f"{GMACS}, the ceiling {figure(roof.limit)} {GMACS} ({roof.bound})."
        for roof in roofs
    )
    return _svg(name, "Roofline: rates below the measured ceilings of one lane", words, height, parts)
