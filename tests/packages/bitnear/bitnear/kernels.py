# SPDX-License-Identifier: Apache-2.0
"""Hamming distance of one packed bit vector to many: the axes are how bits are counted, and how far it is unrolled."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

import tunekit as tk

SCOPE = tk.Scope("bitnear")

COUNTS = {"popcnt": ("x86_64", "popcnt"), "shuffle": ("x86_64", "avx2"), "vpopcntdq": ("x86_64", "avx512f,avx512vpopcntdq"), "cnt": ("aarch64", "neon")}
ROWS = [tk.perm(count=c, unroll=u, requires=isa) for c, (_, isa) in COUNTS.items() for u in (1, 2, 4)]


def declines(row: tk.Row, target: tk.Target) -> str | None:
    """Which rows cannot be emitted: instructions of another architecture."""
    arch, _ = COUNTS[str(row["count"])]
    return None if target.arch == arch else f"{row['count']} is an instruction of {arch}"


def samples() -> list[Any]:
    """Widths with and without tails; 768 and 1024 bits, as embeddings have, are timed."""
    from tunekit.measure.fixtures import Sample

    found = []
    for n, width, work in ((0, 8, 0), (1, 1, 0), (3, 7, 0), (5, 31, 0), (4, 65, 0), (7, 200, 0), (4096, 96, 1), (4096, 128, 1)):
        rng = np.random.default_rng(width)
        query, base = rng.integers(0, 256, width, np.uint8), rng.integers(0, 256, (n, width), np.uint8)
        out = np.empty(n, np.uint32)
        found.append(Sample(f"{n}x{8 * width} bits", (out, query, base, n, width), work * n * width * 8, "Gbit/s"))
        if n:
            base[-1] = base[n // 2] = query  # two at distance 0: the first must win
            found.append(Sample(f"nearest of {n}x{8 * width}", (query, base, n, width), function="nearest"))
    return found


@tk.companion
def nearest(query: Annotated[tk.In[tk.u8], "width"], base: Annotated[tk.In[tk.u8], "n", "width"], n: tk.i32, width: tk.i32) -> tk.i32:
    """The index of the vector nearest to the query, the first where several are; -1 of none."""
    if n == 0:
        return -1
    return int(np.argmin(np.bitwise_count(base.reshape(n, width) ^ query).sum(1, dtype=np.uint32)))


@tk.tune(
    scope=SCOPE,
    template="bitnear/bitnear.c.j2",
    reference="bitnear/bitnear.c.j2",
    rows=ROWS,
    defaults={"count": "portable", "unroll": 1},
    declines=declines,
    fallback="count_shuffle_unroll1;count_popcnt_unroll4;count_cnt_unroll2",
    companions=[nearest],
    fixtures="bitnear.kernels:samples",
)
def distances(
    out: Annotated[tk.Out[tk.u32], "n"],
    query: Annotated[tk.In[tk.u8], "width"],
    base: Annotated[tk.In[tk.u8], "n", "width"],
    n: tk.i32,
    width: tk.i32,
) -> None:
    """``out[i]``: how many bits of ``base[i]`` and the query differ. ``width`` is in bytes."""
    out[:] = np.bitwise_count(base.reshape(n, width) ^ query).sum(1, dtype=np.uint32)
