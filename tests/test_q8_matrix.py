# SPDX-License-Identifier: Apache-2.0
"""Matrix and Activations: packing, bytes in and out, pickles, files."""

from __future__ import annotations

import copy
import pickle
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit import q8
from tunekit.q8 import matrix
from tunekit.q8.layout import REFERENCE, Layout

WIDE = Layout(16, 2, codes="int16")


def some_matrix(n: int = 37, k: int = 96, wide: bool = False) -> q8.Matrix:
    rng = np.random.default_rng([n, k])
    codes = rng.integers(-128, 128, (n, k), dtype=np.int8)
    scales = rng.standard_normal((n, k // 32)).astype(np.float16).astype(np.float32)
    if wide:
        scales[n // 2, 0] = np.float32(1e-30)
    return q8.Matrix(codes, scales)


def same(a: q8.Matrix, b: q8.Matrix) -> None:
    assert a.shape == b.shape
    np.testing.assert_array_equal(a.codes, b.codes)
    exact.same_bits(a.scales, b.scales)


# --- packing ---------------------------------------------------------------------------------------------


def check_pack(w: np.ndarray) -> q8.Matrix:
    """Against the definition in exact arithmetic, block by block."""
    m = q8.pack(w)
    codes, scales = m.codes, m.scales
    for n in range(w.shape[0]):
        for b in range(w.shape[1] // 32):
            block = [float(v) for v in w[n, b * 32 : b * 32 + 32]]
            got = codes[n, b * 32 : b * 32 + 32].tolist()
            if not np.isfinite(block).all():
                assert np.isnan(scales[n, b]) and not any(got)
                continue
            d = exact.round32(Fraction(max(abs(v) for v in block)) / 127)
            if d < 2.0**-126:
                assert scales[n, b] == 0 and not any(got)
                continue
            with np.errstate(all="ignore"):
                half = float(np.float16(np.float32(d)))
            d = half if half not in (0.0, np.inf) else d
            assert scales[n, b] == d
            ratios = [exact.round32(Fraction(v) / Fraction(d)) for v in block]
            assert got == [max(-127, min(127, round(Fraction(r)))) for r in ratios]
    return m


def test_pack_of_ordinary_weights() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((40, 96), dtype=np.float32) * np.exp2(rng.integers(-9, 9, (40, 1))).astype(np.float32)
    m = check_pack(w)
    assert m.scales_fit_float16
    d = np.repeat(m.scales, 32, axis=1)
    # Half a step, and where rounding the scale to 11 bits pushed the largest over 127, what clamping cut.
    assert (np.abs(m.codes * d - w) <= d * (0.5 + 127 * 2.0**-11 + 1e-5)).all()


def test_pack_at_the_edges_of_float16() -> None:
    rng = np.random.default_rng(2)
    shape = rng.standard_normal((1, 32)).astype(np.float32)
    shape /= np.abs(shape).max()
    sizes = [1.0, 1e-7, 6e-8, 3e-8, 2.9e-8, 2e-8, 1e-20, 2.0**-126, 2.0**-127, 1e-40, 0.0]
    sizes += [6e4, 65503.0, 65520.0, 7e4, 1e30]
    with np.errstate(all="ignore"):
        w = np.concatenate([shape * np.float32(127) * np.float32(s) for s in sizes])
    w = np.concatenate([w, np.full((1, 32), np.finfo(np.float32).max)]).astype(np.float32)
    m = check_pack(w)
    assert not m.scales_fit_float16
    assert check_pack(w[:4]).scales_fit_float16


def test_pack_confines_nan_and_infinity() -> None:
    w = np.random.default_rng(3).standard_normal((6, 64), dtype=np.float32)
    w[1, 40], w[2, 0], w[3, 63] = np.nan, np.inf, -np.inf
    m = check_pack(w)
    bad = np.isnan(m.scales)
    assert bad.sum() == 3 and bad[1, 1] and bad[2, 0] and bad[3, 1]
    assert m.scales_fit_float16


def test_pack_takes_any_strides_and_byte_order() -> None:
    w = np.random.default_rng(4).standard_normal((10, 128), dtype=np.float32)
    plain = q8.pack(w)
    for other in (np.asfortranarray(w), w.astype(">f4"), w[::-1][::-1], w.view(np.matrix)):
        same(q8.pack(other), plain)


def test_pack_in_chunks_is_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.random.default_rng(5).standard_normal((33, 64), dtype=np.float32)
    plain = q8.pack(w)
    monkeypatch.setattr(matrix, "_CHUNK", 100)
    same(q8.pack(w), plain)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    m = q8.pack(np.empty(shape, np.float32))
    assert m.shape == shape and m.to_q8_0() == b"" and m.nbytes == 0
    same(q8.from_q8_0(b"", *shape), m)
    same(pickle.loads(pickle.dumps(m)), m)
    assert m.planes(WIDE)[0].shape == (m.layout.padded(shape[0]) * shape[1],)


@pytest.mark.parametrize(
    ("w", "error", "words"),
    [
        (np.zeros((2, 32)), TypeError, r"w\.astype\(np\.float32\)"),
        (np.zeros((2, 32), np.int8), TypeError, "float32"),
        ([[0.0] * 32], TypeError, "not list"),
        (np.zeros((2, 33), np.float32), ValueError, "multiple of 32"),
        (np.zeros(32, np.float32), ValueError, r"\(N, K\)"),
        (np.zeros((1, 2, 32), np.float32), ValueError, "dimensions"),
        (np.float32(1), TypeError, "not float32"),
    ],
)
def test_what_pack_refuses(w: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        q8.pack(w)


# --- Q8_0 ------------------------------------------------------------------------------------------------


def test_q8_0_bytes_are_ggml_s() -> None:
    blocks = b"\x00\x3c" + bytes(range(32)) + b"\x00\xc0" + bytes([0x80] * 32)  # scale 1.0, then -2.0 and all -128
    m = q8.from_q8_0(blocks, 1, 64)
    np.testing.assert_array_equal(m.scales, [[1.0, -2.0]])
    np.testing.assert_array_equal(m.codes[0], [*range(32), *[-128] * 32])
    assert m.to_q8_0() == blocks


@pytest.mark.parametrize("give", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_q8_0_from_every_kind_of_buffer(give: Any) -> None:
    m = some_matrix()
    blocks = m.to_q8_0()
    same(q8.from_q8_0(give(blocks), 37, 96), m)


def test_q8_0_from_strided_and_shaped_arrays() -> None:
    m = some_matrix()
    raw = np.frombuffer(m.to_q8_0(), np.uint8)
    same(q8.from_q8_0(raw.reshape(37, -1), 37, 96), m)
    same(q8.from_q8_0(np.repeat(raw, 2)[::2], 37, 96), m)
    same(q8.from_q8_0(memoryview(np.repeat(raw, 2))[::2], 37, 96), m)


def test_q8_0_is_copied() -> None:
    raw = bytearray(some_matrix().to_q8_0())
    m = q8.from_q8_0(raw, 37, 96)
    before = m.to_q8_0()
    raw[:] = bytes(len(raw))
    assert m.to_q8_0() == before


def test_every_float16_scale_survives() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    blocks = np.zeros((1 << 16, 34), np.uint8)
    blocks[:, :2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    m = q8.from_q8_0(blocks, 1 << 16, 32)
    assert m.scales_fit_float16
    back = np.frombuffer(m.to_q8_0(), np.uint8).reshape(-1, 34)[:, :2].copy().view("<u2").reshape(-1)
    np.testing.assert_array_equal(back, halves)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(m.scales[:, 0], halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((b"x" * 34, 1, 64), ValueError, "68 bytes.* got 34"),
        ((b"", 1, 32), ValueError, "got 0"),
        ((b"x" * 34, 1, 33), ValueError, "multiple of 32"),
        ((b"x" * 34, -1, 32), ValueError, "negative"),
        ((b"x" * 34, 1.0, 32), TypeError, "n must be a whole number"),
        ((np.zeros(34, np.int8), 1, 32), TypeError, "uint8"),
        ((np.zeros(34), 1, 32), TypeError, "uint8"),
        (("x" * 34, 1, 32), TypeError, "not str"),
        (([0] * 34, 1, 32), TypeError, "not list"),
    ],
)
def test_what_from_q8_0_refuses(args: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        q8.from_q8_0(*args)


def test_to_q8_0_names_the_block_that_does_not_fit() -> None:
    m = some_matrix(wide=True)
    assert not m.scales_fit_float16
    with pytest.raises(ValueError, match=r"row 18, block 0 is 1\.000\d*e-30"):
        m.to_q8_0()


def test_packed_weights_are_q8_0_exactly() -> None:
    w = np.random.default_rng(6).standard_normal((20, 64), dtype=np.float32)
    m = q8.pack(w)
    same(q8.from_q8_0(m.to_q8_0(), 20, 64), m)


# --- one copy, in one layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
def test_planes_repack_on_demand_and_keep_one_copy(wide: bool) -> None:
    m = some_matrix(wide=wide)
    codes, scales = m.codes.copy(), m.scales.copy()
    item = 4 if wide else 2
    canonical = 37 * 96 + 37 * 3 * item
    assert m.layout == REFERENCE and m.nbytes == canonical
    for layout in (WIDE, Layout(8, 4), Layout(8, 4, 128), Layout(16, 4), REFERENCE, WIDE):
        w, ws = m.planes(layout)
        assert m.layout == layout and m.nbytes == w.nbytes + ws.nbytes == layout.padded(37) * (96 + 3 * item)
        assert ws.dtype == (np.float32 if wide else np.float16)
        assert m.planes(layout)[0] is w
        np.testing.assert_array_equal(m.codes, codes)
        np.testing.assert_array_equal(m.scales, scales)


def test_rows_that_differ_in_activations_share_a_plane() -> None:
    m = some_matrix()
    w, _ = m.planes(Layout(8, 4))
    assert m.planes(Layout(8, 4, codes="int16"))[0] is w


def test_nothing_of_it_can_be_written() -> None:
    m = some_matrix()
    for layout in (REFERENCE, WIDE):
        for array in (*m.planes(layout), m.codes, m.scales):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_constructor_copies_and_checks() -> None:
    codes, scales = np.zeros((2, 32), np.int8), np.ones((2, 1), np.float32)
    m = q8.Matrix(codes, scales)
    codes[...], scales[...] = 1, 2
    assert not m.codes.any() and (m.scales == 1).all()
    same(q8.Matrix(np.asfortranarray(m.codes), m.scales.astype(">f4")), m)
    for wrong, words in (
        ((codes.astype(np.int16), scales), "int8"),
        ((codes, scales.astype(np.float64)), "float32"),
        ((codes.tolist(), scales), "not list"),
        ((codes, np.ma.masked_less(scales, 0)), r"mask.*scales\.filled"),
    ):
        with pytest.raises(TypeError, match=words):
            q8.Matrix(*wrong)
    for wrong in ((codes[:, :31], scales), (codes, scales[:1]), (codes[0], scales), (codes, scales[:, 0])):
        with pytest.raises(ValueError, match="shape"):
            q8.Matrix(*wrong)


def test_repr() -> None:
    m = some_matrix(576, 1536)
    assert repr(m) == "Matrix(576 x 1536, Q8, 940.0 kB, layout mr1_kgroup4)"
    m.planes(WIDE)
    assert "layout mr16_kgroup2" in repr(m)
    assert repr(q8.Activations(m.codes[:1] | 1, m.scales[:1])) == "Activations(1 tokens x 1536, 1.7 kB)"


# --- pickles and files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layout", [REFERENCE, WIDE, Layout(8, 4, 128)], ids=str)
def test_pickle_is_canonical(layout: Layout, wide: bool) -> None:
    m = some_matrix(wide=wide)
    plain = pickle.dumps(m)
    m.planes(layout)
    assert pickle.dumps(m) == plain
    assert len(plain) < 37 * 3 * (36 if wide else 34) + 200
    back = pickle.loads(plain)
    same(back, m)
    assert back.layout == REFERENCE and back.scales_fit_float16 is not wide
    same(copy.deepcopy(m), m)


@pytest.mark.parametrize("wide", [False, True])
def test_save_and_load(tmp_path: Path, wide: bool) -> None:
    m = some_matrix(wide=wide)
    m.planes(WIDE)
    file = tmp_path / "m.tkq8"
    m.save(file)
    same(q8.Matrix.load(str(file)), m)
    assert [p.name for p in tmp_path.iterdir() if p.suffix in (".tkq8", ".tmp")] == ["m.tkq8"]
    data = file.read_bytes()
    assert data[:8] == b"\x93tkq8\r\n\x1a" and len(data) == 32 + 37 * 3 * (36 if wide else 34)
    if not wide:
        assert data[32:] == m.to_q8_0()


def test_save_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.tkq8"
    some_matrix().save(file)
    before = file.read_bytes()
    some_matrix(5, 64).save(file)
    assert file.read_bytes() != before

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    kept = file.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        some_matrix().save(file)
    assert file.read_bytes() == kept
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.tkq8"
    some_matrix().save(file)
    data = bytearray(file.read_bytes())

    def refused(changed: bytes, words: str) -> None:
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=words):
            q8.Matrix.load(file)

    refused(b"", "no matrix")
    refused(bytes(data[:20]), "no matrix")
    refused(bytes(data[:-1]), "torn")
    refused(bytes(data) + b"x", "torn")
    refused(bytes(data[:100]) + bytes([data[100] ^ 1]) + bytes(data[101:]), "damaged")
    refused(b"x" + bytes(data[1:]), "no matrix")
    refused(bytes(data[:8]) + b"\x02" + bytes(data[9:]), "not known")
    huge = bytes(data[:16]) + (1 << 60).to_bytes(8, "little") + bytes(data[24:])
    refused(huge, "torn")
    with pytest.raises(FileNotFoundError):
        q8.Matrix.load(tmp_path / "none")


def test_checksum_is_that_of_the_body(tmp_path: Path) -> None:
    file = tmp_path / "m.tkq8"
    some_matrix().save(file)
    data = file.read_bytes()
    assert int.from_bytes(data[12:16], "little") == zlib.crc32(data[32:])


# --- activations -----------------------------------------------------------------------------------------


def test_activations_check_their_range_and_copy() -> None:
    codes, scales = np.full((3, 64), -127, np.int8), np.ones((3, 2), np.float32)
    a = q8.Activations(codes, scales)
    assert a.shape == (3, 64)
    codes[2, 5] = -128
    assert a.codes.min() == -127
    with pytest.raises(ValueError, match=r"codes\[2, 5\] is -128"):
        q8.Activations(codes, scales)
    for array in (a.codes, a.scales):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_activations_refuse_other_types_and_shapes() -> None:
    codes, scales = np.zeros((3, 64), np.int8), np.ones((3, 2), np.float32)
    with pytest.raises(TypeError, match="codes must have dtype int8"):
        q8.Activations(codes.astype(np.uint8), scales)
    with pytest.raises(TypeError, match=r"scales.*astype\(np\.float32\)"):
        q8.Activations(codes, scales.astype(np.float64))
    with pytest.raises(ValueError, match="multiple of 32"):
        q8.Activations(codes[:, :40], scales)
    with pytest.raises(ValueError, match=r"scales of shape \(3, 2\)"):
        q8.Activations(codes, scales.T.copy())


def test_activations_pickle() -> None:
    a = q8.Activations(np.full((3, 64), -127, np.int8), np.full((3, 2), np.nan, np.float32))
    back = pickle.loads(pickle.dumps(a))
    np.testing.assert_array_equal(back.codes, a.codes)
    exact.same_bits(back.scales, a.scales)
