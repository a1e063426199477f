# SPDX-License-Identifier: Apache-2.0
"""Every row that this box can compile and run: its gates, whole products, and that all rows agree in every bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit.cpu import this_features
from tunekit.errors import TunekitError
from tunekit.q8 import fixtures, grid, kernels, legality, oracle, product
from tunekit.q8.layout import layout_of

pytestmark = pytest.mark.build


@pytest.fixture
def rows(q8_cache: Path, environ: Callable[..., None]) -> dict[str, Any]:
    """Every built row that can run here, by suffix, the C reference among them."""
    from tunekit import dispatch

    environ(CACHE=str(q8_cache))
    if product.find_core() is None:
        pytest.skip("tunekit._core is not built")
    found = dispatch.grid_rows(kernels.q8q8.kernel)
    if not found:
        pytest.skip("no row is built here")
    return dict(found)


def test_every_legal_row_is_built(rows: dict[str, Any]) -> None:
    from tunekit.cpu import this_cpu
    from tunekit.kernel import Target

    for row in grid.ROWS:
        can = any(
            this_features().issuperset(needs)
            and legality.declines(row, Target(this_cpu().arch, features=frozenset(needs))) is None
            for needs in grid.targets(row)
        )
        assert (row.suffix in rows) == can, row.suffix


@pytest.mark.parametrize("suffix", ["reference", *(row.suffix for row in grid.ROWS)])
def test_gates(rows: dict[str, Any], suffix: str) -> None:
    if suffix not in rows:
        pytest.skip("declined, or not for this CPU")
    failed = [f"{gate.name}: {reason}" for gate in fixtures.FIXTURES.gates() if (reason := gate.run(rows[suffix]))]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("t", "k", "n"), [(1, 576, 192), (7, 576, 100), (64, 256, 67), (130, 1536, 40), (300, 96, 33)])
def test_all_rows_give_the_same_bits(rows: dict[str, Any], t: int, k: int, n: int) -> None:
    rng = np.random.default_rng([t, k, n])
    x = rng.standard_normal((t, k), dtype=np.float32)
    from tunekit import q8

    m = q8.Matrix(rng.integers(-128, 128, (n, k), dtype=np.int8), fixtures.scales(rng, (n, k // 32)))
    want = oracle.matmul_codes(*oracle.quantize(x), m.codes, m.scales)
    for bound in rows.values():
        row = product.bind(bound)
        y = np.full((t, n), np.nan, np.float32)
        row.core.q8_matmul(row.row, y, x, *m.planes(row.layout), t, n, k)
        exact.same_bits(y, want)


def test_every_row_through_the_public_calls(
    rows: dict[str, Any], q8_cache: Path, environ: Callable[..., None]
) -> None:
    """pack and matmul under each row in turn: whole groups, row tails 40 and 44, 5 tokens, odd and even blocks."""
    from tunekit import q8

    rng = np.random.default_rng(5)
    cases = []
    for n, k in ((64, 256), (40, 256), (44, 256), (44, 224)):
        x, w = rng.standard_normal((5, k), dtype=np.float32), rng.standard_normal((n, k), dtype=np.float32)
        m = q8.pack(w)
        cases.append((x, w, oracle.matmul_codes(*oracle.quantize(x), m.codes, m.scales)))
    for suffix in rows:
        if suffix == "reference":
            continue
        environ(CACHE=str(q8_cache), PIN=f"q8q8={suffix}")
        for x, w, want in cases:
            exact.same_bits(q8.matmul(x, q8.pack(w)), want)
            exact.same_bits(q8.matmul(x[0], q8.pack(w)), want[0])
        assert kernels.q8q8.bound().suffix == suffix


def test_rows_and_companions_never_part(rows: dict[str, Any], q8_cache: Path, environ: Callable[..., None]) -> None:
    """A row whose companions say anything but the reference's is live; one that declined is the reference throughout."""
    environ(CACHE=str(q8_cache), MODE="test")
    found = {
        name: dict(getattr(kernels, f"q8q8_{name}").variants())
        for name in ("layout", "wbias", "kgroup", "tokstep", "live")
    }
    suffixes = ["reference", *(row.suffix for row in grid.ROWS)]
    for companion in found.values():
        assert list(companion) == suffixes
    for row in grid.ROWS:
        got = {name: found[name][row.suffix]() for name in found}
        if row.suffix in rows:
            schema = layout_of(row)
            assert got == {
                "layout": schema.mr, "wbias": schema.bias, "kgroup": schema.kgroup, "tokstep": grid.tokstep(row), "live": 1
            }  # fmt: skip
        else:
            assert got == {name: found[name]["reference"]() for name in found}
    assert not found["live"]["reference"]()


def test_regimes_run_and_are_exact(rows: dict[str, Any]) -> None:
    """The timed call computes what it should: its output is the oracle's."""
    for bound in list(rows.values())[:2]:
        for regime in fixtures.FIXTURES.regimes()[:3]:
            call = regime.prepare(bound)
            call()
            cells = dict(zip(call.__code__.co_freevars, (c.cell_contents for c in call.__closure__), strict=True))
            k, n, t = cells["k"], cells["n"], cells["t"]
            q, s = cells["codes"].reshape(t, k), cells["scale"].reshape(t, k // 32)
            w, ws = fixtures._weights(k, n)
            assert np.abs(q).max() == 127
            exact.same_bits(cells["y"].reshape(t, n), oracle.matmul_codes(q, s, w, ws.astype(np.float32)))


def test_a_wrong_plane_is_refused_by_the_traversal(rows: dict[str, Any]) -> None:
    """Sizes are checked once more in C: a plane without its padding, or too few scales."""
    bound = rows.get(grid.FALLBACK.split(";")[0]) or list(rows.values())[-1]
    row = product.bind(bound)
    if row.layout.mr == 1:
        pytest.skip("the reference plane has no padding")
    y, x = np.zeros((2, 5), np.float32), np.zeros((2, 64), np.float32)
    w, ws = np.zeros(row.layout.mr * 64, np.int8), np.zeros(row.layout.mr * 2, np.float32)
    halves = ws.astype(np.float16)
    row.core.q8_matmul(row.row, y, x, w, ws, 2, 5, 64)
    row.core.q8_matmul(row.row, y, x, w, halves, 2, 5, 64)
    for wrong in (
        (y, x, w[: 5 * 64], ws, 2, 5, 64),
        (y, x, w, ws[:-1], 2, 5, 64),
        (y, x, w, halves[:-1], 2, 5, 64),
        (y, x, w, halves.repeat(2), 2, 5, 64),  # the bytes of float32 ones
        (y, x, w, halves.view(np.uint16), 2, 5, 64),
        (y, x, w, halves.byteswap().view(halves.dtype.newbyteorder()), 2, 5, 64),
        (y, x, w, ws.astype(np.float64), 2, 5, 64),
        (y[:1], x, w, ws, 2, 5, 64),
        (y, x[:1], w, ws, 2, 5, 64),
        (y, x, w, ws, 2, 5, 63),
        (y, x, w, ws, -2, 5, 64),
    ):
        with pytest.raises((ValueError, TypeError, BufferError)):
            row.core.q8_matmul(row.row, *wrong)
    frozen = y.copy()
    frozen.flags.writeable = False
    with pytest.raises((ValueError, TypeError, BufferError)):
        row.core.q8_matmul(row.row, frozen, x, w, ws, 2, 5, 64)


def test_call_through_the_generated_module(rows: dict[str, Any]) -> None:
    """``kernels.q8q8_layout`` and its siblings answer for the chosen row."""
    bound = kernels.q8q8.bound()
    if bound is None:
        pytest.skip("the Python tier runs")
    try:
        layout = kernels.q8q8_layout()
    except TunekitError as error:  # pragma: no cover
        pytest.fail(str(error))
    assert layout == (grid.number(bound.row, "mr") if bound.row else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_products_after_fork(rows: dict[str, Any]) -> None:
    from tunekit import q8

    m = q8.pack(np.random.default_rng(1).standard_normal((40, 64), dtype=np.float32))
    x = np.ones((3, 64), np.float32)
    bound = list(rows.values())[-1]
    row = product.bind(bound)
    planes = m.planes(row.layout)
    want = np.zeros((3, 40), np.float32)
    row.core.q8_matmul(row.row, want, x, *planes, 3, 40, 64)
    child = os.fork()
    if child == 0:
        y = np.zeros((3, 40), np.float32)
        row.core.q8_matmul(row.row, y, x, *planes, 3, 40, 64)
        os._exit(0 if (y == want).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
