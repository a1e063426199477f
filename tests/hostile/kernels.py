# SPDX-License-Identifier: Apache-2.0
"""A family whose rows are compiled C that does everything a bad kernel can do, beside one that is right and one faster.

    PYTHONPATH=tests python -m tunekit.retune --module hostile.kernels --scope hostile --row-timeout 2 --dry-run

prints each row with its verdict; it ends with status 0, since rejected rows are no failure.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

import tunekit as tk
from tunekit.measure.fixtures import Sample

ACTS = (
    "sigill", "sigsegv", "sigfpe", "abort", "exits", "hangs", "heap", "memory",
    "past", "before", "half", "zeros", "long_k", "minus_128",
    "late_exits", "late_sigsegv", "late_hangs", "late_heap",
)  # fmt: skip
"""What a row does wrong: ends the process, damages it, or answers wrongly; always, for some operands, or only later."""


def samples() -> list[Sample]:
    """Products of (rows, K) int8 matrices by vectors: a small one, K beyond 64, the ends of the range, a timed one."""

    def one(name: str, n: int, k: int, low: int, work: bool = False) -> Sample:
        rng = np.random.default_rng([n, k])
        w = rng.integers(low, 128, (n, k), dtype=np.int8)
        w[:, 0] = low
        x = rng.integers(-127, 128, k, dtype=np.int8)
        x[0] = 127
        return Sample(name, (np.empty(n, np.int32), w, x, n, k), work=float(n * k) if work else 0.0, unit="GMAC/s")

    return [
        one("small", 24, 32, -127),
        one("K of 96", 24, 96, -127),
        one("full range", 24, 48, -128),
        one("large", 512, 512, -128, work=True),
    ]


@tk.tune(
    scope=tk.Scope("hostile"),
    template="hostile/dot.c.j2",
    reference="hostile/dot.c.j2",
    defaults={"act": "none", "twice": 0},
    targets=lambda row: ((),),
    rows=[tk.perm(act="none"), tk.perm(act="none", twice=1), *(tk.perm(act=act) for act in ACTS)],
    fallback="act_none",
    fixtures="hostile.kernels:samples",
)
def dot(
    y: Annotated[tk.Out[tk.i32], "n"],
    w: Annotated[tk.In[tk.i8], "n", "k"],
    x: Annotated[tk.In[tk.i8], "k"],
    n: tk.i32,
    k: tk.i32,
) -> None:
    """y[i] = sum over j of w[i, j] * x[j]."""
    del n, k
    y[:] = w.astype(np.int32) @ x.astype(np.int32)
