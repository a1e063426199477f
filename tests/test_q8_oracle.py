# SPDX-License-Identifier: Apache-2.0
"""The oracle against exact arithmetic."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import q8_cases as exact
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit import q8
from tunekit.q8 import fixtures, oracle

FLOAT32 = st.floats(width=32)
FINITE32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def check_fma(a: float, b: float, c: float) -> None:
    got = oracle.fma32(a, b, c)
    want = np.float32(exact.fma(a, b, c))
    if exact.bits(got)[0] != exact.bits(want)[0]:
        raise AssertionError(f"fma({a!r}, {b!r}, {c!r}) is {got!r}, exactly {want!r}")


@settings(max_examples=1500, deadline=None)
@given(FLOAT32, FLOAT32, FLOAT32)
def test_fma_of_any_floats(a: float, b: float, c: float) -> None:
    check_fma(a, b, c)


@settings(max_examples=500, deadline=None)
@given(FINITE32, FINITE32, st.integers(-3, 3))
def test_fma_beside_cancellation(a: float, b: float, steps: int) -> None:
    with np.errstate(all="ignore"):
        c = -np.float32(a) * np.float32(b)
        for _ in range(abs(steps)):
            c = np.nextafter(c, np.float32(math.copysign(math.inf, steps)))
    if np.isfinite(c):
        check_fma(a, b, float(c))


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 127 * 128 * 32), FINITE32, FINITE32)
def test_fma_of_block_sums(acc: int, p: float, f: float) -> None:
    check_fma(float(acc), p, f)
    check_fma(-float(acc), p, f)


def midpoints(count: int) -> list[tuple[float, float, float]]:
    """Products exactly halfway between two float32, with an addend that float64 cannot see beside them."""
    rng = random.Random(5)
    found = []
    while len(found) < count:
        acc = rng.randrange(1, 520192) | 1
        low, high = -(-(1 << 24) // acc), (1 << 25) // acc
        p = rng.randrange(low, high) | 1 if high > low else 0
        if not (1 << 24) <= acc * p < 1 << 25:
            continue
        scale = 2.0 ** rng.randrange(-60, 60)
        tiny = rng.choice([-1, 1]) * scale * 2.0 ** -rng.randrange(31, 60)
        found.append((rng.choice([-1.0, 1.0]) * acc, p * scale, tiny))
    return found


def test_fma_on_double_rounding_midpoints() -> None:
    cases = midpoints(4000)
    a, b, c = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    got = oracle.fma32(a, b, c)
    want = np.array([exact.fma(*case) for case in cases], np.float32)
    exact.same_bits(got, want)
    # The cases are what they claim to be: float64 alone gets a good part of them wrong.
    naive = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    assert (naive != want).mean() > 0.25


def test_fma_at_the_subnormal_and_the_overflow_edge() -> None:
    tiny, top = exact.f32(1), exact.f32(0x7F7FFFFF)
    values = [0.0, -0.0, tiny, -tiny, exact.f32(0x007FFFFF), 2.0**-126, 0.5, -0.5, 1.0, 1.5, 3.0, top, -top]
    for a in values:
        for b in values:
            for c in values:
                check_fma(a, b, c)
    rng = np.random.default_rng(1)
    for _ in range(2000):
        a = float(np.float32(rng.standard_normal() * 2.0**-70))
        b = float(np.float32(rng.standard_normal() * 2.0**-70))
        check_fma(a, b, exact.f32(int(rng.integers(0, 1 << 24)) | int(rng.integers(0, 2)) << 31))


def test_fma_of_infinities_and_nans() -> None:
    values = [0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, exact.f32(0x7F7FFFFF)]
    for a in values:
        for b in values:
            for c in values:
                check_fma(a, b, c)


def test_fma_broadcasts() -> None:
    got = oracle.fma32(np.ones((3, 1), np.float32), np.arange(4, dtype=np.float32), np.float32(2))
    assert got.shape == (3, 4) and got.dtype == np.float32
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(4) + 2, (3, 4)))
    assert oracle.fma32(2.0, 3.0, 1.0).shape == ()


def test_block_sums_are_python_integers() -> None:
    """With unit scales the first fold is the block's sum; both extremes of it, and every value between."""
    rng = np.random.default_rng(2)
    q = rng.integers(-127, 128, (9, 32), dtype=np.int8)
    w = rng.integers(-128, 128, (11, 32), dtype=np.int8)
    q[0], q[1], w[0], w[1] = 127, -127, -128, 127
    one = np.ones((11, 1), np.float32)
    y = oracle.matmul_codes(q, one[:9], w, one)
    for t in range(9):
        for n in range(11):
            total = sum(int(a) * int(b) for a, b in zip(q[t], w[n], strict=True))
            assert y[t, n] == total and abs(total) < 1 << 24
    assert y[0, 0] == -520192


@pytest.mark.parametrize("kind", fixtures.KINDS)
@pytest.mark.parametrize("nb", [1, 2, 5])
def test_product_against_fractions(kind: str, nb: int) -> None:
    case = fixtures.case(kind, nb, 17)
    rows = slice(0, 24)
    want = exact.matmul(case.q[:6], case.s[:6], case.w[rows], case.ws[rows])
    exact.same_bits(case.y[:6, rows], want)


def test_hard_case_is_hard() -> None:
    """A fold in float64, and one that rounds the product apart, both fail on it; or it would prove nothing."""
    case = fixtures.case("double rounding", 3, 17)
    wide = np.zeros(case.y.shape, np.float32)
    apart = np.zeros(case.y.shape, np.float32)
    for b in range(3):
        part = slice(b * 32, (b + 1) * 32)
        acc = case.q[:, part].astype(np.float64) @ case.w[:, part].astype(np.float64).T
        p = case.s[:, b, None] * case.ws[None, :, b]
        wide = (acc * p + wide).astype(np.float32)
        apart = acc.astype(np.float32) * p + apart
    assert (wide != case.y).mean() > 0.2
    assert (apart != case.y).mean() > 0.2


def test_product_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fixtures.case("full range", 5, 70)
    for outputs, weights in ((1, 1), (7, 1000), (1 << 20, 1 << 30)):
        monkeypatch.setattr(oracle, "_OUTPUTS", outputs)
        monkeypatch.setattr(oracle, "_WEIGHTS", weights)
        exact.same_bits(oracle.matmul_codes(case.q, case.s, case.w, case.ws), case.y)


def test_nan_and_infinity_stay_where_they_belong() -> None:
    case = fixtures.case("full range", 3, 17)
    ws, s = case.ws.copy(), case.s.copy()
    ws[4, 1], s[6, 2] = np.nan, np.inf
    y = oracle.matmul_codes(case.q, s, case.w, ws)
    clean = np.ones(y.shape, bool)
    clean[:, 4] = clean[6] = False
    exact.same_bits(y[clean], case.y[clean])
    assert np.isnan(y[:, 4]).all() and not np.isfinite(y[6]).any()


@pytest.mark.parametrize("shape", [(0, 64, 5), (3, 64, 0), (3, 0, 5), (0, 0, 0)])
def test_empty_products(shape: tuple[int, int, int]) -> None:
    t, k, n = shape
    y = oracle.matmul_codes(
        np.empty((t, k), np.int8),
        np.empty((t, k // 32), np.float32),
        np.empty((n, k), np.int8),
        np.empty((n, k // 32), np.float32),
    )
    assert y.shape == (t, n) and not y.any()


def test_shapes_that_do_not_fit() -> None:
    codes, scales = np.zeros((2, 64), np.int8), np.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"do not fit"):
        oracle.matmul_codes(codes, scales, codes[:, :32], scales[:, :1])
    with pytest.raises(ValueError, match=r"do not fit"):
        oracle.matmul_codes(codes, scales[:, :1], codes, scales)


# --- the quantiser ---------------------------------------------------------------------------------------


def check_blocks(blocks: np.ndarray) -> None:
    codes, scales = oracle.quantize(blocks)
    assert codes.dtype == np.int8 and scales.dtype == np.float32
    for i, block in enumerate(blocks):
        want, d = exact.quantize_block([float(v) for v in block])
        assert codes[i].tolist() == want
        exact.same_bits(scales[i], np.array([d], np.float32))


def test_quantiser_on_its_edges() -> None:
    check_blocks(fixtures.quantiser_blocks())


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOAT32, min_size=32, max_size=32))
def test_quantiser_on_any_floats(values: list[float]) -> None:
    check_blocks(np.array([values], np.float32))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=32, max_size=32), st.integers(-130, 120))
def test_quantiser_on_ordinary_floats(values: list[float], exponent: int) -> None:
    with np.errstate(all="ignore"):
        check_blocks(np.ldexp(np.array([values], np.float32), exponent))


def test_division_and_not_the_reciprocal() -> None:
    """A tie that multiplying by 1/d decides otherwise must be among the cases."""
    blocks = fixtures.quantiser_blocks()
    codes, scales = oracle.quantize(blocks)
    good = np.isfinite(scales[:, 0]) & (scales[:, 0] > 0)
    with np.errstate(all="ignore"):
        other = np.rint(blocks[good] * (np.float32(1) / scales[good]))
    assert (np.clip(other, -127, 127) != codes[good]).any()


def test_quantiser_scale_is_the_rounded_quotient() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, 64), dtype=np.float32)
    codes, scales = oracle.quantize(x)
    for t in range(50):
        for b in range(2):
            top = max(abs(float(v)) for v in x[t, b * 32 : b * 32 + 32])
            assert scales[t, b] == exact.round32(Fraction(top) / 127)
    assert codes.min() >= -127 and np.abs(codes.reshape(50, 2, 32)).max(axis=2).min() == 127


def test_quantiser_cuts_nothing_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(4).standard_normal((9000, 64), dtype=np.float32)  # several chunks
    codes, scales = oracle.quantize(x)
    again = [oracle.quantize(x[t : t + 1]) for t in (0, 4095, 4096, 8999)]
    for t, (q, s) in zip((0, 4095, 4096, 8999), again, strict=True):
        np.testing.assert_array_equal(codes[t : t + 1], q)
        np.testing.assert_array_equal(scales[t : t + 1], s)


def test_the_specification_wants_quantised_operands_and_says_so() -> None:
    m = q8.pack(np.ones((2, 32), np.float32))
    with pytest.raises(TypeError, match=r"a is a ndarray without codes and scales; give q8.quantize\(x\)"):
        oracle.matmul(np.ones((1, 32), np.float32), m)  # type: ignore[arg-type]
