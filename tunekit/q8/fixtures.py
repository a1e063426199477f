# SPDX-License-Identifier: Apache-2.0
"""What a row of the family must pass before it may be timed, and what it is timed on.

Every gate is exact equality with :mod:`tunekit.q8.oracle`, into outputs that are filled with a recognisable NaN
beforehand, between canaries that must survive. Operands have the alignment of their elements and no more (the
prepared activations alone are 64-byte aligned by contract). A reason names the case, the first index that differs,
what was there and what should have been.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.measure.fixtures import EVERYTHING, Chain, Count, GateCase, Regime, Unit
from tunekit.q8 import chains, emission, grid, legality, oracle, product
from tunekit.q8.layout import Layout, aligned, layout_of, pack_nibbles, pack_plane

if TYPE_CHECKING:
    from tunekit.dispatch import BoundRow

BLOCK = oracle.BLOCK
ROWS = 96  # weight rows of a gate: whole groups for every mr up to 32, and three of them
NB = (1, 2, 3, 5, 7)  # odd and even block counts; every remainder of kstep and gkstep 4
KINDS = ("full range", "extremes", "double rounding", "special scales")
ANY = "activations of -128"  # one more kind, for the rows that need no activations in [-127, 127]
MX4_KINDS = ("every exponent", "extremes", "double rounding", "special scales")

CANARY = 0x7FC0BEEF  # a quiet NaN whose payload no arithmetic on the operands makes
_EDGE = 24  # canaries on either side of an output


# --- operands --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Operands of a product, and what it must give."""

    q: NDArray[np.int8]
    s: NDArray[np.float32]
    w: NDArray[np.int8]
    ws: NDArray[Any]
    y: NDArray[np.float32]


def scales(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Normal-valued scales of either sign, over some binades, with full mantissas."""
    magnitude = np.exp2(rng.uniform(-12, 2, shape))
    return np.asarray(magnitude * rng.choice([-1.0, 1.0], shape), np.float32)


def double_rounding(
    rng: np.random.Generator, t: int, n: int, nb: int
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int8], NDArray[np.float32]]:
    """Products that land on the midpoint of two float32, beside a sum too small for float64 to see.

    The last block's term is an odd number of 25 bits times a power of two; an earlier block leaves a sum 2**-70 or
    so below it, whose sign alone says which way to round. An fma that is a float64 addition, or a product and an
    addition that round apart, fails about every second output.
    """
    q = np.zeros((t, nb * BLOCK), np.int8)
    w = np.zeros((n, nb * BLOCK), np.int8)
    s = np.exp2(rng.integers(-3, 4, (t, nb))).astype(np.float32)
    ws = scales(rng, (n, nb))
    odd = rng.choice([3, 5, 7, 9, 11, 25, 49, 77, 99, 127], n)
    low, high = -(-(1 << 24) // odd), (1 << 25) // odd
    mantissa = np.minimum(rng.integers(low, high) | 1, (1 << 24) - 1)
    place = int(rng.integers(0, BLOCK))
    last = (nb - 1) * BLOCK + place
    w[:, last] = odd
    q[:, last] = rng.choice([-1, 1], t)
    ws[:, nb - 1] = np.ldexp(mantissa.astype(np.float64), -24).astype(np.float32)
    if nb > 1:
        first = int(rng.integers(0, nb - 1))
        w[:, first * BLOCK + place] = rng.choice([-1, 1], n)
        q[:, first * BLOCK + place] = rng.choice([-1, 1], t)
        ws[:, first] = np.ldexp(1.0, -rng.integers(60, 100, n)).astype(np.float32)
    return q, s, w, ws


@functools.lru_cache(maxsize=128)
def case(kind: str, nb: int, t: int, rows: int = ROWS, halves: bool = False) -> Case:
    """Operands of one of :data:`KINDS`, or :data:`ANY`: ``t`` tokens, so many rows of weights, ``nb`` blocks.

    With ``halves`` the scales of the weights are float16.
    """
    rng = np.random.default_rng([nb, t, (*KINDS, ANY).index(kind)])
    k = nb * BLOCK
    q = rng.integers(-127, 128, (t, k), dtype=np.int8)
    w = rng.integers(-128, 128, (rows, k), dtype=np.int8)
    s, ws = scales(rng, (t, nb)), scales(rng, (rows, nb))
    if kind == "extremes":
        # Whole rows of one extreme: the sums are the largest there are, and a pair of them is what saturates.
        w[:] = rng.choice(np.array([-128, 127], np.int8), (rows, 1))
        q[:] = rng.choice(np.array([-127, 127], np.int8), (t, 1))
        w[1::4] = -128
        q[1::3] = 127
        w[2::8, ::2] = 127
    elif kind == ANY:
        q[:, ::2] = -128
        q[1::3] = -128
        w[1::4] = -128
    elif kind == "double rounding":
        if halves:  # of the two sides, that one has full mantissas whose scales are float32
            w, ws, q, s = double_rounding(rng, rows, t, nb)
        else:
            q, s, w, ws = double_rounding(rng, t, rows, nb)
    elif kind == "special scales":
        odd = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e38, 1.2e-38], np.float32)
        ws[::3] = np.where(rng.random((len(ws[::3]), nb)) < 0.5, rng.choice(odd, (len(ws[::3]), nb)), ws[::3])
        s[1::4] = np.where(rng.random((len(s[1::4]), nb)) < 0.5, rng.choice(odd, (len(s[1::4]), nb)), s[1::4])
    if not halves:
        return Case(q, s, w, ws, oracle.matmul_codes(q, s, w, ws))
    with np.errstate(all="ignore"):  # converting a signalling NaN, some CPUs say that it was invalid
        short = ws.astype(np.float16)
        if kind == "special scales":  # every pattern is one, subnormal and infinite ones too
            short[1::3] = rng.integers(0, 1 << 16, short[1::3].shape).astype(np.uint16).view(np.float16)
        return Case(q, s, w, short, oracle.matmul_codes(q, s, w, short.astype(np.float32)))


@dataclass(frozen=True)
class Mx4Case:
    """Activations, MXFP4 weights of :data:`ROWS` rows, and what their product must be."""

    q: NDArray[np.int8]
    s: NDArray[np.float32]
    nibbles: NDArray[np.uint8]
    exponents: NDArray[np.uint8]
    y: NDArray[np.float32]


@functools.lru_cache(maxsize=64)
def mx4_case(kind: str, nb: int, t: int) -> Mx4Case:
    """Operands of one of :data:`MX4_KINDS`: ``t`` tokens, :data:`ROWS` rows of weights, ``nb`` blocks."""
    rng = np.random.default_rng([nb, t, MX4_KINDS.index(kind), 4])
    k = nb * BLOCK
    q = rng.integers(-127, 128, (t, k), dtype=np.int8)
    s = scales(rng, (t, nb))
    nibbles = rng.integers(0, 256, (ROWS, k // 2), dtype=np.uint8)
    # From 0 to 255 over the rows, none left out from three blocks on, and near to each other within a row, so that
    # every block counts in its sum.
    steps = np.arange(ROWS)[:, None] * 256 // ROWS + np.append([0, 1, 2], rng.integers(-3, 4, nb))[:nb]
    exponents = np.clip(steps, 0, 255).astype(np.uint8)
    if kind == "extremes":
        # Whole rows of 6 or of -6: the largest sums, which are what a narrow accumulator would lose.
        exponents[:] = 120
        nibbles[:] = rng.choice(np.array([0x77, 0xFF, 0x7F, 0xF7], np.uint8), (ROWS, 1))
        q[:] = rng.choice(np.array([-127, 127], np.int8), (t, 1))
        nibbles[1::4], nibbles[2::4] = 0x77, 0xFF
        q[1::3] = 127
    elif kind == "double rounding":
        # As double_rounding, with the full mantissa on the side of the activations: a power of two has none.
        odd = rng.choice([3, 5, 7, 9, 11, 25, 49, 77, 99, 127], t)
        low, high = -(-(1 << 24) // odd), (1 << 25) // odd
        mantissa = np.minimum(rng.integers(low, high) | 1, (1 << 24) - 1)
        place = int(rng.integers(0, BLOCK // 2))
        q[:], nibbles[:], exponents[:] = 0, 0, 128
        q[:, k - BLOCK + place] = odd
        nibbles[:, k // 2 - BLOCK // 2 + place] = rng.choice([1, 9], ROWS)  # codes 1 and -1
        s[:, nb - 1] = np.ldexp(mantissa.astype(np.float64), -24).astype(np.float32)
        if nb > 1:
            first = int(rng.integers(0, nb - 1))
            q[:, first * BLOCK + place] = rng.choice([-1, 1], t)
            nibbles[:, first * BLOCK // 2 + place] = rng.choice([1, 9], ROWS)
            exponents[:, first] = rng.integers(30, 70, ROWS)
            s[:, first] = 1
    elif kind == "special scales":
        odd_ones = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e38, 1.2e-38], np.float32)
        s[1::4] = np.where(rng.random((len(s[1::4]), nb)) < 0.5, rng.choice(odd_ones, (len(s[1::4]), nb)), s[1::4])
    return Mx4Case(q, s, nibbles, exponents, oracle.matmul_codes(q, s, *oracle.mxfp4(nibbles, exponents)))


@functools.cache
def quantiser_blocks() -> NDArray[np.float32]:
    """Blocks (count, 32) that a quantiser may get wrong."""
    rng = np.random.default_rng(7)
    base = rng.standard_normal(BLOCK).astype(np.float32)
    top = np.float32(np.finfo(np.float32).max)
    blocks: list[Any] = [np.zeros(BLOCK), np.full(BLOCK, -0.0), base]
    ties = np.arange(BLOCK, dtype=np.float32) - np.float32(15.5)
    for step in (1.0, 2.0**-126, 2.0**-40, 2.0**100, 3.0):
        # amax = 127 * step, so x / d is the tie itself wherever the division is exact.
        blocks.append(np.float32(step) * np.append(ties[1:], np.float32(127)))
        blocks.append(np.float32(step) * np.append(ties[1:] * 4 + np.float32(0.5), np.float32(-127)))
    smallest = np.float32(127) * np.float32(2.0**-126)
    for edge in (np.nextafter(smallest, np.float32(0)), smallest, np.nextafter(smallest, top)):
        blocks.append(base / np.abs(base).max() * edge)
    blocks += [np.full(BLOCK, 1e-45), base * np.float32(1e-41), np.full(BLOCK, top), base / np.abs(base).max() * top]
    for lane in range(BLOCK):
        for value in (np.nan, np.inf, -np.inf, -top, 300.0):
            block = base.copy()
            block[lane] = value
            blocks.append(block)
    for _ in range(60):
        # x beside a tie of x / d: where a product with the reciprocal of d falls on the other side.
        d = np.float32(rng.uniform(1, 2))
        halves = np.asarray(rng.integers(-126, 126, BLOCK - 1) + 0.5, np.float32)
        blocks.append(np.append(halves * d, d * np.float32(127)))
    for exponent in range(-120, 120, 8):
        blocks.append(rng.standard_normal(BLOCK) * 2.0**exponent)
    return np.asarray(np.stack([np.asarray(b, np.float32) for b in blocks]))


def displaced(array: NDArray[Any]) -> NDArray[Any]:
    """A flat copy that has the alignment of its elements and no more."""
    size = array.dtype.itemsize
    buffer = aligned(array.size + 64 // size + 1, array.dtype)
    part = buffer[1 : 1 + array.size]
    part[...] = array.reshape(-1)
    return part


class Guarded:
    """A float32 output between canaries, filled with them."""

    def __init__(self, size: int) -> None:
        self.whole = aligned(size + 2 * _EDGE + 1, np.float32)
        self.whole.view(np.uint32)[...] = CANARY
        self.inner = self.whole[_EDGE + 1 : _EDGE + 1 + size]  # one off: no more than element alignment

    def check(self, name: str, expected: NDArray[np.float32], stride: int, width: int) -> str | None:
        """Compare rows of ``width`` outputs that lie ``stride`` apart; everything else must be untouched."""
        bits = self.whole.view(np.uint32).copy()
        start, tokens = _EDGE + 1, expected.shape[0]
        at = start + np.arange(tokens)[:, None] * stride + np.arange(width)[None, :]
        found = bits[at]
        bits[at] = CANARY
        stray = np.flatnonzero(bits != CANARY)
        if stray.size:
            return f"{name}: wrote outside its output, at float {int(stray[0]) - start} from its start"
        if (found == CANARY).any():
            t, i = (int(v) for v in np.argwhere(found == CANARY)[0])
            return f"{name}: y[{t}, {i}] was not written"
        return difference(name, found.view(np.float32), expected)


def difference(name: str, got: NDArray[Any], expected: NDArray[Any]) -> str | None:
    """None where the arrays have the same bits, NaN standing for NaN; else the first difference."""
    if got.shape != expected.shape:
        return f"{name}: shape {got.shape}, expected {expected.shape}"
    if got.dtype == np.float32:
        same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    else:
        same = got == expected
    if same.all():
        return None
    index = tuple(int(v) for v in np.argwhere(~same)[0])
    shown = ", ".join(map(str, index))
    count = int((~same).sum())
    return f"{name}: [{shown}] is {got[index]!r}, expected {expected[index]!r} ({count} of {same.size} differ)"


def prepared(bound: BoundRow, q: NDArray[np.int8], s: NDArray[np.float32]) -> NDArray[np.uint8] | str:
    """The row's own form of activations, made in two ranges; or why that went wrong."""
    t, k = q.shape
    nb = k // BLOCK
    size = int(bound.call("q8q8_acts_bytes", t, nb))
    if size < 0 or size % 64:
        return f"acts_bytes({t}, {nb}) is {size}, no multiple of 64"
    buffer = aligned(size + 128, np.uint8)
    buffer[...] = 0xA5
    xa = buffer[64 : 64 + size]
    codes, factors = displaced(q), displaced(s)
    for t0, t1 in ((t // 3, t), (0, t // 3)):
        bound.call("q8q8_prepare", xa, codes, factors, t, t0, t1, nb)
    if (buffer[:64] != 0xA5).any() or (buffer[64 + size :] != 0xA5).any():
        return f"prepare({t} tokens, {nb} blocks) wrote outside acts_bytes"
    return xa


# --- gates -----------------------------------------------------------------------------------------------


def _schema(bound: BoundRow) -> str | None:
    """The compiled companions say what the schema says, or layouts desynchronise silently."""
    layout = layout_of(bound.row)
    for name, expected in (("layout", layout.mr), ("wbias", layout.bias), ("kgroup", layout.kgroup)):
        got = bound.call(f"q8q8_{name}")
        if got != expected:
            return f"q8q8_{name}() is {got}, and the layout schema says {expected}"
    step = bound.call("q8q8_tokstep")
    if bound.row is not None and step != grid.tokstep(bound.row):
        return f"q8q8_tokstep() is {step}, and the grid says {grid.tokstep(bound.row)}"
    if step < 1:
        return f"q8q8_tokstep() is {step}"
    live = bound.call("q8q8_live")
    if live != (bound.row is not None):
        return f"q8q8_live() is {live}: {'a row' if bound.row else 'the reference'} that says it is something else"
    # A block's codes, its scale, and the sum of a biased row's codes; some numbers of blocks leave no slack.
    block = BLOCK * np.dtype(layout.codes).itemsize + 4 + (4 if layout.sums or layout.pairs else 0)
    block += BLOCK if layout.pairs and layout.codes == "int16" else 0
    for tokens, nb in ((0, 0), (0, 3), (3, 0), *((t, n) for t in (1, 17) for n in range(1, 34))):
        size = bound.call("q8q8_acts_bytes", tokens, nb)
        if size % 64 or size < tokens * nb * block:
            return f"acts_bytes({tokens}, {nb}) is {size}: not a multiple of 64 of at least {tokens * nb * block}"
    return None


def _quantise(bound: BoundRow, nb: int) -> str | None:
    blocks = quantiser_blocks()
    t = len(blocks) // nb
    x = blocks[: t * nb].reshape(t, nb * BLOCK)
    codes, factors = oracle.quantize(x)
    q = np.full((t + 2) * nb * BLOCK, 77, np.int8)[nb * BLOCK :]
    s = Guarded((t + 1) * nb)
    padded = displaced(np.vstack([x[:1], x]))
    # Tokens [1, t + 1) of an array whose first token, and everything behind the last, must stay as they are.
    bound.call("q8q8_quantize", q, s.inner, padded, 1, t + 1, nb)
    if (q[: nb * BLOCK] != 77).any() or q.base is None or (q.base[: nb * BLOCK] != 77).any():
        return "quantize wrote codes outside its tokens"
    reason = difference("codes", q[nb * BLOCK :].reshape(t, -1), codes)
    if reason:
        return reason
    whole = s.whole[_EDGE + 1 + nb : _EDGE + 1 + (t + 1) * nb].reshape(t, nb).copy()
    rest = s.whole.view(np.uint32).copy()
    rest[_EDGE + 1 + nb : _EDGE + 1 + (t + 1) * nb] = CANARY
    if (rest != CANARY).any():
        return "quantize wrote scales outside its tokens"
    return difference("scales", whole, factors)


def _tokens(bound: BoundRow) -> int:
    return max(17, 2 * int(bound.call("q8q8_tokstep")) + 1)


def _widths(most: int) -> list[int]:
    """Numbers of tokens up to ``most``: all that a vector tile may have, and those around the sides of matrix tiles."""
    return [n for n in range(1, most + 1) if n <= 17 or n % 16 in (0, 1, 15)]


def _calls(tokens: int, step: int, groups: int) -> Iterator[tuple[int, int, int]]:
    """Calls of a tile for each of its widths: the first token, how many, and of how many groups."""
    for nt in _widths(step):
        yield from ((0, nt, groups), (1, nt, 1), (tokens - nt, nt, min(groups, 2)))


def _planes(
    codes: NDArray[np.int8], factors: NDArray[Any], layout: Layout
) -> tuple[NDArray[np.int8], NDArray[Any], str]:
    """Planes as functions take them, and what their names end with: float16 scales are given as their bits."""
    w, ws = (displaced(plane) for plane in pack_plane(codes, factors, layout))
    return (w, ws, "") if ws.dtype == np.float32 else (w, ws.view(np.uint16), "_f16")


def _tile(bound: BoundRow, kind: str, nb: int, halves: bool = False) -> str | None:
    layout = layout_of(bound.row)
    step = int(bound.call("q8q8_tokstep"))
    tokens = _tokens(bound)
    data = case(kind, nb, tokens, halves=halves)
    xa = prepared(bound, data.q, data.s)
    if isinstance(xa, str):
        return xa
    w, ws, suffix = _planes(data.w, data.ws, layout)
    groups = ROWS // layout.mr

    def check(t0: int, nt: int, ng: int) -> str | None:
        width = ng * layout.mr
        ldy = width + 5
        y = Guarded((nt - 1) * ldy + width)
        bound.call(f"q8q8{suffix}", y.inner, ldy, w, ws, xa, tokens, t0, nt, nb, ng)
        return y.check(f"tile{suffix} of {nt} tokens from {t0}, {ng} groups", data.y[t0 : t0 + nt, :width], ldy, width)

    bound.call("q8q8_amx_cfg")  # what another row left in this thread's tiles is not to be relied upon
    for t0, nt, ng in _calls(tokens, step, groups):
        if reason := check(t0, nt, ng):
            return reason
    for t0 in range(0, tokens, step):
        if reason := check(t0, min(step, tokens - t0), groups):
            return reason
    return None


def _any(bound: BoundRow, run: Callable[[BoundRow, str, int], str | None], nb: int) -> str | None:
    """Activations of -128, on the rows that do not exclude them."""
    return run(bound, ANY, nb) if legality.any_activation(bound.row) else None


def _gemv(bound: BoundRow, kind: str, nb: int, halves: bool = False) -> str | None:
    layout = layout_of(bound.row)
    # Up to two groups a stream and every remainder: streams of one group each may begin in the wrong places unseen.
    far = 3 * (1 if bound.row is None else grid.number(bound.row, "gstreams")) - 1
    groups = max(ROWS // layout.mr, far)
    data = case(kind, nb, 17, max(ROWS, groups * layout.mr), halves)
    xa = prepared(bound, data.q, data.s)
    if isinstance(xa, str):
        return xa
    w, ws, suffix = _planes(data.w, data.ws, layout)
    # Every number of groups up to eight: a GEMV may take several a step, and then has a tail of its own.
    for t, ng in [(t, groups) for t in (0, 1, 16)] + [(2, ng) for ng in range(1, min(groups, max(8, far)) + 1)]:
        width = ng * layout.mr
        y = Guarded(width)
        bound.call(f"q8q8_gemv{suffix}", y.inner, w, ws, xa, 17, t, nb, ng)
        if reason := y.check(f"gemv{suffix} of token {t}, {ng} groups", data.y[t : t + 1, :width], width, width):
            return reason
    return None


def _every_half(bound: BoundRow) -> str | None:
    """Every float16 there is as a scale of weights, by the GEMV and by a tile of one token."""
    layout = layout_of(bound.row)
    data = case_of_every_half()
    xa = prepared(bound, data.q, data.s)
    if isinstance(xa, str):
        return xa
    w, ws, suffix = _planes(data.w, data.ws, layout)
    rows = len(data.ws)
    groups = rows // layout.mr
    y = Guarded(rows)
    bound.call(f"q8q8_gemv{suffix}", y.inner, w, ws, xa, 1, 0, 1, groups)
    if reason := y.check("gemv of every float16 scale", data.y, rows, rows):
        return reason
    y = Guarded(rows)
    bound.call("q8q8_amx_cfg")
    bound.call(f"q8q8{suffix}", y.inner, rows, w, ws, xa, 1, 0, 1, 1, groups)
    return y.check("tile of every float16 scale", data.y, rows, rows)


@functools.cache
def case_of_every_half() -> Case:
    """One token, and one block of as many rows of weights as there are float16, each row with a scale of its own."""
    rng = np.random.default_rng(16)
    ws = np.arange(1 << 16).astype(np.uint16).view(np.float16).reshape(-1, 1)
    w = rng.integers(-128, 128, (len(ws), BLOCK), dtype=np.int8)
    q, s = rng.integers(-127, 128, (1, BLOCK), dtype=np.int8), scales(rng, (1, 1))
    with np.errstate(all="ignore"):
        return Case(q, s, w, ws, oracle.matmul_codes(q, s, w, ws.astype(np.float32)))


def _traversal(bound: BoundRow, nb: int) -> str | None:
    """Whole products: rows that fill no group, every number of tokens, floats in."""
    row = product.bind(bound)
    step = int(bound.call("q8q8_tokstep"))
    k = nb * BLOCK
    rng = np.random.default_rng([nb, 99])
    sizes = sorted({1, row.layout.mr - 1, row.layout.mr, row.layout.mr + 1, 3 * row.layout.mr + 5} - {0})
    # The core tells the types of scales apart; with float16 ones again whole groups and a tail.
    for n, kind in [*((n, np.float32) for n in sizes), (sizes[-1], np.float16)]:
        weights = rng.integers(-128, 128, (n, k), dtype=np.int8)
        factors = scales(rng, (n, nb)).astype(kind)
        w, ws = (displaced(plane) for plane in pack_plane(weights, factors, row.layout))
        for t in _widths(2 * step + 1):
            x = rng.standard_normal((t, k), dtype=np.float32) * np.float32(3)
            if t == 2:
                x[0, k // 2] = np.nan
                x[1, 0] = np.inf
            q, s = oracle.quantize(x)
            expected = oracle.matmul_codes(q, s, weights, factors.astype(np.float32))
            y = Guarded(t * n)
            row.core.q8_matmul(row.row, y.inner, displaced(x), w, ws, t, n, k)
            if reason := y.check(f"product ({t}, {k}) by ({n}, {k})", expected, n, n):
                return reason
            y = Guarded(t * n)
            row.core.q8_matmul_acts(row.row, y.inner, displaced(q), displaced(s), w, ws, t, n, k)
            if reason := y.check(f"product of Activations ({t}, {k}) by ({n}, {k})", expected, n, n):
                return reason
    return None


def _mx4_gemv(bound: BoundRow, kind: str, nb: int) -> str | None:
    layout = layout_of(bound.row)
    data = mx4_case(kind, nb, 17)
    xa = prepared(bound, data.q, data.s)
    if isinstance(xa, str):
        return xa
    nib, e = (displaced(plane) for plane in pack_nibbles(data.nibbles, data.exponents, layout))
    groups = ROWS // layout.mr
    for t, ng in [(t, groups) for t in (0, 1, 5, 16)] + [(2, ng) for ng in range(1, min(groups, 8) + 1)]:
        width = ng * layout.mr
        y = Guarded(width)
        bound.call("q8q8_mx4_gemv", y.inner, nib, e, xa, 17, t, nb, ng)
        if reason := y.check(f"MXFP4 gemv of token {t}, {ng} groups", data.y[t : t + 1, :width], width, width):
            return reason
    return None


def _mx4_tile(bound: BoundRow, kind: str, nb: int) -> str | None:
    """The tile from nibbles, with what the row expanded of them, if it does so, in a room of exactly its size."""
    layout = layout_of(bound.row)
    step = int(bound.call("q8q8_tokstep"))
    tokens = _tokens(bound)
    data = mx4_case(kind, nb, tokens)
    xa = prepared(bound, data.q, data.s)
    if isinstance(xa, str):
        return xa
    nib, e = (displaced(plane) for plane in pack_nibbles(data.nibbles, data.exponents, layout))
    groups = ROWS // layout.mr
    room = int(bound.call("q8q8_mx4_room", nb))
    if room < 0:
        return f"mx4_room({nb}) is {room}"
    rooms: dict[int, NDArray[np.uint8]] = {}
    for ng in {ng for _, _, ng in _calls(tokens, step, groups)}:
        buffer = aligned(ng * room + 128, np.uint8)
        buffer[...] = 0x5A
        rooms[ng] = buffer[64 : 64 + ng * room]
        bound.call("q8q8_mx4_expand", rooms[ng], nib, e, nb, ng)
        if (buffer[:64] != 0x5A).any() or (buffer[64 + ng * room :] != 0x5A).any():
            return f"expansion of {ng} groups of {nb} blocks wrote outside its room"
    bound.call("q8q8_amx_cfg")
    for t0, nt, ng in _calls(tokens, step, groups):
        width = ng * layout.mr
        ldy = width + 5
        y = Guarded((nt - 1) * ldy + width)
        bound.call("q8q8_mx4_tile", y.inner, ldy, nib, e, rooms[ng], xa, tokens, t0, nt, nb, ng)
        name = f"MXFP4 tile of {nt} tokens from {t0}, {ng} groups"
        if reason := y.check(name, data.y[t0 : t0 + nt, :width], ldy, width):
            return reason
    return None


def _mx4_traversal(bound: BoundRow, nb: int) -> str | None:
    """Whole products with MXFP4 weights: rows that fill no group, every number of tokens, floats in."""
    row = product.bind(bound)
    step = int(bound.call("q8q8_tokstep"))
    k, mr = nb * BLOCK, row.layout.mr
    rng = np.random.default_rng([nb, 77])
    for n in sorted({1, mr - 1, mr, 3 * mr + 5} - {0}):
        nibbles = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        exponents = rng.integers(100, 140, (n, nb), dtype=np.uint8)
        nib, e = (displaced(plane) for plane in pack_nibbles(nibbles, exponents, row.layout))
        weights = oracle.mxfp4(nibbles, exponents)
        for t in _widths(2 * step + 1):
            x = rng.standard_normal((t, k), dtype=np.float32) * np.float32(3)
            if t == 2:
                x[0, k // 2], x[1, 0] = np.nan, np.inf
            q, s = oracle.quantize(x)
            expected = oracle.matmul_codes(q, s, *weights)
            y = Guarded(t * n)
            row.core.q8_mx4_matmul(row.row, y.inner, displaced(x), nib, e, t, n, k)
            if reason := y.check(f"MXFP4 product ({t}, {k}) by ({n}, {k})", expected, n, n):
                return reason
            y = Guarded(t * n)
            row.core.q8_mx4_matmul_acts(row.row, y.inner, displaced(q), displaced(s), nib, e, t, n, k)
            if reason := y.check(f"MXFP4 product of Activations ({t}, {k}) by ({n}, {k})", expected, n, n):
                return reason
    return None


# --- workloads -------------------------------------------------------------------------------------------


def _arena(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """Copies in one allocation, each at a cache line of its own within the 4 KiB page.

    Separate allocations that agree in their low twelve address bits alias, and whether they do is up to the heap;
    64-byte alignment and a stagger take that chance out of the comparison.
    """
    starts, end = [], 0
    for i, array in enumerate(arrays):
        start = -(-end // 4096) * 4096 + (i * 7 % 64) * 64
        starts.append(start)
        end = start + array.nbytes
    raw = np.empty(end + 4096, np.uint8)
    base = -raw.ctypes.data % 4096
    out = []
    for start, array in zip(starts, arrays, strict=True):
        part = raw[base + start : base + start + array.nbytes].view(array.dtype)
        part[...] = array.reshape(-1)
        out.append(part)
    return out


@functools.lru_cache(maxsize=2)
def _weights(k: int, n: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    rng, few = np.random.default_rng([k, n]), min(n, 1024)
    # A quantised normal distribution: what weights look like, and no denormal anywhere. Rows repeat in large ones.
    w = np.clip(np.rint(rng.standard_normal((few, k), dtype=np.float32) * np.float32(40)), -128, 127).astype(np.int8)
    ws = rng.uniform(0.0005, 0.002, (few, k // BLOCK)).astype(np.float16)
    return np.tile(w, (-(-n // few), 1))[:n], np.tile(ws, (-(-n // few), 1))[:n]


@functools.lru_cache(maxsize=16)
def _streamed(k: int, n: int, layout: Layout) -> tuple[NDArray[Any], ...]:
    """Planes of a large matrix, one pair a layout: they are only read, and a copy a row would fill the memory."""
    return tuple(_arena(*pack_plane(*_weights(k, n), layout)))


def _prepare(k: int, n: int, t: int, streamed: bool) -> Callable[[BoundRow], Callable[[], None]]:
    def prepare(bound: BoundRow) -> Callable[[], None]:
        row = product.bind(bound)
        q, s = oracle.quantize(np.random.default_rng([k, t]).standard_normal((t, k), dtype=np.float32))
        y = np.zeros((t, n), np.float32)
        if streamed:
            w, ws = _streamed(k, n, row.layout)
            codes, scale, y = _arena(q, s, y)
        else:
            w, ws, codes, scale, y = _arena(*pack_plane(*_weights(k, n), row.layout), q, s, y)
        run, capsule = row.core.q8_matmul_acts, row.row

        def call() -> None:
            run(capsule, y, codes, scale, w, ws, t, n, k)

        return call

    return prepare


def _regime(
    name: str,
    k: int,
    n: int,
    t: int,
    decides: str | tuple[str, ...] = (),
    seat: str = "",
    streamed: bool = False,
) -> Regime:
    # Codes and scales of the weights and of the tokens, and the sums.
    traffic = n * (k + 2 * (k // BLOCK)) + t * (k + 4 * (k // BLOCK)) + 4 * t * n
    return Regime(name, float(k) * n * t, "GMAC/s", decides, _prepare(k, n, t, streamed), traffic, seat)


class Q8Fixtures:
    """The gates and regimes of ``q8q8``."""

    def gates(self) -> list[GateCase]:
        """The checks, cheap ones first."""

        def gate(name: str, run: Callable[..., str | None], *extra: Any) -> GateCase:
            return GateCase(name, lambda bound: run(bound, *extra))

        return [
            gate("schema", _schema),
            *(gate(f"quantise, {nb} blocks a token", _quantise, nb) for nb in (1, 3)),
            *(gate(f"tile, {kind}, {nb} blocks", _tile, kind, nb) for kind in KINDS for nb in NB),
            *(gate(f"gemv, {kind}, {nb} blocks", _gemv, kind, nb) for kind in KINDS for nb in NB),
            *(gate(f"tile, float16, {kind}, {nb} blocks", _tile, kind, nb, True) for kind in KINDS for nb in NB),
            *(gate(f"gemv, float16, {kind}, {nb} blocks", _gemv, kind, nb, True) for kind in KINDS for nb in NB),
            gate("every float16 scale", _every_half),
            *(gate(f"MXFP4 gemv, {kind}, {nb} blocks", _mx4_gemv, kind, nb) for kind in MX4_KINDS for nb in NB),
            *(gate(f"MXFP4 tile, {kind}, {nb} blocks", _mx4_tile, kind, nb) for kind in MX4_KINDS for nb in NB),
            gate(f"tile, {ANY}", _any, _tile, 3),
            gate(f"gemv, {ANY}", _any, _gemv, 3),
            *(gate(f"traversal, {nb} blocks", _traversal, nb) for nb in (1, 4, 7)),
            *(gate(f"traversal of MXFP4, {nb} blocks", _mx4_traversal, nb) for nb in (1, 4, 7)),
        ]

    def regimes(self) -> list[Regime]:
        """A batch in cache decides the row; a vector in cache decides what is the GEMV's own, and the row of its seat.

        The others are reported. Streamed from memory, a vector cannot rank kernels and a batch mostly agrees with the
        one in cache (the chains of a model have the last word); a few tokens are the tile at less than its width.
        The streamed matrix is some 40 MB with its scales: more than the last cache of all but the largest servers.
        """
        return [
            _regime("tile", 2048, 512, 64, EVERYTHING),
            _regime("gemv", 2048, 512, 1, ("gkstep", "gstreams", "gahead"), seat="q8q8_gemv"),
            _regime("few", 2048, 512, 3),
            _regime("tile_stream", 2048, 18432, 32, streamed=True),
            _regime("gemv_stream", 2048, 18432, 1, streamed=True),
        ]

    def confirm(self, model: str | None) -> list[Chain]:
        """Whole models: :mod:`tunekit.q8.chains`."""
        return chains.chains(model)

    def emission(self, unit: Unit) -> list[Count]:
        """What a compiler must make of a row: :mod:`tunekit.q8.emission`."""
        return emission.expected(unit)


FIXTURES = Q8Fixtures()
