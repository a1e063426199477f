# SPDX-License-Identifier: Apache-2.0
"""Packing by the core against packing by NumPy, bit for bit, and what the C function refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunekit import core, q8
from tunekit.q8 import layout, matrix
from tunekit.q8.layout import interleave_by_numpy
from tunekit.team import threads

native = core.core()
pytestmark = pytest.mark.skipif(native is None, reason="no core is built")

SIZES = ((0, 64), (1, 32), (3, 96), (8, 64), (15, 2048), (16, 160), (33, 32), (70, 256), (40, 0))


@pytest.mark.parametrize("mr", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("kgroup", [1, 2, 4, 8])
def test_codes_are_laid_out_as_numpy_does(mr: int, kgroup: int) -> None:
    rng = np.random.default_rng(mr * 10 + kgroup)
    for n, k in SIZES:
        codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
        for bias in (0, 128):
            got, want = layout._rooms(mr, codes, codes)
            assert not got.size or got.ctypes.data % 64 == want.ctypes.data % 64 == 0
            layout._interleave(codes, got, mr, kgroup, bias)
            assert np.array_equal(got, interleave_by_numpy(codes, want, mr, kgroup, bias)), (n, k, bias)


@pytest.mark.parametrize("mr", [1, 4, 8, 16, 32])
def test_scales_are_laid_out_as_numpy_does(mr: int) -> None:
    rng = np.random.default_rng(mr)
    for n in (1, 7, 16, 33):
        for nb in (0, 1, 3, 4, 5, 8, 16, 65):
            for kind in (np.float32, np.float16):
                scales = rng.standard_normal((n, nb)).astype(kind)
                got, want = layout._rooms(mr, scales, scales)
                layout._interleave(scales, got, mr, 1)
                assert np.array_equal(got, interleave_by_numpy(scales, want, mr, 1, 0)), (n, nb)


def test_bits_do_not_depend_on_the_lanes() -> None:
    codes = np.random.default_rng(3).integers(0, 256, (1003, 2048), dtype=np.uint8)
    got, want = layout._rooms(16, codes, codes)
    interleave_by_numpy(codes, want, 16, 2, 0)
    for lanes in (1, 2, 5):
        with threads(lanes):
            got[:] = 0
            assert np.array_equal(layout._interleave(codes, got, 16, 2), want)


def test_q8_0_bytes_become_the_matrix_that_numpy_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    for n, k in (*SIZES, (37, 4096)):
        blocks = rng.integers(0, 256, n * (k // 32) * 34, dtype=np.uint8)
        by_core = q8.from_q8_0(blocks.tobytes(), n, k)
        with monkeypatch.context() as without:
            without.setattr(matrix, "core", lambda: None)
            by_numpy = q8.from_q8_0(blocks.tobytes(), n, k)
        assert np.array_equal(by_core.codes, by_numpy.codes)
        assert np.array_equal(by_core.scales.view(np.uint32), by_numpy.scales.view(np.uint32))
        assert by_core.to_q8_0() == blocks.tobytes()  # NaN of every payload too
        blocks[:] = 0  # it was copied
        assert np.array_equal(by_core.codes, by_numpy.codes)


@pytest.mark.parametrize(
    "change",
    [
        {"out": 63}, {"out": 65}, {"source": 63}, {"kgroup": 3}, {"mr": 0}, {"flip": 1}, {"stride": 31}, {"N": -1},
        {"first": 33}, {"N": 1 << 60}, {"blocks": 1 << 61}, {"bytes": 30},
        {"N": (1 << 59) + 2},  # in 64 bits its sizes are those of two rows
        {"out": 0, "N": 0, "stride": 1 << 60, "blocks": 1 << 60, "bytes": 1 << 60},
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_the_buffers_are_refused(change: dict[str, int]) -> None:
    numbers: dict[str, Any] = {"out": 64, "source": 64, "first": 0, "stride": 32, "N": 2, "blocks": 1, "bytes": 32,
                               "mr": 2, "kgroup": 4, "flip": 0} | change  # fmt: skip
    out, source = np.zeros(numbers.pop("out"), np.uint8), np.zeros(numbers.pop("source"), np.uint8)
    with pytest.raises(ValueError, match="pack"):
        native.pack(out, source, *numbers.values())
    with pytest.raises((BufferError, ValueError)):
        native.pack(memoryview(bytes(64)), source, 0, 32, 2, 1, 32, 2, 4, 0)
