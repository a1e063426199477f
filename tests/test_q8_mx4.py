# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: the format against its definition and against ``gguf``, the matrix, products, and the gates."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit import q8
from tunekit.q8 import fixtures, grid, oracle, product
from tunekit.q8.layout import REFERENCE, Layout, layout_of, pack_nibbles, pack_plane, unpack_nibbles
from tunekit.q8.mx4 import Mxfp4Matrix

WIDE = Layout(16, 2, codes="int16")
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
LAYOUTS = sorted(
    {layout_of(row) for row in grid.ROWS} | {REFERENCE, Layout(4, 8), Layout(16, 8), Layout(5, 1), Layout(32, 4, 128)},
    key=lambda layout: (layout.mr, layout.kgroup, layout.bias, layout.id),
)


def some_blocks(n: int = 37, k: int = 96, exponents: tuple[int, int] = (0, 256)) -> bytes:
    rng = np.random.default_rng([n, k, *exponents])
    raw = rng.integers(0, 256, (n * (k // 32), 17), dtype=np.uint8)
    raw[:, 0] = rng.integers(*exponents, raw.shape[0])
    return raw.tobytes()


def matrix(n: int = 37, k: int = 96, exponents: tuple[int, int] = (0, 256)) -> Mxfp4Matrix:
    return q8.from_mxfp4(some_blocks(n, k, exponents), n, k)


# --- the format ------------------------------------------------------------------------------------------


def test_every_nibble_and_every_exponent() -> None:
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) | (15 - np.arange(16)) << 4
    m = q8.from_mxfp4(raw, 256, 32)
    doubled = [int(2 * v) for v in VALUES]
    assert (m.codes == [*doubled, *doubled[::-1]]).all()
    # Byte 255 as well: 2**127, and no NaN.
    assert [Fraction(float(s)) for s in m.scales[:, 0]] == [Fraction(2) ** (e - 128) for e in range(256)]
    assert m.scales.view(np.uint32)[:3, 0].tolist() == [0x00200000, 0x00400000, 0x00800000]
    assert m.scales.view(np.uint32)[255, 0] == 0x7F000000


def test_gguf_reads_the_same_values() -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.MXFP4
    raw = np.frombuffer(some_blocks(512, 96), np.uint8).reshape(512, 3 * 17).copy()
    raw[:256, 0] = np.arange(256)
    m = q8.from_mxfp4(raw, 512, 96)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, kind)
        ours = np.repeat(m.scales, 32, axis=1) * m.codes.astype(np.float32)
    exact.same_bits(theirs, ours)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-37, 1e30])
def test_weights_that_gguf_quantised(tier: str, size: float) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.MXFP4
    rng = np.random.default_rng(3)
    w = rng.standard_normal((40, 128), dtype=np.float32) * np.float32(size)
    w[3, :32] = 0
    raw = gguf.quants.quantize(w, kind)
    m = q8.from_mxfp4(raw, 40, 128)
    assert m.to_mxfp4() == raw.tobytes()
    exact.same_bits(gguf.quants.dequantize(raw, kind), np.repeat(m.scales, 32, axis=1) * m.codes.astype(np.float32))
    x = rng.standard_normal((5, 128), dtype=np.float32)
    exact.same_bits(q8.matmul(x, m), oracle.matmul(q8.quantize(x), m))
    # A four-bit float is within a quarter of its value, or half the smallest step.
    with np.errstate(all="ignore"):
        near = np.abs(m.codes * np.repeat(m.scales, 32, axis=1) - w) <= np.maximum(
            np.abs(w) / 3, np.repeat(m.scales, 32, axis=1)
        )
    assert near.all()


@pytest.mark.parametrize("give", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_from_every_kind_of_buffer_and_copied(give: Any) -> None:
    blocks = some_blocks()
    given = give(blocks)
    m = q8.from_mxfp4(given, 37, 96)
    assert m.to_mxfp4() == blocks
    if isinstance(given, bytearray):
        given[:] = bytes(len(given))
        assert m.to_mxfp4() == blocks


def test_from_strided_and_shaped_arrays() -> None:
    raw = np.frombuffer(some_blocks(), np.uint8)
    for given in (raw.reshape(37, -1), np.repeat(raw, 2)[::2], memoryview(np.repeat(raw, 2))[::2]):
        assert q8.from_mxfp4(given, 37, 96).to_mxfp4() == raw.tobytes()


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((b"x" * 17, 1, 64), ValueError, "34 bytes of MXFP4 blocks, got 17"),
        ((b"", 1, 32), ValueError, "got 0"),
        ((b"x" * 17, 1, 33), ValueError, "multiple of 32"),
        ((b"x" * 17, -1, 32), ValueError, "negative"),
        ((b"x" * 17, 1.0, 32), TypeError, "n must be a whole number"),
        ((np.zeros(17, np.int8), 1, 32), TypeError, "uint8"),
        (("x" * 17, 1, 32), TypeError, "not str"),
        (([0] * 17, 1, 32), TypeError, "not list"),
    ],
)
def test_what_from_mxfp4_refuses(args: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        q8.from_mxfp4(*args)


# --- the planes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(0, 64), (5, 0), (1, 32), (37, 96), (64, 64)])
def test_nibble_plane_is_the_schema(layout: Layout, n: int, k: int) -> None:
    rng = np.random.default_rng([n, k])
    nibbles = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    exponents = rng.integers(0, 256, (n, k // 32), dtype=np.uint8)
    nib, e = pack_nibbles(nibbles, exponents, layout)
    mr, nb, padded = layout.mr, k // 32, layout.padded(n)
    assert nib.shape == (padded * k // 2,) and e.shape == (padded * nb,)
    want, want_e = np.zeros_like(nib), np.zeros_like(e)
    for row in range(n):
        group, r = divmod(row, mr)
        for block in range(nb):
            want_e[(group * nb + block) * mr + r] = exponents[row, block]
            for i in range(16):
                kg, j = divmod(i, layout.nibble_kgroup)
                at = (group * nb + block) * 16 * mr + (kg * mr + r) * layout.nibble_kgroup + j
                want[at] = nibbles[row, block * 16 + i]
    np.testing.assert_array_equal(nib, want)
    np.testing.assert_array_equal(e, want_e)
    back = unpack_nibbles(nib, e, n, k, layout)
    np.testing.assert_array_equal(back[0], nibbles)
    np.testing.assert_array_equal(back[1], exponents)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.kgroup == each.nibble_kgroup], ids=str)
def test_expansion_is_positional(layout: Layout) -> None:
    """Low nibbles at their own offset of the Q8 plane's block, high ones 16 * mr bytes on; and the bias on top."""
    m = matrix(3 * layout.mr, 96)
    nib, _ = m.nibble_planes(layout)
    w, _ = pack_plane(m.codes, m.scales, layout)
    pairs = nib.reshape(-1, 16 * layout.mr)
    expanded = np.concatenate([oracle.MXFP4_CODES[pairs & 15], oracle.MXFP4_CODES[pairs >> 4]], axis=1)
    np.testing.assert_array_equal(expanded.reshape(-1).view(np.uint8) ^ layout.bias, w.view(np.uint8))


def test_wrong_nibble_planes_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of one matrix"):
        pack_nibbles(np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8), WIDE)
    nib, e = pack_nibbles(np.zeros((4, 32), np.uint8), np.zeros((4, 2), np.uint8), WIDE)
    with pytest.raises(ValueError, match="planes"):
        unpack_nibbles(nib, e, 17, 64, WIDE)


# --- the matrix ------------------------------------------------------------------------------------------


def test_it_is_a_matrix_of_half_the_size() -> None:
    m = matrix(64, 256)
    q = q8.Matrix(m.codes, m.scales)
    assert isinstance(m, q8.Matrix) and m.shape == q.shape == (64, 256)
    assert (m.format, q.format) == ("MXFP4", "Q8")
    assert m.nbytes == 64 * 8 * 17 and q.nbytes == 64 * 8 * 36
    assert repr(m) == "Matrix(64 x 256, MXFP4, 8.7 kB, layout mr1_kgroup4)"
    assert not m.codes.flags.writeable and not m.scales.flags.writeable
    with pytest.raises((AttributeError, TypeError)):
        m.anything = 1  # type: ignore[attr-defined]
    for mine, plain in zip(m.planes(WIDE), q.planes(WIDE), strict=True):
        np.testing.assert_array_equal(mine, plain)
    assert m.nbytes == 64 * 8 * 17 and m.layout == REFERENCE  # an expansion is not kept


def test_one_copy_in_one_layout() -> None:
    m = matrix()
    blocks = m.to_mxfp4()
    planes = m.nibble_planes(WIDE)
    assert m.nibble_planes(WIDE)[0] is planes[0] and m.layout == WIDE
    assert m.nbytes == 48 * 3 * 17
    assert not planes[0].flags.writeable and planes[0].ctypes.data % 64 == 0
    assert m.to_mxfp4() == blocks
    # A bias is none of a nibble plane's business.
    narrow = m.nibble_planes(Layout(8, 4))
    assert m.nibble_planes(Layout(8, 4, 128, sums=True))[0] is narrow[0]
    assert m.nibble_planes(REFERENCE)[0].tobytes() == matrix().nibble_planes(REFERENCE)[0].tobytes()
    assert m.to_mxfp4() == blocks


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    m = q8.from_mxfp4(b"", *shape)
    assert m.shape == shape and m.to_mxfp4() == b"" and m.to_q8_0() == b"" and m.nbytes == 0
    assert pickle.loads(pickle.dumps(m)).shape == shape
    y = q8.matmul(np.ones((2, shape[1]), np.float32), m)
    assert y.shape == (2, shape[0]) and not y.any()


@pytest.mark.parametrize("layout", [REFERENCE, WIDE])
def test_pickles_and_files_are_mxfp4(layout: Layout, tmp_path: Path) -> None:
    m = matrix()
    m.nibble_planes(layout)
    m.save(tmp_path / "m")
    data = (tmp_path / "m").read_bytes()
    assert data[32:] == some_blocks() and data[10:12] == b"\x01\x00"
    assert some_blocks() in pickle.dumps(m)
    for other in (pickle.loads(pickle.dumps(m)), copy.deepcopy(m), q8.Matrix.load(tmp_path / "m")):
        assert type(other) is Mxfp4Matrix and other.layout == REFERENCE
        assert other.shape == m.shape and other.to_mxfp4() == some_blocks()
    (tmp_path / "torn").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="torn"):
        q8.Matrix.load(tmp_path / "torn")
    (tmp_path / "bad").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged"):
        q8.Matrix.load(tmp_path / "bad")


def test_to_q8_0_where_the_scales_fit() -> None:
    m = matrix(exponents=(104, 144))
    assert m.scales_fit_float16
    other = q8.from_q8_0(m.to_q8_0(), 37, 96)
    np.testing.assert_array_equal(other.codes, m.codes)
    exact.same_bits(other.scales, m.scales)
    for e in (103, 144):
        wide = matrix(exponents=(e, e + 1))
        assert not wide.scales_fit_float16
        with pytest.raises(ValueError, match="row 0, block 0 .* no float16 holds"):
            wide.to_q8_0()


# --- products --------------------------------------------------------------------------------------------


@pytest.fixture(params=["python", "reference", "fallback"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on one tier, whatever this box would choose."""
    name = str(request.param)
    if name == "python":
        monkeypatch.setattr(product, "native", lambda: None)
        return name
    rows = exact.built_rows()
    wanted = ["reference"] if name == "reference" else grid.FALLBACK.split(";")
    bound = next((rows[suffix] for suffix in wanted if suffix in rows), None)
    if bound is None:
        pytest.skip(f"no {name} row is built here, or this CPU cannot run it")
    row = product.bind(bound)
    monkeypatch.setattr(product, "native", lambda: row)
    return name


@pytest.mark.parametrize("t", [1, 2, 3, 5, 9, 64, 131])
@pytest.mark.parametrize("n", [1, 15, 16, 40, 44, 200])
def test_products_are_the_oracle_s(tier: str, t: int, n: int) -> None:
    rng = np.random.default_rng([t, n])
    k = 32 * int(rng.integers(1, 8))
    m = matrix(n, k, (100, 140))
    x = rng.standard_normal((t, k), dtype=np.float32)
    a = q8.quantize(x)
    want = oracle.matmul_codes(*oracle.quantize(x), m.codes, m.scales)
    exact.same_bits(q8.oracle.matmul(a, m), want)
    exact.same_bits(q8.matmul(x, m), want)
    exact.same_bits(q8.matmul(a, m), want)
    exact.same_bits(q8.matmul(x[0], m), want[0])
    # The same weights in 8 bits, and a second time: the matrix is what it was.
    exact.same_bits(q8.matmul(a, q8.Matrix(m.codes, m.scales)), want)
    out = np.full((t, n), np.nan, np.float32)
    assert q8.matmul(a, m, out=out) is out
    exact.same_bits(out, want)


@pytest.mark.parametrize("kind", fixtures.MX4_KINDS)
@pytest.mark.parametrize("t", [1, 17])
def test_hard_operands(tier: str, kind: str, t: int) -> None:
    case = fixtures.mx4_case(kind, 5, 17)
    raw = np.concatenate([case.exponents.reshape(-1, 1), case.nibbles.reshape(-1, 16)], axis=1)
    m = q8.from_mxfp4(raw, fixtures.ROWS, 160)
    a = q8.Activations(case.q[:t], case.s[:t])
    exact.same_bits(q8.matmul(a, m), case.y[:t])


def test_exact_arithmetic() -> None:
    """The fixtures' expectations against integers and fractions, which know nothing of NumPy."""
    for kind in fixtures.MX4_KINDS[:3]:
        case = fixtures.mx4_case(kind, 3, 17)
        codes, scales = oracle.mxfp4(case.nibbles, case.exponents)
        pick = slice(0, 96, 7)
        exact.same_bits(case.y[:3, pick], exact.matmul(case.q[:3], case.s[:3], codes[pick], scales[pick]))


def test_nan_and_infinity_stay_in_their_token(tier: str) -> None:
    m, rng = matrix(20, 96, (120, 130)), np.random.default_rng(5)
    x = rng.standard_normal((7, 96), dtype=np.float32)
    want = q8.matmul(x, m)
    x[2, 50], x[4, 0], x[5, 95] = np.nan, np.inf, -np.inf
    y = q8.matmul(x, m)
    good = np.array([t not in (2, 4, 5) for t in range(7)])
    exact.same_bits(y[good], want[good])
    assert np.isnan(y[~good]).all()


def test_large_groups_and_many_steps(tier: str) -> None:
    """K so large that one group is more than a step of the traversal, and N of many steps with a partial one."""
    rng = np.random.default_rng(6)
    for n, k, t in ((35, 4096, 3), (400, 96, 5)):
        m = matrix(n, k, (110, 130))
        x = rng.standard_normal((t, k), dtype=np.float32)
        exact.same_bits(q8.matmul(x, m), oracle.matmul(q8.quantize(x), m))


def test_a_wrong_plane_is_refused_by_the_traversal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = exact.built_rows()
    bound = next((rows[suffix] for suffix in [*grid.FALLBACK.split(";"), "reference"] if suffix in rows), None)
    if bound is None:
        pytest.skip("no native row is built here")
    row = product.bind(bound)
    y, x = np.zeros((2, 5), np.float32), np.zeros((2, 64), np.float32)
    nib, e = matrix(5, 64).nibble_planes(row.layout)
    row.core.q8_mx4_matmul(row.row, y, x, nib, e, 2, 5, 64)
    for wrong in (
        (y, x, nib[:-1], e, 2, 5, 64),
        (y, x, nib, e[:-1], 2, 5, 64),
        (y, x, nib.view(np.int8), e, 2, 5, 64),
        (y, x, nib, e, 2, 5, 63),
        (y[:1], x, nib, e, 2, 5, 64),
    ):
        with pytest.raises((ValueError, TypeError, BufferError)):
            row.core.q8_mx4_matmul(row.row, *wrong)
    given: list[Any] = []
    monkeypatch.setattr(product, "find_core", lambda: SimpleNamespace(q8_row=lambda *args: given.extend(args)))
    product.bind(bound)
    bare = row.core.q8_row(*given[:-4])
    with pytest.raises(ValueError, match="without its functions for MXFP4"):
        row.core.q8_mx4_matmul(bare, y, x, nib, e, 2, 5, 64)


# --- the gates find faults -------------------------------------------------------------------------------

GATES = [gate for gate in fixtures.FIXTURES.gates() if gate.name.startswith("MXFP4")]


def first_failure(row: exact.PythonRow) -> str | None:
    return next((f"{gate.name}: {reason}" for gate in GATES if (reason := gate.run(row))), None)


def with_planes(change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """A GEMV and an expansion that see other weights than they should; the tile reads the expansion."""

    def gemv(original: Any, y: Any, nib: Any, e: Any, *rest: Any) -> None:
        original(y, *change(nib, e), *rest)

    def expand(original: Any, room: Any, nib: Any, e: Any, *rest: Any) -> None:
        original(room, *change(nib, e), *rest)

    return {"q8q8_mx4_gemv": gemv, "q8q8_mx4_expand": expand}


def table(codes: list[int]) -> Callable[..., None]:
    """A GEMV with another table of codes."""

    def body(original: Any, *args: Any) -> None:
        keep = oracle.MXFP4_CODES
        oracle.MXFP4_CODES = np.array(codes, np.int8)  # type: ignore[misc]
        try:
            original(*args)
        finally:
            oracle.MXFP4_CODES = keep  # type: ignore[misc]

    return body


def scale(change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., None]:
    """A GEMV with another meaning of exponents."""

    def body(original: Any, *args: Any) -> None:
        keep = oracle.e8m0_half
        oracle.e8m0_half = lambda e: change(e).astype(np.float32)  # type: ignore[assignment]
        try:
            with np.errstate(all="ignore"):
                original(*args)
        finally:
            oracle.e8m0_half = keep  # type: ignore[assignment]

    return body


def power(e: np.ndarray) -> np.ndarray:
    return np.exp2(e.astype(np.float64) - 128)


def narrow(original: Any, y: Any, nib: Any, e: Any, xa: Any, tokens: int, t: int, nb: int, ng: int) -> None:
    """Sums of a block kept in 16 bits."""
    keep = oracle._blocks

    original(y, nib, e, xa, tokens, t, nb, ng)
    matmul = np.matmul

    def short(a: Any, b: Any) -> Any:
        return matmul(a, b).astype(np.int64).astype(np.int16).astype(np.float32)

    oracle.np.matmul = short  # type: ignore[assignment]
    try:
        original(y, nib, e, xa, tokens, t, nb, ng)
    finally:
        oracle.np.matmul = matmul
        oracle._blocks = keep


def one_group_less(original: Any, *args: Any) -> None:
    original(*args[:-1], max(1, args[-1] - 1))


def last_block_lost(original: Any, y: Any, nib: Any, e: Any, xa: Any, tokens: int, t: int, nb: int, ng: int) -> None:
    masked = nib.reshape(-1)[: ng * nb * 16].reshape(ng, nb, 16).copy()
    masked[:, nb - nb % 2 :] = 0
    original(y, masked, e, xa, tokens, t, nb, ng)


def beyond(original: Any, room: Any, *args: Any) -> None:
    original(room, *args)
    (ctypes.c_int8 * (room.size + 1)).from_address(room.ctypes.data)[room.size] = 0


def one_token_less(original: Any, y: Any, ldy: int, *args: Any) -> None:
    *operands, nt, nb, ng = args
    original(y, ldy, *operands, max(1, nt - 1), nb, ng)


def the_first_tokens(original: Any, y: Any, ldy: int, *args: Any) -> None:
    *operands, _, nt, nb, ng = args
    original(y, ldy, *operands, 0, nt, nb, ng)


CODES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
MUTANTS: dict[str, dict[str, Any]] = {
    "nibbles swapped": with_planes(lambda nib, e: ((nib >> 4 | nib << 4).astype(np.uint8), e)),
    "the other format's interleave": with_planes(lambda nib, e: (np.roll(nib, 1), e)),
    "an exponent of the neighbour": with_planes(lambda nib, e: (nib, np.roll(e, 1))),
    "12 taken for 10": {"q8q8_mx4_gemv": table([*CODES[:7], 10, *CODES[8:]])},
    "minus zero has a value": {"q8q8_mx4_gemv": table([*CODES[:8], -1, *CODES[9:]])},
    "codes not doubled in the scale": {"q8q8_mx4_gemv": scale(lambda e: power(e) * 2)},
    "255 is NaN": {"q8q8_mx4_gemv": scale(lambda e: np.where(e == 255, np.nan, power(e)))},
    "0 is zero": {"q8q8_mx4_gemv": scale(lambda e: np.where(e == 0, 0, power(e)))},
    "1 is zero": {"q8q8_mx4_gemv": scale(lambda e: np.where(e == 1, 0, power(e)))},
    "0 is zero in the expansion": {"q8q8_mx4_expand": scale(lambda e: np.where(e == 0, 0, power(e)))},
    "sums of 16 bits": {"q8q8_mx4_gemv": narrow},
    "a group left out": {"q8q8_mx4_gemv": one_group_less},
    "a group not expanded": {"q8q8_mx4_expand": one_group_less},
    "the odd block lost": {"q8q8_mx4_gemv": last_block_lost},
    "an expansion that writes on": {"q8q8_mx4_expand": beyond},
    "a token left out of a tile": {"q8q8_mx4_tile": one_token_less},
    "a group left out of a tile": {"q8q8_mx4_tile": one_group_less},
    "a tile of the first tokens": {"q8q8_mx4_tile": the_first_tokens},
}


def test_the_reference_bodies_pass() -> None:
    assert first_failure(exact.PythonRow()) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str) -> None:
    assert first_failure(exact.PythonRow(**MUTANTS[name])), name


def test_cases_cover_the_format() -> None:
    seen = set()
    for nb in fixtures.NB:
        seen |= set(fixtures.mx4_case("every exponent", nb, 17).exponents.reshape(-1).tolist())
    assert seen == set(range(256))
    data = fixtures.mx4_case("every exponent", 1, 17)
    assert set((data.nibbles & 15).reshape(-1)) == set((data.nibbles >> 4).reshape(-1)) == set(range(16))
    data = fixtures.mx4_case("extremes", 1, 17)
    sums = data.q.astype(int) @ oracle.mxfp4(data.nibbles, data.exponents)[0].astype(int).T
    assert np.abs(sums).max() == 32 * 12 * 127
