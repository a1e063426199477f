# SPDX-License-Identifier: Apache-2.0
"""What a compiler must make of a row: counts of instructions, computed from the row's own arguments.

A block of the plane is multiplied once per k-group, row vector and token, and stands in a function once per place
in its main iteration and once per link of the chain that takes the remainder: ``2 * kstep - 1`` times. Only what
every compiler must do alike is counted exactly: multiplies, sign operations, conversions, fused multiply-adds, and
what must not be there. Totals are a compiler's own affair.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.measure.fixtures import SPILLS, Count, Unit
from tunekit.q8 import legality
from tunekit.q8.grid import BLOCK, FALLBACK, PAIRS, Leg, leg_of, looks_up, number
from tunekit.rows import Row


@dataclass(frozen=True)
class Words:
    """The instructions of a leg.

    Attributes:
        dots: each stands once per k-group, row vector and token.
        per_dot: as ``dots``: sign operations on activations.
        per_weight: each stands once per k-group and row vector, however many tokens there are.
    """

    dots: tuple[str, ...]
    per_dot: tuple[str, ...] = ()
    per_weight: tuple[str, ...] = ()


# (dot, width, bias) to the instructions of tile and GEMV. A biased plane needs no signs: that is its whole purpose.
# fmt: off
WORDS: dict[tuple[str, int, int], Words] = {
    ("maddubs",  256,   0): Words(("vpmaddubsw", "vpmaddwd"), ("vpsignb",), ("vpabsb",)),
    ("madd16",   256,   0): Words(("vpmaddwd",),              (),           ("vpmovsxbw",)),
    ("vpdpbusd", 256,   0): Words(("vpdpbusd",),              ("vpsignb",), ("vpabsb",)),
    ("vpdpbusd", 256, 128): Words(("vpdpbusd",)),
    ("vpdpbssd", 256,   0): Words(("vpdpbssd",)),
    ("maddubs",  512,   0): Words(("vpmaddubsw", "vpmaddwd"), ("vpsubb",),  ("vpabsb", "vpmovb2m")),
    ("vpdpbusd", 512,   0): Words(("vpdpbusd",),              ("vpsubb",),  ("vpabsb", "vpmovb2m")),
    ("vpdpbusd", 512, 128): Words(("vpdpbusd",)),
    ("sdot",     128,   0): Words(("sdot",)),
    ("smmla",    128,   0): Words(("smmla",)),  # the tile; its GEMV is made of sdot
    ("amx_int8", 512,   0): Words(("vpdpbusd",),              ("vpsubb",),  ("vpabsb", "vpmovb2m")),  # the GEMV
    ("amx_int8", 512, 128): Words(("vpdpbusd",)),  # the GEMV; the tile is counted by itself
}

DOTS = (
    "vpmaddubsw", "vpmaddwd", "vpdpbusd", "vpdpbusds", "vpdpbssd", "vpdpbsud", "vpdpbuud", "vpdpwssd", "tdp*",
    "sdot", "udot", "usdot", "sudot", "smmla", "ummla", "usmmla",
)
"""Every instruction that some leg multiplies with: those of the other legs must be absent."""

SIGNS = ("vpsign*", "vpabs*", "vpmovb2m", "vpsubb", "abs", "sqabs", "sqneg")
# fmt: on
CALLS = "call* bl blr"
_AVX512 = r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])"
_REGISTERS = {128: r"\bv\d+\.4s", 256: "%ymm", 512: "%zmm"}


def leg(row: Row) -> Leg:
    """The row's leg. Raises ValueError where it has none."""
    found = leg_of(row)
    if found is None:
        raise ValueError(f"row {row.suffix} has no leg")
    return found


def vectors(row: Row) -> int:
    """Row vectors of a group."""
    return number(row, "mr") // leg(row).lanes


def tile_widths(row: Row) -> range:
    """Tokens that the row's tile functions serve: each width has a function of its own."""
    return range(1, (number(row, "nr") or number(row, "nrsplit")) + 1)


def instances(step: int) -> int:
    """How often a block stands in a function that takes ``step`` blocks an iteration and the rest one by one."""
    return 2 * step - 1


def block_dots(row: Row, tokens: int) -> int:
    """Multiplies of one kind that a tile does for one block.

    An smmla multiplies two rows by two tokens over a k-group of 8; a single last token is a pair with itself.
    """
    if leg(row).dot == "smmla":
        return BLOCK // 8 * (number(row, "mr") // 2) * (-(-tokens // 2))
    return BLOCK // leg(row).kgroup * vectors(row) * tokens


def tile_dots(row: Row, tokens: int) -> int:
    """Multiplies of one kind in the tile function that serves ``tokens`` tokens."""
    return instances(number(row, "kstep")) * block_dots(row, tokens)


def gemv_block_dots(row: Row) -> int:
    """Multiplies of one kind that the GEMV does for one block; on the smmla plane sdot does, four codes at a time."""
    return BLOCK // min(leg(row).kgroup, 4) * vectors(row)


def gemv_dots(row: Row) -> int:
    """Multiplies of one kind in the GEMV's function for one stream."""
    return instances(number(row, "gkstep")) * gemv_block_dots(row)


def gemv_functions(row: Row, entry: str) -> dict[str, int]:
    """The functions of the GEMV that ``entry`` is, by name: how many streams each reads side by side."""
    streams = number(row, "gstreams")
    return {entry: 1} if streams == 1 else {f"{entry}_g{count}": count for count in range(1, streams + 1)}


def mx4_codes(row: Row) -> int:
    """Vectors of codes in a block of the MXFP4 plane, looked up. The smmla plane's hold two rows by eight k."""
    return BLOCK * number(row, "mr") // (leg(row).width // 8)


def mx4_dots(row: Row) -> int:
    """Multiplies in the MXFP4 GEMV: one a vector of codes, and what the offset of unsigned factors adds.

    That is multiplied out by itself, where the prepared activations do not hold it.
    """
    offset = leg(row).dot in ("vpdpbusd", "amx_int8") and not number(row, "bias")
    return mx4_codes(row) + (BLOCK // leg(row).kgroup if offset else 0)


def in_chain(row: Row) -> bool:
    """Whether untuned boxes run the row."""
    return row.suffix in FALLBACK.split(";")


def spill_bound(row: Row) -> int:
    """Spilled vectors that a tile's loops may hold: few where registers suffice, and not without bound elsewhere.

    None at all in a row of the fallback chain, with any compiler: a spilled sum whose slot straddles a page halves the
    speed, in one process of some dozen. In proportion to the multiplies of the main iteration in other rows, which are
    raced before they are used; measured with gcc 12 and clang 19.
    """
    if in_chain(row):
        return 0
    whole = number(row, "kstep") * block_dots(row, tile_widths(row)[-1])
    return whole // (8 if legality.advice(row) is None else 2)


def _blocks(function: str, names: str, each: int, step: int, having: str = "", what: str = "") -> list[Count]:
    """``each`` of an instruction for every block: exact in the main loop, and in the whole function.

    clang may take the chain of remainders twice, once for fewer blocks than an iteration has: whole blocks more.
    """
    total = instances(step) * each
    most = total + (step - 1) * each
    return [
        Count.exactly(function, names, step * each, having, what, looped=True),
        Count(function, names, total, most, having, what, max(each, 1)),
    ]


KINDS = {"": False, "_f16": True}
"""Tile and GEMV stand twice: what their names end with, and whether scales of weights are float16."""


def _product(
    unit: Unit, function: str, halves: bool, words: Words, each: int, tokens: int, step: int, streams: int = 1
) -> list[Count]:
    """The gates that a tile function and a GEMV share: ``each`` products a block and stream, for ``tokens`` tokens.

    Float16 scales are widened once a row vector, however many tokens there are.
    """
    row: Row = unit.row
    width, arm = leg(row).width, leg(row).arch == "aarch64"
    each, folds = each * streams, vectors(row) * tokens * streams
    widened = vectors(row) * streams if halves else 0
    own = (*words.dots, *words.per_dot, *words.per_weight)
    exactly = Count.exactly
    counts: list[Count] = []
    for name in words.dots:
        counts += _blocks(function, name, each, step, "", f"{name}, each product")
        counts += _blocks(function, name, each, step, _REGISTERS[width], f"{name} on {width} bits")
    for name in words.per_dot:
        if width == 512 and vectors(row) * streams > 1:
            # Masked negations; a compiler may negate an activation once, and choose by mask for each row vector.
            least = instances(step) * each // (vectors(row) * streams)
            counts.append(Count(function, name, least, None, what=f"{name}, each splat"))
        else:
            counts += _blocks(function, name, each, step, "", f"{name}, each product")
    for name in words.per_weight:
        counts += _blocks(function, name, each // tokens, step, "", f"{name}, each weight vector")
    counts += _blocks(function, "fmla" if arm else "vfmadd*ps", folds, step, "", "fused multiply-adds of the fold")
    counts += _blocks(function, "scvtf ucvtf fcvt*" if arm else "*cvt*", folds + widened, step, "", "conversions")
    counts += _blocks(function, "fcvtl*" if arm else "vcvtph2ps", widened, step, "", "float16 scales widened")
    counts += [
        exactly(function, " ".join(w for w in DOTS if w not in own), 0, what="other legs' products"),
        exactly(function, CALLS, 0, what="calls"),
    ]
    if not words.per_dot:
        counts.append(exactly(function, " ".join(SIGNS), 0, what="sign operations"))
    if "avxvnni" in unit.features:
        counts.append(exactly(function, "vpdpbusd", 0, r"^(?!\{vex\})", "EVEX encoding"))
    elif "vpdpbusd" in words.dots:
        counts.append(exactly(function, "vpdpbusd", 0, r"\{vex\}", "VEX encoding"))
    return counts


def _tiles(unit: Unit) -> list[Count]:
    """The gates of the row's tile functions."""
    row: Row = unit.row
    words = WORDS[leg(row).dot, leg(row).width, number(row, "bias")]
    counts: list[Count] = []
    for kind, halves in KINDS.items():
        for tokens in tile_widths(row):
            function = f"{unit.symbols[f'q8q8{kind}']}_nt{tokens}"
            counts += _product(unit, function, halves, words, block_dots(row, tokens), tokens, number(row, "kstep"))
            counts.append(Count(function, SPILLS, 0, spill_bound(row)))
    return counts


def _matrix_tiles(unit: Unit) -> list[Count]:
    """The gates of a row of matrix tiles: one function for each number of token tiles and of groups.

    A piped row multiplies once before the loop and once in it. Tiles leave for memory once a block and come from it
    never; the configuration is the entry's, or with latch its own companion's, and never a tile function's. clang
    copies the block of a small tile for counts of tokens that it tells apart: whole blocks more.
    """
    row: Row = unit.row
    side = range(1, number(row, "nrsplit") + 1)
    times = 2 if number(row, "pipe") else 1
    product, other = ("tdpbsud", "tdpbssd") if number(row, "bias") else ("tdpbssd", "tdpbsud")
    configured = 0 if number(row, "latch") else 1
    counts: list[Count] = []
    for kind, tokens, groups in itertools.product(KINDS, side, side):
        function, block = f"{unit.symbols[f'q8q8{kind}']}_{tokens}x{groups}", tokens * groups
        loads = tokens + groups
        counts += [
            Count(function, name, times * each, times * each if block == 4 else None, what=name, step=each)
            for name, each in (
                (product, block), ("tilezero", block), ("tilestored", block), ("tileloadd", loads),
            )
        ]  # fmt: skip
        counts += [
            Count.exactly(function, f"{other} tdpbusd tdpbuud vpdp* vpmadd*", 0, what="other legs' products"),
            Count.exactly(function, "ldtilecfg sttilecfg tilerelease", 0, what="tile configuration"),
            Count.exactly(function, " ".join(SIGNS), 0, what="sign operations"),
            Count.exactly(function, "*", 0, _AVX512, "AVX-512 in the narrow part"),
            Count(function, "vcvtdq2ps", 1, None, what="conversions of the fold"),
            Count(function, "vpaddd", 1 if number(row, "bias") else 0, None, "%ymm", "block sums added"),
        ]
        if KINDS[kind]:  # two vectors a group, which a compiler may put off into the loops over tokens
            counts.append(Count(function, "vcvtph2ps", times * 2 * groups, None, what="float16 scales widened"))
        else:
            counts.append(Count.exactly(function, "vcvtph2ps", 0, what="float16 scales widened"))
    for kind in KINDS:
        tile = unit.symbols[f"q8q8{kind}"]
        counts += [
            Count.exactly(tile, "ldtilecfg", configured),
            Count.exactly(tile, "tilerelease", configured),
        ]
    if "q8q8_amx_cfg" in unit.symbols:
        counts += [
            Count.exactly(unit.symbols["q8q8_amx_cfg"], "ldtilecfg", 1 - configured),
            Count.exactly(unit.symbols["q8q8_amx_cfg"], "tilerelease", 0),
        ]
    return counts


def _mx4(unit: Unit) -> list[Count]:
    """MXFP4: each nibble vector is looked up twice; looked up, codes need no signs. Then the tile, or the expansion."""
    row: Row = unit.row
    gemv, tile, expand = (unit.symbols[f"q8q8_mx4_{name}"] for name in ("gemv", "tile", "expand"))
    arm, dot = leg(row).arch == "aarch64", leg(row).dot
    codes = mx4_codes(row)
    product = {"smmla": "sdot", "amx_int8": "vpdpbusd", "madd16": "vpmaddubsw", "maddubs": "vpmaddubsw"}.get(dot, dot)
    own = (product, "vpmaddwd") if dot in PAIRS else (product,)
    lookups = "tbl" if arm else "vpshufb"
    exactly = Count.exactly

    def products(function: str, count: int, tokens: int) -> list[Count]:
        folds = vectors(row) * tokens
        counts = [
            exactly(function, lookups, codes, what="look-ups"),
            exactly(function, product, count, what=f"{product}, each product"),
            exactly(function, product, count, _REGISTERS[leg(row).width], f"{product} on {leg(row).width} bits"),
            exactly(function, " ".join(w for w in DOTS if w not in own), 0, what="other legs' products"),
            exactly(function, "fmla" if arm else "vfmadd*ps", folds, what="fused multiply-adds of the fold"),
            exactly(function, "scvtf ucvtf fcvt*" if arm else "*cvt*", folds, what="conversions"),
            exactly(function, " ".join(SIGNS), 0, what="sign operations"),
            exactly(function, CALLS, 0, what="calls"),
        ]
        if dot in PAIRS:
            counts.append(exactly(function, "vpmaddwd", folds, what="sums widened once a block"))
        return counts

    counts = [*products(gemv, mx4_dots(row), 1), Count(gemv, SPILLS, 0, 0 if in_chain(row) else codes // 2)]
    if looks_up(row):
        registers = 32 if {"avx512f", "avx512vl"} & set(unit.features) else 16
        for tokens in range(1, min(tile_widths(row)[-1], (registers - 6) // vectors(row)) + 1):
            function = f"{tile}_nt{tokens}"
            counts += [*products(function, codes * tokens, tokens), Count(function, SPILLS, 0, spill_bound(row))]
        return counts
    return [
        *counts,
        exactly(expand, " ".join(DOTS), 0, what="products"),
        exactly(expand, "scvtf ucvtf fcvt*" if arm else "*cvt*", 0, what="conversions"),
        Count(expand, lookups, 1, None, what="nibble look-ups"),
    ]


def expected(unit: Unit) -> list[Count]:
    """The gates of one object of a row."""
    row: Row = unit.row
    words = WORDS[leg(row).dot, leg(row).width, number(row, "bias")]
    counts = _matrix_tiles(unit) if leg(row).dot == "amx_int8" else _tiles(unit)
    each, step = gemv_block_dots(row), number(row, "gkstep")
    if leg(row).dot == "smmla":
        words = Words(("sdot",))
    for kind, halves in KINDS.items():
        for function, streams in gemv_functions(row, unit.symbols[f"q8q8_gemv{kind}"]).items():
            if leg(row).dot == "smmla":
                # Even and odd k-groups of 4 are told apart while they are loaded, or after.
                counts += _blocks(function, "ld2 ld2 uzp1 uzp2", each * streams, step, "", "de-interleaving")
            counts += _product(unit, function, halves, words, each, 1, step, streams)
            counts.append(Count(function, SPILLS, 0, 0))
    if "q8q8_mx4_gemv" in unit.symbols:
        counts += _mx4(unit)
    return [*counts, *_quantiser(unit.symbols["q8q8_quantize"])]


def _quantiser(function: str) -> Sequence[Count]:
    """Divided, and never multiplied by a reciprocal, which differs in ties; in float32, and never in double."""
    return [
        Count.exactly(function, "vrcp* vrsqrt* rcp* frecp* frsqrt*", 0, what="reciprocals"),
        Count.exactly(function, "vmulps vmulss mulps mulss fmul", 0, what="multiplications"),
        Count(function, "vdivps divps fdiv", 1, None, what="divisions"),
        Count.exactly(function, "*cvtps2pd *cvtss2sd *divsd *divpd *mulsd *mulpd", 0, what="double precision"),
    ]
