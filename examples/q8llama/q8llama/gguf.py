# SPDX-License-Identifier: Apache-2.0
"""Reading GGUF files: metadata, and tensors as arrays over the mapped file.

A file is ``GGUF``, a version, two counts, metadata (name, type, value), a table of tensors (name, extents with the
fastest first, ggml's type, offset), and data from the next multiple of the alignment on. Every number is held against
the file's size before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q8llama.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 24  # of anything that is counted: entries, tensors, characters

TYPES = {0: ("F32", 4, 1), 1: ("F16", 2, 1), 3: ("Q4_1", 20, 32), 8: ("Q8_0", 34, 32), 39: ("MXFP4", 17, 32)}
"""ggml's number of a type that is read here: its name, and bytes of a block of so many values."""

OTHERS = {
    2: "Q4_0", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
"""Types that are only named, in errors."""


@dataclass(frozen=True)
class Tensor:
    """A tensor: its name, its shape with rows first, its type's name, and its bytes as rows of blocks (or None)."""

    name: str
    shape: tuple[int, ...]
    type: str
    raw: NDArray[np.uint8] | None

    def floats(self, first: int, count: int) -> NDArray[np.float32]:
        """Rows [first, first + count) as float32.

        Raises:
            ValueError: of a type that is not read here.
        """
        if self.raw is None:
            raise ValueError(f"{self.name} is of type {self.type}")
        rows = np.ascontiguousarray(self.raw[first : first + count])
        if self.type in ("F32", "F16"):
            return np.asarray(rows.view("<f4" if self.type == "F32" else "<f2"), np.float32)
        if self.type == "Q8_0":
            blocks = rows.reshape(len(rows), -1, 34)
            scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").astype(np.float32)
            return (blocks[:, :, 2:].view(np.int8) * scales).reshape(len(rows), -1)
        if self.type == "Q4_1":
            blocks = rows.reshape(len(rows), -1, 20)
            head = np.ascontiguousarray(blocks[:, :, :4]).view("<f2").astype(np.float32)
            both = blocks[:, :, 4:]  # low nibbles are the first 16 values
            values = np.concatenate([both & 15, both >> 4], axis=2).astype(np.float32)
            return (values * head[:, :, :1] + head[:, :, 1:]).reshape(len(rows), -1)
        blocks = rows.reshape(len(rows), -1, 17)
        table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
        both = blocks[:, :, 1:]
        values = table[np.concatenate([both & 15, both >> 4], axis=2)]
        return (values * np.exp2(blocks[:, :, :1].astype(np.float32) - 128)).reshape(len(rows), -1)


class _Head:
    """A cursor over the file's head that refuses to leave it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.at, self.path = data, 0, path

    def fail(self, why: str) -> ModelError:
        return ModelError(f"{self.path}: it is no GGUF file that can be read: {why} (at byte {self.at})")

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
            raise self.fail("text that is no UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth > 2:
            raise self.fail(f"a value of type {kind}")
        inner, length = int(self.number("I")), self.count("values")
        if inner in _SCALARS:
            code = f"{length}{_SCALARS[inner]}"
            return list(struct.unpack("<" + code, self.take(struct.calcsize("<" + code))))
        return [self.value(inner, depth + 1) for _ in range(length)]


class File:
    """An open GGUF file; a context manager, after which its tensors' bytes are gone.

    Attributes:
        path: where it lies.
        metadata: by name.
        tensors: by name, in the file's order.

    Raises:
        ModelError: it is none, is cut short, or says what cannot be.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            if not path.stat().st_size:
                raise ModelError(f"{path}: the file is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, self.tensors = self._read(_Head(self._map, path))
        except BaseException:
            self.close()
            raise

    def _read(self, head: _Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if head.take(4) != b"GGUF":
            raise ModelError(f"{self.path}: it is no GGUF file: it does not begin with GGUF")
        version = int(head.number("I"))
        if version not in (2, 3):
            raise head.fail(f"version {version}; 2 and 3 are read")
        tensors, entries = head.count("tensors"), head.count("entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = head.text()
            metadata[name] = head.value(int(head.number("I")))
        listed = []
        for _ in range(tensors):
            name, dimensions = head.text(), int(head.number("I"))
            if not 1 <= dimensions <= 4:
                raise head.fail(f"tensor {name} has {dimensions} dimensions")
            extents = tuple(int(head.number("Q")) for _ in range(dimensions))
            listed.append((name, extents, int(head.number("I")), int(head.number("Q"))))
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise head.fail(f"an alignment of {step!r}")
        start = -(-head.at // step) * step
        found = {}
        for name, extents, kind, offset in listed:
            if name in found:
                raise head.fail(f"two tensors are called {name}")
            found[name] = self._tensor(head, name, extents, kind, start + offset)
        return metadata, found

    def _tensor(self, head: _Head, name: str, extents: tuple[int, ...], kind: int, at: int) -> Tensor:
        if any(not 1 <= e < 1 << 32 for e in extents):
            raise head.fail(f"tensor {name} has the extents {extents}")
        if kind not in TYPES:
            return Tensor(name, extents[::-1], OTHERS.get(kind, f"number {kind}"), None)
        label, size, block = TYPES[kind]
        if extents[0] % block:
            raise head.fail(f"tensor {name} is {label} with rows of {extents[0]} values")
        rows, row = 1, extents[0] // block * size
        for e in extents[1:]:
            rows *= e
        if at + rows * row > len(self._map):
            raise ModelError(
                f"{self.path}: it is cut short: tensor {name} ends at byte {at + rows * row}, "
                f"the file at {len(self._map)}"
            )
        raw = np.frombuffer(self._map, np.uint8, rows * row, at).reshape(rows, row)
        return Tensor(name, extents[::-1], label, raw)

    def close(self) -> None:
        """Let the mapping go."""
        self.tensors: dict[str, Tensor] = {}
        try:
            self._map.close()
        except BufferError:  # an array over it lives on somewhere (a traceback); it goes with that
            pass

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors.values())
