# SPDX-License-Identifier: Apache-2.0
"""The grid of the Q8xQ8 family: which instruction legs there are, which rows, which of them by default.

This is the one list. The builder, the dispatcher, the layout schema, the decline predicate, the gates, the tests
and the docs all read it, and none of them repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tunekit as tk
from tunekit.rows import Row, Value

BLOCK = 32
"""Values that share one scale."""


@dataclass(frozen=True)
class Leg:
    """One way of multiplying int8 by int8 exactly: an instruction at a vector width.

    Attributes:
        dot, width: the row arguments that select it (``width`` in bits).
        arch: the architecture that has it.
        lanes: rows of weights in one vector of 32-bit sums; ``mr`` is a multiple of it.
        kgroup: neighbouring k of one row that stand together in the weight plane.
        codes: how the row's own activation form holds the codes.
        needs: alternatives, each the features that an object of the leg is compiled for.
        written: False while the templates do not have the leg; such a row declines, and says so.
    """

    dot: str
    width: int
    arch: str
    lanes: int
    kgroup: int
    codes: Literal["int8", "int16"]
    needs: tuple[tuple[str, ...], ...]
    written: bool = True


_AVX2 = ("avx2", "fma", "f16c")
_VNNI256 = ((*_AVX2, "avxvnni"), (*_AVX2, "avx512vnni", "avx512vl"))
_VNNI512 = (("avx512f", "avx512bw", "avx512vnni"),)

# fmt: off
LEGS: tuple[Leg, ...] = (
    #   dot         width  arch      lanes  kgroup  codes    needs                                          written
    Leg("maddubs",    256, "x86_64",     8,      4, "int8",  (_AVX2,)),
    Leg("madd16",     256, "x86_64",     8,      2, "int16", (_AVX2,)),
    Leg("vpdpbusd",   256, "x86_64",     8,      4, "int8",  _VNNI256),
    Leg("vpdpbssd",   256, "x86_64",     8,      4, "int8",  ((*_AVX2, "avxvnniint8"),)),
    Leg("maddubs",    512, "x86_64",    16,      4, "int8",  (("avx512f", "avx512bw"),)),
    Leg("vpdpbusd",   512, "x86_64",    16,      4, "int8",  _VNNI512),
    Leg("amx_int8",   512, "x86_64",    16,      4, "int8",  (("amx-tile", "amx-int8", *_AVX2, *_VNNI512[0]),)),
    Leg("sdot",       128, "aarch64",    4,      4, "int8",  (("dotprod",),)),
    Leg("smmla",      128, "aarch64",    4,      8, "int8",  (("dotprod", "i8mm"),)),
)
# fmt: on

DEFAULTS: dict[str, Value] = {
    "dot": "sdot",  # the leg
    "width": 128,  # vector bits
    "mr": 4,  # rows of weights in a group, and of a tile
    "kstep": 2,  # blocks of 32 per main iteration of the tile
    "nrsplit": 4,  # tokens per pass of the seeds' rows, whose tile always covers 4
    "nr": 0,  # tokens per tile where it is not 4 (our axis; 0: the seeds' 4)
    "gkstep": 1,  # blocks per main iteration of the GEMV
    "gstreams": 1,  # streams of weights that the GEMV reads side by side
    "gahead": 8192,  # bytes ahead of its reading for which it asks
    "bias": 0,  # 128: the plane holds w ^ 0x80, bytes 0..255
    "pipe": 0,  # 1: matrix products of a block while the one before it is folded (amx)
    "latch": 0,  # 1: tiles are configured by a companion, once per traversal (amx)
}
"""Row arguments that a row's name does not spell."""

# The seeds' 49 rows keep their names and have their numbers in the margin; beside them stand shapes of our own.
# Three rows are kept to hold the decline rail to its word: 31 (pairs of biased bytes saturate 16 bits), 48 and 49.
# fmt: off
ROWS: tuple[Row, ...] = (
    tk.perm(kstep=1),                                                                                   # 1
    tk.perm(kstep=2),                                                                                   # 2
    tk.perm(kstep=4),                                                                                   # 3
    tk.perm(kstep=2, nrsplit=2),                                                                        # 4
    tk.perm(kstep=1, nrsplit=2),                                                                        # 5
    tk.perm(kstep=4, nrsplit=2),                                                                        # 6
    tk.perm(kstep=1, nrsplit=2, mr=8),                                                                  # 7
    tk.perm(kstep=2, nrsplit=2, mr=8),                                                                  # 8
    tk.perm(kstep=4, nrsplit=2, mr=8),                                                                  # 9
    tk.perm(kstep=2, gkstep=2),                                                                         # 10
    tk.perm(kstep=2, gkstep=4),                                                                         # 11
    tk.perm(kstep=4, nrsplit=2, mr=8, gkstep=2),                                                        # 12
    tk.perm(kstep=4, nrsplit=2, mr=8, gkstep=4),                                                        # 13
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=2, requires="avx2"),                                 # 14
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=4, nrsplit=2),                                       # 15
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=2, bias=128),                                        # 31, declines
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=1),
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=1, nr=6),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=1, nr=3),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=1, nr=4),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=2, nr=4),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=1, nr=5),  # over the register budget
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=3),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=4),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=5, requires="avx2,fma"),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=5, gstreams=3, gahead=1344),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=5, gstreams=4, gahead=0, requires="avx2,fma"),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=2, nr=5),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=6),
    tk.perm(dot="madd16",  width=256, mr=32, kstep=1, nr=2),
    tk.perm(dot="madd16",  width=256, mr=32, kstep=1, nr=2, gstreams=2, gahead=1344),
    tk.perm(dot="vpdpbusd", width=256, mr=8,  kstep=2),                                                 # 16
    tk.perm(dot="vpdpbusd", width=256, mr=8,  kstep=4, nrsplit=2),                                      # 17
    tk.perm(dot="vpdpbusd", width=256, mr=16, kstep=2, nrsplit=2),                                      # 18
    tk.perm(dot="vpdpbssd", width=256, mr=8,  kstep=2),                                                 # 19
    tk.perm(dot="maddubs",  width=512, mr=16, kstep=2),                                                 # 20
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=2),                                                 # 21
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=4, nrsplit=2),                                      # 22
    tk.perm(dot="vpdpbusd", width=512, mr=32, kstep=2, nrsplit=2),                                      # 23
    tk.perm(dot="vpdpbusd", width=256, mr=8,  kstep=2, gkstep=2),                                       # 24
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=2, gkstep=2),                                       # 25
    tk.perm(dot="vpdpbusd", width=256, mr=8,  kstep=2, bias=128),                                       # 26
    tk.perm(dot="vpdpbusd", width=256, mr=8,  kstep=2, gkstep=2, bias=128, requires="avxvnni|avx512vnni"),  # 27
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=2, bias=128),                                       # 28
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=2, gkstep=2, bias=128, requires="avx512vnni,avx512bw"),  # 29
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=4, nrsplit=2, bias=128),                            # 30
    tk.perm(dot="vpdpbusd", width=256, mr=16, kstep=1, nr=6, gstreams=2, gahead=0, bias=128,
            requires="avxvnni|avx512vnni"),
    tk.perm(dot="vpdpbusd", width=512, mr=16, kstep=1, nr=8, gstreams=2, gahead=0, bias=128),
    tk.perm(dot="vpdpbusd", width=512, mr=32, kstep=1, nr=6, gstreams=2, gahead=0, bias=128),
    tk.perm(dot="vpdpbusd", width=512, mr=32, kstep=1, nr=4, gstreams=2, gahead=0, bias=128,
            requires="avx512vnni,avx512bw"),
    tk.perm(dot="vpdpbssd", width=256, mr=16, kstep=1, nr=6, gstreams=2, gahead=0),
    tk.perm(dot="maddubs",  width=512, mr=16, kstep=1, nr=6),
    tk.perm(dot="smmla", mr=4, kstep=2, requires="i8mm"),                                               # 32
    tk.perm(dot="smmla", mr=4, kstep=2, nrsplit=2, requires="i8mm"),                                    # 33
    tk.perm(dot="smmla", mr=8, kstep=2, nrsplit=2, requires="i8mm"),                                    # 34
    tk.perm(dot="smmla", mr=8, kstep=4, nrsplit=2, requires="i8mm"),                                    # 35
    tk.perm(dot="smmla", mr=8, kstep=2, nrsplit=2, gkstep=2, requires="i8mm"),                          # 36
    tk.perm(suffix="mr8_budget", mr=8, kstep=2),  # 47, over budget
    tk.perm(suffix="mr2_lanes", mr=2, kstep=2),                                                         # 48, declines
    tk.perm(dot="vpdpbusd"),                                                                            # 49, declines
    tk.perm(mr=8, kstep=1, nr=4),
    tk.perm(mr=8, kstep=1, nr=4, gstreams=3, gahead=1344),
    tk.perm(mr=8, kstep=1, nr=5),
    tk.perm(mr=8, kstep=1, nr=8),
    tk.perm(mr=16, kstep=1, nr=3),
    tk.perm(mr=16, kstep=1, nr=4),
    tk.perm(dot="smmla", mr=8, kstep=1, nr=4, requires="i8mm"),
    tk.perm(dot="smmla", mr=8, kstep=1, nr=6, requires="i8mm"),
    tk.perm(dot="smmla", mr=8, kstep=1, nr=8, requires="i8mm"),
    tk.perm(dot="smmla", mr=16, kstep=1, nr=4, requires="i8mm"),
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=1, requires="amx-int8"),  # 37
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, requires="amx-int8"),  # 38
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, gkstep=2, requires="amx-int8"),  # 39
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, pipe=1, requires="amx-int8"),  # 40
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, latch=1, requires="amx-int8"),  # 41
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, bias=128, requires="amx-int8"),  # 42
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, pipe=1, latch=1, requires="amx-int8"),  # 43
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, pipe=1, bias=128, requires="amx-int8"),  # 44
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, latch=1, bias=128, requires="amx-int8"),  # 45
    tk.perm(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2, pipe=1, latch=1, bias=128, requires="amx-int8"),  # 46
)
# fmt: on

# One line per tier of instruction sets, best first; behind ours the seeds' row of the tier, for a compiler that drops
# the first. On AVX2 (Zen 3, gcc 12) the int16 leg is a tenth ahead of the sign trick in batches; its GEMV in four
# streams is a tenth ahead of one stream in L2 and four tenths from DRAM. On AVX512-VNNI (Zen 4, gcc 12; 2048x512, 64
# tokens | 1, GMAC/s) 32 rows by 4 tokens reach 176 | 75, the seeds' 16 rows by 4 tokens 164 | 74, and at 256 bits 16
# rows by 6 tokens 172 | 70 against the seeds' 8 by 4 with 123 | 59: two row vectors share each splat, which Intel's
# two load ports need more than Zen's. Their GEMVs read two streams without hints: from DRAM that is 31 GMAC/s there,
# 0.94 of the best plain reading, where two blocks an iteration get 11 to 14, and in L2 a tenth more.
#
# No AMX row heads the chain: the scale of each 32 weights takes every product out of its tile to be folded, which cost
# the seeds' AMX rows the race on every box they had. So the AMX class, which has AVX512-VNNI too, runs on the first
# line, and `retune` races its own.
#
# On AArch64 nothing was measured here; llvm-mca 19 on what gcc 12 makes stands in. MACs a cycle on Neoverse N1 | V1 |
# N2 | V2, tile: smmla 8 by 4 - | 44 | 22 | 44, sdot 4 by 4 and 8 by 4 19 | 38 | 19 | 38. Hot GEMV: smmla, whose
# plane sdot must first part, 12 | 24 | 12 | 24 and sdot 18 | 36 | 19 | 36, both beyond what memory delivers to a core.
# So smmla where it is; the seeds saw sdot ahead of it on one Apple M3, and `retune` corrects that. With sdot 8 rows by
# 4 tokens before the seeds' 4 by 4: a third fewer loads a product, and 7-10 % in their measurements on M1 and M4.
FALLBACK = (
    "dot_vpdpbusd_width512_mr32_kstep1_nr4_gstreams2_gahead0_bias128"
    ";dot_vpdpbusd_width512_mr16_kstep2_gkstep2_bias128"
    ";dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128"
    ";dot_vpdpbusd_width256_mr8_kstep2_gkstep2_bias128"
    ";dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0"
    ";dot_maddubs_width256_mr8_kstep2"
    ";dot_smmla_mr8_kstep1_nr4"
    ";mr8_kstep1_nr4"
    ";kstep2"
)  # fmt: skip


def value(row: Row, name: str) -> Value:
    """A row's argument, or the default that its name does not spell."""
    return row.get(name, DEFAULTS[name])


def number(row: Row, name: str) -> int:
    """An integer argument of a row, as :func:`value`."""
    found = value(row, name)
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"row {row.suffix}: {name} must be a whole number, not {found!r}")
    return found


def leg_of(row: Row) -> Leg | None:
    """The leg that a row is built on, or None where there is no such instruction at that width."""
    dot, width = value(row, "dot"), value(row, "width")
    return next((leg for leg in LEGS if (leg.dot, leg.width) == (dot, width)), None)


PAIRS = ("maddubs", "madd16")
"""The legs that multiply pairs and then add; MXFP4's products add up in 16 bits there."""


def looks_up(row: Row) -> bool:
    """Whether the row's tile looks MXFP4 weights up in their nibbles; other rows expand them for it.

    Of the x86-64 vector tiles those that need not take an offset off again, product by product. (Zen 4, one lane, to
    expanding: 512-bit vpdpbusd 1.3 by 8 tokens and 1.0 by 64, 256-bit 1.1 and 0.9, int16 leg 1.7 and 1.5, 16-bit sums
    included.)
    """
    leg = leg_of(row)
    if leg is None or leg.arch != "x86_64":
        return False
    return leg.dot in (*PAIRS, "vpdpbssd") or (leg.dot == "vpdpbusd" and number(row, "bias") != 0)


def tokstep(row: Row) -> int:
    """The most tokens that one call of the row's tile covers."""
    if value(row, "dot") == "amx_int8":
        return 16 * number(row, "nrsplit")
    return number(row, "nr") or 4


def inside(row: Row) -> tuple[str, ...]:
    """Features that only some functions of a row's unit are compiled for: the 512-bit companions of matrix tiles."""
    return _VNNI512[0] if value(row, "dot") == "amx_int8" else ()


def groups(row: Row) -> int:
    """How many groups of rows the tile takes at once: a call should have a multiple of them."""
    return number(row, "nrsplit") if value(row, "dot") == "amx_int8" else 1


def targets(row: Row) -> tuple[tuple[str, ...], ...]:
    """The alternatives of a row, each the features that one object of it is compiled for; () without a leg."""
    leg = leg_of(row)
    return leg.needs if leg else ()
