# SPDX-License-Identifier: Apache-2.0
"""Rows whose instructions this CPU lacks, run by trap and emulate: the shipped objects, the family's own gates.

AVX-VNNI and VNNI-INT8 rows (VEX encodings) and AMX rows; of these the 512-bit companions run in the machine
(emulate/machine.py) where the CPU has no AVX-512. What retires in the handler is counted, and compared with what a
row's parameters say. A CPU that has the instructions runs the same tests on them, uncounted.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import resource
import signal
import subprocess
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulate
import numpy as np
import pytest
import q8_cases as exact
from conftest import lacking
from emulate import machine
from emulate.rows import KERNEL, Object, bind, failures, mutant

import tunekit
from tunekit.cpu import this_features
from tunekit.cpu.features import implied
from tunekit.q8 import fixtures, grid, oracle, product
from tunekit.q8.layout import aligned, layout_of, pack_plane
from tunekit.rows import Row

BLOCK = grid.BLOCK

pytestmark = [pytest.mark.build, pytest.mark.slow]


def _objects() -> list[Object]:
    """Every object of the grid that has instructions which the handler performs."""
    return [(row, f) for row in grid.ROWS for f in grid.targets(row) if implied(f) & emulate.EMULATED]


def _name(item: Object) -> str:
    return item[0].suffix


OBJECTS = _objects()
AMX = [item for item in OBJECTS if item[0]["dot"] == "amx_int8"]
VECTOR = [item for item in OBJECTS if item[0]["dot"] != "amx_int8"]


@pytest.fixture(autouse=True)
def one_lane() -> Iterator[None]:
    """What is counted is counted of one thread."""
    with tunekit.threads(1):
        yield


@pytest.fixture
def trap(q8_cache: Path, environ: Callable[..., None]) -> Iterator[emulate.Trap]:
    if not emulate.possible():
        pytest.skip("the handler is written for Linux on x86-64")
    if reason := emulate.why_not():
        lacking(f"no emulation here: {reason}")
    environ(CACHE=str(q8_cache))
    if product.find_core() is None:
        lacking("tunekit._core is not built")
    with emulate.trapping() as found:
        yield found


def _counted(retired: Counter[str]) -> None:
    """The counts are the handler's; where the CPU performs an instruction itself there are none."""
    if emulate.native():
        pytest.skip("this CPU has some of the instructions itself: nothing to count")


def test_there_are_rows() -> None:
    assert len(AMX) >= 10
    assert {row["dot"] for row, _ in VECTOR} == {"vpdpbusd", "vpdpbssd"}
    assert {row.get("bias", 0) for row, _ in VECTOR} == {row.get("bias", 0) for row, _ in AMX} == {0, 128}


@pytest.mark.parametrize("item", OBJECTS, ids=_name)
def test_gates(trap: emulate.Trap, item: Object) -> None:
    bound = bind(item)
    before = trap.retired()
    failed = failures(bound, exact.thinned_gates())
    assert not failed, "\n".join(failed)
    if not emulate.native():
        bias, dot = item[0].get("bias", 0), item[0]["dot"]
        wanted = dot if dot != "amx_int8" else "tdpbsud" if bias else "tdpbssd"
        seen = {name for name in trap.retired() - before if name.startswith(("vpdp", "tdp"))}
        assert seen == {wanted}


@pytest.mark.parametrize("item", [AMX[0], AMX[-1]], ids=_name)
def test_only_the_companions_of_an_amx_row_use_avx512(trap: emulate.Trap, item: Object) -> None:
    """What runs while trapping alone, and what needs AVX-512, or the machine."""
    bound = bind(item)
    try:
        code = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(bound.module.path)], capture_output=True, text=True, timeout=60
        ).stdout
    except OSError:
        lacking("no objdump here")
    functions = {part.partition(">:")[0].rpartition("<")[2]: part for part in code.split("\n\n")}
    mine = {name: text for name, text in functions.items() if name.partition("__")[2].startswith(item[0].suffix)}
    wide = {name for name, text in mine.items() if any(w in text for w in ("%zmm", "%k1", "%xmm16", "%ymm16"))}
    exactly = {n for n in mine if n.partition("__")[2] == item[0].suffix or "x" in n.rpartition("_")[2]}
    assert {name.partition("__")[0] for name in wide & exactly} <= {f"tk_tunekit_{name}" for name in machine.WIDE}


# --- what retires -----------------------------------------------------------------------------------------


@functools.cache
def _operands(layout: Any, tokens: int, nb: int, groups: int) -> tuple[Any, ...]:
    rng = np.random.default_rng([tokens, nb, groups])
    n, k = groups * layout.mr, nb * BLOCK
    q = rng.integers(-127, 128, (tokens, k), dtype=np.int8)
    w = rng.integers(-128, 128, (n, k), dtype=np.int8)
    return q, fixtures.scales(rng, (tokens, nb)), w, fixtures.scales(rng, (n, nb))


def _tile_call(trap: emulate.Trap, bound: Any, tokens: int, t0: int, nt: int, nb: int, ng: int) -> Counter[str]:
    """What one call of the tile retires; its result is compared as well."""
    layout = layout_of(bound.row)
    q, s, w, ws = _operands(layout, tokens, nb, ng)
    xa = aligned(int(bound.call("q8q8_acts_bytes", tokens, nb)), np.uint8)
    bound.call("q8q8_prepare", xa, q, s, tokens, 0, tokens, nb)
    planes = pack_plane(w, ws, layout)
    y = np.full((nt, ng * layout.mr), np.nan, np.float32)
    retired = trap.during(bound.call, "q8q8", y, y.shape[1], *planes, xa, tokens, t0, nt, nb, ng)
    exact.same_bits(y, oracle.matmul_codes(q[t0 : t0 + nt], s[t0 : t0 + nt], w, ws))
    return retired


@pytest.mark.parametrize("item", VECTOR, ids=_name)
def test_vector_rows_retire_what_their_parameters_say(trap: emulate.Trap, item: Object) -> None:
    row, bound = item[0], bind(item)
    _counted(trap.retired())
    layout, step = layout_of(row), grid.tokstep(row)
    each = layout.mr // 8 * (BLOCK // layout.kgroup)  # dots for one token and one block of one group
    for nt in range(1, step + 1):
        for nb, ng in ((1, 1), (4, 2), (5, 3)):
            retired = _tile_call(trap, bound, nt + 2, 1, nt, nb, ng)
            assert retired == {row["dot"]: each * nt * nb * ng}, (nt, nb, ng)
    q, s, w, ws = _operands(layout, 3, 7, 4)
    xa = aligned(int(bound.call("q8q8_acts_bytes", 3, 7)), np.uint8)
    bound.call("q8q8_prepare", xa, q, s, 3, 0, 3, 7)
    y = np.empty(4 * layout.mr, np.float32)
    retired = trap.during(bound.call, "q8q8_gemv", y, *pack_plane(w, ws, layout), xa, 3, 2, 7, 4)
    assert retired == {row["dot"]: each * 7 * 4}
    exact.same_bits(y, oracle.matmul_codes(q[2:], s[2:], w, ws)[0])


def _amx_tile(row: Row, nt: int, nb: int, ng: int) -> Counter[str]:
    """Instructions of one call of an AMX tile."""
    side, tiles = grid.groups(row), -(-nt // 16)
    steps = [side] * (ng // side) + [1] * (ng % side)
    dot = "tdpbsud" if row.get("bias", 0) else "tdpbssd"
    products = nb * tiles * ng
    found = Counter({dot: products, "tilezero": products, "tilestored": products})
    found["tileloadd"] = nb * sum(tiles + g for g in steps)
    if not row.get("latch", 0):
        found += Counter(ldtilecfg=1, tilerelease=1)
    return found


@pytest.mark.parametrize("item", AMX, ids=_name)
def test_amx_rows_retire_what_their_parameters_say(trap: emulate.Trap, item: Object) -> None:
    row, bound = item[0], bind(item)
    _counted(trap.retired())
    step, latch = grid.tokstep(row), int(row.get("latch", 0))
    assert trap.during(bound.call, "q8q8_amx_cfg") == Counter(ldtilecfg=latch)
    for nt in sorted({1, 2, 15, 16, min(17, step), step}):
        for nb, ng in ((1, 1), (2, 2), (3, 3), (5, 1)):
            for tokens, t0 in ((nt, 0), (nt + 40, 7), (nt + 3, 3)):
                assert _tile_call(trap, bound, tokens, t0, nt, nb, ng) == _amx_tile(row, nt, nb, ng), (nt, nb, ng)
    assert trap.palette() == latch


@pytest.mark.parametrize("item", AMX, ids=_name)
def test_a_traversal_configures_once_and_takes_whole_steps(trap: emulate.Trap, item: Object) -> None:
    row, bound = item[0], bind(item)
    _counted(trap.retired())
    native, side = product.bind(bound), grid.groups(row)
    for t, k, n in ((33, 96, 40), (33, 8192, 40), (5, 96, 48)):  # K 8192: a group is all of a step's 128 KiB
        rng = np.random.default_rng([t, k, n])
        w = rng.integers(-128, 128, (n, k), dtype=np.int8)
        ws = fixtures.scales(rng, (n, k // BLOCK))
        x = rng.standard_normal((t, k), dtype=np.float32)
        y = np.empty((t, n), np.float32)
        retired = trap.during(native.core.q8_matmul, native.row, y, x, *pack_plane(w, ws, native.layout), t, n, k)
        exact.same_bits(y, oracle.matmul_codes(*oracle.quantize(x), w, ws))
        count = -(-t // grid.tokstep(row))
        widths = [t // count + (i < t % count) for i in range(count)]
        groups, rest = divmod(n, 16)
        near = -(-max(131072 // (16 * k), 1) // side) * side
        steps = [min(near if count > 1 else groups, groups - g) for g in range(0, groups, near if count > 1 else groups)]
        want = Counter(ldtilecfg=int(row.get("latch", 0)))
        for ng in steps + [1] * bool(rest):
            for nt in widths:
                want += _amx_tile(row, nt, k // BLOCK, ng)
        assert retired == want, (t, k, n)


# --- tile state -------------------------------------------------------------------------------------------


def _product(bound: Any, t: int = 20) -> None:
    """A whole product, compared with the oracle."""
    row = product.bind(bound)
    rng = np.random.default_rng(3)
    w, ws = rng.integers(-128, 128, (40, 96), dtype=np.int8), fixtures.scales(rng, (40, 3))
    x = rng.standard_normal((t, 96), dtype=np.float32)
    y = np.full((t, 40), np.nan, np.float32)
    row.core.q8_matmul(row.row, y, x, *pack_plane(w, ws, row.layout), t, 40, 96)
    exact.same_bits(y, oracle.matmul_codes(*oracle.quantize(x), w, ws))


LATCH = [item for item in AMX if item[0].get("latch", 0)]
OPEN = [item for item in AMX if not item[0].get("latch", 0)]


@pytest.mark.parametrize("latch", LATCH, ids=_name)
def test_tile_state_between_rows(trap: emulate.Trap, latch: Object) -> None:
    """A row without latch releases the tiles that a row with latch has configured; the next traversal mends it."""
    first, second = bind(latch), bind(OPEN[1])
    for bound in (first, second, first, first, second, second, first):
        _product(bound)
        if not emulate.native():
            assert trap.palette() == (bound is first)


@pytest.mark.parametrize("latch", LATCH[:1], ids=_name)
def test_every_thread_configures_its_own_tiles(trap: emulate.Trap, latch: Object) -> None:
    bound = bind(latch)
    _product(bound)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _product(bound)
        except BaseException as error:  # an assertion in a thread is nobody's failure
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def _ends_with(act: Callable[[], None]) -> int:
    """The signal that ends a child which does this; 0 where it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside other threads: the child only computes
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        emulate._load().remove()
        faulthandler.disable()
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        signal.alarm(60)
        with emulate.trapping():
            act()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def test_a_latch_row_without_its_configuration_faults(trap: emulate.Trap) -> None:
    """The mistake that the configuration companion is there for, put back."""
    if emulate.native():
        pytest.skip("this CPU has the instructions itself")
    bound, other, layout = bind(LATCH[0]), bind(OPEN[1]), layout_of(LATCH[0][0])
    q, s, w, ws = _operands(layout, 16, 1, 1)
    xa = aligned(int(bound.call("q8q8_acts_bytes", 16, 1)), np.uint8)
    bound.call("q8q8_prepare", xa, q, s, 16, 0, 16, 1)
    y, planes = np.empty((16, 16), np.float32), pack_plane(w, ws, layout)
    arguments = ("q8q8", y, 16, *planes, xa, 16, 0, 16, 1, 1)

    def configured() -> None:
        bound.call("q8q8_amx_cfg")
        bound.call(*arguments)

    def released_by_another() -> None:
        _product(other)
        bound.call(*arguments)

    assert _ends_with(configured) == 0
    assert _ends_with(released_by_another) == signal.SIGILL


# --- mutants ----------------------------------------------------------------------------------------------


def _row(suffix: str) -> Object:
    return next(item for item in OBJECTS if item[0].suffix == suffix)


_AMX = "dot_amx_int8_width512_mr16_kstep1_nrsplit2"
_BUSD = "dot_vpdpbusd_width256_mr8_kstep2"

MUTANTS: list[tuple[str, str | re.Pattern[str], str, str | None]] = [
    (f"{_AMX}_bias128", "_tile_dpbsud", "_tile_dpbsud", None),
    (f"{_AMX}_bias128", "_tile_dpbsud", "_tile_dpbssd", "tile"),
    (f"{_AMX}_bias128", "_tile_dpbsud", "_tile_dpbusd", "tile"),
    (f"{_AMX}_bias128", "_mm256_add_epi32(a, begin)", "a", "tile"),
    (_AMX, "_tile_dpbssd", "_tile_dpbsud", "tile"),
    (_AMX, "_tile_dpbssd", "_tile_dpbusd", "tile"),
    (_AMX, "skip0 * TK_SIDE", "0 * TK_SIDE", "tile"),
    (_AMX, "skip1 * stride + tk_scales(nb)", "tk_scales(nb)", "tile"),
    (_AMX, "_tile_zero(3);", "", "tile"),
    (f"{_AMX}_pipe1", "products[(i & 1) ^ 1]", "products[i & 1]", "tile"),
    (f"{_AMX}_pipe1", "products[(nb & 1) ^ 1]", "products[0]", "tile"),
    (f"{_BUSD}_bias128", "_mm256_dpbusd_avx_epi32(acc, w, x)", "_mm256_dpbusd_avx_epi32(acc, x, w)", "tile"),
    (f"{_BUSD}", "tk_signed(w, x))", "x)", "tile"),
    # As an intrinsic, or where the compiler has none as assembly text.
    ("dot_vpdpbssd_width256_mr8_kstep2", re.compile(r"dpbssd(?=_epi32\(| %2)"), "dpbsud", "tile"),
]


@pytest.mark.parametrize(("suffix", "old", "new", "fails"), MUTANTS, ids=[f"{m[0]}: {m[2] or 'nothing'}" for m in MUTANTS])
def test_mutants_fail(
    trap: emulate.Trap, suffix: str, old: str | re.Pattern[str], new: str, fails: str | None
) -> None:
    item = _row(suffix)
    bound = bind(item)
    changed, _library = mutant(item, old, new, bound)
    if isinstance(bound, machine.InMachine):
        changed = machine.within(changed)
    failed = next((f"{g.name}: {reason}" for g in exact.thinned_gates() if (reason := machine.guarded(g.run, changed))), None)
    assert (failed is None) if fails is None else (failed is not None and failed.startswith(fails)), failed


# --- the public way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", OBJECTS, ids=_name)
def test_public_pack_and_matmul(trap: emulate.Trap, item: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row tails and a token tail, through the calls that users make."""
    from tunekit import q8

    bound = bind(item)
    row = product.bind(bound)
    monkeypatch.setattr(product, "native", lambda: row)
    rng = np.random.default_rng(11)
    for n, t in ((40, 5), (44, 5), (64, 17), (44, 1)):
        m = q8.Matrix(rng.integers(-128, 128, (n, 256), dtype=np.int8), fixtures.scales(rng, (n, 8)))
        x = rng.standard_normal((t, 256), dtype=np.float32)
        before = trap.retired()
        y = q8.matmul(x, m)
        assert emulate.native() or trap.retired() != before or item[0]["dot"] == "amx_int8"
        exact.same_bits(y, oracle.matmul_codes(*oracle.quantize(x), m.codes, m.scales))
        exact.same_bits(q8.matmul(q8.quantize(x), m), y)


def test_the_dispatcher_is_not_fooled(trap: emulate.Trap) -> None:
    """While the handler is on, rows that this CPU lacks stay as refused as ever."""
    from tunekit import dispatch

    refused = dispatch.why_not(KERNEL)
    for row, features in OBJECTS:
        others = [implied(f) <= this_features() for f in grid.targets(row)]
        if not implied(features) <= this_features() and not any(others):
            assert "this CPU lacks" in refused[row.suffix] or "not built" in refused[row.suffix]
    assert not set(dispatch.grid_rows(KERNEL)) & set(refused)
