# SPDX-License-Identifier: Apache-2.0
"""The shapers on paper, for 1 to 256 lanes: every row and token once, no chunk below its grain, no idle lane."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, lacking

from tunekit import core

CORE = core.core()
pytestmark = pytest.mark.skipif(CORE is None, reason="tunekit._core is not built")

LANES = range(1, 257)
UNITS = (1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 36, 48, 64, 96, 100, 127, 128, 192, 256, 257, 336, 512, 1000, 2048, 8016)
GRAINS = (0, 1, 2, 4, 7)
OVERSPLITS = (1, 2, 4, 8)


def parts(total: int, count: int) -> list[tuple[int, int]]:
    cuts = [CORE.part(total, count, i) for i in range(count + 1)]
    return list(itertools.pairwise(cuts))


@functools.cache
def cached_parts(total: int, count: int) -> list[tuple[int, int]]:
    return parts(total, count)


def waves(chunks: int, lanes: int) -> list[int]:
    """How many equal chunks each lane gets when each takes the next one as soon as it is free."""
    return [chunks // lanes + (lane < chunks % lanes) for lane in range(lanes)]


def test_lanes_follow_the_work() -> None:
    for live, cap in itertools.product((1, 2, 3, 8, 48, 192, 256), (0, 1, 2, 24, 256)):
        most = min(live, cap or live)
        before = 1
        for work in (0, 1, 999_999, 1_999_999, 2_000_000, 3_000_000, 10**7, 10**9, 2**62):
            found = CORE.lanes(work, 1_000_000, live, cap)
            assert found == max(1, min(work // 1_000_000, most))
            assert found >= before
            before = found
        assert CORE.lanes(1, 0, live, cap) == most


@pytest.mark.parametrize("oversplit", OVERSPLITS)
@pytest.mark.parametrize("fill", [0, 1])
def test_chunks(oversplit: int, fill: int) -> None:
    for lanes, units, grain in itertools.product(LANES, UNITS, GRAINS):
        n = CORE.chunks(units, grain, lanes, oversplit, fill)
        where = (units, grain, lanes, oversplit, fill, n)
        assert 1 <= n <= units, where
        assert n <= max(1, lanes * oversplit), where
        least = units // n
        if units < grain:
            assert n == 1, where
        elif fill and n == lanes:
            assert 2 * least + 1 >= grain, where  # a filled wave: half the grain, and a unit is not cut
        else:
            assert least >= grain, where
        shares = waves(n, lanes)
        assert not (min(shares) == 0 and max(shares) > 1), where
        if n > lanes:
            assert max(shares) - min(shares) == 0, where  # whole waves
        if lanes == 1:
            assert n == 1, where


def test_a_wave_is_filled_from_half_a_wave_on() -> None:
    for lanes in LANES[1:]:
        for chunks in range(1, lanes):
            n = CORE.chunks(chunks * 4, 4, lanes, 1, 1)
            expected = lanes if 8 * chunks // lanes >= 4 and chunks * 4 >= lanes else chunks
            assert n == expected, (lanes, chunks)
            assert CORE.chunks(chunks * 4, 4, lanes, 1, 0) == chunks


def test_parts_are_near_equal_and_cover_everything_once() -> None:
    for total in (*UNITS, 0, 10**6, 2**40 + 7):
        for count in (1, 2, 3, 7, 8, 47, 48, 255, 256, 1024):
            found = parts(total, count)
            assert found[0][0] == 0 and found[-1][1] == total
            sizes = {b - a for a, b in found}
            assert min(sizes) >= total // count and max(sizes) <= -(-total // count), (total, count)
            assert [b - a for a, b in found] == sorted((b - a for a, b in found), reverse=True)  # larger ones first
    assert [b - a for a, b in parts(2**62, 3)] == [2**62 // 3 + 1, 2**62 // 3, 2**62 // 3]


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("oversplit", [1, 4])
def test_cells_arm_only_where_rows_starve_the_lanes(mode: int, oversplit: int) -> None:
    armed = 0
    for lanes, units, (tokens, step) in itertools.product(
        LANES, (1, 2, 4, 12, 36, 64, 128), ((1, 4), (4, 4), (5, 5), (64, 5), (128, 32), (512, 4), (4096, 5))
    ):
        tiles = -(-tokens // step)
        chunks = CORE.chunks(units, 1, lanes, oversplit, 0)
        most = (2**40, 3 * lanes)[units % 3 == 1]
        rows, cells = CORE.cells(chunks, tokens, tiles, lanes, oversplit, mode, most)
        where = (units, tokens, step, lanes, rows, cells)
        assert rows == chunks, where
        if mode == 0 or chunks >= lanes or tiles < 2:
            assert cells == 1, where
            continue
        assert 1 <= cells <= tiles, where
        armed += cells > 1
        assert cells == 1 or rows * cells <= most, where
        if mode == 2 and cells > 1:  # no lane idles while another has two
            assert rows * cells % lanes == 0 or rows * cells <= lanes, where
        # Parts follow each other without a gap, so areas that are all positive and sum to the whole cover it once.
        widths = [b - a for a, b in cached_parts(units, rows)]
        heights = [min(b * step, tokens) - a * step for a, b in cached_parts(tiles, cells)]
        assert min(widths) > 0 and min(heights) > 0, where
        assert sum(widths) * sum(heights) == units * tokens, where
    assert (armed > 0) == (mode > 0)


def test_token_blocks() -> None:
    assert CORE.token_block(128, 4 << 20, 4096) == 128
    assert CORE.token_block(128, 4 << 20, 1 << 16) == 64
    assert CORE.token_block(128, 1, 1 << 16) == 1
    assert CORE.token_block(0, 4 << 20, 1) == 1


def test_the_rank_gate_invites_who_has_a_chunk_to_get() -> None:
    for workers, lanes, widest in itertools.product((0, 1, 7, 47, 255), (1, 2, 8, 48, 256), (0, 1, 2, 8, 300)):
        gated = CORE.admitted(workers, lanes, widest, 1)
        assert gated == max(0, min(workers, lanes - 1, widest - 1))
        assert CORE.admitted(workers, lanes, widest, 0) == workers


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    """In C only: what asks for a product of sizes asks there."""
    source = ROOT / "tunekit" / "csrc" / "shape.c"
    if shutil.which("cc") is None or not source.is_file():
        lacking("a C compiler, or the core's sources")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "shape.so")], check=True)
    times = ctypes.CDLL(str(tmp_path / "shape.so")).tk_times
    times.argtypes, times.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    top = (1 << 63) - 1
    sizes = [-(1 << 63), -2, -1, 0, 1, 2, 3, 7, 1 << 31, 1 << 32, 3037000499, 3037000500, 1 << 61, top // 7, top - 1, top]
    for a, b in itertools.product(sizes, repeat=2):
        assert times(a, b) == (a * b if min(a, b) >= 0 and a * b <= top else -1), (a, b)
