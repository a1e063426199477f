# SPDX-License-Identifier: Apache-2.0
"""The trap-and-emulate handler itself: every instruction against a scalar definition, every refusal.

The stubs are assembled by the machine's own assembler, so the decoder is held to somebody else's encoder.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulate
import numpy as np
import pytest
from numpy.typing import NDArray

# In CI a handler that does not compile is a failure: of every test that asks for it.
_MAY_LACK = os.environ.get("CI", "").lower() in ("", "0", "false") or not emulate.possible()
pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(
        _MAY_LACK and emulate.why_not() is not None, reason=f"no emulation here: {emulate.why_not()}"
    ),
]

# The first letter is the sign of the bytes in the second operand (vvvv), the second of those in the third.
VNNI = {f"vpdpb{a}{b}d{s}": (a == "s", b == "s", s == "s") for a, b in ("us", "ss", "su", "uu") for s in ("", "s")}
TDP = {f"tdpb{a}{b}d": (a == "s", b == "s") for a, b in ("ss", "su", "us", "uu")}

# How a memory operand may be written: what goes before it (b is in rdx, and a copy of it on the stack), and itself.
_ADDRESSES = {
    "base": ("", "(%rdx)"),
    "disp8": ("sub $0x40, %rdx", "0x40(%rdx)"),
    "negative disp8": ("add $0x20, %rdx", "-0x20(%rdx)"),
    "disp32": ("sub $0x12345, %rdx", "0x12345(%rdx)"),
    "negative disp32": ("add $0x12345, %rdx", "-0x12345(%rdx)"),
    "index": ("mov $0x30, %ecx; sub %rcx, %rdx", "(%rdx,%rcx)"),
    "index times 8": ("mov $0x30, %ecx; sub $0x188, %rdx", "8(%rdx,%rcx,8)"),
    "index times 4, disp32": ("mov $-0x30, %rcx; sub $0x340, %rdx", "0x400(%rdx,%rcx,4)"),
    "index without base": ("mov %rdx, %rcx; shr $1, %rcx", "(,%rcx,2)"),
    "r8": ("mov %rdx, %r8", "(%r8)"),
    "r12": ("mov %rdx, %r12", "(%r12)"),
    "r13": ("mov %rdx, %r13", "(%r13)"),
    "rbp": ("mov %rdx, %rbp", "(%rbp)"),
    "r13 and r12": ("lea -0x70(%rdx), %r13; mov $0x38, %r12d", "(%r13,%r12,2)"),
    "rbp and r15": ("lea -0x70(%rdx), %rbp; mov $0x70, %r15d", "(%rbp,%r15)"),
    "rsp": ("", "(%rsp)"),
    "rsp, disp8 and index": ("mov $-0x20, %rcx", "0x20(%rsp,%rcx)"),
    "rsp, disp32": ("mov $-0x100, %rcx", "0x400(%rsp,%rcx,4)"),
    "rip": ("vmovdqu %ymm2, scratch(%rip)", "scratch(%rip)"),
    "fs": ("sub %fs:0, %rdx", "%fs:(%rdx)"),
    "ds": ("", "%ds:(%rdx)"),
    "32 bits": ("bts $40, %rdx", "(%edx)"),
    "32 bits, index": ("mov $-0x10, %ecx; add $0x10, %edx", "(%edx,%ecx)"),
}


def _function(name: str, *lines: str) -> str:
    body = "\n".join(f'  "{line}\\n"' for part in lines for line in part.split("; ") if line)
    return f'__asm__(".globl {name}\\n.type {name}, @function\\n{name}:\\n"\n{body}\n  "ret\\n");\n'


_SAVE = "push %rbp; push %r12; push %r13; push %r15; sub $0x28, %rsp; vmovdqu (%rdx), %ymm2; vmovdqu %ymm2, (%rsp)"
_RESTORE = "add $0x28, %rsp; pop %r15; pop %r13; pop %r12; pop %rbp; vzeroupper"


def _vnni_stub(name: str, line: str, before: str = "", registers: tuple[int, int, int] = (0, 1, 2)) -> str:
    """``acc`` in rdi, ``a`` in rsi, ``b`` in rdx, 32 bytes each; all of acc's register is written back."""
    c, a, b = registers
    return _function(
        name, _SAVE, f"vmovdqu (%rdi), %ymm{c}; vmovdqu (%rsi), %ymm{a}; vmovdqu (%rdx), %ymm{b}",
        before, line, f"vmovdqu %ymm{c}, (%rdi)", _RESTORE,
    )  # fmt: skip


def _source() -> str:
    parts = ["#include <setjmp.h>\n#include <signal.h>\n#include <string.h>\n"]
    parts.append('__asm__(".text\\n.local scratch\\n.comm scratch,32,32\\n");\n')
    for m, (width, low) in itertools.product(VNNI, (("xmm", "low"), ("ymm", "low"), ("ymm", "high"))):
        c, a, b = (0, 1, 2) if low == "low" else (9, 14, 11)
        line = f"{{vex}} {m} %{width}{b}, %{width}{a}, %{width}{c}"
        parts.append(_vnni_stub(f"{m}_{width}_{low}", line, registers=(c, a, b)))
    for m, width in itertools.product(VNNI, ("xmm", "ymm")):
        parts.append(_vnni_stub(f"{m}_{width}_mem", f"{{vex}} {m} (%rdx), %{width}1, %{width}0"))
    for i, (before, operand) in enumerate(_ADDRESSES.values()):
        parts.append(_vnni_stub(f"address_{i}", f"{{vex}} vpdpbusd {operand}, %ymm1, %ymm8", before, (8, 1, 2)))
    # acc and a operand in one register, and all three.
    parts.append(_vnni_stub("same_ca", "{vex} vpdpbssd %ymm2, %ymm0, %ymm0"))
    parts.append(_vnni_stub("same_cab", "{vex} vpdpbssd %ymm0, %ymm0, %ymm0"))
    parts.append(_function("zmm_upper", "vmovdqu64 (%rdi), %zmm3", "{vex} vpdpbusd %ymm3, %ymm3, %ymm3", "vmovdqu64 %zmm3, (%rdi)", "vzeroupper"))
    parts.append(_function("untouched", "vpcmpeqd %ymm7, %ymm7, %ymm7", "{vex} vpdpbusd %ymm3, %ymm3, %ymm4", "vmovdqu %ymm7, (%rdi)", "vzeroupper"))
    parts.append(_function("flags", "mov $-1, %rax; cmp %rax, %rdi", "{vex} vpdpbusd %xmm3, %xmm3, %xmm4", "sete (%rdi); vzeroupper"))

    parts += [_function("ldcfg", "ldtilecfg (%rdi)"), _function("stcfg", "sttilecfg (%rdi)"), _function("release", "tilerelease")]
    parts.append(_function("ldcfg_disp", "ldtilecfg 0x12345(%rdi,%rsi,2)"))
    for t in range(8):
        parts.append(_function(f"zero{t}", f"tilezero %tmm{t}"))
        parts.append(_function(f"load{t}", f"tileloadd (%rdi,%rsi,1), %tmm{t}"))
        parts.append(_function(f"loadt{t}", f"tileloaddt1 (%rdi,%rsi,1), %tmm{t}"))
        parts.append(_function(f"store{t}", f"tilestored %tmm{t}, (%rdi,%rsi,1)"))
    parts.append(_function("load_scaled", "tileloadd 0x40(%rdi,%rsi,8), %tmm1"))
    parts.append(_function("load_high", "mov %rdi, %r10; mov %rsi, %r11", "tileloadd -0x12345(%r10,%r11,2), %tmm1"))
    parts.append(_function("load_no_index", "tileloadd (%rdi), %tmm1"))
    for m in TDP:
        for c, a, b in ((0, 1, 2), (7, 3, 5), (2, 6, 4)):
            parts.append(_function(f"{m}_{c}{a}{b}", f"{m} %tmm{b}, %tmm{a}, %tmm{c}"))

    # Encodings that the assembler refuses, by hand.
    for name, code in {
        "ud2": "0x0f,0x0b",
        "tdp_same_ca": "0xc4,0xe2,0x6b,0x5e,0xc0",  # tdpbssd tmm0, tmm0, tmm2
        "tdp_same_ab": "0xc4,0xe2,0x73,0x5e,0xc1",  # tdpbssd tmm0, tmm1, tmm1
        "tdp_256": "0xc4,0xe2,0x6f,0x5e,0xc1",
        "tdp_w1": "0xc4,0xe2,0xeb,0x5e,0xc1",
        "tdp_tmm8": "0xc4,0x62,0x6b,0x5e,0xc1",
        "tdp_memory": "0xc4,0xe2,0x6b,0x5e,0x07",
        "load_vvvv": "0xc4,0xe2,0x73,0x4b,0x0c,0x37",
        "load_without_sib": "0xc4,0xe2,0x7b,0x4b,0x0f",
        "zero_of_rm1": "0xc4,0xe2,0x7b,0x49,0xc9",
        "vnni_w1": "0xc4,0xe2,0xf5,0x50,0xc2",
        "vnni_map3": "0xc4,0xe3,0x75,0x50,0xc2",
        "vnni_f2_before_vex": "0xf2,0xc4,0xe2,0x75,0x50,0xc2",
        "vpdpwssd": "0xc4,0xe2,0x75,0x52,0xc2",
    }.items():
        parts.append(_function(name, f".byte {code}"))
    parts.append("""
static sigjmp_buf out;
static struct sigaction old[2];
static void jump(int number) { siglongjmp(out, number); }
__attribute__((visibility("default"))) void catch_begin(void)
{
    struct sigaction own;
    memset(&own, 0, sizeof own);
    own.sa_handler = jump;
    sigaction(SIGILL, &own, &old[0]);
    sigaction(SIGSEGV, &own, &old[1]);
}
__attribute__((visibility("default"))) void catch_end(void)
{
    sigaction(SIGILL, &old[0], 0);
    sigaction(SIGSEGV, &old[1], 0);
}
__attribute__((visibility("default"))) int attempt(void (*f)(const void *, long), const void *p, long n)
{
    const int number = sigsetjmp(out, 1);
    if (number == 0)
        f(p, n);
    return number;
}
""")
    return "".join(parts)


@pytest.fixture(scope="module")
def stubs() -> Any:
    try:
        return emulate.compile_c(_source(), "stubs")
    except RuntimeError as error:
        pytest.skip(f"the assembler does not know the instructions: {str(error)[:300]}")


@pytest.fixture
def trap() -> Iterator[emulate.Trap]:
    with emulate.trapping() as found:
        yield found


def needs(*features: str) -> Any:
    """For tests of what the handler does: a CPU that has the instruction does it itself."""
    return pytest.mark.skipif(bool(emulate.native() & set(features)), reason="this CPU has the instruction itself")


def _pointer(array: NDArray[Any], offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + offset)


# --- VNNI -------------------------------------------------------------------------------------------------


def _bytes(kind: str, count: int, seed: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng([seed, len(kind)])
    if kind == "random":
        return rng.integers(0, 256, count, dtype=np.uint8)
    return rng.choice(np.array([0, 255, 128, 127, 1], np.uint8), count)


def _dot4(acc: NDArray[Any], a: NDArray[Any], b: NDArray[Any], signs: tuple[bool, bool], saturate: bool) -> NDArray[Any]:
    """Sums of four products, lane by lane, in Python integers: acc uint32 (n,), a and b uint8 (n, 4)."""
    out = []
    unsigned = not any(signs)
    for c, x, y in zip(acc, a.reshape(-1, 4), b.reshape(-1, 4), strict=True):
        total = int(c) if unsigned else int(np.int32(np.uint32(c).view(np.int32)))
        for p, q in zip(x, y, strict=True):
            total += (int(p.view(np.int8)) if signs[0] else int(p)) * (int(q.view(np.int8)) if signs[1] else int(q))
        if saturate:
            low, high = (0, 2**32 - 1) if unsigned else (-(2**31), 2**31 - 1)
            total = min(max(total, low), high)
        out.append(total & 0xFFFFFFFF)
    return np.array(out, np.uint32)


def _operands(kind: str, seed: int) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint8]]:
    if kind == "random":
        acc = np.random.default_rng(seed).integers(0, 2**32, 8, dtype=np.uint32)
    else:
        edge = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFF00, 0x80000100, 0xFFFFFF00]
        acc = np.random.default_rng(seed).permutation(np.array(edge, np.uint32))
    return acc, _bytes(kind, 32, seed), _bytes(kind, 32, seed + 1000)


@pytest.mark.parametrize("form", ["xmm_low", "ymm_low", "ymm_high", "xmm_mem", "ymm_mem"])
@pytest.mark.parametrize("mnemonic", VNNI)
def test_vnni(stubs: Any, trap: emulate.Trap, mnemonic: str, form: str) -> None:
    a_signed, b_signed, saturate = VNNI[mnemonic]
    lanes = 4 if form.startswith("xmm") else 8
    stub = getattr(stubs, f"{mnemonic}_{form}")
    differ = 0
    for kind, seed in itertools.product(("random", "extreme"), range(12)):
        acc, a, b = _operands(kind, seed)
        want = np.zeros(8, np.uint32)
        want[:lanes] = _dot4(acc, a, b, (a_signed, b_signed), saturate)[:lanes]
        swapped = _dot4(acc, b, a, (a_signed, b_signed), saturate)[:lanes]
        differ += int((swapped != want[:lanes]).sum())
        got = acc.copy()
        retired = trap.during(stub, _pointer(got), _pointer(a), _pointer(b))
        assert (got == want).all(), (kind, seed)
        if not emulate.native():
            assert retired == {mnemonic: 1}
    # Data on which an executor that takes its operands the wrong way round would pass prove nothing.
    assert differ > 20 or a_signed == b_signed


def test_saturation_and_signs_are_told_apart(stubs: Any, trap: emulate.Trap) -> None:
    """No two of the eight instructions agree on the extreme data: each is itself and none of its siblings."""
    seen = {}
    for mnemonic in VNNI:
        results = []
        for seed in range(12):
            acc, a, b = _operands("extreme", seed)
            getattr(stubs, f"{mnemonic}_ymm_low")(_pointer(acc), _pointer(a), _pointer(b))
            results.append(acc)
        seen[mnemonic] = np.concatenate(results).tobytes()
    assert len(set(seen.values())) == len(VNNI)


@pytest.mark.parametrize("which", range(len(_ADDRESSES)), ids=list(_ADDRESSES))
def test_addressing_modes(stubs: Any, trap: emulate.Trap, which: int) -> None:
    name = list(_ADDRESSES)[which]
    low = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)  # MAP_32BIT: in the low 2 GiB
    try:
        acc, a, b = _operands("random", which)
        view = np.frombuffer(low, np.uint8)[512:544]
        view[:] = b
        want = _dot4(acc, a, b, (False, True), False)
        where = view if name.startswith("32 bits") or name == "index without base" else b
        getattr(stubs, f"address_{which}")(_pointer(acc), _pointer(a), _pointer(where))
        assert (acc == want).all()
        del view, where
    finally:
        low.close()


def test_one_register_in_several_places(stubs: Any, trap: emulate.Trap) -> None:
    acc, a, b = _operands("random", 5)
    for name, x, y in (("same_ca", "c", "b"), ("same_cab", "c", "c")):
        got = acc.copy()
        operands = {"c": acc.view(np.uint8), "b": b}
        getattr(stubs, name)(_pointer(got), _pointer(a), _pointer(b))
        assert (got == _dot4(acc, operands[x], operands[y], (True, True), False)).all()


def test_the_rest_of_the_machine_is_left_alone(stubs: Any, trap: emulate.Trap) -> None:
    from tunekit.cpu import this_features

    out = np.zeros(32, np.uint8)
    stubs.untouched(_pointer(out))
    assert (out == 255).all()
    flag = np.full(1, 7, np.uint8)
    stubs.flags(_pointer(flag))
    assert flag[0] == 0
    if "avx512f" in this_features():  # a VEX write zeroes the register beyond its own width
        wide = np.arange(64, dtype=np.uint8)
        want = _dot4(wide[:32].view(np.uint32), wide[:32], wide[:32], (False, True), False)
        stubs.zmm_upper(_pointer(wide))
        assert (wide[:32].view(np.uint32) == want).all()
        assert not wide[32:].any()


# --- AMX --------------------------------------------------------------------------------------------------

Shapes = dict[int, tuple[int, int]]
FULL: Shapes = dict.fromkeys(range(8), (16, 64))


def configuration(shapes: Shapes, palette: int = 1) -> NDArray[np.uint8]:
    """The 64 bytes of a configuration: tile to (rows, colsb)."""
    m = np.zeros(64, np.uint8)
    m[0] = palette
    for t, (rows, colsb) in shapes.items():
        m[16 + 2 * t : 18 + 2 * t].view("<u2")[0] = colsb
        m[48 + t] = rows
    return m


class Tiles:
    """The stubs, as instructions."""

    def __init__(self, stubs: Any, shapes: Shapes) -> None:
        self.stubs = stubs
        self.configured = configuration(shapes)
        stubs.ldcfg(_pointer(self.configured))

    def load(self, t: int, data: NDArray[np.uint8], name: str = "load") -> None:
        getattr(self.stubs, f"{name}{t}")(_pointer(data), ctypes.c_long(data.strides[0]))

    def store(self, t: int, stride: int = 80) -> NDArray[np.uint8]:
        out = np.full((16, stride), 0xEE, np.uint8)
        getattr(self.stubs, f"store{t}")(_pointer(out), ctypes.c_long(stride))
        return out


@pytest.fixture
def amx(stubs: Any) -> Iterator[Callable[[Shapes], Tiles]]:
    from tunekit.core import core

    found = core()
    if "amx-int8" in emulate.native() and (found is None or not found.request_tiles()):
        pytest.skip("the kernel refuses the tile permission")
    with emulate.trapping():
        yield lambda shapes: Tiles(stubs, shapes)
        stubs.release()


@pytest.mark.parametrize("shape", [(16, 64), (1, 4), (5, 20), (16, 4), (1, 64), (16, 62)])
@pytest.mark.parametrize("name", ["load", "loadt"])
def test_tiles_move(amx: Callable[[Shapes], Tiles], shape: tuple[int, int], name: str) -> None:
    rows, colsb = shape
    tiles = amx({t: (16, 64) if t % 2 else shape for t in range(8)})
    data = np.random.default_rng(1).integers(0, 256, (16, 96), dtype=np.uint8)
    for t in range(8):
        tiles.load(t, data, name)
    for t in range(8):
        r, c = (16, 64) if t % 2 else (rows, colsb)
        out = tiles.store(t)
        assert (out[:r, :c] == data[:r, :c]).all()
        out[:r, :c] = 0xEE
        assert (out == 0xEE).all()
    tiles.stubs.zero3()
    assert not tiles.store(3)[:, :64].any()
    assert (tiles.store(5)[:, :64] == data[:, :64]).all()


def test_tile_addresses(amx: Callable[[Shapes], Tiles]) -> None:
    tiles = amx(FULL)
    data = np.random.default_rng(2).integers(0, 256, 16 * 80 + 64, dtype=np.uint8)
    want = np.stack([data[64 + 80 * r : 128 + 80 * r] for r in range(16)])
    tiles.stubs.load_scaled(_pointer(data), ctypes.c_long(10))
    assert (tiles.store(1)[:, :64] == want).all()
    tiles.stubs.zero1()
    tiles.stubs.load_high(_pointer(data, 0x12345 + 64), ctypes.c_long(40))
    assert (tiles.store(1)[:, :64] == want).all()
    tiles.stubs.load_no_index(_pointer(data))  # stride 0: one row sixteen times
    assert (tiles.store(1)[:, :64] == data[:64]).all()
    backwards = np.random.default_rng(3).integers(0, 256, (16, 64), dtype=np.uint8)
    tiles.stubs.load1(_pointer(backwards, 15 * 64), ctypes.c_long(-64))
    assert (tiles.store(1)[:, :64] == backwards[::-1]).all()


def _tile_product(
    start: NDArray[np.uint32], x: NDArray[np.uint8], y: NDArray[np.uint8], signs: tuple[bool, bool]
) -> NDArray[np.uint32]:
    """start (m, n) plus x (m, k, 4) by y (k, n, 4), each byte as signed or not, modulo 2**32."""
    wide = [(v.view(np.int8) if s else v).astype(np.int64) for v, s in zip((x, y), signs, strict=True)]
    return np.asarray((np.einsum("mkj,knj->mn", *wide) + start.astype(np.int64)).astype(np.uint32))


@pytest.mark.parametrize("kind", ["random", "extreme"])
@pytest.mark.parametrize("shape", [(16, 16, 8), (16, 16, 16), (1, 1, 1), (3, 5, 7), (16, 1, 2), (9, 16, 1)])
@pytest.mark.parametrize("mnemonic", TDP)
def test_tile_dot(amx: Callable[[Shapes], Tiles], mnemonic: str, shape: tuple[int, int, int], kind: str) -> None:
    m, n, k = shape  # rows of A, columns of C, groups of four bytes
    signs = TDP[mnemonic]
    for c, a, b in ((0, 1, 2), (7, 3, 5), (2, 6, 4)):
        tiles = amx({c: (m, 4 * n), a: (m, 4 * k), b: (k, 4 * n)})
        left, right = _bytes(kind, m * 4 * k, c).reshape(m, k, 4), _bytes(kind, k * 4 * n, c + 9).reshape(k, n, 4)
        start = np.random.default_rng(7).integers(0, 2**32, (m, n), dtype=np.uint32)

        wanted = _tile_product(start, left, right, signs)

        tiles.load(a, left.reshape(m, 4 * k))
        tiles.load(b, right.reshape(k, 4 * n))
        tiles.load(c, start.view(np.uint8).reshape(m, 4 * n))
        getattr(tiles.stubs, f"{mnemonic}_{c}{a}{b}")()
        got = np.ascontiguousarray(tiles.store(c)[:m, : 4 * n]).view(np.uint32)
        assert (got == wanted).all()
        if signs[0] != signs[1] and m * n > 100:  # the operands the wrong way round are seen
            assert (got != _tile_product(start, left, right, signs[::-1])).any()
            assert (got != _tile_product(start, left, right, (True, True))).any()


def test_configuration_is_read_back_and_clears(amx: Callable[[Shapes], Tiles]) -> None:
    tiles = amx({0: (16, 64), 3: (2, 8)})
    out = np.full(64, 0xEE, np.uint8)
    tiles.stubs.stcfg(_pointer(out))
    assert (out == tiles.configured).all()
    tiles.load(0, np.full((16, 64), 7, np.uint8))
    tiles.stubs.ldcfg_disp(_pointer(tiles.configured, -0x12345 - 200), ctypes.c_long(100))
    assert not tiles.store(0)[:, :64].any()  # loading a configuration zeroes all tiles
    tiles.stubs.release()
    tiles.stubs.stcfg(_pointer(out))
    assert not out.any()
    tiles.stubs.release()  # legal without a configuration, too


@needs("amx-tile")
def test_tiles_belong_to_a_thread(amx: Callable[[Shapes], Tiles], trap: emulate.Trap) -> None:
    tiles = amx(FULL)
    tiles.load(0, np.full((16, 64), 7, np.uint8))
    seen = []

    def other() -> None:
        seen.append(trap.palette())
        mine = Tiles(tiles.stubs, FULL)
        mine.load(0, np.full((16, 64), 9, np.uint8))
        seen.append(mine.store(0)[0, 0])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [0, 9]
    assert (tiles.store(0)[:, :64] == 7).all()


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.fixture
def attempt(stubs: Any) -> Iterator[Callable[..., int]]:
    """Run one stub with the handler on; the number of the signal that it ended with, or 0."""
    stubs.catch_begin()

    def run(name: str, data: NDArray[Any] | None = None, stride: int = 64) -> int:
        with emulate.trapping():
            pointer = _pointer(data) if data is not None else ctypes.c_void_p()
            return int(stubs.attempt(getattr(stubs, name), pointer, ctypes.c_long(stride)))

    yield run
    stubs.catch_end()


SPACE = np.zeros((32, 64), np.uint8)


@pytest.mark.parametrize("name", ["ud2", "vnni_w1", "vnni_map3", "vnni_f2_before_vex"])
def test_foreign_instructions_are_not_ours(attempt: Callable[..., int], name: str) -> None:
    assert attempt(name) == signal.SIGILL


@needs("avxvnni")
def test_word_dots_are_not_emulated(attempt: Callable[..., int]) -> None:
    assert attempt("vpdpwssd") == signal.SIGILL


@needs("amx-tile")
@pytest.mark.parametrize(
    "name", ["zero0", "load0", "loadt0", "store0", "tdpbssd_012", "tdpbsud_012", "tdpbusd_012", "tdpbuud_012"]
)
def test_unconfigured_tiles_fault(attempt: Callable[..., int], name: str) -> None:
    assert attempt("release") == 0
    assert attempt(name, SPACE) == signal.SIGILL
    assert attempt("ldcfg", configuration({7: (16, 64)})) == 0  # others are, these are not
    assert attempt(name, SPACE) == signal.SIGILL
    assert attempt("ldcfg", configuration({}, palette=0)) == 0
    assert attempt(name, SPACE) == signal.SIGILL


@needs("amx-tile")
@pytest.mark.parametrize(
    ("shapes", "fine"),
    [
        ({0: (16, 64), 1: (16, 32), 2: (8, 64)}, True),
        ({0: (15, 64), 1: (16, 32), 2: (8, 64)}, False),  # rows of C and A
        ({0: (16, 64), 1: (16, 32), 2: (9, 64)}, False),  # columns of A and rows of B
        ({0: (16, 64), 1: (16, 36), 2: (8, 64)}, False),
        ({0: (16, 60), 1: (16, 32), 2: (8, 64)}, False),  # columns of C and B
        ({0: (16, 62), 1: (16, 32), 2: (8, 62)}, False),  # no whole 32-bit elements
        ({0: (16, 64), 1: (16, 30), 2: (7, 64)}, False),
        ({0: (16, 64), 1: (16, 32)}, False),
    ],
)
def test_dimensions_that_do_not_fit_fault(attempt: Callable[..., int], shapes: Shapes, fine: bool) -> None:
    assert attempt("ldcfg", configuration(shapes)) == 0
    assert attempt("tdpbssd_012") == (0 if fine else signal.SIGILL)
    assert attempt("release") == 0


@needs("amx-tile")
@pytest.mark.parametrize(
    "name",
    ["tdp_same_ca", "tdp_same_ab", "tdp_256", "tdp_w1", "tdp_tmm8", "tdp_memory", "load_vvvv", "load_without_sib", "zero_of_rm1"],
)  # fmt: skip
def test_encodings_that_do_not_exist_fault(attempt: Callable[..., int], name: str) -> None:
    assert attempt("ldcfg", configuration(FULL)) == 0
    assert attempt(name, SPACE) == signal.SIGILL
    assert attempt("release") == 0


@needs("amx-tile")
@pytest.mark.parametrize(
    "change",
    [{0: 2}, {2: 1}, {15: 1}, {48: 17}, {16: 65}, {17: 1}, {48: 0}, {16: 0}, {32: 4, 56: 1}, {56: 1}],
    ids=["palette", "reserved", "last reserved", "rows", "colsb", "colsb high", "no rows", "no colsb", "tile 8", "row 8"],
)
def test_bad_configurations_are_protection_faults(attempt: Callable[..., int], change: dict[int, int]) -> None:
    bad = configuration({0: (16, 64)})
    for at, byte in change.items():
        bad[at] = byte
    assert attempt("ldcfg", bad) == signal.SIGSEGV


@needs("amx-tile")
def test_the_previous_handler_is_given_back(attempt: Callable[..., int], stubs: Any) -> None:
    """After a refusal the handler is out of the way, and what it would emulate faults like everything else."""
    assert attempt("ud2") == signal.SIGILL
    with emulate.trapping():
        assert stubs.attempt(stubs.ud2, None, 0) == signal.SIGILL
        assert stubs.attempt(stubs.release, None, 0) == signal.SIGILL


@pytest.mark.parametrize("code", ["ud2()", "kill"])
def test_a_real_sigill_ends_the_process(code: str) -> None:
    """An instruction that nobody has, and a signal that no instruction raised."""
    act = "stubs.ud2()" if code == "ud2()" else "os.kill(os.getpid(), 4); time.sleep(5)"
    script = (
        "import os, resource, time, emulate\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        """stubs = emulate.compile_c('__asm__(".globl ud2\\\\nud2: ud2\\\\n");', 'u')\n"""
        f"with emulate.trapping():\n    {act}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGILL, done.stderr.decode()
