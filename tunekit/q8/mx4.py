# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: blocks of 32 four-bit floats (e2m1) that share one E8M0 exponent, as ggml stores them.

A block is 17 bytes: the exponent byte, then 16 bytes of which byte j holds element j in its low nibble and element
j + 16 in its high one. Codes and scales are those of :func:`tunekit.q8.oracle.mxfp4`: values doubled to be
whole numbers, scales 2**(e - 128), **byte 255 included**: it gives 2**127, as every reader of such files has it.

A product with such a matrix has the bits of :func:`tunekit.q8.oracle.matmul` on those codes and scales. The
weights stay four bits wide in memory. A vector tile of x86-64 looks them up in registers, once for all its tokens,
which costs no more than reading bytes that are twice as many (Zen 4, one lane, to the same weights held as Q8: 512-bit
VNNI 0.92 to 1.33, int16 leg 1.2 to 1.7). Tiles of other kinds want bytes: for them up to four tokens meet the nibbles
one after the other, and for more a few groups of rows (128 KiB of int8, or one group where that is more) are expanded
into the thread's scratch, meet all the tokens of a block there, and are overwritten by the next. A Q8 plane that is
made once and kept would hold 36 + 17 bytes a block instead of 17 for as long as the matrix lives.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tunekit.q8 import oracle
from tunekit.q8.layout import REFERENCE, Layout, pack_nibbles, pack_plane, unpack_nibbles
from tunekit.q8.matrix import Matrix, block_bytes, fits_float16, frozen, narrowed
from tunekit.q8.oracle import BLOCK

MXFP4_BYTES = 1 + BLOCK // 2
"""Bytes of an MXFP4 block: an exponent and 32 nibbles."""


class Mxfp4Matrix(Matrix):
    """Weights in MXFP4; a :class:`~tunekit.q8.Matrix` in everything that a product asks. Its values are immutable.

    :func:`from_mxfp4` makes it. ``codes`` and ``scales`` are expanded for the occasion and not kept. It pickles and
    saves as canonical MXFP4 bytes; :meth:`to_mxfp4` gives them back, byte for byte.
    """

    __slots__ = ()
    format = "MXFP4"

    def __init__(self, blocks: Any, n: SupportsIndex, k: SupportsIndex) -> None:
        rows, columns, raw = block_bytes(blocks, n, k, MXFP4_BYTES, "MXFP4")
        self._adopt_blocks(rows, columns, raw)

    def _adopt_blocks(self, n: int, k: int, raw: Any) -> None:
        nb = k // BLOCK
        table = (np.frombuffer(raw, np.uint8) if n * nb else np.empty(0, np.uint8)).reshape(n * nb, MXFP4_BYTES)
        self._n, self._k = n, k
        # The reference plane is the nibbles row by row, apart from their exponents.
        self._held = (
            REFERENCE,
            frozen(table[:, 1:].reshape(-1).copy()),
            frozen(table[:, 0].copy()),
        )
        self._call = None

    @property
    def nbytes(self) -> int:
        """Bytes held: the nibble plane and its exponents, padding included."""
        return super().nbytes

    def _separate(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Nibbles (N, K/2) and exponents (N, K/32)."""
        layout, nibbles, exponents = self._held
        if layout.nibbles == REFERENCE.nibbles:
            return nibbles.reshape(self._n, self._k // 2), exponents.reshape(self._n, self._k // BLOCK)
        return unpack_nibbles(nibbles, exponents, self._n, self._k, layout)

    def _canonical(self) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        codes, scales = oracle.mxfp4(*self._separate())
        return frozen(codes), frozen(scales)

    @property
    def scales_fit_float16(self) -> bool:
        """Whether every scale is a float16 exactly: exponent bytes 104 to 143."""
        return bool(fits_float16(oracle.e8m0_half(self._held[2])).all())

    def planes(self, layout: Layout) -> tuple[NDArray[np.int8], NDArray[Any]]:
        """The matrix expanded to int8, in a layout: fresh planes of twice the size, which it does not keep.

        Products do not ask for them; they take :meth:`nibble_planes`.
        """
        codes, scales = self._canonical()
        return pack_plane(codes, narrowed(scales), layout)

    def nibble_planes(self, layout: Layout) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The nibble and exponent planes in a layout, read-only. The matrix is held in that layout from now on.

        Rows whose layouts differ in bias or in the form of the activations read the same planes.
        """
        held, nibbles, exponents = self._held
        if held is not layout and held.nibbles != layout.nibbles:
            # As in Matrix.planes: whichever of two threads comes last, each has planes that are right.
            nibbles, exponents = pack_nibbles(*self._separate(), layout)
            self._held = (layout, frozen(nibbles), frozen(exponents))
            self._call = None
        return nibbles, exponents

    def to_mxfp4(self) -> bytes:
        """The matrix as ggml's MXFP4: N*K/32 blocks of an exponent and 16 bytes of nibbles."""
        nibbles, exponents = self._separate()
        out = np.empty((self._n * (self._k // BLOCK), MXFP4_BYTES), np.uint8)
        out[:, 0] = exponents.reshape(-1)
        out[:, 1:] = nibbles.reshape(-1, BLOCK // 2)
        return out.tobytes()

    def to_q8_0(self) -> bytes:
        """The same values as ggml's Q8_0, exactly: doubled codes under half the scale.

        Raises:
            ValueError: a scale is not a float16 (an exponent byte outside 104 to 143); names the block.
        """
        return super().to_q8_0()

    def _stored(self) -> tuple[int, bytes]:
        return 1, self.to_mxfp4()


def restore(n: int, k: int, blocks: Any) -> Mxfp4Matrix:
    """A matrix from MXFP4 blocks of exactly the right size."""
    self = Mxfp4Matrix.__new__(Mxfp4Matrix)
    self._adopt_blocks(n, k, blocks)
    return self


def from_mxfp4(blocks: Any, n: SupportsIndex, k: SupportsIndex) -> Mxfp4Matrix:
    """A matrix from ggml's MXFP4 bytes.

    Args:
        blocks: bytes, a memoryview or other buffer, or a uint8 array (any shape): exactly n*(k/32)*17 bytes, row
            by row, each block an E8M0 exponent and 16 bytes of nibbles. It is copied. Every byte is legal: an
            exponent of 255 scales by 2**127 here as it does in ggml and in the ``gguf`` package (the OCP format
            calls it NaN; the files' own readers do not), and the nibble 8 (minus zero) counts as 0.
        n, k: rows and columns; k a multiple of 32.

    Raises:
        TypeError: no buffer of bytes.
        ValueError: another number of bytes, or k is no multiple of 32.
    """
    return Mxfp4Matrix(blocks, n, k)
