# SPDX-License-Identifier: Apache-2.0
"""The public calls, on the Python reference and, where rows are built, on the C reference and the fallback row."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit import core, q8
from tunekit.errors import AbiError
from tunekit.q8 import fixtures, grid, oracle, product
from tunekit.q8.layout import Layout
from tunekit.q8.matrix import as_float32

TIERS = ("python", "reference", "fallback")


@pytest.fixture(params=TIERS)
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
    monkeypatch.setattr(product, "_ready", (None, row))
    return name


RNG = np.random.default_rng(11)
WEIGHTS = q8.Matrix(
    RNG.integers(-128, 128, (37, 96), dtype=np.int8), RNG.standard_normal((37, 3)).astype(np.float32)
)
X = RNG.standard_normal((7, 96), dtype=np.float32)
EXPECTED = oracle.matmul_codes(*oracle.quantize(X), WEIGHTS.codes, WEIGHTS.scales)


def matrix() -> q8.Matrix:
    return q8.Matrix(WEIGHTS.codes, WEIGHTS.scales)


def test_a_core_of_another_abi_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkout left behind: a core beside the package that the Python side does not fit any more."""
    if core.core() is None:
        pytest.skip("tunekit._core is not built")
    assert core.core().abi == core.ABI
    monkeypatch.setattr(core, "_found", [])
    monkeypatch.setattr(core, "ABI", core.ABI + 1)
    monkeypatch.setattr(core, "_from_cache", lambda: None)
    assert core.core() is None


# --- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 7, 9, 64, 131])
@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 37, 200])
def test_products_are_the_oracle_s(tier: str, t: int, n: int, halves: bool) -> None:
    rng = np.random.default_rng([t, n])
    k = 32 * int(rng.integers(1, 8))
    factors = fixtures.scales(rng, (n, k // 32))
    if halves:
        factors = factors.astype(np.float16).astype(np.float32)
    m = q8.Matrix(rng.integers(-128, 128, (n, k), dtype=np.int8), factors)
    assert m.scales_fit_float16 == halves
    x = rng.standard_normal((t, k), dtype=np.float32)
    a = q8.quantize(x)
    codes, scales = oracle.quantize(x)
    np.testing.assert_array_equal(a.codes, codes)
    exact.same_bits(a.scales, scales)
    want = oracle.matmul_codes(codes, scales, m.codes, m.scales)
    exact.same_bits(q8.oracle.matmul(a, m), want)
    exact.same_bits(q8.matmul(x, m), want)
    exact.same_bits(q8.matmul(a, m), want)
    exact.same_bits(q8.matmul(x[0], m), want[0])
    out = np.full((t, n), np.nan, np.float32)
    assert q8.matmul(a, m, out=out) is out
    exact.same_bits(out, want)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", fixtures.KINDS)
def test_hard_activations(tier: str, kind: str, halves: bool) -> None:
    case = fixtures.case(kind, 5, 17, halves=halves)
    with np.errstate(all="ignore"):
        a, m = q8.Activations(case.q, case.s), q8.Matrix(case.w, case.ws.astype(np.float32))
    assert m.scales_fit_float16 == halves
    exact.same_bits(q8.matmul(a, m), case.y)


def test_quantiser_edges(tier: str) -> None:
    x = fixtures.quantiser_blocks()
    a = q8.quantize(x)
    codes, scales = oracle.quantize(x)
    np.testing.assert_array_equal(a.codes, codes)
    exact.same_bits(a.scales, scales)


def test_no_saturation_at_the_extremes(tier: str) -> None:
    k = 4096
    m = q8.Matrix(np.full((9, k), -128, np.int8), np.ones((9, k // 32), np.float32))
    a = q8.Activations(np.full((3, k), -127, np.int8), np.ones((3, k // 32), np.float32))
    assert (q8.matmul(a, m) == 128 * 127 * k).all()


def test_long_sum_stays_exact(tier: str) -> None:
    m = q8.Matrix(np.full((1, 2080), 127, np.int8), np.ones((1, 65), np.float32))
    a = q8.Activations(np.full((1, 2080), 127, np.int8), np.ones((1, 65), np.float32))
    exact.same_bits(q8.matmul(a, m), exact.matmul(a.codes, a.scales, m.codes, m.scales))


def test_nan_and_infinity_stay_in_their_token(tier: str) -> None:
    x = X.copy()
    x[2, 50], x[4, 0], x[5, 95] = np.nan, np.inf, -np.inf
    y = q8.matmul(x, matrix())
    good = np.array([t not in (2, 4, 5) for t in range(7)])
    exact.same_bits(y[good], EXPECTED[good])
    assert np.isnan(y[~good]).all()


def test_block_scale_over_float16(tier: str) -> None:
    """127 everywhere under large scales: a compensation held in 16-bit floats would overflow."""
    for scale in (17.0, 1000.0, 1e30):
        m = q8.Matrix(np.full((8, 32), 127, np.int8), np.full((8, 1), scale, np.float32))
        a = q8.Activations(np.full((5, 32), 127, np.int8), np.ones((5, 1), np.float32))
        exact.same_bits(q8.matmul(a, m), np.full((5, 8), np.float32(scale) * np.float32(32 * 127 * 127)))


@pytest.mark.parametrize(("t", "k", "n"), [(0, 96, 37), (3, 96, 0), (3, 0, 5), (0, 0, 0), (1, 0, 4)])
def test_empty_products(tier: str, t: int, k: int, n: int) -> None:
    m = q8.pack(np.ones((n, k), np.float32))
    x = np.ones((t, k), np.float32)
    y = q8.matmul(x, m)
    assert y.shape == (t, n) and y.dtype == np.float32 and not y.any()
    assert q8.matmul(q8.quantize(x), m).shape == (t, n)
    out = np.full((t, n), np.nan, np.float32)
    assert not q8.matmul(x, m, out=out).any()
    if t == 1:
        assert q8.matmul(x[0], m).shape == (n,)


# --- what goes in ----------------------------------------------------------------------------------------


def variants(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same values in every memory that NumPy can put them in."""
    packed = np.zeros(x.shape, np.dtype([("tag", "u1"), ("value", "f4")]))
    packed["value"] = x
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    unaligned[...] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    return {
        "plain": x,
        "read-only": read_only,
        "frombuffer": np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
        "big-endian": x.astype(">f4"),
        "fortran": np.asfortranarray(x),
        "every second column": np.repeat(x, 2, axis=1)[:, ::2],
        "reversed rows": x[::-1].copy()[::-1],
        "reversed columns": x[:, ::-1].copy()[:, ::-1],
        "transposed": x.T.copy().T,
        "field of a packed struct": packed["value"],
        "unaligned": unaligned,
        "matrix": x.view(np.matrix),
        "slice": np.pad(x, ((2, 1), (5, 4)))[2:-1, 5:-4],
    }


@pytest.mark.parametrize("name", list(variants(X)))
def test_inputs_in_any_memory(tier: str, name: str) -> None:
    x = variants(X)[name]
    before = np.array(x)
    exact.same_bits(q8.matmul(x, matrix()), EXPECTED)
    exact.same_bits(q8.matmul(q8.quantize(x), matrix()), EXPECTED)
    np.testing.assert_array_equal(np.asarray(x), before)


def test_one_row_broadcast_with_stride_zero(tier: str) -> None:
    x = np.broadcast_to(X[0], (5, 96))
    exact.same_bits(q8.matmul(x, matrix()), np.broadcast_to(EXPECTED[0], (5, 37)).copy())


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_inputs_at_every_offset_of_a_cache_line(tier: str, offset: int) -> None:
    raw = np.zeros(X.nbytes + 128, np.uint8)
    base = -raw.ctypes.data % 64 + offset
    x = raw[base : base + X.nbytes].view(np.float32).reshape(X.shape)
    x[...] = X
    exact.same_bits(q8.matmul(x, matrix()), EXPECTED)


def test_memory_mapped_input(tier: str, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(X.tobytes())
    x = np.memmap(file, np.float32, "r", shape=X.shape)
    exact.same_bits(q8.matmul(x, matrix()), EXPECTED)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.float32).reshape(X.shape)
        exact.same_bits(q8.matmul(view, matrix()), EXPECTED)
        del view


def test_good_arrays_are_not_copied() -> None:
    x = X.copy()
    x.flags.writeable = False
    assert as_float32("x", x) is x


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (X.astype(np.float64), TypeError, r"x must be float32, not float64; pass x\.astype\(np\.float32\)"),
    (X.astype(np.float16), TypeError, "not float16"),
    (X.astype(np.int8), TypeError, "not int8"),
    (X.astype(np.int32).view(np.uint32), TypeError, "not uint32"),
    (X.astype(np.complex64), TypeError, "not complex64"),
    (X.astype(object), TypeError, "not object"),
    (X > 0, TypeError, "not bool"),
    (X.tolist(), TypeError, r"not list; pass np\.asarray\(x, dtype=np\.float32\)"),
    (None, TypeError, "not NoneType"),
    (X.tobytes(), TypeError, "not bytes"),
    (np.ma.masked_greater(X, 1), TypeError, r"mask.*filled"),
    (np.float32(1), TypeError, "not float32"),
    (np.array(1, np.float32), ValueError, r"shape \(\)"),
    (X[None], ValueError, "dimensions"),
    (X[:, :95], ValueError, "multiple of 32"),
    (X[:, :64], ValueError, r"x of shape \(7, 64\) does not fit the matrix of shape \(37, 96\)"),
    (X[0, :64], ValueError, r"x of shape \(64,\) does not fit"),
    (X.T.copy(), ValueError, "multiple of 32"),
]


@pytest.mark.parametrize(("x", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_inputs_that_are_refused(tier: str, x: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        q8.matmul(x, matrix())


def test_quantize_refuses_alike(tier: str) -> None:
    with pytest.raises(TypeError, match=r"x\.astype\(np\.float32\)"):
        q8.quantize(X.astype(np.float64))
    with pytest.raises(ValueError, match="multiple of 32"):
        q8.quantize(X[:, :33])
    assert q8.quantize(X[0]).shape == (1, 96)


def test_the_matrix_must_be_one(tier: str) -> None:
    with pytest.raises(TypeError, match=r"Matrix, not ndarray; pack\(w\)"):
        q8.matmul(X, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x of shape \(7, 96\) does not fit the matrix of shape \(3, 64\)"):
        q8.matmul(q8.quantize(X), q8.pack(np.ones((3, 64), np.float32)))


# --- out -------------------------------------------------------------------------------------------------


def read_only() -> np.ndarray:
    out = np.zeros((7, 37), np.float32)
    out.flags.writeable = False
    return out


OUTS: list[tuple[Any, type[Exception], str]] = [
    (np.zeros((7, 37)), TypeError, "native float32"),
    (np.zeros((7, 37), ">f4"), TypeError, "native float32, not >f4"),
    (np.zeros((7, 37), np.int32), TypeError, "native float32"),
    (np.zeros((7, 36), np.float32), ValueError, r"shape \(7, 37\), not \(7, 36\)"),
    (np.zeros((37, 7), np.float32), ValueError, "shape"),
    (np.zeros((1, 7, 37), np.float32), ValueError, "shape"),
    (np.zeros((37, 7), np.float32).T, ValueError, "C-contiguous"),
    (np.zeros((7, 74), np.float32)[:, ::2], ValueError, "C-contiguous"),
    (np.zeros((7, 37), np.float32)[::-1], ValueError, "C-contiguous"),
    (np.zeros(7 * 37 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(7, 37), ValueError, "aligned"),
    (read_only(), ValueError, "read-only"),
    ([[0.0] * 37] * 7, TypeError, "not list"),
]


@pytest.mark.parametrize(("out", "error", "words"), OUTS, ids=range(len(OUTS)))
def test_outputs_that_are_refused(tier: str, out: Any, error: type[Exception], words: str) -> None:
    before = np.array(out)
    for x in (X, q8.quantize(X)):
        with pytest.raises(error, match=words):
            q8.matmul(x, matrix(), out=out)
    np.testing.assert_array_equal(np.array(out), before)


@pytest.mark.parametrize("offset", [0, 1, 100, 7 * 64 - 1])
def test_out_must_not_overlap_x(tier: str, offset: int) -> None:
    buffer = np.zeros(7 * 64 * 2, np.float32)
    x = buffer[: 7 * 64].reshape(7, 64)
    m = q8.pack(np.ones((64, 64), np.float32))
    with pytest.raises(ValueError, match="overlaps x"):
        q8.matmul(x, m, out=buffer[offset : offset + 7 * 64].reshape(7, 64))
    q8.matmul(x, m, out=buffer[7 * 64 :].reshape(7, 64))


def test_a_second_product_is_as_careful_as_the_first(tier: str) -> None:
    """The first leaves a prepared call behind, which must know what is none of its business."""
    m = matrix()
    out = np.empty((7, 37), np.float32)
    first = q8.matmul(X, m, out=out)
    assert (m._call is not None) == (tier != "python")
    frozen_out = np.empty((7, 37), np.float32)
    frozen_out.flags.writeable = False
    masked = np.ma.masked_array(X, np.zeros(X.shape, bool))
    both = np.zeros((7, 96 + 37), np.float32)
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        (X[:, :64], None, ValueError, "does not fit"),
        (X.astype(np.float64), None, TypeError, "float32"),
        (X.view(np.int32), out, TypeError, "float32"),
        (X.tolist(), None, TypeError, "NumPy array"),
        (masked, out, TypeError, "mask"),
        (X[None], None, ValueError, "dimensions"),
        (np.zeros((), np.float32), None, ValueError, "dimensions"),
        (X, frozen_out, ValueError, "read-only"),
        (X, np.empty((7, 38), np.float32), ValueError, "shape"),
        (X, np.empty((6, 37), np.float32), ValueError, "shape"),
        (X[0], np.empty((1, 37), np.float32), ValueError, "shape"),
        (X, np.empty((37, 7), np.float32).T, ValueError, "contiguous"),
        (X, np.empty((7, 37)), TypeError, "float32"),
        (X, np.empty((7, 37), np.int32), TypeError, "float32"),
        (X, "out", TypeError, "NumPy array"),
        (both.reshape(-1)[: 7 * 96].reshape(7, 96), both.reshape(-1)[96 : 96 + 7 * 37].reshape(7, 37), ValueError, "overlaps"),
    ]  # fmt: skip
    for x, to, error, words in refused:
        with pytest.raises(error, match=words):
            q8.matmul(x, m, out=to)
    copied = [X.astype(">f4"), np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2]]
    for x in (X, *copied):
        exact.same_bits(q8.matmul(x, m), first)
        exact.same_bits(q8.matmul(x[0], m), first[0])
    assert q8.matmul(X, m, out=out) is out
    assert q8.matmul(X[:0], m).shape == (0, 37)


def test_a_prepared_call_ends_with_its_planes(tier: str) -> None:
    if tier == "python":
        pytest.skip("nothing is prepared there")
    m = matrix()
    first = q8.matmul(X, m)
    m.planes(Layout(mr=2, kgroup=8))
    assert m._call is None, "it would keep the planes of a layout that the matrix has left"
    exact.same_bits(q8.matmul(X, m), first)


def test_out_writes_its_own_bytes_only(tier: str) -> None:
    buffer = np.full(7 * 37 + 40, np.nan, np.float32)
    out = buffer[20:-20].reshape(7, 37)
    q8.matmul(X, matrix(), out=out)
    exact.same_bits(out, EXPECTED)
    assert np.isnan(buffer[:20]).all() and np.isnan(buffer[-20:]).all()


# --- rows and layouts ------------------------------------------------------------------------------------


def test_matrix_in_a_foreign_layout_is_repacked(tier: str) -> None:
    m = matrix()
    for layout in (Layout(4, 8), Layout(8, 4, 128)):
        m.planes(layout)
        exact.same_bits(q8.matmul(X, m), EXPECTED)


def test_a_row_that_reads_another_layout_than_the_schema_is_refused() -> None:
    class Skewed(exact.PythonRow):
        row = grid.ROWS[0]

        def address(self, name: str) -> int:
            return 0

    if product.find_core() is None:
        with pytest.raises(AbiError, match="not built"):
            product.bind(Skewed())  # type: ignore[arg-type]
    else:
        with pytest.raises(AbiError, match="the schema says"):
            product.bind(Skewed())  # type: ignore[arg-type]


def test_import_chooses_nothing() -> None:
    from conftest import run_python

    done = run_python(
        "import warnings; warnings.simplefilter('error')\n"
        "import numpy as np; from tunekit import dispatch, q8; m = q8.pack(np.ones((4, 32), np.float32))\n"
        "m.to_q8_0(); assert not dispatch._bindings\n"
        "import sys; print([n for n in ('jinja2', 'setuptools', 'cpuinfo', 'cffi') if n in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
