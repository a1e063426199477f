# SPDX-License-Identifier: Apache-2.0
"""The gates: they pass what is right, and each kind of fault fails in some gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit.measure.fixtures import Fixtures, check_regimes
from tunekit.q8 import fixtures, oracle

# The traversal runs in C and cannot call Python bodies; test_q8_rows runs it on built rows.
GATES = [gate for gate in fixtures.FIXTURES.gates() if not gate.name.startswith("traversal")]


def first_failure(row: exact.PythonRow) -> str | None:
    for gate in GATES:
        reason = gate.run(row)
        if reason:
            return f"{gate.name}: {reason}"
    return None


def test_they_implement_the_protocol() -> None:
    assert isinstance(fixtures.FIXTURES, Fixtures)
    regimes = check_regimes(fixtures.FIXTURES.regimes())
    decides = {r.name: r.decides for r in regimes}
    assert decides == {"tile": "*", "gemv": ("gkstep", "gstreams", "gahead"), "few": (), "tile_stream": (), "gemv_stream": ()}
    assert [r.name for r in regimes if r.seat] == ["gemv"]
    assert regimes[0].work == 2048 * 512 * 64
    names = [gate.name for gate in fixtures.FIXTURES.gates()]
    assert len(set(names)) == len(names)


def test_the_reference_bodies_pass() -> None:
    assert first_failure(exact.PythonRow()) is None


Body = Callable[..., Any]


def tile_with(change: Callable[[np.ndarray], None]) -> Body:
    """A tile that spoils its output afterwards; ``change`` gets y[t, i] as floats."""

    def body(original: Body, y: Any, ldy: int, *rest: Any) -> None:
        original(y, ldy, *rest)
        nt, _, ng = rest[-3:]
        change(np.lib.stride_tricks.as_strided(y, (nt, ng), (ldy * 4, 4)))

    return body


def one_ulp(y: np.ndarray) -> None:
    y.view(np.uint32)[-1, -1] ^= 1


def poison(y: np.ndarray) -> None:
    y.view(np.uint32)[-1, 0] = fixtures.CANARY


def overrun(original: Body, y: Any, *args: Any) -> None:
    original(y, *args)
    np.lib.stride_tricks.as_strided(y, (y.size + 1,))[-1] = 0.0


def between(original: Body, y: Any, *rest: Any) -> None:
    original(y, *rest)
    nt, _, ng = rest[-3:]
    if nt > 1:
        y[ng] = 0.0


def wide_tile(original: Body, y: Any, ldy: int, *rest: Any) -> None:
    """The fold in float64, rounded once a block: right nearly always."""
    keep = oracle._add_to_odd
    oracle._add_to_odd = lambda m, f: m + f
    try:
        original(y, ldy, *rest)
    finally:
        oracle._add_to_odd = keep


def accumulating(original: Body, y: Any, *args: Any) -> None:
    before = y.copy()
    original(y, *args)
    y += before


def wrong_token(original: Body, y: Any, ldy: int, w: Any, ws: Any, xa: Any, tokens: int, t0: int, *rest: Any) -> None:
    original(y, ldy, w, ws, xa, tokens, 0, *rest)


def saturating(original: Body, y: Any, ldy: int, w: Any, *rest: Any) -> None:
    """Weights of -128 taken for -127, as a sign trick on the wrong operand would have it."""
    original(y, ldy, np.maximum(w, -127), *rest)


def no_tail(original: Body, y: Any, ldy: int, w: Any, ws: Any, *rest: Any) -> None:
    """The remainder of a main loop of two blocks forgotten: its scales are taken for zero."""
    nb = rest[-2]
    masked = ws.reshape(-1, nb).copy()
    masked[:, nb - nb % 2 :] = 0
    original(y, ldy, w, masked.reshape(-1), *rest)


def reciprocal(original: Body, q: Any, s: Any, x: Any, t0: int, t1: int, nb: int) -> None:
    original(q, s, x, t0, t1, nb)
    part = x.reshape(-1, 32)[t0 * nb : t1 * nb]
    d = s[t0 * nb : t1 * nb, None]
    good = np.isfinite(d[:, 0]) & (d[:, 0] > 0)
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint(part[good] * (np.float32(1) / d[good])), -127, 127).astype(np.int8)
    q.reshape(-1, 32)[t0 * nb : t1 * nb][good] = codes


def half_away(original: Body, q: Any, s: Any, x: Any, t0: int, t1: int, nb: int) -> None:
    original(q, s, x, t0, t1, nb)
    part = x.reshape(-1, 32)[t0 * nb : t1 * nb]
    d = s[t0 * nb : t1 * nb, None]
    good = np.isfinite(d[:, 0]) & (d[:, 0] > 0)
    ratio = part[good] / d[good]
    codes = np.clip(np.trunc(ratio + np.copysign(np.float32(0.5), ratio)), -127, 127).astype(np.int8)
    q.reshape(-1, 32)[t0 * nb : t1 * nb][good] = codes


def no_zero_block(original: Body, q: Any, s: Any, x: Any, t0: int, t1: int, nb: int) -> None:
    original(q, s, x, t0, t1, nb)
    amax = np.abs(x.reshape(-1, 32)[t0 * nb : t1 * nb]).max(axis=1)
    with np.errstate(all="ignore"):
        s[t0 * nb : t1 * nb] = np.where(np.isfinite(amax), amax / np.float32(127), s[t0 * nb : t1 * nb])


def past_end(original: Body, q: Any, s: Any, x: Any, t0: int, t1: int, nb: int) -> None:
    original(q, s, x, t0, t1, nb)
    q.reshape(-1)[t0 * nb * 32 - 1] = 1


def gemv_one_group(original: Body, y: Any, w: Any, ws: Any, xa: Any, tokens: int, t: int, nb: int, ng: int) -> None:
    original(y, w, ws, xa, tokens, t, nb, max(1, ng - 1))


def flushed(original: Body, y: Any, w: Any, ws: Any, *rest: Any) -> None:
    """Subnormal float16 taken for zero."""
    original(y, w, np.where(ws & 0x7C00, ws, 0).astype(np.uint16), *rest)


def prepare_beyond(original: Body, xa: Any, *args: Any) -> None:
    original(xa, *args)
    np.lib.stride_tricks.as_strided(xa, (xa.size + 1,))[-1] = 0


MUTANTS: dict[str, dict[str, Body]] = {
    "last bit": {"q8q8": tile_with(one_ulp)},
    "an output left out": {"q8q8": tile_with(poison)},
    "a write behind the output": {"q8q8": overrun},
    "a write between two tokens": {"q8q8": between},
    "double rounding": {"q8q8": wide_tile},
    "adding to the output": {"q8q8": accumulating},
    "another token": {"q8q8": wrong_token},
    "-128 lost": {"q8q8": saturating},
    "remainder lost": {"q8q8": no_tail},
    "quantiser multiplies by the reciprocal": {"q8q8_quantize": reciprocal},
    "quantiser rounds half away": {"q8q8_quantize": half_away},
    "quantiser keeps subnormal scales": {"q8q8_quantize": no_zero_block},
    "quantiser writes another token": {"q8q8_quantize": past_end},
    "gemv leaves a group out": {"q8q8_gemv": gemv_one_group},
    "float16 tile: another token": {"q8q8_f16": wrong_token},
    "float16 tile: -128 lost": {"q8q8_f16": saturating},
    "float16 tile: double rounding": {"q8q8_f16": wide_tile},
    "float16 tile: remainder lost": {"q8q8_f16": no_tail},
    "float16 gemv leaves a group out": {"q8q8_gemv_f16": gemv_one_group},
    "float16 gemv: subnormal scales lost": {"q8q8_gemv_f16": flushed},
    "prepare writes too far": {"q8q8_prepare": prepare_beyond},
    "acts_bytes is no multiple of 64": {"q8q8_acts_bytes": lambda original, *args: original(*args) + 8},
    "acts_bytes is too small": {"q8q8_acts_bytes": lambda original, *args: 0},
    "layout desynchronised": {"q8q8_layout": lambda original: 8},
    "bias desynchronised": {"q8q8_wbias": lambda original: 128},
    "k-group desynchronised": {"q8q8_kgroup": lambda original: 2},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    reason = first_failure(exact.PythonRow(**MUTANTS[name]))
    assert reason, name


def test_a_reason_says_where_and_what() -> None:
    reason = str(first_failure(exact.PythonRow(q8q8=tile_with(one_ulp))))
    assert "tile, full range, 1 blocks: tile of 1 tokens from 0, 96 groups: [0, 95] is" in reason
    assert "expected" in reason and "(1 of 96 differ)" in reason


def test_cases_are_the_same_every_time() -> None:
    for kind in fixtures.KINDS:
        first = fixtures.case(kind, 3, 17)
        fixtures.case.cache_clear()
        again = fixtures.case(kind, 3, 17)
        np.testing.assert_array_equal(first.w, again.w)
        exact.same_bits(first.y, again.y)


def test_full_range_holds_minus_128() -> None:
    assert fixtures.case("full range", 5, 17).w.min() == -128
    assert fixtures.case("extremes", 1, 17).w.min() == -128
    assert np.abs(fixtures.case("extremes", 1, 17).q).min() == 127


def test_workload_is_aligned_and_staggered() -> None:
    parts = fixtures._arena(np.zeros(5000, np.int8), np.zeros(100, np.float32), np.zeros(7, np.float32))
    addresses = [part.ctypes.data for part in parts]
    assert all(a % 64 == 0 for a in addresses)
    assert len({a % 4096 for a in addresses}) == 3
