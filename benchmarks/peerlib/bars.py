# SPDX-License-Identifier: Apache-2.0
"""The bars: by how much tile, GEMV, MXFP4 and a model's chain are to be ahead, and by how much they are.

Each is met by the geometric mean over its cells, with no cell below nine tenths of it. On all cores the same ratios
hold within 5 %. Rates, not seconds, are compared: how many matrices are streamed differs from peer to peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LLAMA, ONNX = ("llama.cpp Q8_0",), ("ONNX Runtime MatMulNBits 8 bits, block 32",)
IK = ("ik_llama.cpp Q8_0", "ik_llama.cpp Q8_0 by 8 rows (q8_0_r8)")
LLAMA4, IK4 = ("llama.cpp MXFP4 repacked",), ("ik_llama.cpp MXFP4",)
AGAINST = {IK: "ik_llama.cpp's best", LLAMA4 + IK4: "the better of llama.cpp and ik_llama.cpp"}
OURS = {"q8_0": "tunekit", "mxfp4": "tunekit MXFP4"}
LEAST_CELL, ALL_CORES = 0.9, 0.95


@dataclass(frozen=True)
class Bar:
    """``best of`` these peers times ``least`` is what we are to reach in these cells."""

    what: str
    form: str
    regime: str
    tokens: Callable[[int], bool]
    peers: tuple[str, ...]
    least: float
    stretch: float | None = None


def many(t: int) -> bool:
    return t >= 8


def one(t: int) -> bool:
    return t == 1


# fmt: off
BARS = (
    #   what                          form     regime      tokens              against       least  stretch
    Bar("tile, T >= 8",               "q8_0",  "hot",      many,               LLAMA,        1.95,  2.1),
    Bar("tile, T >= 8",               "q8_0",  "hot",      many,               IK,           1.22,  1.3),
    Bar("tile, T >= 8",               "q8_0",  "hot",      many,               ONNX,         2.2,   2.5),
    Bar("tile, T = 4",                "q8_0",  "hot",      lambda t: t == 4,   LLAMA,        1.9),
    Bar("tile, T = 4",                "q8_0",  "hot",      lambda t: t == 4,   IK,           1.2),
    Bar("GEMV, hot",                  "q8_0",  "hot",      one,                LLAMA,        2.2),
    Bar("GEMV, hot",                  "q8_0",  "hot",      one,                IK,           1.2),
    Bar("GEMV, streamed",             "q8_0",  "streamed", one,                LLAMA,        1.45),
    Bar("MXFP4 tile, T >= 8",         "mxfp4", "hot",      many,               LLAMA4,       2.0),
    Bar("MXFP4 tile, T >= 8",         "mxfp4", "hot",      many,               IK4,          1.6),
    Bar("MXFP4 GEMV, hot",            "mxfp4", "hot",      one,                LLAMA4 + IK4, 1.5),
    Bar("SmolLM2-135M, prefill 512",  "q8_0",  "chain",    lambda t: t == 512, LLAMA,        1.9),
    Bar("SmolLM2-135M, decode",       "q8_0",  "chain",    one,                LLAMA,        1.8),
)
# fmt: on


def mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _judge(
    what: str, against: str, threads: int, least: float, ratios: dict[str, float], stretch: float | None
) -> dict[str, Any]:
    if threads > 1:
        least, stretch = least * ALL_CORES, stretch and stretch * ALL_CORES
    worst = min(ratios, key=ratios.__getitem__)
    found = mean(list(ratios.values()))
    return {
        "bar": what, "against": against, "threads": threads, "least": least, "stretch": stretch, "mean": found,
        "cells": len(ratios), "minimum": ratios[worst], "where": worst,
        "met": found >= least and ratios[worst] >= LEAST_CELL * least,
    }  # fmt: skip


def judge(cells: list[dict[str, Any]], limits: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Every bar that these cells speak of, on one core and on all."""
    found = []
    for threads in sorted({c["threads"] for c in cells} | {int(t) for t in limits}):
        for bar in BARS:
            ratios = {}
            for cell in cells:
                same = (cell["threads"], cell["form"], cell["regime"]) == (threads, bar.form, bar.regime)
                ours = cell["peers"].get(OURS[bar.form])
                others = [cell["peers"][p]["gmacs"] for p in bar.peers if p in cell["peers"]]
                if same and bar.tokens(cell["tokens"]) and ours and others:
                    ratios[f"{cell['shape']} T={cell['tokens']}"] = ours["gmacs"] / max(others)
            if ratios:
                against = AGAINST.get(bar.peers, bar.peers[0])
                found.append(_judge(bar.what, against, threads, bar.least, ratios, bar.stretch))
        own = limits.get(str(threads), {})
        if "tile" in own and threads == 1:
            ratio = {"L1": own["tile"] / own["port"]}
            found.append(_judge("tile alone", "the multipliers' limit", threads, 0.66, ratio, None))
        streamed = {
            f"{c['shape']} T=1": c["peers"]["tunekit"]["bytes"] / c["peers"]["tunekit"]["seconds"] / 1e9 / c["read"]
            for c in cells
            if "read" in c and c["regime"] == "streamed" and c["form"] == "q8_0" and c["tokens"] == 1
            and c["threads"] == threads and "tunekit" in c["peers"]
        }  # fmt: skip
        if streamed:
            found.append(_judge("GEMV, streamed", "the best plain read", threads, 0.92, streamed, None))
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    heads = f"{'bar':27} {'against':42} {'cores':>5} {'wanted':>7} {'mean':>6} {'least':>6}  {'met':3}"
    lines = [f"{heads}  where least, of how many"]
    for b in found:
        lines.append(
            f"{b['bar']:27} {b['against']:42} {b['threads']:5} {b['least']:7.2f} {b['mean']:6.2f} {b['minimum']:6.2f}  "
            f"{'yes' if b['met'] else 'NO ':3}  {b['where']}, {b['cells']}"
            + (f" (stretch {b['stretch']:.2f}{', met' if b['mean'] >= b['stretch'] else ''})" if b["stretch"] else "")
        )
    return lines
