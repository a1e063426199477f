# SPDX-License-Identifier: Apache-2.0
"""The first race and the roofline as a PNG, for those who paste into chats. Needs matplotlib, the extra ``report``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tunekit.ceilings import size_name
from tunekit.errors import TunekitError
from tunekit.report.charts import figure
from tunekit.report.reading import GMACS, Entry, Race, races, rates, reads, roofs
from tunekit.report.sources import Source

ROWS = 12
"""Rows of the picture; the page has more."""

_COLOURS = {"winner": "#0072b2", "fallback": "#b84a00", "": "#68737f"}
_MARKERS = {"winner": "D", "fallback": "s", "": "o"}


def check() -> None:
    """Raises TunekitError with the command that installs what is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TunekitError(f"--png needs matplotlib ({error}): pip install 'tunekit-native[report]'") from error


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")


def rows_of(race: Race) -> list[Entry]:
    """The fastest rows, and the winner and the fallback wherever they are."""
    return [entry for at, entry in enumerate(race.entries) if at < ROWS or entry.role]


def draw(found: Sequence[Source]) -> bytes:
    """The picture of the first kernel that was raced.

    Raises:
        TunekitError: none was.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for source in found:
        for name, kernel in source.record.kernels.items():
            timed = [race for race in races(kernel) if race.entries]
            if timed:
                limits = roofs(timed, source.ceilings)
                rows = rows_of(timed[0])
                canvas: Any = Figure(figsize=(13 if limits else 8, 2.2 + 0.33 * len(rows)), layout="constrained")
                FigureCanvasAgg(canvas)
                axes = canvas.subplots(1, 2 if limits else 1, squeeze=False, width_ratios=[3, 2] if limits else None)[0]
                canvas.suptitle(plain(f"{source.record.scope}.{name} on {source.record.brand}"), fontsize=13)
                _race(axes[0], timed[0], rows)
                if limits:
                    _roofline(axes[1], timed, source)
                out = io.BytesIO()
                canvas.savefig(out, format="png", dpi=120, facecolor="white")
                return out.getvalue()
    raise TunekitError("no kernel of these records was raced, so there is nothing to draw; leave out --png")


def _race(axes: Any, race: Race, rows: Sequence[Entry]) -> None:
    for at, entry in enumerate(rows):
        colour = _COLOURS[entry.role]
        axes.plot([entry.rate * (1 - entry.spread), entry.rate * (1 + entry.spread)], [at, at], color=colour, lw=1)
        axes.plot([entry.low, entry.high], [at, at], color=colour, lw=4, alpha=0.5, solid_capstyle="butt")
        face = colour if entry.final or entry.role else "white"
        axes.plot([entry.rate], [at], _MARKERS[entry.role], color=colour, markerfacecolor=face, ms=7)
    if race.band is not None:
        axes.axvspan(*race.band, color=_COLOURS["winner"], alpha=0.12, lw=0, label="tied with the fastest")
    labels = [plain(entry.suffix) + (f"  ({entry.role})" if entry.role else "") for entry in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8, family="monospace")
    for text, entry in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_color(_COLOURS[entry.role] if entry.role else "black")
    axes.invert_yaxis()
    axes.set_xlabel(plain(f"{race.unit}, more is better (2 standard errors, spread)"))
    margin = "" if race.margin is None else f", margin {100 * race.margin:.1f} %"
    axes.set_title(plain(f"{race.name}: {race.decides}{margin}"), fontsize=10)
    axes.grid(axis="x", color="#d5dae0", lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _roofline(axes: Any, timed: Sequence[Race], source: Source) -> None:
    limits = roofs(timed, source.ceilings)
    bandwidths, arithmetic = reads(source.ceilings), rates(source.ceilings, "gmacs")
    peak = max(arithmetic.values())
    xs = [limit.intensity for limit in limits]
    left, right = min(xs) / 4, max(*xs, peak / min(bandwidths.values())) * 3
    for size in sorted({limit.size for limit in limits} | {min(bandwidths), max(bandwidths)}):
        rate = bandwidths[size]
        ends = [left, min(peak / rate, right)]
        axes.plot(ends, [x * rate for x in ends], color="#1b1f24", lw=1.2)
        axes.annotate(
            f"{size_name(size)}: {figure(rate)} GB/s", (left, left * rate), xytext=(18, -2), textcoords="offset points",
            fontsize=7, color="#57606a",
        )  # fmt: skip
    for leg, rate in arithmetic.items():
        top = rate == peak
        axes.plot(
            [rate / max(bandwidths.values()), right], [rate, rate], color="#1b1f24", lw=1.2, ls="-" if top else "--"
        )
        axes.annotate(
            plain(f"{leg}: {figure(rate)}"), (right, rate), xytext=(-3, 3), textcoords="offset points", ha="right",
            fontsize=7, color="#57606a",
        )  # fmt: skip
    for race in timed:
        if race.intensity is None:
            continue
        low = race.entries[0].rate / 20
        for entry in reversed([e for e in race.entries if e.rate >= low]):
            size_, alpha = (8, 1.0) if entry.role else (3, 0.5)
            axes.plot(
                [race.intensity], [entry.rate], _MARKERS[entry.role], color=_COLOURS[entry.role], ms=size_, alpha=alpha
            )
        axes.annotate(
            plain(race.name),
            (race.intensity, race.entries[0].rate),
            xytext=(8, 3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(None, peak * 2))
    axes.set_xlabel("multiply-accumulates a byte")
    axes.set_ylabel(GMACS)
    axes.set_title("against this box's ceilings, one lane", fontsize=10)
    axes.grid(color="#d5dae0", lw=0.6)
