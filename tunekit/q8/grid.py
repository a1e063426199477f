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


_VNNI256 = (("avx2", "fma", "avxvnni"), ("avx2", "fma", "avx512vnni", "avx512vl"))
_VNNI512 = (("avx512f", "avx512bw", "avx512vnni"),)

# fmt: off
LEGS: tuple[Leg, ...] = (
    #   dot         width  arch      lanes  kgroup  codes    needs                                          written
    Leg("maddubs",    256, "x86_64",     8,      4, "int8",  (("avx2", "fma"),)),
    Leg("madd16",     256, "x86_64",     8,      2, "int16", (("avx2", "fma"),)),
    Leg("vpdpbusd",   256, "x86_64",     8,      4, "int8",  _VNNI256,                                      False),
    Leg("vpdpbssd",   256, "x86_64",     8,      4, "int8",  (("avx2", "fma", "avxvnniint8"),),             False),
    Leg("maddubs",    512, "x86_64",    16,      4, "int8",  (("avx512f", "avx512bw"),),                    False),
    Leg("vpdpbusd",   512, "x86_64",    16,      4, "int8",  _VNNI512,                                      False),
    Leg("amx_int8",   512, "x86_64",    16,      4, "int8",  (("amx-tile", "amx-int8", *_VNNI512[0]),),     False),
    Leg("sdot",       128, "aarch64",    4,      4, "int8",  (("dotprod",),),                               False),
    Leg("smmla",      128, "aarch64",    4,      8, "int8",  (("dotprod", "i8mm"),),                        False),
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
    "bias": 0,  # 128: the plane holds w ^ 0x80, bytes 0..255
}
"""Row arguments that a row's name does not spell."""

# Two instruction legs times the shapes that a tile can have within sixteen vector registers, and the seeds' rows
# (their numbers in the margin), which keep their names. `bias128` on this leg is kept to hold the
# decline rail to its word: pairs of biased bytes saturate 16 bits.
# fmt: off
ROWS: tuple[Row, ...] = (
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=2, requires="avx2"),                                 # 14
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=4, nrsplit=2),                                       # 15
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=2, bias=128),                                        # 31, declines
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=1),
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=4),
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=1, nr=5),
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=1, nr=6),
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=1, nr=8),
    tk.perm(dot="maddubs", width=256, mr=8,  kstep=2, gkstep=2),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=1, nr=3),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=1, nr=4),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=2, nr=4),
    tk.perm(dot="maddubs", width=256, mr=16, kstep=1, nr=5),                                            # over the register budget
    tk.perm(dot="madd16",  width=256, mr=8,  kstep=1, nr=6),
    tk.perm(dot="madd16",  width=256, mr=8,  kstep=1, nr=8),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=3),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=4),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=5, requires="avx2,fma"),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=2, nr=5),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=4, nr=5),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=6),
    tk.perm(dot="madd16",  width=256, mr=16, kstep=1, nr=5, gkstep=2),
)
# fmt: on

# One line per tier of instruction sets, best first. On AVX2 (Zen 3, gcc 12) the int16 leg is a tenth ahead of the
# sign trick in batches and a few percent behind it in hot GEMV; the seeds' row of the tier stands behind it for a
# compiler that drops the first.
FALLBACK = (
    "dot_madd16_width256_mr16_kstep1_nr5"
    ";dot_maddubs_width256_mr8_kstep2"
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


def tokstep(row: Row) -> int:
    """The most tokens that one call of the row's tile covers."""
    return number(row, "nr") or 4


def targets(row: Row) -> tuple[tuple[str, ...], ...]:
    """The alternatives of a row, each the features that one object of it is compiled for; () without a leg."""
    leg = leg_of(row)
    return leg.needs if leg else ()
