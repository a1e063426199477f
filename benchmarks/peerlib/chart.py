# SPDX-License-Identifier: Apache-2.0
"""The chart: GMAC/s of everyone over tokens, a panel for each shape, regime and number of threads, as SVG."""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, COLUMNS = 330, 230, 44, 30, 3
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#17becf", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#ff7f0e",
           "#393b79", "#637939", "#843c39", "#7b4173")  # fmt: skip


def svg(cells: list[dict[str, Any]]) -> str:
    """A panel where a shape has more than one number of tokens; the same colour for a peer everywhere. Kernels that
    are not whole products are left out; dashed lines are not exact."""
    panels: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["regime"] != "chain":
            panels.setdefault((cell["form"], cell["regime"], cell["shape"], cell["threads"]), []).append(cell)
    panels = {key: sorted(own, key=lambda c: c["tokens"]) for key, own in panels.items() if len(own) > 1}
    everyone = [(p, v) for own in panels.values() for c in own for p, v in c["peers"].items() if not v["kernel"]]
    labels = list(dict.fromkeys(p for p, _ in everyone))
    colour = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    exact = {p: v["exact"] for p, v in everyone}
    rows = -(-len(panels) // COLUMNS)
    legend = 18 * -(-len(labels) // 2) + 20
    width, height = COLUMNS * WIDTH, max(1, rows) * HEIGHT + legend
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, label in enumerate(labels):
        x, y = 10 + (i % 2) * width // 2, 16 + 18 * (i // 2)
        dash = "" if exact[label] else ' stroke-dasharray="4 3"'
        line = f'x1="{x}" y1="{y - 4}" x2="{x + 24}" y2="{y - 4}"'
        out.append(f'<line {line} stroke="{colour[label]}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{x + 30}" y="{y}">{escape(label)}</text>')
    for index, ((form, regime, shape, threads), own) in enumerate(panels.items()):
        x0, y0 = (index % COLUMNS) * WIDTH + LEFT, legend + (index // COLUMNS) * HEIGHT + TOP
        w, h = WIDTH - LEFT - 14, HEIGHT - TOP - 30
        top = max(v["gmacs"] for c in own for v in c["peers"].values() if not v["kernel"])
        step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e9) if top / s <= 6)
        top = step * math.ceil(top / step)
        first, last = math.log2(own[0]["tokens"]), math.log2(own[-1]["tokens"])
        k, n = own[0]["k"], own[0]["n"]
        cores = "1 core" if threads == 1 else f"{threads} cores"
        title = f"{form} {shape} ({k} x {n}), {regime}, {cores}"
        out.append(f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{escape(title)}</text>')
        for mark in range(0, int(top) + 1, int(step)):
            y = y0 + h - h * mark / top
            out.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + w}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{x0 - 4}" y="{y + 3:.1f}" text-anchor="end">{mark}</text>')
        place = {c["tokens"]: x0 + w * (math.log2(c["tokens"]) - first) / (last - first) for c in own}
        for tokens, x in place.items():
            out.append(f'<text x="{x:.1f}" y="{y0 + h + 12}" text-anchor="middle">{tokens}</text>')
        out.append(f'<text x="{x0 + w / 2}" y="{y0 + h + 24}" text-anchor="middle">tokens; GMAC/s</text>')
        for label in labels:
            points = [(place[c["tokens"]], c["peers"][label]["gmacs"]) for c in own if label in c["peers"]]
            path = " ".join(f"{x:.1f},{y0 + h - h * v / top:.1f}" for x, v in points)
            dash = "" if exact[label] else ' stroke-dasharray="4 3"'
            thick = 2.5 if label.startswith("tunekit") else 1.2
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour[label]}" stroke-width="{thick}"{dash}/>')
    return "\n".join([*out, "</svg>", ""])
