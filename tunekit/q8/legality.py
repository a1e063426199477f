# SPDX-License-Identifier: Apache-2.0
"""Which rows can be emitted: the one decline predicate of the family, and advice on registers.

Kernel, GEMV, quantiser and every companion of a row stand in one translation unit and go by this one answer, so no
part of a family can decline alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from tunekit.q8.grid import Leg, leg_of, number, tokstep, value
from tunekit.rows import Row


class Target(Protocol):
    """What a row is to be emitted for; ``features`` are those that its code would be compiled with."""

    @property
    def arch(self) -> str: ...

    @property
    def features(self) -> frozenset[str]: ...


MAX_TOKENS = 8
"""Tokens that one tile may cover; wider tiles leave no register for anything but sums."""

_BIASED = ("vpdpbusd", "amx_int8")
_REGISTERS = {128: 32, 256: 16, 512: 32}


def _argument(row: Row, name: str, legal: Collection[int]) -> str | None:
    found = number(row, name)
    if found in legal:
        return None
    return f"{name} {found} is not one of {', '.join(map(str, sorted(legal)))}"


def _shape(row: Row, leg: Leg) -> str | None:
    """What is wrong with a row's shape on its leg, whoever could run it."""
    amx = leg.dot == "amx_int8"
    mr, bias = number(row, "mr"), number(row, "bias")
    reason = (
        _argument(row, "kstep", (1,) if amx else (1, 2, 4))
        or _argument(row, "gkstep", (1, 2, 4))
        or _argument(row, "gstreams", range(1, 5))
        or _argument(row, "gahead", range(0, 16385, 64))
        or _argument(row, "nrsplit", (1, 2) if amx else (2, 4))
        or _argument(row, "nr", (0,) if amx else range(MAX_TOKENS + 1))
        or _argument(row, "bias", (0, 128))
        or _argument(row, "pipe", (0, 1) if amx else (0,))
        or _argument(row, "latch", (0, 1) if amx else (0,))
    )
    if reason:
        return reason
    if mr < 4 or mr % leg.lanes:
        return f"mr {mr} is not a multiple of the {leg.lanes} rows that a vector of {leg.dot} holds"
    if mr > 4 * leg.lanes or (amx and mr != leg.lanes):
        return f"mr {mr} is more than {leg.dot} at {leg.width} bits is written for"
    if leg.dot == "madd16" and mr % 16:
        return f"mr {mr} is not a multiple of the 16 rows whose pairs of MXFP4 codes fill a vector of {leg.dot}"
    if bias and leg.dot == "maddubs":
        return "biased bytes reach 255, and maddubs saturates the 16-bit sum of two of their products"
    if bias and leg.dot not in _BIASED:
        return f"{leg.dot} multiplies signed bytes; a biased plane would give it other weights"
    return None


def declines(row: Row, target: Target) -> str | None:
    """Why the row cannot be emitted for the target, or None.

    Register pressure is no reason (see :func:`advice`): a budget that vetoes once hid the best row of a whole
    architecture for weeks.
    """
    leg = leg_of(row)
    if leg is None:
        return f"there is no {number(row, 'width')}-bit leg {value(row, 'dot')}"
    reason = _shape(row, leg)
    if reason:
        return reason
    if target.arch != leg.arch:
        return f"{leg.dot} is an instruction of {leg.arch}, and the target is {target.arch}"
    if not leg.written:
        return f"the templates do not have the leg {leg.dot} at {leg.width} bits yet"
    if not any(target.features.issuperset(needs) for needs in leg.needs):
        shown = " or ".join("+".join(needs) for needs in leg.needs)
        return f"{leg.dot} at {leg.width} bits is compiled for {shown}, and the target lacks it"
    return None


def any_activation(row: Row | None) -> bool:
    """Whether the row is exact for activations of -128 too; None is the reference.

    The sign trick multiplies |w| by sign(w) * x, and there is no byte for -(-128). A quantiser makes no such code, and
    :class:`~tunekit.q8.Activations` refuses it, so that every row may be chosen; a row without sign work does not care.
    """
    if row is None:
        return True
    signs = value(row, "dot") in ("maddubs", "vpdpbusd", "amx_int8")  # amx_int8: in its GEMV
    return not signs or number(row, "bias") != 0


def registers(row: Row) -> tuple[int, int] | None:
    """Vector registers that a pass of the row's tile wants, and those that there are; None without a leg.

    Counted: one sum per (row vector, token), the weight vectors of one k-group and what is made of them once, one
    splatted activation, one product, and constants. On aarch64 the weights of a block are live together.
    """
    leg = leg_of(row)
    if leg is None:
        return None
    tokens = number(row, "nr") or min(number(row, "nrsplit"), tokstep(row))
    mr = number(row, "mr")
    vectors = mr // leg.lanes
    sums = tokens * vectors
    if leg.dot in ("madd16", "vpdpbssd") or (leg.dot == "vpdpbusd" and number(row, "bias")):
        want = sums + vectors + 2
    elif leg.dot in ("maddubs", "vpdpbusd"):  # the sign trick
        want = sums + 2 * vectors + 3
    elif leg.arch == "aarch64":
        want = 2 * mr + sums + 2 * tokens + 2
    else:
        want = 2 * sums + 6
    return want, _REGISTERS[leg.width]


def advice(row: Row) -> str | None:
    """A warning where the row's tile is over the register budget, or None. It never vetoes; racing decides."""
    budget = registers(row)
    if budget is None or budget[0] <= budget[1]:
        return None
    return f"over the register budget: the tile wants {budget[0]} vector registers, and there are {budget[1]}"
