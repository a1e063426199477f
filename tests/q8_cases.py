# SPDX-License-Identifier: Apache-2.0
"""Definitions in exact arithmetic (Python integers and fractions) that the oracle itself is checked against."""

from __future__ import annotations

import functools
import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_LIMIT = Fraction((1 << 24) - 1) * Fraction(2) ** 104  # the largest finite float32


def round32(value: Fraction, sign_of_zero: float = 1.0) -> float:
    """A fraction rounded to the nearest float32, ties to even, as IEEE 754 does it."""
    if value == 0:
        return math.copysign(0.0, sign_of_zero)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    units, rest = divmod(size, quantum)
    count = int(units)
    if rest * 2 > quantum or (rest * 2 == quantum and count % 2):
        count += 1
    rounded = count * quantum
    result = math.inf if rounded > _LIMIT else float(rounded)
    return math.copysign(result, value)


def fma(a: float, b: float, c: float) -> float:
    """``a * b + c`` of float32 values, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        if math.isnan(a) or math.isnan(b) or math.isnan(c):
            return math.nan
        if (math.isinf(a) and b == 0) or (math.isinf(b) and a == 0):
            return math.nan
        if math.isinf(a) or math.isinf(b):
            product = math.copysign(math.inf, math.copysign(1, a) * math.copysign(1, b))
            return math.nan if math.isinf(c) and c != product else product
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    sign = math.copysign(1, a) * math.copysign(1, b)
    # A sum of zeros of different signs, and an exact cancellation, are +0.
    zero = sign if (a == 0 or b == 0) and c == 0 and math.copysign(1, c) == sign else 1.0
    return round32(exact, zero)


def times(a: float, b: float) -> float:
    """``a * b`` rounded to float32."""
    if math.isfinite(a) and math.isfinite(b):
        return round32(Fraction(a) * Fraction(b), math.copysign(1, a) * math.copysign(1, b))
    return a * b


def matmul(q: NDArray[Any], s: NDArray[Any], w: NDArray[Any], ws: NDArray[Any]) -> NDArray[np.float32]:
    """The product by its definition, in Python integers and fractions."""
    t, k = q.shape
    y = np.empty((t, w.shape[0]), np.float32)
    for i in range(t):
        for n in range(w.shape[0]):
            f = 0.0
            for b in range(k // BLOCK):
                part = slice(b * BLOCK, (b + 1) * BLOCK)
                acc = sum(int(x) * int(v) for x, v in zip(q[i, part], w[n, part], strict=True))
                f = fma(float(acc), times(float(ws[n, b]), float(s[i, b])), f)
            y[i, n] = f
    return y


def quantize_block(x: list[float]) -> tuple[list[int], float]:
    """The quantiser by its definition, for one block of float32 values."""
    if not all(math.isfinite(v) for v in x):
        return [0] * len(x), math.nan
    d = round32(Fraction(max(abs(v) for v in x)) / 127)
    if d < 2.0**-126:
        return [0] * len(x), 0.0
    codes = []
    for v in x:
        ratio = Fraction(round32(Fraction(v) / Fraction(d)))
        codes.append(max(-127, min(127, round(ratio))))  # round() of a fraction: half to even
    return codes, d


def bits(array: Any) -> NDArray[np.uint32]:
    """The bits of float32 values, every NaN as one and the same."""
    flat = np.atleast_1d(np.array(array, np.float32))
    found = flat.view(np.uint32).copy()
    found[np.isnan(flat)] = 0x7FC00000
    return found


def same_bits(a: Any, b: Any) -> None:
    """Fail unless two float32 arrays agree in shape and bits, NaN standing for NaN."""
    left, right = np.asarray(a), np.asarray(b)
    if left.shape != right.shape or left.dtype != np.float32 or right.dtype != np.float32:
        raise AssertionError(f"{left.dtype} {left.shape} against {right.dtype} {right.shape}")
    different = np.flatnonzero(bits(left).reshape(-1) != bits(right).reshape(-1))
    if different.size:
        i = int(different[0])
        raise AssertionError(
            f"{different.size} of {left.size} differ; element {i}: {left.reshape(-1)[i]!r} against "
            f"{right.reshape(-1)[i]!r}"
        )


def f32(pattern: int) -> float:
    """The float32 with these bits."""
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])


@functools.cache
def built_rows() -> dict[str, Any]:
    """Every row of ``q8q8`` that is built here and that this CPU can run, by suffix; none where nothing is."""
    from tunekit import dispatch
    from tunekit.q8 import kernels

    return dict(dispatch.grid_rows(kernels.q8q8.kernel))


class PythonRow:
    """The Python reference bodies in the dress of a built row, for checking the gates themselves."""

    suffix = "reference"
    row = None
    alternative = ()

    def __init__(self, **replaced: Any) -> None:
        self.replaced = replaced

    def call(self, name: str, *args: Any) -> Any:
        from tunekit.q8 import kernels

        function = getattr(kernels, name)
        body = getattr(function, "__wrapped__", function)
        if name in self.replaced:
            return self.replaced[name](body, *args)
        return body(*args)


def thinned_gates() -> list[Any]:
    """The family's gates, the costly ones thinned, for emulators: a trap takes 8 us, and a gate of 7 blocks makes 20 000.

    Products of full range and MXFP4 of every exponent meet every number of blocks; data that is hard on the fold,
    an even and an odd number of them.
    """
    from tunekit.q8 import fixtures

    every = ("full range", "every exponent")
    found = []
    for gate in fixtures.FIXTURES.gates():
        hard = any(f", {kind}, " in gate.name for kind in fixtures.KINDS if kind not in every)
        if hard and not gate.name.endswith((" 2 blocks", " 7 blocks")):
            continue
        if "traversal of MXFP4" in gate.name and not gate.name.endswith(" 4 blocks"):
            continue
        found.append(gate)
    return found
