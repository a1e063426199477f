# SPDX-License-Identifier: Apache-2.0
"""AVX-512 rows executed by a CPU of software (emulate/machine.py): the shipped objects, the family's own gates.

Every object with EVEX instructions, and the 512-bit companions of the AMX rows, whose tiles run by trap and emulate
beside them. What this CPU has itself is run by other tests; here one object of each leg is, so that the way stays open,
and EMULATE_ALL=1 runs all, as a CPU with AVX2 alone would.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulate
import numpy as np
import pytest
import q8_cases as exact
from conftest import ROOT, lacking
from emulate import machine
from emulate.rows import KERNEL, Object, failures, mutant, name_of, not_made

from tunekit.cpu.features import implied
from tunekit.q8 import grid, oracle, product

pytestmark = [pytest.mark.build, pytest.mark.slow]

OBJECTS: list[Object] = [
    (row, features)
    for row in grid.ROWS
    for features in grid.targets(row)
    if "avx512f" in implied(features) and KERNEL.refuses(row, "x86_64") is None
]
AMX = [item for item in OBJECTS if item[0]["dot"] == "amx_int8"]


def _leg(item: Object) -> tuple[Any, ...]:
    return item[0]["dot"], item[0]["width"], item[0].get("bias", 0) if item[0]["dot"] == "vpdpbusd" else 0


_FIRST = {_leg(item): item for item in reversed(OBJECTS)}
CHOSEN = [
    item for item in OBJECTS if _FIRST[_leg(item)] is item or not implied(item[1]) <= emulate.own() | emulate.EMULATED
]


@pytest.fixture
def ready(q8_cache: Path, environ: Callable[..., None]) -> Iterator[None]:
    """The grid is built, and what the machine leaves to the trap is trapped."""
    if not emulate.possible():
        pytest.skip("the machine is written for Linux on x86-64")
    for reason in (machine.why_not(), emulate.why_not()):
        if reason:
            lacking(reason)
    environ(CACHE=str(q8_cache))
    if product.find_core() is None:
        lacking("tunekit._core is not built")
    with emulate.trapping():
        yield


def _bind(item: Object) -> machine.InMachine:
    try:
        return machine.bind(KERNEL, item[0].suffix, item[1])
    except LookupError as error:
        not_made(str(error))


def _gates(item: Object) -> list[Any]:
    """Of an AMX row those that its 512-bit companions have a part in: the others are test_emulated_rows.py's."""
    wide = ("gemv", "MXFP4", "traversal, 1 ")
    return [g for g in exact.thinned_gates() if item not in AMX or any(w in g.name for w in wide)]


def test_there_are_rows() -> None:
    assert {_leg(item) for item in OBJECTS} == {
        ("maddubs", 512, 0), ("vpdpbusd", 256, 0), ("vpdpbusd", 256, 128), ("vpdpbusd", 512, 0),
        ("vpdpbusd", 512, 128), ("amx_int8", 512, 0),
    }  # fmt: skip
    assert len(AMX) >= 10
    assert all(implied(features) <= emulate.EMULATED | machine.FEATURES for _, features in OBJECTS)


@pytest.mark.parametrize("item", CHOSEN, ids=name_of)
def test_gates(ready: None, item: Object) -> None:
    failed = failures(_bind(item), _gates(item))
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("item", CHOSEN, ids=name_of)
def test_public_pack_and_matmul(ready: None, item: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row tails and a token tail, through the calls that users make."""
    from tunekit import q8

    row = product.bind(_bind(item))
    monkeypatch.setattr(product, "native", lambda: row)
    rng = np.random.default_rng(11)
    for n, t in ((40, 5), (44, 5), (44, 1)):
        m = q8.pack(rng.standard_normal((n, 256), dtype=np.float32))
        x = rng.standard_normal((t, 256), dtype=np.float32)
        y = q8.matmul(x, m)
        assert machine.fault() is None
        exact.same_bits(y, oracle.matmul_codes(*oracle.quantize(x), m.codes, m.scales))
        blocks = rng.integers(0, 256, (n, 8, 17), dtype=np.uint8)
        blocks[..., 0] = rng.integers(100, 140, (n, 8))  # exponents, each before its 16 bytes of codes
        mx4 = q8.from_mxfp4(blocks, n, 256)
        exact.same_bits(q8.matmul(x, mx4), oracle.matmul_codes(*oracle.quantize(x), mx4.codes, mx4.scales))
        assert machine.fault() is None


# --- mutants ----------------------------------------------------------------------------------------------

_BUSD = "dot_vpdpbusd_width512_mr16_kstep2"
_OFF_BY_ONE = "(_mm512_movepi8_mask(raw) & ~(1ULL << 63))"

MUTANTS: list[tuple[str, str, str, str | None]] = [
    (f"{_BUSD}_bias128", "_mm512_dpbusd_epi32", "_mm512_dpbusd_epi32", None),
    (f"{_BUSD}_bias128", "_mm512_dpbusd_epi32(acc, w, x)", "_mm512_dpbusd_epi32(acc, x, w)", "tile"),
    (_BUSD, "_mm512_movepi8_mask(raw)", _OFF_BY_ONE, "tile"),
    ("dot_vpdpbusd_width256_mr8_kstep2_bias128", "_mm256_dpbusd_epi32(acc, w, x)", "_mm256_dpbusd_epi32(acc, x, w)", "tile"),
    ("dot_maddubs_width512_mr16_kstep2", "_mm512_maddubs_epi16(w.mag, tk_signed(w, x))", "_mm512_maddubs_epi16(w.mag, x)", "tile"),
    ("dot_amx_int8_width512_mr16_kstep1_nrsplit2_bias128", "_mm512_dpbusd_epi32(acc, w, x)", "_mm512_dpbusd_epi32(acc, x, w)", "gemv"),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "old", "new", "fails"), MUTANTS, ids=[f"{m[0]}: {m[2]}" for m in MUTANTS])
def test_mutants_fail(ready: None, suffix: str, old: str, new: str, fails: str | None) -> None:
    item = next(item for item in OBJECTS if item[0].suffix == suffix)
    bound = emulate.bind(KERNEL, suffix, item[1], emulate.EMULATED | machine.FEATURES)
    changed, _library = mutant(item, old, new, bound)
    inside = machine.within(changed)
    failed = next((f"{g.name}: {reason}" for g in _gates(item) if (reason := machine.guarded(g.run, inside))), None)
    assert (failed is None) if fails is None else (failed is not None and failed.startswith(fails)), failed


# --- the machine itself -----------------------------------------------------------------------------------

_CODE = r"""
#include <stdint.h>
#include <string.h>
int64_t weigh(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int32_t g, int64_t h)
{ return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h; }
double mean(int64_t n, float a, double b, float c, double d, float e, double f, float g, double h, float i, double j)
{ return (a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j) / n; }
float half(float x) { return x / 2; }
int64_t filled(int32_t n) { volatile char p[1000]; memset((char *)p, 3, sizeof p); return p[n]; }
int64_t aligned(void) { __attribute__((aligned(16))) char p[16]; __asm__ volatile("movaps %%xmm0, %0" : "=m"(p)); return 1; }
int64_t loop(void) { for (;;) __asm__ volatile(""); }
int64_t divide(int64_t a, int64_t b) { return a / b; }
int64_t look(const int64_t *p) { return *p; }
void undefined(void) { __asm__ volatile("ud2"); }
void tiles(void) { __asm__ volatile("tilerelease"); }
"""


@pytest.fixture
def code(ready: None) -> Any:
    return emulate.compile_c(_CODE, "code", "-fvisibility=default", "-fstack-protector-all")


def _at(code: Any, name: str) -> int:
    return int(ctypes.cast(getattr(code, name), ctypes.c_void_p).value or 0)


def test_arguments_and_the_stack(code: Any) -> None:
    assert machine.call(_at(code, "weigh"), 1, -2, 3, -4, 5, -6, 7, -8) == (1 - 4 + 9 - 16 + 25 - 36 + 49 - 64) % 2**64
    assert machine.call(_at(code, "weigh"), 1, 2, 3, 4, 5, 6, -7, 8) == 1 + 4 + 9 + 16 + 25 + 36 - 49 + 64
    f, d = ctypes.c_float, ctypes.c_double
    floats = (f(1.5), d(2.25), f(-3.5), d(4.75), f(5.5), d(-6.25), f(7.5), d(8.125), f(-9.5), d(10.0625))  # two on the stack
    mean = sum((i + 1) * x.value for i, x in enumerate(floats)) / 8
    assert machine.call(_at(code, "mean"), 8, *floats, result=d) == int.from_bytes(bytes(d(mean)), "little")
    assert machine.call(_at(code, "half"), f(-5), result=f) == int.from_bytes(bytes(f(-2.5)), "little")
    assert machine.call(_at(code, "filled"), 999) == 3  # through libc, with the thread's own stack protector
    assert machine.call(_at(code, "aligned")) == 1


def test_faults_are_told_and_the_machine_goes_on(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, arguments, told in (
        ("undefined", (), "#UD"),
        ("tiles", (), "#UD"),  # Bochs has no AMX here: tiles are the trap's
        ("divide", (1, 0), "#DE"),
        ("look", (8,), "no memory at 0x0"),
        ("look", (1 << 63,), "#GP"),
    ):
        with pytest.raises(machine.MachineFault, match=told):
            machine.call(_at(code, name), *arguments)
        assert machine.call(_at(code, "divide"), 12, 3) == 4
    monkeypatch.setattr(machine, "limit", 0.2)
    with pytest.raises(machine.MachineFault, match="did not end within"):
        machine.call(_at(code, "loop"))
    assert machine.call(_at(code, "divide"), 12, 3) == 4


def test_a_cpu_without_vnni_says_so(ready: None, q8_cache: Path) -> None:
    """The wrong CPU: AVX-512 without VNNI runs the rows that need no more, and refuses the others by name."""
    script = (
        "import emulate\nfrom emulate import machine\nfrom emulate.rows import KERNEL, failures\nfrom q8_cases import thinned_gates\n"
        "machine.model = machine.SKYLAKE_X\n"
        "gates = [g for g in thinned_gates() if g.name == 'tile, full range, 2 blocks']\n"
        f"for suffix in ('dot_maddubs_width512_mr16_kstep2', '{_BUSD}'):\n"
        "    print(failures(machine.bind(KERNEL, suffix), gates))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "tests", text=True, capture_output=True, timeout=100, check=False
    )  # the environment names the cache
    assert done.returncode == 0, done.stderr
    passed, refused = done.stdout.splitlines()
    assert passed == "[]"
    assert "q8q8: #UD" in refused


def test_without_the_wheel_there_is_a_reason_and_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    if not emulate.possible():
        pytest.skip("no machine here, wheel or not")
    with pytest.raises(RuntimeError, match=machine.MEND):
        machine._library()
