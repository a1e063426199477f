# SPDX-License-Identifier: Apache-2.0
"""What the family's operations are, in NumPy, to the bit: float32 throughout, each operation rounded once.

``fma`` is exact: the product of two float32 is exact in float64; their sum with a third is rounded to odd there, so
that the last rounding, to float32, is the only one that counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Floats = NDArray[np.float32]
LANES, SLICE = 16, 256


def fma(a: Any, b: Any, c: Any) -> Floats:
    """``a * b + c`` of float32, rounded once."""
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        c64 = np.asarray(c, np.float64)
        total = product + c64
        back = total - product
        error = (product - (total - back)) + (c64 - back)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
        # Towards the error: away from zero where it has the sum's sign.
        step = np.where((error > 0) == (total > 0), 1, -1)
        return np.where(inexact, (bits + step).view(np.float64), total).astype(F32)


def exponential(x: Floats) -> Floats:
    """e to the x, as vec.h has it."""
    with np.errstate(all="ignore"):
        c = np.where(np.isnan(x), x, np.clip(x, F32(-87), F32(88))).astype(F32)
        t = fma(c, F32(1.44269504), F32(12582912))
        n = (t - F32(12582912)).astype(F32)
        r = fma(n, F32(2.12194440e-4), fma(n, F32(-0.693359375), c))
        p = np.full_like(r, F32(1.9875691500e-4))
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma(p, r, F32(factor))
        p = (fma(p, (r * r).astype(F32), r) + F32(1)).astype(F32)
        power = ((np.nan_to_num(n).astype(np.int64) + 127) << 23).astype(np.uint32).view(F32)
        return np.where(x < F32(-87), F32(0), p * power).astype(F32)


def _folded(lanes: Floats) -> np.float32:
    """The sum of 16 lanes: halves onto each other."""
    while lanes.size > 1:
        lanes = (lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]).astype(F32)
    return F32(lanes[0])


def _padded(x: Floats) -> Floats:
    return np.concatenate([x, np.zeros(-x.size % LANES, F32)]).reshape(-1, LANES)


def attend(
    acc: Floats, ml: Floats, q: Floats, k: Floats, v: Floats,
    ldq: int, group: int, rows: int, first: int, j0: int, j1: int, hd: int, scale: float,
) -> None:  # fmt: skip
    """See :func:`q8llama.kernels.attend`."""
    keys = k.reshape(-1, hd, LANES).transpose(0, 2, 1).reshape(-1, hd)
    values, to, sums = v.reshape(-1, hd), acc.reshape(rows, hd), ml.reshape(rows, 2)
    for i in range(rows):
        end = min(j1, first + i // group + 1)
        to[i], sums[i] = 0, (-np.inf, 0)
        if end <= j0:
            continue
        at = i // group * ldq + i % group * hd
        query, s = q.reshape(-1)[at : at + hd], np.zeros(end - j0, F32)
        for d in range(hd):
            s = fma(query[d], keys[j0:end, d], s)
        s = (s * F32(scale)).astype(F32)
        most = s.max()
        p = exponential((s - most).astype(F32))
        lanes = np.zeros(LANES, F32)
        for part in _padded(p):
            lanes = (lanes + part).astype(F32)
        total = np.zeros(hd, F32)
        for j in range(end - j0):
            total = fma(p[j], values[j0 + j], total)
        to[i], sums[i] = total, (most, _folded(lanes))


def merge(acc: Floats, ml: Floats, part: Floats, pml: Floats, rows: int, hd: int) -> None:
    """See :func:`q8llama.kernels.merge`."""
    a, s, b, t = acc.reshape(rows, hd), ml.reshape(rows, 2), part.reshape(rows, hd), pml.reshape(rows, 2)
    for i in range(rows):
        if t[i, 1] == 0:
            continue
        if s[i, 1] == 0:
            a[i], s[i] = b[i], t[i]
            continue
        most = max(s[i, 0], t[i, 0])
        x, y = exponential(np.array([s[i, 0] - most, t[i, 0] - most], F32))
        s[i] = most, fma(s[i, 1], x, F32(t[i, 1] * y))
        a[i] = fma(a[i], x, (b[i] * y).astype(F32))


def finish(out: Floats, acc: Floats, ml: Floats, ldo: int, group: int, rows: int, hd: int) -> None:
    """See :func:`q8llama.kernels.finish`."""
    flat = out.reshape(-1)
    for i in range(rows):
        at = i // group * ldo + i % group * hd
        flat[at : at + hd] = acc.reshape(rows, hd)[i] * (F32(1) / ml.reshape(rows, 2)[i, 1])


def rmsnorm(x: Floats, w: Floats, eps: float) -> Floats:
    """See :func:`q8llama.kernels.rmsnorm`."""
    lanes = np.zeros(LANES, F32)
    for part in _padded(x):
        lanes = fma(part, part, lanes)
    by = F32(1) / np.sqrt(F32(_folded(lanes) / F32(x.size) + F32(eps)))
    divided: Floats = (x * by).astype(F32)
    return (divided * w).astype(F32)


def rope(x: Floats, cosines: Floats, sines: Floats, heads: int, hd: int) -> None:
    """See :func:`q8llama.kernels.rope`."""
    both = x.reshape(heads, 2, hd // 2)
    a, b = both[:, 0].copy(), both[:, 1].copy()
    both[:, 0], both[:, 1] = a * cosines - b * sines, b * cosines + a * sines


def swiglu(g: Floats, u: Floats) -> Floats:
    """See :func:`q8llama.kernels.swiglu`."""
    with np.errstate(all="ignore"):
        return (g / (F32(1) + exponential((F32(0) - g).astype(F32))) * u).astype(F32)


# --- what rows are checked and timed on ------------------------------------------------------------------


def _attend(name: str, tokens: int, group: int, first: int, j0: int, j1: int, hd: int, work: bool = False) -> Any:
    from tunekit.measure.fixtures import Sample

    rng = np.random.default_rng([tokens, group, first, j0, j1, hd])
    rows, ldq = tokens * group, group * hd + 16
    q = rng.standard_normal(((tokens - 1) * ldq + group * hd), F32) * F32(2)
    k = rng.standard_normal((j1 + 15) // 16 * 16 * hd, F32)
    v = rng.standard_normal(j1 * hd, F32)
    arguments = (np.empty(rows * hd, F32), np.empty(rows * 2, F32), q, k, v, ldq, group, rows, first, j0, j1, hd)
    done = 2.0 * rows * min(j1 - j0, first + 1 - j0) * hd if work else 0.0
    return Sample(name, (*arguments, hd**-0.5), done, "GMAC/s")


def attend_samples() -> list[Any]:
    """For :data:`q8llama.kernels.attend`: odd numbers of everything, and what prefill and decode do.

    The first that is timed, a block of a prompt, decides.
    """
    from tunekit.measure.fixtures import Sample

    found = [
        _attend("the first token", 1, 3, 0, 0, 1, 16),
        _attend("a triangle", 17, 1, 0, 0, 17, 32),
        _attend("an odd group", 5, 7, 11, 0, 16, 48),
        _attend("a later slice, of which some see nothing", 9, 2, 250, 256, 259, 80),
        _attend("heads of 128", 2, 4, 300, 256, 302, 128),
        _attend("prefill", 8, 3, 255, 0, 256, 64, work=True),
        _attend("decode", 1, 3, 255, 0, 256, 64, work=True),
    ]
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 5 * 48), F32)
    ml = np.array([3, 2, -np.inf, 0, 1, 5, 90, 2, -4, 9], F32)
    other = np.array([3.5, 1, 2, 3, -np.inf, 0, -90, 4, -4, 1], F32)
    found.append(Sample("merge", (a, ml, b, other, 5, 48), function="merge"))
    good = np.array([3, 2, 1, 0.3, 1, 5, 90, 2, -4, 9], F32)
    found.append(Sample("finish", (rng.standard_normal(2 * 100 + 96, F32), a, good, 100, 2, 5, 48), function="finish"))
    return found


def gates_samples() -> list[Any]:
    """For :data:`q8llama.kernels.swiglu` and its companions: tails, extremes, and a token of a small model."""
    from tunekit.measure.fixtures import Sample

    found = []
    for n in (1, 7, 16, 31, 80, 576, 1536):
        g, u = np.random.default_rng(n).standard_normal((2, n), F32) * F32(4)
        if n == 80:
            g[:12] = [0, -0.0, 87, 88, 89, -87, -88, 1e30, -1e30, np.inf, -np.inf, np.nan]
        work = n if n == 1536 else 0
        found.append(Sample(f"n={n}", (np.empty(n, F32), g, u, n), work, "G values/s"))
        found.append(Sample(f"norm {n}", (np.empty(n, F32), g[::-1].copy(), u, n, 1e-5), function="rmsnorm"))
        found.append(Sample(f"sum {n}", (g, u, n), function="accumulate"))
    for heads, hd in ((1, 2), (3, 64), (2, 80)):
        x = np.random.default_rng(hd).standard_normal(heads * hd, F32)
        turn = np.random.default_rng(hd + 1).uniform(0, 6, hd // 2)
        cosines, sines = np.cos(turn).astype(F32), np.sin(turn).astype(F32)
        found.append(Sample(f"rope {heads}x{hd}", (x, cosines, sines, heads, hd), function="rope"))
    return found
