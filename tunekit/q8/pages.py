# SPDX-License-Identifier: Apache-2.0
"""Memory for weights: on huge pages where the kernel gives them, several matrices to a mapping.

A decoder reads every weight for every token, and on pages of 4 KiB a core walks the page tables for it: from DRAM it
then reads a tenth slower (benchmarks/gemv.py; 14.1 against 12.2 GMAC/s for the matrices of SmolLM2-135M one after the
other, Zen 3 guest). Linux makes a page huge only where 2 MiB of one mapping lie on a boundary of 2 MiB, and NumPy asks
for it from 4 MiB on; most matrices of a small model are shorter. So they share mappings of :data:`CHUNK` bytes, in the
order in which they are packed. A mapping goes when the last plane in it does.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGN = 64
"""Bytes to which planes are aligned: a cache line, and the widest vector."""
HUGE = 2 << 20
CHUNK = 16 << 20
SMALL = 32 << 10
"""Bytes below which an array is not worth a place among the weights: it would keep a mapping alive."""

_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)

# Mappings with room left, and how much of each is taken. Whoever packs takes one out and puts it back: no lock that a
# fork or a signal's handler could meet, at worst one mapping more.
_open: list[tuple[NDArray[np.uint8], int]] = []


def aligned(size: int) -> NDArray[np.uint8]:
    """So many uninitialised bytes, at a multiple of 64 bytes."""
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size]


def weights(size: int) -> NDArray[np.uint8]:
    """As :func:`aligned`, for planes that stay: on huge pages where that can be.

    Raises:
        MemoryError: there is no room.
    """
    if size < SMALL or _ADVICE is None:
        return aligned(size)
    if size > CHUNK // 2:
        return _mapping(size)
    try:
        room, used = _open.pop()
    except IndexError:
        room, used = _mapping(CHUNK), 0
    if used + size > len(room):
        room, used = _mapping(CHUNK), 0
    _open.append((room, used + -(-size // ALIGN) * ALIGN))
    return room[used : used + size]


def _mapping(size: int) -> NDArray[np.uint8]:
    """A mapping of its own, from a boundary of 2 MiB; it lives as long as arrays on it do."""
    assert _ADVICE is not None
    try:
        room = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for weights: {error.strerror}") from None
    try:
        room.madvise(_ADVICE)
    except OSError:
        pass  # a kernel built without them
    raw: NDArray[Any] = np.frombuffer(room, np.uint8)
    start = -raw.ctypes.data % HUGE
    return raw[start : start + size]
