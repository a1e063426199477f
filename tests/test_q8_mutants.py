# SPDX-License-Identifier: Apache-2.0
"""The gates see what they are for: mistakes that are on record, put back into rendered rows, must fail them.

Each mutant is the C of a row with one thing changed, compiled with the row's flags and run where the CPU can.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import lacking

import tunekit as tk
from tunekit.cpu import this_features
from tunekit.cpu.features import implied
from tunekit.q8 import fixtures, grid, kernels, legality
from tunekit.rows import Row
from tunekit.signature import check_call

pytestmark = [pytest.mark.build, pytest.mark.slow]

KERNEL = kernels.q8q8.kernel

SIGN = tk.perm(dot="maddubs", width=256, mr=8, kstep=2)
SIGN_VNNI = tk.perm(dot="vpdpbusd", width=256, mr=8, kstep=2)
SIGN512 = tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=2)
BIASED = tk.perm(dot="vpdpbusd", width=256, mr=8, kstep=2, gkstep=2, bias=128)
STEPS = tk.perm(dot="maddubs", width=256, mr=8, kstep=4, gkstep=4)
SLICES = tk.perm(dot="maddubs", width=256, mr=8, kstep=4, nrsplit=2)
STREAMS = tk.perm(dot="madd16", width=256, mr=16, kstep=1, nr=5, gstreams=4, gahead=0)
EVEX = 1  # the alternative of the 256-bit VNNI rows that AVX512-VNNI has

# Multiplies biased bytes as the biased row does, with the instruction that cannot.
SATURATING = (
    r"_mm256_dpbusd_epi32\((\w+), (\w+), (\w+)\)",
    r"_mm256_add_epi32(\1, _mm256_madd_epi16(_mm256_maddubs_epi16(\2, \3), _mm256_set1_epi16(1)))",
)


class Built:
    """A compiled unit in the dress of a built row."""

    def __init__(self, library: Path, row: Row, alternative: int) -> None:
        self.row, self.suffix, self.kernel = row, row.suffix, KERNEL
        self.alternative = grid.targets(row)[alternative]
        self._number = alternative
        self._library = ctypes.CDLL(str(library))
        self._signatures = dict(KERNEL.functions)

    def _function(self, name: str) -> Any:
        return getattr(self._library, KERNEL.symbol(name, self.suffix, self._number))

    def address(self, name: str) -> int:
        return int(ctypes.cast(self._function(name), ctypes.c_void_p).value or 0)

    def call(self, name: str, *arguments: Any) -> Any:
        signature = self._signatures[name]
        checked = check_call(name, signature, arguments)
        kinds = {4: ctypes.c_int32, 8: ctypes.c_int64}
        function = self._function(name)
        function.restype = kinds[signature.returns.size] if signature.returns else None
        return function(
            *(
                ctypes.c_void_p(value.ctypes.data) if p.is_pointer else kinds[p.ctype.size](value)
                for p, value in zip(signature.parameters, checked, strict=True)
            )
        )


Make = Callable[..., Built]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Builds a row, changed by (pattern, replacement), each of which must be found."""
    from tunekit.build_tools.render import render
    from tunekit.build_tools.toolchain import Runner, find_toolchain, row_flags

    from tunekit.errors import ToolchainError

    folder = tmp_path_factory.mktemp("mutants")
    try:
        toolchain = find_toolchain(Runner())
    except ToolchainError as error:
        pytest.skip(str(error))
    if toolchain.arch != "x86_64":
        pytest.skip("mutants of x86 rows")
    count = 0

    def build(
        row: Row, *edits: tuple[str, str], alternative: int = 0, features: tuple[str, ...] | None = None
    ) -> Built:
        nonlocal count
        features = features or grid.targets(row)[alternative]
        missing = implied(features) - this_features()
        if missing:
            pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
        text = render(KERNEL, row, "x86_64", alternative, features)
        for pattern, replacement in edits:
            text, found = re.subn(pattern, replacement, text)
            assert found, f"{row.suffix} has no {pattern}"
        count += 1
        source, library = folder / f"m{count}.c", folder / f"m{count}.so"
        source.write_text(text, encoding="utf-8")
        # -O1: half the time, and what a mutant computes does not depend on it.
        flags = [f for f in row_flags("x86_64", features) if f not in ("-O3", "-fvisibility=hidden")]
        command = [*toolchain.command, *toolchain.places, *flags, "-O1", "-w", "-shared", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return Built(library, row, alternative)

    return build


def gates(built: Built, *words: str) -> list[str]:
    """Run the gates whose names begin with one of ``words``; what they object to."""
    return [
        f"{gate.name}: {reason}"
        for gate in fixtures.FIXTURES.gates()
        if gate.name.startswith(words or ("schema", "tile", "gemv")) and (reason := gate.run(built))  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("row", "alternative"), [(SIGN, 0), (SIGN_VNNI, EVEX), (SIGN512, 0), (BIASED, EVEX), (STEPS, 0), (STREAMS, 0)], ids=lambda v: v.suffix if isinstance(v, Row) else str(v)
)
def test_unchanged_rows_pass(make: Make, row: Row, alternative: int) -> None:
    assert gates(make(row, alternative=alternative)) == []


# --- saturation --------------------------------------------------------------------------------------------


def test_maddubs_on_biased_bytes_saturates_and_is_seen(make: Make) -> None:
    """Row 31 declines for this. Needs AVX2 alone: the biased unit, its product replaced."""
    wrong = make(BIASED, SATURATING, alternative=EVEX, features=("avx2", "fma", "f16c"))
    assert any("extremes" in reason for reason in gates(wrong, "tile"))
    assert any("extremes" in reason for reason in gates(wrong, "gemv"))


# --- signs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [SIGN, SIGN512, SIGN_VNNI], ids=lambda v: v.suffix)
def test_sign_rows_rely_on_activations_above_minus_128(make: Make, row: Row) -> None:
    """The precondition is real: psignb and the masked subtract cannot negate -128; the rail is Activations."""
    built = make(row, alternative=EVEX if row is SIGN_VNNI else 0)
    assert not legality.any_activation(row)
    for run in (fixtures._tile, fixtures._gemv):
        assert run(built, fixtures.ANY, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-128"):
        from tunekit import q8

        q8.Activations(np.full((1, 32), -128, np.int8), np.ones((1, 1), np.float32))


def test_biased_rows_do_not(make: Make) -> None:
    built = make(BIASED, alternative=EVEX)
    assert legality.any_activation(BIASED)
    assert gates(built, f"tile, {fixtures.ANY}", f"gemv, {fixtures.ANY}") == []


@pytest.mark.parametrize(
    ("row", "edit"),
    [
        (SIGN, (r"_mm256_sign_epi8\(x, w.raw\)", "x")),
        (SIGN, (r"_mm256_abs_epi8\(raw\)", "raw")),
        (SIGN512, (r"_mm512_mask_sub_epi8\(x, w.negative, _mm512_setzero_si512\(\), x\)", "x")),
        (SIGN512, (r"_mm512_movepi8_mask\(raw\)", "_mm512_movepi8_mask(_mm512_abs_epi8(raw))")),
    ],
    ids=lambda v: v.suffix if isinstance(v, Row) else v[1],
)
def test_signs_left_out(make: Make, row: Row, edit: tuple[str, str]) -> None:
    wrong = gates(make(row, edit))
    assert any(reason.startswith("tile, full range") for reason in wrong)
    assert any(reason.startswith("gemv, full range") for reason in wrong)


# --- block sums --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        (r"sum \*= -128;", "sum *= -127;"),  # for weights - 127
        (r"sum \+= from\[b \* 32 \+ i\];", "sum += from[i];"),  # every block's sum is the first one's
        (r"tk_splat_i\(TK_XSUM\((\d+), (\d+)\)\)", r"tk_splat_i(TK_XSUM(0, \2))"),  # every token's the first one's
        (r"\(TK_XS\(t, at\) \+ 4\)", "TK_XS(t, at)"),  # the scale for the sum
        (r"_mm256_dpbusd_epi32\(acc, w, x\)", "_mm256_dpbusd_epi32(acc, x, w)"),  # the signed operand first
    ],
    ids=lambda edit: edit[1],
)
def test_wrong_block_sums(make: Make, edit: tuple[str, str]) -> None:
    assert any(reason.startswith("tile, full range") for reason in gates(make(BIASED, edit, alternative=EVEX)))


# --- float16 scales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (  # subnormal ones as zero
            (
                r"return _mm256_cvtph_ps\((.*)\);",
                r"const __m128i h = \1, e = _mm_and_si128(h, _mm_set1_epi16(0x7c00));"
                r"return _mm256_cvtph_ps(_mm_andnot_si128(_mm_cmpeq_epi16(e, _mm_setzero_si128()), h));",
            ),
            "every float16 scale",
        ),
        (  # infinities and NaN as numbers, as in the alternative format of Arm's
            (
                r"return _mm256_cvtph_ps\((.*)\);",
                r"const __m128i h = \1, top = _mm_set1_epi16(0x7c00), e = _mm_and_si128(h, top);"
                r"const __m128i most = _mm_or_si128(_mm_and_si128(h, _mm_set1_epi16(INT16_MIN)), _mm_set1_epi16(0x7bff));"
                r"return _mm256_cvtph_ps(_mm_blendv_epi8(h, most, _mm_cmpeq_epi16(e, top)));",
            ),
            "every float16 scale",
        ),
        ((r"const uint16_t \*wsg = ws \+ \(int64_t\)g \* nb", "const uint16_t *wsg = ws + (int64_t)g"), "tile, float16"),
    ],
    ids=["subnormal", "largest exponent", "another group"],
)
def test_float16_scales_read_wrongly(make: Make, edit: tuple[str, str], words: str) -> None:
    row = SLICES if "wsg" in edit[0] else SIGN
    built = make(row, edit)
    assert any(reason.startswith(words) for reason in gates(built, "every float16 scale", "tile", "gemv"))
    assert gates(built, *(f"{what}, {kind}" for what in ("tile", "gemv") for kind in fixtures.KINDS)) == []


# --- remainders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [1, 2, 3])
def test_each_link_of_the_remainder_chain(make: Make, link: int) -> None:
    """Tile and GEMV both: blocks left over by 4 that are not computed, from the first, second or third on."""
    wrong = gates(make(STEPS, (rf"if \(left > {link - 1}\)", f"if (left > {link - 1} && 0)")))
    for kind in ("tile", "gemv"):
        assert any(reason.startswith(f"{kind}, full range, {nb} blocks") for reason in wrong for nb in (link, link + 4))


def test_a_remainder_of_the_wrong_count(make: Make) -> None:
    assert gates(make(STEPS, (r"left = nb % 4", "left = nb % 2")))


# --- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        (r"\+ 2 \* span", "+ 1 * span"),  # a stream's weights are another one's
        (r"\+ 3 \* wspan", "+ 2 * wspan"),  # its scales
        (r"\+ 2 \* yspan", "+ 1 * yspan"),  # its results
        (r" span = \(int64_t\)ng \* nb", " span = (int64_t)nb"),  # right where a stream is one group long
        (r" wspan = \(int64_t\)ng \* nb", " wspan = (int64_t)nb"),
        (r"w \+= \(int64_t\)done \* nb", "w += (int64_t)each * nb"),  # the groups that are left over
        (r"ws \+= \(int64_t\)done \* nb", "ws += (int64_t)each * nb"),
        (r"y \+= \(int64_t\)done", "y += (int64_t)each"),
        (r"_g3\(y, w, ws, record, nb, 1\)", "_g2(y, w, ws, record, nb, 1)"),
    ],
    ids=lambda edit: edit[0],
)
def test_streams_that_begin_elsewhere(make: Make, edit: tuple[str, str]) -> None:
    wrong = gates(make(STREAMS, edit))
    assert wrong and all(reason.startswith("gemv") for reason in wrong)


# --- sizes -------------------------------------------------------------------------------------------------


def test_prepared_form_without_room_for_the_sums(make: Make) -> None:
    small = make(BIASED, (r"\(nb \* \(TK_XBLOCK \+ TK_XSCALE\) \+ 63\)", "(nb * (TK_XBLOCK + 4) + 63)"), alternative=EVEX)
    assert any("acts_bytes" in reason for reason in gates(small, "schema"))


_DRIVER = r"""
#include "q8.h"
#include <string.h>
enum { MR = 32, STEP = 5 };
static void tile(float *restrict y, int64_t ldy, const int8_t *restrict w, const float *restrict ws,
    const uint8_t *restrict xa, int64_t tokens, int64_t t0, int32_t nt, int32_t nb, int32_t ng)
{
    (void)w, (void)ws, (void)xa, (void)tokens, (void)t0, (void)nb;
    for (int64_t t = 0; t < nt; t++)
        for (int64_t i = 0; i < (int64_t)ng * MR; i++)
            y[t * ldy + i] = 1.0f;
}
static void gemv(float *restrict y, const int8_t *restrict w, const float *restrict ws, const uint8_t *restrict xa,
    int64_t tokens, int64_t t, int32_t nb, int32_t ng)
{
    tile(y, 0, w, ws, xa, tokens, t, 1, nb, ng);
}
static int64_t acts_bytes(int64_t tokens, int32_t nb)
{
    return tokens * nb * 64;
}
static void prepare(uint8_t *restrict xa, const int8_t *restrict q, const float *restrict s, int64_t tokens,
    int64_t t0, int64_t t1, int32_t nb)
{
    (void)q, (void)s, (void)tokens;
    memset(xa + t0 * nb * 64, 1, (size_t)((t1 - t0) * nb * 64));
}
static void quantize(int8_t *restrict q, float *restrict s, const float *restrict x, int64_t t0, int64_t t1, int32_t nb)
{
    (void)x, (void)t0;
    memset(q, 1, (size_t)(t1 * nb * 32));
    memset(s, 0, (size_t)(t1 * nb) * sizeof *s);
}
static void none(void)
{
}
int main(void)
{
    tk_q8_load();
    static float y[300 * 97], x[300 * 64], ws[128 * 2];
    static int8_t w[128 * 64];
    const tk_q8_region planes = {.w = w, .ws = ws};
    tk_q8_row row;
    memset(&row, 0, sizeof row);
    row.tile = tile, row.gemv = gemv, row.acts_bytes = acts_bytes, row.prepare = prepare, row.quantize = quantize;
    row.amx_cfg = none, row.mr = MR, row.tokstep = STEP, row.groups = 1;
    static const int64_t tokens[] = {1, 5, 7, 130, 300}, widths[] = {1, 31, 32, 33, 97};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++)
            if (tk_q8_matmul(&row, &planes, y, x, NULL, NULL, tokens[i], widths[j], 64) != 0)
                return 1;
    return 0;
}
"""


def test_scratch_sized_for_the_smallest_group(tmp_path: Path) -> None:
    """The traversal's scratch holds a last group of the row's own mr; AddressSanitizer sees one that is sized for 4."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    sources = Path(kernels.__file__).resolve().parent.parent / "csrc"
    if compiler is None or not (sources / "q8.c").is_file():
        pytest.skip("no compiler, or no sources beside the package")
    (tmp_path / "driver.c").write_text(_DRIVER, encoding="utf-8")
    text = (sources / "q8.c").read_text(encoding="utf-8").partition("/* ---- Python")[0]  # no libpython is linked
    wrong, found = re.subn(r"o->block \* o->row->mr \*", "o->block * 4 *", text)
    assert found
    statuses = []
    for name, source in (("right", text), ("wrong", wrong)):
        (tmp_path / f"{name}.c").write_text(source, encoding="utf-8")
        command = [
            compiler, "-O1", "-w", "-std=c11", "-fsanitize=address", "-pthread", f"-I{sources}",
            f"-I{sysconfig.get_path('include')}", f"{name}.c", "driver.c", str(sources / "team.c"), str(sources / "shape.c"), "-o", name,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        if done.returncode:
            lacking(f"AddressSanitizer and Python.h: {done.stderr.strip()[-200:]}")
        ran = subprocess.run(
            [f"./{name}"], cwd=tmp_path, env={"ASAN_OPTIONS": "detect_leaks=0"}, capture_output=True, text=True, timeout=60
        )
        statuses.append((ran.returncode, "heap-buffer-overflow" in ran.stderr, ran.stderr[-600:]))
    assert statuses[0][0] == 0, statuses[0][2]
    assert statuses[1][0] != 0 and statuses[1][1], statuses[1][2]


# --- companions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("companion", "value"), [("layout", 16), ("layout", 1), ("wbias", 0), ("kgroup", 8), ("kgroup", 1), ("tokstep", 5)]
)
def test_companions_that_disagree_with_the_schema(make: Make, companion: str, value: int) -> None:
    edit = (rf"(q8q8_{companion}__\w+\(void\)\s*\{{\s*return )\d+;", rf"\g<1>{value};")
    wrong = gates(make(BIASED, edit, alternative=EVEX), "schema")
    assert wrong and f"q8q8_{companion}()" in wrong[0]
