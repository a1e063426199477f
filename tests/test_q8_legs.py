# SPDX-License-Identifier: Apache-2.0
"""The x86 legs as C: every encoding compiles on every compiler that is here, and units guard what they are made for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tunekit as tk
from tunekit.errors import TemplateError, ToolchainError
from tunekit.q8 import grid, kernels
from tunekit.rows import Row

pytestmark = [pytest.mark.build, pytest.mark.slow]

KERNEL = kernels.q8q8.kernel
COMPILERS = [name for name in ("gcc", "clang", "clang-19", "gcc-13", "gcc-14") if shutil.which(name)]
OBJDUMP = shutil.which("objdump")

LEGS = [leg for leg in grid.LEGS if leg.arch == "x86_64" and leg.dot != "amx_int8"]


@pytest.fixture(params=COMPILERS)
def toolchain(request: pytest.FixtureRequest) -> Any:
    from tunekit.build_tools.toolchain import Runner, find_toolchain

    found = find_toolchain(Runner(), {"CC": request.param})
    if found.arch != "x86_64":
        pytest.skip(f"{request.param} compiles for {found.arch}")
    return found


def compiled(toolchain: Any, text: str, flags: tuple[str, ...], folder: Path) -> Path:
    from tunekit.build_tools.objects import compile_text
    from tunekit.build_tools.toolchain import Runner

    path: Path = compile_text(Runner(), toolchain, text, flags, folder)[0]
    return path


def rendered(row: Row, alternative: int) -> tuple[str, tuple[str, ...]]:
    from tunekit.build_tools.render import render
    from tunekit.build_tools.toolchain import row_flags

    features = grid.targets(row)[alternative]
    return render(KERNEL, row, "x86_64", alternative, features), (*row_flags("x86_64", features), *KERNEL.cflags)


def smallest(leg: grid.Leg, **more: int) -> Row:
    return tk.perm(dot=leg.dot, width=leg.width, mr=16 if leg.dot == "madd16" else leg.lanes, kstep=1, nr=1, **more)


def stacked(body: str) -> list[str]:
    """Instructions that move a vector to or from the stack; a broadcast reads four bytes, a scalar."""
    found = re.findall(r"^.*(?:[yz]mm\d+.*\(%r[sb]p|\(%r[sb]p.*[yz]mm).*$", body, re.MULTILINE)
    return [line for line in found if "vpbroadcastd" not in line]


CASES = [(leg, alternative, 0) for leg in LEGS for alternative in range(len(leg.needs))]
CASES += [(leg, alternative, 128) for leg, alternative, _ in CASES if leg.dot == "vpdpbusd"]


@pytest.mark.skipif(OBJDUMP is None, reason="no objdump")
@pytest.mark.parametrize(
    ("leg", "alternative", "bias"), CASES, ids=lambda v: f"{v.dot}{v.width}" if isinstance(v, grid.Leg) else str(v)
)
def test_every_encoding_is_emitted(toolchain: Any, leg: grid.Leg, alternative: int, bias: int, tmp_path: Path) -> None:
    """Also of the legs that this CPU lacks. Eight k-groups (two row vectors of sixteen, where they are of two codes) by one token, in tile and GEMV."""
    row = smallest(leg, **({"bias": bias} if bias else {}))
    text, flags = rendered(row, alternative)
    shown = subprocess.run(
        [str(OBJDUMP), "-d", "--no-show-raw-insn", str(compiled(toolchain, text, flags, tmp_path))],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    parts = re.split(r"^[0-9a-f]+ <([^>]+)>:$", shown, flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    own = [body for name, body in bodies.items() if re.search(r"q8q8__.*_nt1$|q8q8_gemv__", name)]
    assert len(own) == 2
    register = "%zmm" if leg.width == 512 else "%ymm"
    word = {"maddubs": "vpmaddubsw", "madd16": "vpmaddwd"}.get(leg.dot, leg.dot)
    for body in own:
        dots = [line for line in body.splitlines() if re.search(rf"\b{word}\b", line)]
        assert len(dots) == 32 // leg.kgroup * (grid.number(row, "mr") // leg.lanes)
        assert all(register in line for line in dots)
        if leg.dot == "vpdpbusd":
            vex = "avxvnni" in leg.needs[alternative]
            assert all(("{vex}" in line) == vex for line in dots)
        signs = len(re.findall(r"\bvpsign[bwd]|\bvpabsb|\bvpmovb2m|\bvpmovmskb", body))
        assert bool(signs) == (leg.dot == "maddubs" or (leg.dot == "vpdpbusd" and not bias))
        assert not stacked(body)


FALLBACK = [row for row in grid.ROWS if row.suffix in grid.FALLBACK.split(";") and (grid.leg_of(row) or LEGS[0]) in LEGS]


@pytest.mark.skipif(OBJDUMP is None, reason="no objdump")
@pytest.mark.parametrize("row", FALLBACK, ids=lambda row: row.suffix)
def test_defaults_keep_their_sums_in_registers(toolchain: Any, row: Row, tmp_path: Path) -> None:
    """A spilled sum is half the speed on a bad stack address; so no vector of a tile's loops is on the stack at all."""
    for alternative in range(len(grid.targets(row))):
        text, flags = rendered(row, alternative)
        shown = subprocess.run(
            [str(OBJDUMP), "-d", "--no-show-raw-insn", str(compiled(toolchain, text, flags, tmp_path))],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        parts = re.split(r"^[0-9a-f]+ <([^>]+)>:$", shown, flags=re.MULTILINE)
        gemv = r"q8q8_gemv__.*_g\d$" if grid.number(row, "gstreams") > 1 else "q8q8_gemv__"
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            if re.search(rf"q8q8__.*_nt\d+$|{gemv}", name):
                lines = body.splitlines()
                dots = [i for i, line in enumerate(lines) if re.search(r"\bvpdp|\bvpmadd", line)]
                assert not stacked("\n".join(lines[dots[0] : dots[-1]])), f"{name}, {alternative}"


def test_a_unit_without_its_flags_says_which(toolchain: Any, tmp_path: Path) -> None:
    row = tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=1, nr=1)
    text, flags = rendered(row, 0)
    for feature in grid.targets(row)[0]:
        less = (*(f for f in flags if f != f"-m{feature}"), f"-mno-{feature}")
        with pytest.raises(ToolchainError, match=r"compiled for avx512\w+, and the compiler's flags lack it"):
            compiled(toolchain, text, less, tmp_path)


def test_a_unit_is_empty_for_another_architecture(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if compiler is None:
        pytest.skip("no cross compiler")
    text, _ = rendered(tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=1, nr=1), 0)
    (tmp_path / "unit.c").write_text(text, encoding="utf-8")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run([compiler, *flags, "-S", "unit.c"], cwd=tmp_path, check=True, timeout=60)
    assert ".globl" not in (tmp_path / "unit.s").read_text(encoding="utf-8").replace(".global", ".globl")


def test_a_flag_that_the_compiler_has_never_heard_of(toolchain: Any, tmp_path: Path) -> None:
    """Such a flag drops the row, unless its C says that it can do without, as vpdpbssd under gcc 12."""
    flags = ("-O1", "-mtunekit9")
    optional = "/* tunekit-optional-flag: -mtunekit9 */\n"
    with pytest.raises(ToolchainError, match="-mtunekit9"):
        compiled(toolchain, "int x;\n", flags, tmp_path)
    with pytest.raises(ToolchainError, match="-mtunekit9"):
        compiled(toolchain, optional.replace("9", "8") + "int x;\n", flags, tmp_path)
    assert compiled(toolchain, optional + "int x;\n", flags, tmp_path).is_file()
    with pytest.raises(ToolchainError, match="-mtunekit9.*; and without it: .*no text either"):
        compiled(toolchain, optional + '#error "no text either"\n', flags, tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (tk.perm(dot="maddubs", width=256, mr=8, kstep=2, bias=128), "bias"),
        (tk.perm(dot="madd16", width=256, mr=8, kstep=2, bias=128), "bias"),
        (tk.perm(dot="vpdpbssd", width=256, mr=8, kstep=2, bias=128), "bias"),
        (tk.perm(dot="vpdpbusd", width=512, mr=8, kstep=2), "mr"),
        (tk.perm(dot="vpdpbusd", width=512, mr=128, kstep=2), "mr"),
        (tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=3), "kstep"),
        (tk.perm(dot="vpdpbusd", width=512, mr=16, nr=9), "nr"),
        (tk.perm(dot="vpdpbusd"), "no leg"),
    ],
    ids=str,
)
def test_the_template_checks_what_it_is_given(row: Row, words: str) -> None:
    """A row that got past the decline predicate by mistake is no C, and least of all wrong C."""
    from tunekit.build_tools.render import render

    with pytest.raises(TemplateError, match=words):
        render(KERNEL, row, "x86_64", 0, ("avx2", "fma"))
