# SPDX-License-Identifier: Apache-2.0
"""Products on many lanes: the oracle's bits for every lane count, chunk shape and row; fused products; bad input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit import core, q8, team
from tunekit.q8 import fixtures, kernels, oracle, product

CORE = core.core()
pytestmark = [pytest.mark.build, pytest.mark.skipif(CORE is None, reason="tunekit._core is not built")]

SHAPES: tuple[dict[str, int], ...] = (
    {"ceiling": 1},
    {"q8_batch_chunks_per_job": 1, "q8_gemv_chunks_per_job": 1},
    {"q8_batch_chunks_per_job": 7, "q8_gemv_chunks_per_job": 5, "matmul_min_chunk_rows": 0},
    {"batch_grid_2d": 1, "matmul_min_chunk_rows": 1 << 20},
    {"batch_grid_2d": 2, "matmul_min_chunk_rows": 64, "q8_token_block": 3},
    {"q8_token_block": 1, "gemv_wave_fill": 0, "matmul_min_chunk_rows_gemv": 0},
    {"q8_l2_budget": 1 << 10, "act_threshold": 1, "team_rank_gate": 0},
    {"gemv_lane_cap": 2, "batch_lane_cap": 3, "act_threshold": 100},
)
"""Numbers of the profile under which products are cut in every way that there is."""


@pytest.fixture
def shape() -> Iterator[Callable[[dict[str, int], int], None]]:
    """Sets numbers, and pretends to have so many lanes: workers share the CPUs that there are."""

    def change(numbers: dict[str, int], lanes: int) -> None:
        team.forget()
        team.start()
        CORE.set_knob("target_chunk_work", 1)
        CORE.set_knob("wake_work", 0)
        for name, value in numbers.items():
            CORE.set_knob(name, value)
        CORE.set_knob("pretend_lanes", lanes)

    yield change
    CORE.set_knob("pretend_lanes", 0)
    team.forget()


CASES = ((1, 576, 192), (1, 64, 1000), (3, 96, 37), (5, 64, 16), (33, 160, 300), (130, 96, 40), (64, 32, 7))


def problem(t: int, k: int, n: int) -> tuple[np.ndarray, q8.Matrix, np.ndarray]:
    rng = np.random.default_rng([t, k, n])
    x = rng.standard_normal((t, k), dtype=np.float32)
    m = q8.Matrix(rng.integers(-128, 128, (n, k), dtype=np.int8), fixtures.scales(rng, (n, k // 32)))
    return x, m, oracle.matmul_codes(*oracle.quantize(x), m.codes, m.scales)


@pytest.mark.parametrize("lanes", [2, 3, 4, 8, 17])
@pytest.mark.parametrize("numbers", SHAPES, ids=lambda n: "-".join(n))
def test_bits_do_not_depend_on_lanes_or_chunks(
    shape: Callable[..., None], numbers: dict[str, int], lanes: int
) -> None:
    shape(numbers, lanes)
    product.native()
    CORE.set_knob("team_prof", 1)
    team.counts(reset=True)
    for t, k, n in CASES:
        x, m, want = problem(t, k, n)
        exact.same_bits(q8.matmul(x, m), want)
        exact.same_bits(q8.matmul(q8.quantize(x), m), want)
        exact.same_bits(q8.matmul(x[0], m), want[0])
    assert (team.counts()["ops"] == 0) == ("ceiling" in numbers)  # they did run on the team


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_mxfp4_batches_on_lanes(shape: Callable[..., None], lanes: int) -> None:
    shape({}, lanes)
    rng = np.random.default_rng(8)
    for t, k, n in ((1, 64, 200), (4, 96, 70), (5, 96, 70), (70, 160, 333)):
        m = q8.from_mxfp4(rng.integers(0, 256, n * (k // 32) * 17, dtype=np.uint8) & 0xBF, n, k)
        x = rng.standard_normal((t, k), dtype=np.float32)
        exact.same_bits(q8.matmul(x, m), oracle.matmul(q8.quantize(x), m))


def test_every_row_on_lanes(q8_cache: Path, environ: Callable[..., None], shape: Callable[..., None]) -> None:
    from tunekit import dispatch

    environ(CACHE=str(q8_cache))
    rows = dispatch.grid_rows(kernels.q8q8.kernel)
    if not rows:
        pytest.skip("no row is built here")
    cases = [problem(*case) for case in ((1, 256, 300), (37, 96, 100), (130, 64, 45))]
    for (bound, lanes), numbers in zip(itertools.product(rows.values(), (2, 5)), itertools.cycle(SHAPES[1:])):
        shape(numbers, lanes)
        row = product.bind(bound)
        for x, m, want in cases:
            y = np.full(want.shape, np.nan, np.float32)
            row.core.q8_matmul(row.row, y, x, *m.planes(row.layout), x.shape[0], *m.shape)
            exact.same_bits(y, want)


@pytest.fixture(params=["native", "python"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr("tunekit.q8.fused.native", lambda: None)
    return str(request.param)


def mixed(seed: int = 3) -> tuple[list[q8.Matrix], list[np.ndarray | None]]:
    rng = np.random.default_rng(seed)
    k = 96
    first = q8.pack(rng.standard_normal((70, k), dtype=np.float32))
    second = q8.from_mxfp4(rng.integers(0, 256, 33 * (k // 32) * 17, dtype=np.uint8) & 0xBF, 33, k)
    third = q8.Matrix(rng.integers(-128, 128, (16, k), dtype=np.int8), rng.random((16, k // 32), dtype=np.float32))
    assert first.scales_fit_float16 and not third.scales_fit_float16
    empty = q8.pack(np.zeros((0, k), np.float32))
    return [first, second, third, empty], [rng.standard_normal(70).astype(np.float32), None, None, None]


@pytest.mark.parametrize("lanes", [1, 2, 7])
@pytest.mark.parametrize("t", [1, 2, 6, 140])
def test_matrices_that_share_activations(tier: str, shape: Callable[..., None], lanes: int, t: int) -> None:
    matrices, bias = mixed()
    x = np.random.default_rng(t).standard_normal((t, 96), dtype=np.float32)
    for numbers in SHAPES[1:]:
        shape(numbers, lanes)
        for source in (x, q8.quantize(x)):
            found = q8.matmul_many(source, matrices, bias)
            for y, m, b in zip(found, matrices, bias, strict=True):
                want = oracle.matmul(q8.quantize(x), m)
                exact.same_bits(y, want if b is None else want + b)
    out = [np.full((t, m.shape[0]), np.nan, np.float32) for m in matrices]
    assert all(a is b for a, b in zip(q8.matmul_many(x, matrices, out=out), out, strict=True))
    exact.same_bits(out[0], oracle.matmul(q8.quantize(x), matrices[0]))
    vector = q8.matmul_many(x[0], matrices[:1])[0]
    assert vector.shape == (70,)
    exact.same_bits(vector, out[0][0])


@pytest.mark.parametrize("lanes", [1, 2, 7])
@pytest.mark.parametrize("offsets", [(0, 5, 5, 12, 13), (0, 13, 13, 13, 13), (0, 0, 0, 0, 13), (0, 1, 2, 3, 13)])
def test_experts_share_out_the_tokens(
    tier: str, shape: Callable[..., None], lanes: int, offsets: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(4)
    experts = [q8.pack(rng.standard_normal((75, 64), dtype=np.float32)) for _ in range(4)]
    bias = [None, *(rng.standard_normal(75).astype(np.float32) for _ in range(3))]
    x = rng.standard_normal((13, 64), dtype=np.float32)
    want = np.empty((13, 75), np.float32)
    for e, (m, b) in enumerate(zip(experts, bias, strict=True)):
        part = slice(offsets[e], offsets[e + 1])
        want[part] = oracle.matmul(q8.quantize(x), m)[part] + (0 if b is None else b)
    for numbers in SHAPES[1:]:
        shape(numbers, lanes)
        exact.same_bits(q8.matmul_experts(x, experts, offsets, bias), want)
        exact.same_bits(q8.matmul_experts(q8.quantize(x), experts, offsets, bias), want)


def test_long_products_take_several_ops(shape: Callable[..., None]) -> None:
    """More prepared tokens than one op holds: experts are cut in the middle, too."""
    shape({}, 3)
    rng = np.random.default_rng(6)
    k, t = 8192, 1500
    x = np.repeat(rng.standard_normal((3, k), dtype=np.float32), 500, axis=0)
    m = [q8.pack(rng.standard_normal((17, k), dtype=np.float32)) for _ in range(2)]
    few = x[[0, 500, 1000]]
    want = [np.repeat(oracle.matmul(q8.quantize(few), each), 500, axis=0) for each in m]
    exact.same_bits(q8.matmul(x, m[0]), want[0])
    found = q8.matmul_experts(x, m, [0, 700, t])
    exact.same_bits(found[:700], want[0][:700])
    exact.same_bits(found[700:], want[1][700:])


def test_bad_fused_input() -> None:
    matrices, _ = mixed()
    x = np.ones((4, 96), np.float32)
    other = q8.pack(np.ones((4, 64), np.float32))
    with pytest.raises(ValueError, match="empty"):
        q8.matmul_many(x, [])
    with pytest.raises(TypeError, match=r"matrices\[1\] must be a Matrix"):
        q8.matmul_many(x, [matrices[0], x])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="another K"):
        q8.matmul_many(x, [matrices[0], other])
    with pytest.raises(ValueError, match="does not fit"):
        q8.matmul_many(np.ones((4, 64), np.float32), matrices)
    with pytest.raises(ValueError, match="biases"):
        q8.matmul_many(x, matrices, [None])
    with pytest.raises(ValueError, match=r"bias\[0\] must have shape"):
        q8.matmul_many(x, matrices[:1], [np.ones(3, np.float32)])
    with pytest.raises(TypeError, match=r"bias\[0\] must be an array of float32"):
        q8.matmul_many(x, matrices[:1], [np.ones(70)])
    both = np.zeros((4, 70), np.float32)
    with pytest.raises(ValueError, match="overlaps"):
        q8.matmul_many(x, [matrices[0], matrices[0]], out=[both, both])
    with pytest.raises(ValueError, match="outputs"):
        q8.matmul_many(x, matrices, out=[both])
    for offsets in ([0, 4, 4], [0, 3], [1, 4], [0, 5], [4, 0]):
        with pytest.raises(ValueError, match="offsets"):
            q8.matmul_experts(x, matrices[:1], offsets)
    with pytest.raises(ValueError, match="one shape"):
        q8.matmul_experts(x, [matrices[0], matrices[2]], [0, 2, 4])


def test_bad_regions_never_reach_the_kernel() -> None:
    row = product.native()
    if row is None:
        pytest.skip("nothing native is built here")
    m = mixed()[0][0]
    w, ws = m.planes(row.layout)
    x, y = np.ones((4, 96), np.float32), np.zeros((4, 70), np.float32)

    def call(*regions: Any, t: int = 4) -> None:
        row.core.q8_regions(row.row, x, None, None, t, 96, tuple(regions))

    good = (y, w, ws, None, 70, 0, 4, False)
    call(good)
    with pytest.raises(ValueError, match="same memory"):
        call(good, good)
    with pytest.raises(ValueError, match="same memory"):
        call((y, w, ws, None, 70, 0, 3, False), (y, w, ws, None, 70, 2, 4, False))
    call((y, w, ws, None, 70, 0, 2, False), (y, w, ws, None, 70, 2, 4, False))
    with pytest.raises(ValueError, match="tokens are"):
        call((y, w, ws, None, 70, 0, 5, False))
    with pytest.raises(ValueError, match="holds"):
        call((y, w[:-1], ws, None, 70, 0, 4, False))
    with pytest.raises(ValueError, match="overlaps"):
        call((y, w, ws, y.reshape(-1)[:70], 70, 0, 4, False))
    with pytest.raises(TypeError, match="a region is"):
        call((y, w))
    both = np.zeros(400, np.float32)
    with pytest.raises(ValueError, match="activations"):
        row.core.q8_regions(row.row, both[:384], None, None, 4, 96, ((both[100:380], w, ws, None, 70, 0, 4, False),))
