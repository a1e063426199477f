# SPDX-License-Identifier: Apache-2.0
"""The layout schema: how a row wants its weights laid out, and in which form it reads activations.

The plane of a matrix of N rows and K = 32*nb columns, for a layout with ``mr`` and ``kgroup``: rows stand in groups
of ``mr``; group g starts at byte g*mr*32*nb of the weight plane and at scale g*mr*nb of the scale plane. Inside it,
byte bi*mr*32 + kg*kgroup*mr + r*kgroup + j holds weight k = bi*32 + kg*kgroup + j of row r, so that one vector
load meets the same few k of several rows; the scale of block bi of row r is number bi*mr + r. Scales are float32, or
float16 where that holds them all; every row reads either. With ``bias`` 128 the bytes are stored as ``w ^ 0x80``. N is
padded to a whole number of groups by rows of zero weights and zero scales: no kernel needs a second, row-major path
for the last rows, whose order of additions could differ.

**Nibbles.** MXFP4 weights stand in k-groups of ``nibble_kgroup``, 4 or 8: what looks them up multiplies bytes, by
fours at least. Block bi of group g is 16*mr bytes at byte (g*nb + bi)*16*mr. For k < 16, its byte
kg*kgroup*mr + r*kgroup + j holds weights k = kg*kgroup + j (low nibble) and k + 16 (high) of row r, which are the two
that ggml's block keeps in its byte k. So where the Q8 plane has the same k-groups, the low nibble of the byte at offset
o of a block belongs at offset o of the Q8 plane's block, and the high one at o + 16*mr. The exponent of block bi of row
r is byte (g*nb + bi)*mr + r. Nibbles are not biased; what looks them up or expands them adds the bias.

:func:`pack_plane` and :func:`pack_nibbles` alone write these layouts, and ask the schema for every stride.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tunekit.core import core
from tunekit.q8 import pages
from tunekit.q8.grid import BLOCK, LEGS, PAIRS, leg_of, number, value
from tunekit.rows import Row

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Layout:
    """What a row reads.

    Attributes:
        mr: rows of weights in a group.
        kgroup: neighbouring k of one row that stand together: 1, 2, 4 or 8.
        bias: what is added to the stored weight bytes modulo 256: 0 or 128.
        codes: the form of the activation codes in the row's own prepared form, ``"int8"`` or ``"int16"``.
        sums: whether the prepared form also holds the block sums (a biased row subtracts 128 times them).
        pairs: whether it also holds what a leg that multiplies pairs wants of MXFP4: from what its 16-bit sums begin,
            and the codes as bytes where they are not.
    """

    mr: int
    kgroup: int
    bias: int = 0
    codes: Literal["int8", "int16"] = "int8"
    sums: bool = False
    pairs: bool = False

    def __post_init__(self) -> None:
        if self.mr < 1 or self.kgroup not in _WORDS or self.bias not in (0, 128):
            raise ValueError(f"no such layout: mr {self.mr}, kgroup {self.kgroup}, bias {self.bias}")

    @property
    def plane(self) -> str:
        """Identifies the weight plane alone. Rows that agree in it read the same packed matrix."""
        return f"mr{self.mr}_kgroup{self.kgroup}" + (f"_bias{self.bias}" if self.bias else "")

    @property
    def nibbles(self) -> str:
        """Identifies the nibble plane of MXFP4 weights. It knows no bias."""
        return f"mr{self.mr}_kgroup{self.nibble_kgroup}"

    @property
    def nibble_kgroup(self) -> int:
        """Neighbouring k of one row that stand together in the nibble plane."""
        return max(self.kgroup, 4)

    @property
    def activations(self) -> str:
        """Identifies the prepared form of the activations."""
        return self.codes + ("_sums" if self.sums else "") + ("_pairs" if self.pairs else "")

    @property
    def id(self) -> str:
        """Identifies the whole layout, such as ``mr16_kgroup2+int16_pairs``."""
        return f"{self.plane}+{self.activations}"

    def __str__(self) -> str:
        return self.id

    def padded(self, n: int) -> int:
        """Rows that the plane of an n-row matrix holds."""
        return -(-n // self.mr) * self.mr


REFERENCE = Layout(mr=1, kgroup=4)
"""The layout of the portable row: with one row in a group, the plane is the matrix itself, row by row."""


@functools.cache
def layout_of(row: Row | None) -> Layout:
    """The layout of a row (None: the reference).

    Raises:
        ValueError: the row's instruction does not exist, at any width.
    """
    if row is None:
        return REFERENCE
    leg = leg_of(row) or next((leg for leg in LEGS if leg.dot == value(row, "dot")), None)
    if leg is None:
        raise ValueError(f"row {row.suffix}: there is no leg {value(row, 'dot')!r}")
    bias = number(row, "bias")
    return Layout(number(row, "mr"), leg.kgroup, bias, leg.codes, sums=bias != 0, pairs=leg.dot in PAIRS)


def aligned(count: int, dtype: Any) -> NDArray[Any]:
    """An uninitialised 1-D array whose data starts at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    return pages.aligned(count * kind.itemsize).view(kind)


def _shape(codes: NDArray[np.int8], scales: NDArray[Any]) -> tuple[int, int, int]:
    if codes.ndim != 2 or codes.dtype != np.int8 or codes.shape[1] % BLOCK:
        raise ValueError(f"codes must be int8 (N, K) with K a multiple of {BLOCK}, not {codes.dtype} {codes.shape}")
    n, k = codes.shape
    if scales.shape != (n, k // BLOCK) or scales.dtype not in (np.float32, np.float16):
        raise ValueError(f"scales must be float32 or float16 {(n, k // BLOCK)}, not {scales.dtype} {scales.shape}")
    return n, k, k // BLOCK


def _rooms(mr: int, *planes: NDArray[Any]) -> list[NDArray[Any]]:
    """Uninitialised room for each of these matrices in groups of ``mr``, flat; side by side, as they are read."""
    sizes = [-(-len(plane) // mr) * mr * plane.shape[1] * plane.itemsize for plane in planes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // pages.ALIGN) * pages.ALIGN)
    whole = pages.weights(starts[-1])
    return [whole[a : a + size].view(plane.dtype) for a, size, plane in zip(starts, sizes, planes, strict=False)]


def _interleave(rows: NDArray[Any], out: NDArray[Any], mr: int, kgroup: int, bias: int = 0) -> NDArray[Any]:
    """Rows (N, columns) in groups of ``mr``, ``kgroup`` elements of a row at a time, padded with 0; into ``out``.

    By the core where there is one (csrc/pack.c), which takes all lanes; what NumPy does says what is right.
    """
    native = core()
    if native is None:
        return interleave_by_numpy(rows, out, mr, kgroup, bias)
    n, width = rows.shape
    size = width * rows.itemsize
    part = next((p for p in (64, 32, 16) if size % p == 0), size)  # whole lines, where rows are made of such
    source = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    blocks = size // part if part else 0
    native.pack(out.view(np.uint8), source, 0, part, n, blocks, part, mr, kgroup * rows.itemsize, bias)
    return out


def interleave_by_numpy(rows: NDArray[Any], out: NDArray[Any], mr: int, kgroup: int, bias: int) -> NDArray[Any]:
    """:func:`_interleave` without the core."""
    n, width = rows.shape
    padded, full = -(-n // mr) * mr, n // mr * mr
    # The kgroup bytes of one row move as one word, so the interleave is a transposition of words inside each group.
    word = rows.dtype if kgroup == 1 else np.dtype(_WORDS[kgroup])
    source = np.ascontiguousarray(rows).view(word)
    columns = width // kgroup
    plane = out.view(word).reshape(padded // mr, columns, mr)
    plane[: full // mr] = source[:full].reshape(full // mr, mr, columns).transpose(0, 2, 1)
    if padded != full:
        plane[-1] = 0
        plane[-1, :, : n - full] = source[full:].T
    if bias:
        np.bitwise_xor(out, np.uint8(bias), out=out)
    return out


def _separate(plane: NDArray[Any], n: int, width: int, mr: int, kgroup: int) -> NDArray[Any]:
    """The inverse of :func:`_interleave`: rows (n, width), fresh and C-contiguous."""
    padded = plane.size // width if width else -(-n // mr) * mr
    word = plane.dtype if kgroup == 1 else np.dtype(_WORDS[kgroup])
    columns = width // kgroup
    out = np.empty((padded, columns), word)
    out.reshape(padded // mr, mr, columns)[...] = (
        plane.view(word).reshape(padded // mr, columns, mr).transpose(0, 2, 1)
    )
    # A slice keeps the padding alive, and with it the whole buffer; it is at most mr - 1 rows.
    return out.view(plane.dtype).reshape(padded, width)[:n]


def pack_plane(
    codes: NDArray[np.int8], scales: NDArray[Any], layout: Layout
) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """Lay canonical weights out for a layout.

    Args:
        codes: (N, K) int8, any value.
        scales: (N, K/32) float32 or float16.
        layout: the schema.

    Returns:
        The weight plane, int8, and the scale plane, of the scales' type: flat, 64-byte aligned, for N padded to whole
        groups.
    """
    _shape(codes, scales)
    raw = codes.view(np.uint8)
    w, ws = _rooms(layout.mr, raw, scales)
    _interleave(raw, w, layout.mr, layout.kgroup, layout.bias)
    return w.view(np.int8), _interleave(scales, ws, layout.mr, 1)


def unpack_plane(
    w: NDArray[np.int8], ws: NDArray[Any], n: int, k: int, layout: Layout
) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """The inverse of :func:`pack_plane`: canonical codes (n, k) and scales (n, k/32), fresh and C-contiguous."""
    mr, padded, nb = layout.mr, layout.padded(n), k // BLOCK
    if w.shape != (padded * k,) or ws.shape != (padded * nb,):
        raise ValueError(f"planes of {w.shape} and {ws.shape} are not those of a {(n, k)} matrix in layout {layout}")
    out = _separate(w.view(np.uint8), n, k, mr, layout.kgroup).view(np.int8)
    if layout.bias:
        np.bitwise_xor(out.view(np.uint8), np.uint8(layout.bias), out=out.view(np.uint8))
    return out, _separate(ws, n, nb, mr, 1)


def pack_nibbles(
    nibbles: NDArray[np.uint8], exponents: NDArray[np.uint8], layout: Layout
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Lay MXFP4 weights out for a layout.

    Args:
        nibbles: (N, K/2) uint8, 16 bytes a block as in ggml's: low nibbles k 0 to 15, high nibbles k 16 to 31.
        exponents: (N, K/32) uint8.
        layout: the schema.

    Returns:
        The nibble plane and the exponent plane: flat, 64-byte aligned, for N padded to whole groups with zero bytes.
    """
    n, nb = exponents.shape
    if nibbles.shape != (n, nb * BLOCK // 2) or nibbles.dtype != np.uint8 or exponents.dtype != np.uint8:
        raise ValueError(f"nibbles of {nibbles.shape} and exponents of {exponents.shape} are not those of one matrix")
    nib, e = _rooms(layout.mr, nibbles, exponents)
    return _interleave(nibbles, nib, layout.mr, layout.nibble_kgroup), _interleave(exponents, e, layout.mr, 1)


def unpack_nibbles(
    nibbles: NDArray[np.uint8], exponents: NDArray[np.uint8], n: int, k: int, layout: Layout
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The inverse of :func:`pack_nibbles`: (n, k/2) and (n, k/32) bytes, fresh and C-contiguous."""
    mr, padded, nb = layout.mr, layout.padded(n), k // BLOCK
    if nibbles.shape != (padded * k // 2,) or exponents.shape != (padded * nb,):
        raise ValueError(
            f"planes of {nibbles.shape} and {exponents.shape} are not those of a {(n, k)} matrix in layout {layout}"
        )
    return _separate(nibbles, n, k // 2, mr, layout.nibble_kgroup), _separate(exponents, n, nb, mr, 1)
