# SPDX-License-Identifier: Apache-2.0
"""The executable specification of Q8xQ8, in NumPy alone.

Every row of the grid, on every machine, gives the bits that these functions give (where the result is NaN, a NaN;
its sign and payload are free). They are pure functions of canonical codes and scales, know nothing of layouts and
rows, and are written to be read, then to be fast enough to check whole models.

The product, for one output: over the blocks of 32 in ascending order, from f = +0.0,

    acc = the exact integer sum of w*x over the block
    f   = fma(float32(acc), float32(ws * xs), f)

one product rounded to float32 and one fused multiply-add per block.

**The fused multiply-add.** NumPy has none. In float64 the product of two float32 is exact, and ``s = m + f`` is the
sum rounded to 53 bits; rounding that to 24 bits rounds twice, which is wrong where the first rounding lands on a
midpoint of the second. So the first rounding is made *to odd*: where the sum is inexact and the last bit of ``s`` is
even, ``s`` moves one step towards the truth. An odd last bit says "not exactly this", and 53 >= 24 + 2 bits suffice
for the second rounding then to be the right one, subnormal results included. The error ``e`` of the sum comes from
TwoSum, which is exact for any finite float64 operands of these magnitudes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK = 32
_SMALLEST = np.float32(2.0**-126)
# Outputs at a time. A dozen float64 temporaries of this many stay within a second-level cache, and a product of
# them by one block stays below the size from which BLAS wakes its threads, whose spinning costs ten times the work
# on a busy machine.
_OUTPUTS = 1 << 13
_WEIGHTS = 1 << 21  # weights at a time, widened to float32: 8 MiB


class Quantized(Protocol):
    """Canonical codes (rows, K) int8 and scales (rows, K/32) float32: Activations, Matrix."""

    @property
    def codes(self) -> NDArray[np.int8]: ...

    @property
    def scales(self) -> NDArray[np.float32]: ...


def quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise activations: blocks of 32 along the last axis.

    Per block ``d = float32(amax / 127)`` and ``q = rint(float32(x / d))``, half to even, clamped to [-127, 127].
    ``d < 2**-126`` makes a zero block (scale 0, codes 0); a block with a NaN or an infinity has scale NaN and codes
    0. It divides: multiplying by a reciprocal differs in ties.

    Args:
        x: (T, K) float32.

    Returns:
        codes (T, K) int8 and scales (T, K/32) float32.
    """
    t, k = x.shape
    codes = np.empty((t, k), np.int8)
    scales = np.empty((t, k // BLOCK), np.float32)
    step = max(1, (1 << 18) // max(k, 1))
    for t0 in range(0, t, step):
        part = x[t0 : t0 + step]
        blocks = part.reshape(part.shape[0], k // BLOCK, BLOCK)
        with np.errstate(all="ignore"):
            amax = np.abs(blocks).max(axis=-1, initial=np.float32(0))
            d = amax / np.float32(127)
            bad = ~np.isfinite(amax)
            empty = d < _SMALLEST
            divisor = np.where(bad | empty, np.float32(1), d)
            q = np.rint(blocks / divisor[..., None])
            q[bad | empty] = 0
            np.clip(q, -127, 127, out=q)
        codes[t0 : t0 + step] = q.astype(np.int8).reshape(part.shape)
        scales[t0 : t0 + step] = np.where(bad, np.float32(np.nan), np.where(empty, np.float32(0), d))
    return codes, scales


def _add_to_odd(m: NDArray[np.float64], f: NDArray[np.float64]) -> NDArray[np.float64]:
    """``m + f`` rounded to odd; a sum that is not finite is what IEEE addition gives."""
    s = m + f
    b = s - m
    e = (m - (s - b)) + (f - b)
    bits = s.view(np.int64)
    # A comparison with NaN is true under !=, so the finite test also keeps e's NaN (from infinities) out.
    move = (e != 0) & ((bits & 1) == 0) & np.isfinite(s)
    if move.any():
        # One step towards e: away from zero where e has the sign of s, towards zero otherwise. (s is not 0 here:
        # a float64 sum that cancels to 0 is exact.)
        away = (e > 0) == (s > 0)
        bits += np.where(move, np.where(away, 1, -1), 0)
    return s


def fma32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float32]:
    """``a * b + c`` of float32 with a single rounding, element by element; broadcasts.

    It agrees with C's ``fmaf`` bit for bit, but for the sign and payload of a NaN.
    """
    with np.errstate(all="ignore"):
        wide = np.asarray(a, np.float32).astype(np.float64)
        m = wide * np.asarray(b, np.float32).astype(np.float64)
        f = np.asarray(c, np.float32).astype(np.float64)
        m, f = np.broadcast_arrays(np.atleast_1d(m), f)
        shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))
        return _add_to_odd(m, f).astype(np.float32).reshape(shape)


def matmul_codes(
    q: NDArray[np.int8], s: NDArray[np.float32], w: NDArray[np.int8], ws: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The product from codes and scales.

    Args:
        q, s: activations: codes (T, K) int8 in [-127, 127], scales (T, K/32) float32.
        w, ws: weights: codes (N, K) int8, scales (N, K/32) float32.

    Returns:
        (T, N) float32.
    """
    t, k = q.shape
    n, nb = w.shape[0], k // BLOCK
    if k != w.shape[1] or s.shape != (t, nb) or ws.shape != (n, nb) or k % BLOCK:
        raise ValueError(f"shapes do not fit: q {q.shape}, s {s.shape}, w {w.shape}, ws {ws.shape}")
    y = np.zeros((t, n), np.float32)
    if not (t and n and nb):
        return y
    tstep = min(t, 64)
    nstep = max(1, min(_OUTPUTS // tstep, _WEIGHTS // k))
    with np.errstate(all="ignore"):
        for n0 in range(0, n, nstep):
            # Block-major float32: a block's sum is at most 32*128*127 < 2**24, so float32 arithmetic on it is exact
            # in any order, and BLAS may do it.
            wf = _blocks(w[n0 : n0 + nstep])
            for t0 in range(0, t, tstep):
                xf = _blocks(q[t0 : t0 + tstep])
                f = np.zeros((xf.shape[1], wf.shape[1]), np.float32)
                for bi in range(nb):
                    acc = np.matmul(xf[bi], wf[bi].T).astype(np.float64)
                    p = s[t0 : t0 + tstep, bi, None] * ws[None, n0 : n0 + nstep, bi]
                    m = np.multiply(acc, p, out=acc)
                    f = _add_to_odd(m, f.astype(np.float64)).astype(np.float32)
                y[t0 : t0 + tstep, n0 : n0 + nstep] = f
    return y


# Four-bit floats of one sign bit, two of exponent and one of mantissa, doubled: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
MXFP4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""The int8 code of each MXFP4 nibble: twice its value."""


def e8m0_half(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Half of what E8M0 exponent bytes mean: ``2**(e - 128)``, to go with codes that are doubled.

    Bytes 0 and 1 give the subnormal float32 2**-128 and 2**-127. Byte 255, which the OCP format reserves for NaN,
    gives 2**127: that is what ggml (``ggml_e8m0_to_fp32_half``) and the ``gguf`` package compute, and weights
    should mean here what they mean to the programs that wrote and checked the file.
    """
    e = exponents.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (e - np.minimum(e, 1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def mxfp4(
    nibbles: NDArray[np.uint8], exponents: NDArray[np.uint8]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes and scales of MXFP4 weights, for :func:`matmul_codes`.

    Args:
        nibbles: (N, K/2) uint8: 16 bytes a block, byte j with element j in its low nibble and j + 16 in its high one.
        exponents: (N, K/32) uint8.

    Returns:
        codes (N, K) int8 (twice the values: -12 to 12) and scales (N, K/32) float32 (half of 2**(e - 127)).
    """
    n, half = nibbles.shape
    pairs = nibbles.reshape(n, half * 2 // BLOCK, 1, BLOCK // 2) >> np.array([[0], [4]], np.uint8)
    return MXFP4_CODES[pairs & 15].reshape(n, half * 2), e8m0_half(exponents)


def _blocks(codes: NDArray[np.int8]) -> NDArray[np.float32]:
    rows, k = codes.shape
    return np.ascontiguousarray(codes.reshape(rows, k // BLOCK, BLOCK).transpose(1, 0, 2), dtype=np.float32)


def matmul(a: Quantized, m: Quantized) -> NDArray[np.float32]:
    """The product of quantised activations (T, K) and a matrix (N, K): (T, N) float32.

    Raises:
        TypeError: the activations are an array; :func:`tunekit.q8.quantize` makes codes and scales of it.
    """
    for name, value, mend in (("a", a, "q8.quantize(x)"), ("m", m, "q8.pack(w)")):
        if not (hasattr(value, "codes") and hasattr(value, "scales")):
            raise TypeError(f"{name} is a {type(value).__name__} without codes and scales; give {mend}")
    return matmul_codes(a.codes, a.scales, m.codes, m.scales)
