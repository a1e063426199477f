# SPDX-License-Identifier: Apache-2.0
"""A simulator of dispatch, for lane counts that this machine lacks.

    python benchmarks/simulate.py [--lanes 8,48,192] [--profile box_profile.json] [--json]

It runs the shipped shapers and gates (the core's lanes, chunks, cells, part, admitted) on shapes of real models; the
costs alone are parameters: a probe's, where its profile is given. Lanes take the next chunk when they are free. The
claim word and the done word are each one cache line, which one lane at a time can have: whoever looks at it, with or
without a chunk to get, keeps the others from it for ``transfer_ns``. One token is bound by memory, which lanes share.

What it is good for is the direction of a choice at 8, 48 or 192 lanes, not a prediction of nanoseconds.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunekit import core
from tunekit.probe import target_of

CORE = core.core()


@dataclass(frozen=True)
class Costs:
    """What a machine costs. Times in nanoseconds, rates in multiply-accumulates a nanosecond.

    Attributes:
        macs_per_ns: one lane, weights near.
        publish_ns: the caller's part before its first chunk.
        chunk_ns: calling a chunk, beside the claim.
        transfer_ns: a cache line from one core to another.
        react_ns: from the publish until a spinning worker looks at the claim word.
        lane_bytes, all_bytes: bytes a nanosecond that one lane and the whole memory deliver.
        cache: bytes of the last caches together; a model that fits is not streamed.
    """

    macs_per_ns: float = 60.0
    publish_ns: float = 60.0
    chunk_ns: float = 10.0
    transfer_ns: float = 70.0
    react_ns: float = 150.0
    lane_bytes: float = 12.0
    all_bytes: float = 60.0
    cache: float = 32e6


# What larger machines cost more: lines travel farther (other dies, then another socket), and memory is wider.
MACHINES = {
    8: Costs(),
    48: Costs(transfer_ns=100, react_ns=250, all_bytes=250, cache=256e6),
    192: Costs(transfer_ns=180, react_ns=500, all_bytes=600, cache=768e6),
}


def machine(lanes: int, costs: Costs | None = None) -> Costs:
    """The costs of a machine with so many lanes; ``costs``: what a probe measured of a lane goes before."""
    found = MACHINES[max((n for n in MACHINES if n <= lanes), default=8)]
    if costs is None:
        return found
    return replace(
        found,
        macs_per_ns=costs.macs_per_ns,
        publish_ns=costs.publish_ns,
        chunk_ns=costs.chunk_ns,
        lane_bytes=costs.lane_bytes,
    )


def target(costs: Costs) -> int:
    """What the probe would mint there: chunks pass the claim word one after the other."""
    return target_of(costs.transfer_ns, costs.macs_per_ns)


@dataclass(frozen=True)
class Knobs:
    """The profile's numbers that the shapers and gates take."""

    target: int = 65536
    grain: int = 16
    grain_gemv: int = 64
    oversplit: int = 4
    fill: int = 1
    grid: int = 0
    gate: int = 1


@dataclass(frozen=True)
class Op:
    """A product: T tokens, K by N, rows in groups of ``mr`` and tiles of ``tokstep`` tokens."""

    t: int
    k: int
    n: int
    mr: int = 16
    tokstep: int = 5


WEIGHT = 1 + 2 / 32
"""Bytes of a weight, with its share of a float16 scale."""

# The matrices of one layer (K, N) and how many layers: what a forward pass multiplies.
MODELS: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "135M": (30, ((576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576))),
    "1B": (16, ((2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048))),
    "8B": (32, ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))),
}


def cells_of(op: Op, lanes: int, knobs: Knobs) -> list[int]:
    """The work of each chunk as the shipped shapers cut it, in the order in which it is claimed."""
    single = op.t == 1
    units = -(-op.n // op.mr)
    grain = -(-(knobs.grain_gemv if single else knobs.grain) // op.mr)
    oversplit = 1 if single else knobs.oversplit
    chunks = CORE.chunks(units, grain, lanes, oversplit, knobs.fill if single else 0)
    tiles = -(-op.t // op.tokstep)
    most = op.t * op.k * op.n // max(knobs.target // 8 * lanes, 1)
    rows, tokens = CORE.cells(chunks, op.t, tiles, lanes, oversplit, knobs.grid, most)
    found = []
    for j in range(tokens):
        a, b = (CORE.part(tiles, tokens, e) * op.tokstep for e in (j, j + 1))
        for i in range(rows):
            u0, u1 = CORE.part(units, rows, i), CORE.part(units, rows, i + 1)
            found.append((min(u1 * op.mr, op.n) - u0 * op.mr) * (min(b, op.t) - a) * op.k)
    return found


def simulate(
    op: Op, live: int, knobs: Knobs, costs: Costs, speeds: Sequence[float] = (), streamed: bool = False
) -> float:
    """Nanoseconds of one op. ``speeds``: how fast each lane is beside 1.0, the caller first; missing ones are 1.0."""
    work = op.t * op.k * op.n
    lanes = CORE.lanes(work, knobs.target, live, 0)
    speed = [*speeds, *[1.0] * live][:live]
    chunks = cells_of(op, lanes, knobs)
    rate = costs.macs_per_ns
    if op.t == 1 and streamed:  # a weight and its share of the scale
        busy = min(lanes, len(chunks))
        rate = min(rate, costs.lane_bytes / WEIGHT, costs.all_bytes / WEIGHT / max(busy, 1))
    if lanes <= 1 or len(chunks) <= 1:
        return work / rate / speed[0]
    admitted = CORE.admitted(live - 1, lanes, len(chunks), knobs.gate)
    # (when the lane looks at the claim word, lane)
    heap = [(costs.publish_ns, 0), *((costs.publish_ns + costs.react_ns, r + 1) for r in range(admitted))]
    heapq.heapify(heap)
    claim_free = done_free = over = 0.0
    following, owner, mine = 0, -1, [0] * live
    while heap:
        when, lane = heapq.heappop(heap)
        # The line is here already where this lane was the last to have it.
        claim_free = max(when, claim_free) + (costs.transfer_ns if owner != lane else costs.transfer_ns / 10)
        owner = lane
        if following < len(chunks):
            spent = costs.chunk_ns + chunks[following] / rate / speed[lane]
            following, mine[lane] = following + 1, mine[lane] + 1
            heapq.heappush(heap, (claim_free + spent, lane))
        elif mine[lane]:
            done_free = max(claim_free, done_free) + costs.transfer_ns
            over = max(over, done_free)
    return over


def forward(model: str, t: int, live: int, knobs: Knobs, costs: Costs, speeds: Sequence[float] = ()) -> float:
    """Nanoseconds of the products of one forward pass of ``t`` tokens."""
    layers, shapes = MODELS[model]
    streamed = layers * sum(k * n for k, n in shapes) * WEIGHT > costs.cache
    return layers * sum(simulate(Op(t, k, n), live, knobs, costs, speeds, streamed) for k, n in shapes)


def costs_of(profile: Path) -> Costs:
    """Costs as a probe measured them; what it does not measure keeps its default."""
    measured = json.loads(profile.read_text(encoding="utf-8"))["measured"]
    dispatch, stream = measured["dispatch"], measured["stream_gbs"]
    return replace(
        Costs(),
        macs_per_ns=dispatch["macs_per_ns"],
        publish_ns=min(dispatch["op_ns"].values()),
        chunk_ns=max(1.0, dispatch["per_chunk_ns"]),
        lane_bytes=stream["1"],
    )


def findings(lanes: int, costs: Costs) -> dict[str, Any]:
    """The seeds' questions at one lane count: ratios above 1 say how much faster the second choice is."""
    base = Knobs(target=target(costs))
    slow = [1.0 if lane % 4 else 0.4 for lane in range(1, lanes + 1)]  # every fourth core is slow
    straggler = [1.0] * (lanes // 2) + [0.25]
    found: dict[str, Any] = {"lanes": lanes}
    for model in MODELS:
        for t in (1, 128, 512):
            name = f"{model} T={t}"
            start = forward(model, t, lanes, base, costs)
            found[name] = {
                "speedup": forward(model, t, 1, base, costs) / start,
                "rank gate": forward(model, t, lanes, replace(base, gate=0), costs) / start,
                "2-D fine": start / forward(model, t, lanes, replace(base, grid=1), costs),
                "2-D waves": start / forward(model, t, lanes, replace(base, grid=2), costs),
                "minted target, not 1 M": forward(model, t, lanes, replace(base, target=1_000_000), costs) / start,
                "oversplit 4": forward(model, t, lanes, replace(base, oversplit=1), costs) / start,
                "oversplit 4, slow cores": forward(model, t, lanes, replace(base, oversplit=1), costs, slow)
                / forward(model, t, lanes, base, costs, slow),
                "oversplit 4, a straggler": forward(model, t, lanes, replace(base, oversplit=1), costs, straggler)
                / forward(model, t, lanes, base, costs, straggler),
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--lanes", default="8,48,192")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = costs_of(options.profile) if options.profile else None
    results = [findings(int(n), machine(int(n), costs)) for n in options.lanes.split(",")]
    if options.json:
        print(json.dumps(results, indent=1))
        return 0
    for found in results:
        rows = {name: values for name, values in found.items() if isinstance(values, dict)}
        columns = list(next(iter(rows.values())))
        print(f"\n{found['lanes']} lanes: " + " | ".join(["speedup over one lane", *columns[1:]]))
        for name, values in rows.items():
            print(f"{name:12}" + "".join(f"{values[c]:9.2f}" for c in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
