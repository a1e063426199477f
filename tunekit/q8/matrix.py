# SPDX-License-Identifier: Apache-2.0
"""Weights and activations as objects: :class:`Matrix`, :class:`Activations`, and how weights come in.

A block is 32 values with one scale. On disk, in pickles and towards ggml a matrix is *canonical*: its rows in
order, each block a little-endian scale followed by 32 int8. In memory it is one packed plane in the layout that the
chosen row reads; the packed plane never leaves the process, because another box chooses another row.
"""

from __future__ import annotations

import operator
import os
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tunekit.core import core
from tunekit.q8.layout import REFERENCE, Layout, pack_plane, unpack_plane
from tunekit.q8.oracle import BLOCK

Q8_0_BYTES = 2 + BLOCK
"""Bytes of a Q8_0 block: a float16 scale and 32 codes."""

_SMALLEST = np.float32(2.0**-126)
_FLOAT32 = np.dtype(np.float32)
_CHUNK = 1 << 20  # values quantised at a time, so that temporaries stay small beside the matrix

_MAGIC = b"\x93tkq8\r\n\x1a"
_HEADER = struct.Struct("<8sHHIQQ")


_MASKED = "{0} is a masked array and its mask would be lost; pass {0}.filled(value)"


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself, read-only from now on."""
    array.flags.writeable = False
    return array


def as_float32(name: str, array: Any) -> NDArray[np.float32]:
    """A C-contiguous, aligned, native float32 ndarray of one or two dimensions with K a multiple of 32.

    The array itself where it is that already, read-only or not; else a copy.

    Raises:
        TypeError: not an array of float32; names the mend.
        ValueError: another number of dimensions, or K is no multiple of 32.
    """
    if type(array) is not np.ndarray:
        array = _plain(name, array)
    if array.dtype != _FLOAT32:
        if array.dtype.kind != "f" or array.dtype.itemsize != 4:
            raise TypeError(f"{name} must be float32, not {array.dtype}; pass {name}.astype(np.float32)")
        array = array.astype(_FLOAT32)
    if array.ndim not in (1, 2):
        raise ValueError(f"{name} must have one or two dimensions, not shape {array.shape}")
    if array.shape[-1] % BLOCK:
        raise ValueError(
            f"{name} has shape {array.shape}: its last dimension must be a multiple of {BLOCK} (the values of a block)"
        )
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.array(array, order="C", copy=True)
    found: NDArray[np.float32] = array
    return found


def _plain(name: str, array: Any) -> NDArray[Any]:
    """A subclass of ndarray as an ndarray; anything else is a TypeError."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array of float32, not {type(array).__name__}; "
            f"pass np.asarray({name}, dtype=np.float32)"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(_MASKED.format(name))
    return array.view(np.ndarray)


def _checked(name: str, array: object, dtype: type[np.generic]) -> NDArray[Any]:
    """A private C-contiguous native copy of a 2-D array of exactly this type."""
    kind = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array of {kind}, not {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(_MASKED.format(name))
    if array.dtype.newbyteorder("=") != kind:
        raise TypeError(f"{name} must have dtype {kind}, not {array.dtype}; convert it with .astype(np.{kind})")
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, not shape {array.shape}")
    return np.array(array, dtype=kind, order="C", copy=True, subok=False)


def _pair(codes: object, scales: object) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    q = _checked("codes", codes, np.int8)
    s = _checked("scales", scales, np.float32)
    if q.shape[1] % BLOCK:
        raise ValueError(f"codes have shape {q.shape}: the second dimension must be a multiple of {BLOCK}")
    if s.shape != (q.shape[0], q.shape[1] // BLOCK):
        raise ValueError(
            f"codes of shape {q.shape} need scales of shape {(q.shape[0], q.shape[1] // BLOCK)}, not {s.shape}"
        )
    return q, s


class Activations:
    """Quantised activations: what a product multiplies with a :class:`Matrix`. Immutable.

    Args:
        codes: (T, K) int8 in [-127, 127], K a multiple of 32.
        scales: (T, K/32) float32, any value.

    Raises:
        TypeError: another type than these.
        ValueError: another shape, or a code of -128 (some instructions have no room for it).
    """

    __slots__ = ("_codes", "_scales")
    _codes: NDArray[np.int8]
    _scales: NDArray[np.float32]

    def __init__(self, codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
        q, s = _pair(codes, scales)
        if q.size and q.min() < -127:
            t, k = (int(i) for i in np.argwhere(q < -127)[0])
            raise ValueError(f"codes[{t}, {k}] is -128; activation codes lie in [-127, 127]")
        self._codes, self._scales = frozen(q), frozen(s)

    @classmethod
    def _of(cls, codes: NDArray[np.int8], scales: NDArray[np.float32]) -> Activations:
        """From arrays that the quantiser has just made: no check, no copy."""
        self = cls.__new__(cls)
        self._codes, self._scales = frozen(codes), frozen(scales)
        return self

    @property
    def codes(self) -> NDArray[np.int8]:
        """(T, K) int8, read-only."""
        return self._codes

    @property
    def scales(self) -> NDArray[np.float32]:
        """(T, K/32) float32, read-only."""
        return self._scales

    @property
    def shape(self) -> tuple[int, int]:
        """(T, K)."""
        return self._codes.shape[0], self._codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return Activations, (self._codes, self._scales)

    def __repr__(self) -> str:
        return f"Activations({self.shape[0]} tokens x {self.shape[1]}, {_size(self.nbytes)})"


class Matrix:
    """Weights in blocks of 32 int8 with one scale; N rows of K. Its values are immutable.

    It holds one copy of its weights, in one layout, and converts it when a product asks for another: the first
    product after loading repacks it for the row that was chosen for this box. Scales that are float16 all of them, as
    :func:`from_q8_0`'s are and those of :func:`pack` as a rule, are held as float16: a sixteenth less to read.

    Args:
        codes: (N, K) int8, any value, K a multiple of 32.
        scales: (N, K/32) float32, any value.

    Raises:
        TypeError: another type than these.
        ValueError: another shape.
    """

    __slots__ = ("__weakref__", "_call", "_held", "_k", "_n")
    format: ClassVar[str] = "Q8"
    """``"Q8"``: 32 int8 and one scale a block; ``"MXFP4"``: see :mod:`tunekit.q8.mx4`."""
    _n: int
    _k: int
    _held: tuple[Layout, NDArray[Any], NDArray[Any]]
    _call: Any
    """What the last product left for the next one (:mod:`tunekit.q8.product`), or None."""

    def __init__(self, codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
        self._adopt(*_pair(codes, scales))

    def _adopt(self, codes: NDArray[np.int8], scales: NDArray[Any]) -> None:
        self._n, self._k = codes.shape
        scales = narrowed(scales)
        # The reference plane is the matrix row by row, so canonical arrays are a packed plane as they are.
        self._held = (REFERENCE, frozen(codes.reshape(-1)), frozen(scales.reshape(-1)))
        self._call = None

    @classmethod
    def _of(cls, codes: NDArray[np.int8], scales: NDArray[Any]) -> Matrix:
        """From fresh C-contiguous arrays, scales of float32 or float16: no check, no copy."""
        self = cls.__new__(cls)
        self._adopt(codes, scales)
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._n, self._k

    @property
    def layout(self) -> Layout:
        """The layout in which the weights are held at the moment."""
        return self._held[0]

    @property
    def nbytes(self) -> int:
        """Bytes held: the weight plane and its scales, padding included."""
        return self._held[1].nbytes + self._held[2].nbytes

    def _canonical(self) -> tuple[NDArray[np.int8], NDArray[Any]]:
        """Codes (N, K) and scales (N, K/32), these as they are held."""
        layout, w, ws = self._held
        if layout == REFERENCE:
            return w.reshape(self._n, self._k), ws.reshape(self._n, self._k // BLOCK)
        codes, scales = unpack_plane(w, ws, self._n, self._k, layout)
        return frozen(codes), frozen(scales)

    @property
    def codes(self) -> NDArray[np.int8]:
        """(N, K) int8, read-only; unpacked for the occasion where the matrix is held in another layout."""
        return self._canonical()[0]

    @property
    def scales(self) -> NDArray[np.float32]:
        """(N, K/32) float32, read-only; as :attr:`codes`."""
        scales = self._canonical()[1]
        with np.errstate(all="ignore"):
            return frozen(np.asarray(scales, np.float32))

    @property
    def scales_fit_float16(self) -> bool:
        """Whether every scale is a float16 exactly (a NaN is): they are held as such."""
        return bool(self._held[2].dtype == np.float16)

    def planes(self, layout: Layout) -> tuple[NDArray[np.int8], NDArray[Any]]:
        """The weight plane, int8, and the scale plane, float16 or float32, in a layout; read-only.

        The matrix is held in that layout from now on.

        Rows whose layouts differ in the form of the activations alone read the same plane.
        """
        held, w, ws = self._held
        if held is not layout and held.plane != layout.plane:
            # Two threads that meet here both repack, and the later result stays; either is right, and products that
            # are under way keep the planes that they hold. No lock, hence none to be found locked after a fork.
            w, ws = pack_plane(*self._canonical(), layout)
            self._held = (layout, frozen(w), frozen(ws))
            self._call = None
        return w, ws

    def to_q8_0(self) -> bytes:
        """The matrix as ggml's Q8_0: N*K/32 blocks of a little-endian float16 scale and 32 int8.

        Raises:
            ValueError: a scale is not a float16; names the block.
        """
        codes, scales = self._canonical()
        scales = narrowed(scales)
        if scales.dtype != np.float16:
            row, block = (int(i) for i in np.argwhere(~fits_float16(scales))[0])
            raise ValueError(
                f"the scale of row {row}, block {block} is {float(scales[row, block])!r}, which no float16 holds; "
                f"Q8_0 cannot store it (save() and pickle can)"
            )
        return _to_blocks(codes, scales)

    def _stored(self) -> tuple[int, bytes]:
        """Bytes of a scale (2, or 4 where float16 cannot hold them) and the canonical blocks."""
        codes, scales = self._canonical()
        return scales.itemsize, _to_blocks(codes, scales)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._n, self._k, *self._stored())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the matrix to a file, whole or not at all.

        The file is 32 bytes of header, all little-endian: the magic ``93 74 6b 71 38 0d 0a 1a``, uint16 version (1),
        uint16 bytes of a scale (2: float16, the body is Q8_0; 4: float32; 1: E8M0, the body is MXFP4), uint32 CRC-32
        of the body, uint64 N, uint64 K; then the body, N*K/32 blocks of a scale and 32 int8 (MXFP4: 16 bytes of
        nibbles), row by row.
        """
        width, body = self._stored()
        target = Path(path)
        header = _HEADER.pack(_MAGIC, 1, width, zlib.crc32(body), self._n, self._k)
        beside = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        try:
            with open(beside, "xb") as file:
                file.write(header)
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Matrix:
        """Read a matrix that :meth:`save` wrote.

        Raises:
            ValueError: the file is none, is torn, or was damaged; says which.
        """
        data = Path(path).read_bytes()
        if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path} is no matrix that tunekit saved")
        _, version, width, crc, n, k = _HEADER.unpack_from(data)
        if version != 1 or width not in (1, 2, 4) or k % BLOCK:
            raise ValueError(f"{path}: version {version} with {width}-byte scales is not known to this tunekit")
        body = memoryview(data)[_HEADER.size :]
        if len(body) != n * (k // BLOCK) * (width + (BLOCK // 2 if width == 1 else BLOCK)):
            raise ValueError(f"{path} is torn: {len(body)} bytes of weights are not a {n} x {k} matrix")
        if zlib.crc32(body) != crc:
            raise ValueError(f"{path} is damaged: its checksum does not agree")
        return _restore(n, k, width, body)

    def __repr__(self) -> str:
        return f"Matrix({self._n} x {self._k}, {self.format}, {_size(self.nbytes)}, layout {self.layout.plane})"


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1e3:.1f} kB" if nbytes < 10**6 else f"{nbytes / 1e6:.2f} MB"


def fits_float16(scales: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which scales are float16 exactly (a NaN is).

    Bits are compared: to a caller who has set denormals-are-zero, 1e-40 equals 0.
    """
    with np.errstate(all="ignore"):
        back = scales.astype(np.float16).astype(np.float32)
    return np.asarray((back.view(np.uint32) == scales.view(np.uint32)) | np.isnan(scales))


def narrowed(scales: NDArray[Any]) -> NDArray[Any]:
    """Scales as float16, where that holds them all; else as they are."""
    if scales.dtype == np.float16 or not fits_float16(scales).all():
        return scales
    with np.errstate(all="ignore"):
        return scales.astype(np.float16)


def _to_blocks(codes: NDArray[np.int8], scales: NDArray[Any]) -> bytes:
    """Canonical blocks, the scales of the type that they have."""
    n, k = codes.shape
    width = scales.itemsize
    out = np.empty((n * (k // BLOCK), width + BLOCK), np.uint8)
    stored = np.ascontiguousarray(scales, scales.dtype.newbyteorder("<")).reshape(-1, 1)
    out[:, :width] = stored.view(np.uint8).reshape(-1, width)
    out[:, width:] = codes.view(np.uint8).reshape(-1, BLOCK)
    return out.tobytes()


def _restore(n: int, k: int, width: int, blocks: Any) -> Matrix:
    """A matrix from canonical blocks of exactly the right size; ``width`` as in :meth:`Matrix.save`."""
    if width == 1:
        from tunekit.q8 import mx4  # which builds on this module

        return mx4.restore(n, k, blocks)
    nb = k // BLOCK
    size = n * nb * (width + BLOCK)
    raw = np.frombuffer(blocks, np.uint8) if size else np.empty(0, np.uint8)
    native = core()
    if native is not None and width == 2:
        codes, scales = np.empty((n, k), np.int8), np.empty((n, nb), "<f2")
        # With one row in a group codes and scales stay as they are, and only leave each other.
        native.pack(codes.reshape(-1).view(np.uint8), raw, width, width + BLOCK, n, nb, BLOCK, 1, 1, 0)
        native.pack(scales.reshape(-1).view(np.uint8), raw, 0, width + BLOCK, n, nb, width, 1, 1, 0)
    else:
        table = raw.reshape(n * nb, width + BLOCK)
        scales = np.ascontiguousarray(table[:, :width]).view("<f2" if width == 2 else "<f4").reshape(n, nb)
        codes = np.ascontiguousarray(table[:, width:]).view(np.int8).reshape(n, k)
    return Matrix._of(codes, scales.astype(np.float16 if width == 2 else np.float32, copy=False))


def _dimension(name: str, number: SupportsIndex) -> int:
    try:
        found = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {type(number).__name__}") from None
    if found < 0:
        raise ValueError(f"{name} must not be negative, got {found}")
    return found


def block_bytes(
    blocks: Any, n: SupportsIndex, k: SupportsIndex, size: int, name: str
) -> tuple[int, int, Any]:
    """Check the bytes of n rows of k/32 blocks of ``size`` bytes each.

    Returns:
        n and k as ints, and the bytes as a flat contiguous buffer, not copied where they are that already.

    Raises:
        TypeError: no buffer of bytes, or no whole numbers.
        ValueError: another number of bytes, or k is no multiple of 32.
    """
    rows, columns = _dimension("n", n), _dimension("k", k)
    if columns % BLOCK:
        raise ValueError(f"k must be a multiple of {BLOCK}, got {columns}")
    if isinstance(blocks, np.ndarray):
        if blocks.dtype != np.uint8:
            raise TypeError(f"blocks must be bytes or a uint8 array, not one of {blocks.dtype}; use .view(np.uint8)")
        raw: Any = np.ascontiguousarray(blocks).reshape(-1)
        found = raw.size
    else:
        try:
            raw = memoryview(blocks)
        except TypeError:
            raise TypeError(f"blocks must be bytes or a uint8 array, not {type(blocks).__name__}") from None
        if not raw.c_contiguous:
            raw = memoryview(raw.tobytes())
        found = raw.nbytes
    expected = rows * (columns // BLOCK) * size
    if found != expected:
        raise ValueError(f"a {rows} x {columns} matrix is {expected} bytes of {name} blocks, got {found}")
    return rows, columns, raw


def from_q8_0(blocks: Any, n: SupportsIndex, k: SupportsIndex) -> Matrix:
    """A matrix from ggml's Q8_0 bytes.

    Args:
        blocks: bytes, a memoryview or other buffer, or a uint8 array (any shape): exactly n*(k/32)*34 bytes, row
            by row, each block a little-endian float16 scale and 32 int8. It is copied.
        n, k: rows and columns; k a multiple of 32.

    Raises:
        TypeError: no buffer of bytes.
        ValueError: another number of bytes, or k is no multiple of 32.
    """
    rows, columns, raw = block_bytes(blocks, n, k, Q8_0_BYTES, "Q8_0")
    return _restore(rows, columns, 2, raw)


def pack(w: NDArray[np.float32]) -> Matrix:
    """Quantise weights, blocks of 32 along each row.

    Per block ``d = float32(amax / 127)`` is rounded to float16, and the codes ``clamp(rint(float32(w / d)), -127,
    127)`` are computed against the rounded scale, so that Q8_0 stores the matrix exactly. Where the rounding would
    give 0 or infinity, the float32 scale is kept (``scales_fit_float16`` is then False). ``d < 2**-126`` makes a
    zero block; a block with a NaN or an infinity has scale NaN and codes 0.

    Args:
        w: (N, K) float32, K a multiple of 32; any strides or byte order.

    Raises:
        TypeError: not an array of float32.
        ValueError: another shape.
    """
    source = as_float32("w", w)
    if source.ndim != 2:
        raise ValueError(f"w must have shape (N, K), not {source.shape}")
    n, k = source.shape
    nb = k // BLOCK
    codes = np.empty((n, k), np.int8)
    scales = np.empty((n, nb), np.float32)
    step = max(1, _CHUNK // max(k, 1))
    for n0 in range(0, n, step):
        part = source[n0 : n0 + step]
        blocks = part.reshape(part.shape[0], nb, BLOCK)
        with np.errstate(all="ignore"):
            amax = np.abs(blocks).max(axis=-1, initial=np.float32(0))
            d = amax / np.float32(127)
            bad = ~np.isfinite(amax)
            empty = bad | (d < _SMALLEST)
            half = d.astype(np.float16).astype(np.float32)
            d = np.where((half == 0) | np.isinf(half), d, half)
            q = np.rint(blocks / np.where(empty, np.float32(1), d)[..., None])
            q[empty] = 0
            np.clip(q, -127, 127, out=q)
        codes[n0 : n0 + step] = q.astype(np.int8).reshape(part.shape)
        scales[n0 : n0 + step] = np.where(bad, np.float32(np.nan), np.where(empty, np.float32(0), d))
    return Matrix._of(codes, scales)
