# SPDX-License-Identifier: Apache-2.0
"""``dot`` and ``axpy`` on float32: vector width and unrolling are the axes, for AVX2, AVX-512 and NEON.

Rows add in different orders, so ``dot`` promises a relative error and no bits; ``axpy`` too, as some rows fuse.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

import tunekit as tk

SCOPE = tk.Scope("vecs")

ISA = {128: ("aarch64", "neon"), 256: ("x86_64", "avx2,fma"), 512: ("x86_64", "avx512f")}
ROWS = [tk.perm(width=w, unroll=u, requires=isa) for w, (_, isa) in ISA.items() for u in (1, 2, 4, 8)]
FALLBACK = "width256_unroll4;width128_unroll4"


def declines(row: tk.Row, target: tk.Target) -> str | None:
    """Which rows cannot be emitted: vectors of another architecture."""
    arch, isa = ISA[int(row["width"])]
    return None if target.arch == arch else f"its vectors are those of {isa}, which {target.arch} does not have"


def _context(name: str) -> Any:
    return lambda row: {"kernel": name}


def dot_samples() -> list[Any]:
    """Positive numbers: the sum has no cancellation, and a relative error means something."""
    from tunekit.measure.fixtures import Sample

    found = []
    for n, work in ((0, 0), (1, 0), (7, 0), (63, 0), (1003, 0), (4096, 4096), (65536, 65536)):
        x, y = np.random.default_rng(n).uniform(0.5, 1.5, (2, n)).astype(np.float32)
        found.append(Sample(f"n={n}", (x, y, n), work, "GMAC/s", rtol=1e-4))
    a = np.random.default_rng(3).uniform(0.5, 1.5, (5, 77)).astype(np.float32)
    found.append(Sample("dots 5x77", (np.empty(5, np.float32), a, a[2].copy(), 5, 77), function="dots", rtol=1e-4))
    return found


def axpy_samples() -> list[Any]:
    """Of any sign."""
    from tunekit.measure.fixtures import Sample

    found = []
    for n, work in ((0, 0), (1, 0), (7, 0), (63, 0), (1003, 0), (4096, 4096), (65536, 65536)):
        x, y = np.random.default_rng(n).standard_normal((2, n), np.float32)
        found.append(Sample(f"n={n}", (y, x, 0.75, n), work, "GMAC/s", rtol=1e-6, atol=1e-6))
    return found


@tk.companion
def dots(
    out: Annotated[tk.Out[tk.f32], "rows"],
    a: Annotated[tk.In[tk.f32], "rows", "n"],
    x: Annotated[tk.In[tk.f32], "n"],
    rows: tk.i32,
    n: tk.i32,
) -> None:
    """The dot product of each row of ``a`` with ``x``: the same inner loop, so it follows the row of ``dot``."""
    out[:] = a.reshape(rows, n).astype(np.float64) @ x.astype(np.float64)


@tk.tune(
    scope=SCOPE,
    template="vecs/vecs.c.j2",
    reference="vecs/vecs.c.j2",
    rows=ROWS,
    defaults={"width": 0, "unroll": 1},
    declines=declines,
    context=_context("dot"),
    fallback=FALLBACK,
    companions=[dots],
    fixtures="vecs.kernels:dot_samples",
)
def dot(x: Annotated[tk.In[tk.f32], "n"], y: Annotated[tk.In[tk.f32], "n"], n: tk.i32) -> tk.f32:
    """The sum of ``x[i] * y[i]``."""
    del n
    return float(x.astype(np.float64) @ y.astype(np.float64))


@tk.tune(
    scope=SCOPE,
    template="vecs/vecs.c.j2",
    reference="vecs/vecs.c.j2",
    rows=ROWS,
    defaults={"width": 0, "unroll": 1},
    declines=declines,
    context=_context("axpy"),
    fallback=FALLBACK,
    fixtures="vecs.kernels:axpy_samples",
)
def axpy(y: Annotated[tk.InOut[tk.f32], "n"], x: Annotated[tk.In[tk.f32], "n"], a: tk.f32, n: tk.i32) -> None:
    """``y += a * x``."""
    del n
    y += np.float32(a) * x
