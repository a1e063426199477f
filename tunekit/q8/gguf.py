# SPDX-License-Identifier: Apache-2.0
"""Reading GGUF files, as far as the matrix products of a llama-like model need it: names, shapes, and weights.

The file's header is metadata (skipped but for the architecture and alignment) and a table of tensors: name, extents
with the fastest dimension first, type, offset into the data behind the header. Every number is checked against the
file before it is believed. Weights come out as Q8 matrices: Q8_0 and MXFP4 as they are, float types and Q4_0, Q4_1
requantised; of other types only the shape is read.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.q8 import product
from tunekit.q8.matrix import Matrix, from_q8_0
from tunekit.q8.mx4 import from_mxfp4
from tunekit.q8.oracle import BLOCK

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
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

_MOST = 1 << 24  # of anything that is counted: entries, tensors, text


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file.

    Attributes:
        name: as ggml calls it, such as ``blk.0.attn_q.weight``.
        shape: (rows, columns) of a matrix; one number for a vector.
        type: ggml's name of its type, or ``type N``.
        offset: of its data in the file.
        nbytes: of its data; 0 where the type is not read here.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class _Header:
    """A cursor over the file's head that refuses to leave it."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.at, self.path = data, 0, path

    def fail(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is no GGUF file that can be read here: {why} (at byte {self.at})")

    def take(self, count: int) -> Any:
        if count < 0 or self.at + count > len(self.data):
            raise self.fail("it is cut short")
        part = self.data[self.at : self.at + count]
        self.at += count
        return part

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)).tobytes())[0]

    def count(self) -> int:
        found = int(self.number("Q"))
        if found > _MOST:
            raise self.fail(f"it counts {found} of something")
        return found

    def text(self) -> str:
        return bytes(self.take(self.count())).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; arrays are passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth > 4:
            raise self.fail(f"it has a value of type {kind}")
        inner, length = int(self.number("I")), self.count()
        if inner in _SCALARS:
            self.take(length * struct.calcsize("<" + _SCALARS[inner]))
        else:
            for _ in range(length):
                self.value(inner, depth + 1)
        return None


@dataclass(frozen=True)
class File:
    """An open GGUF file.

    Attributes:
        path: where it lies.
        name: the model's own name, or the file's.
        architecture: such as ``llama``.
        layers: how many blocks it says it has.
        tensors: by name, in the file's order.
        data: the file's bytes, mapped.
    """

    path: Path
    name: str
    architecture: str
    layers: int
    tensors: dict[str, Tensor]
    data: NDArray[np.uint8]

    def matrix(self, name: str) -> Matrix | None:
        """A tensor as a Q8 (or MXFP4) matrix, or None where its type is not read here."""
        tensor = self.tensors[name]
        n, k = tensor.shape
        if not tensor.nbytes:
            return None
        raw = self.data[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.type == "Q8_0":
            return from_q8_0(raw.tobytes(), n, k)
        if tensor.type == "MXFP4":
            return from_mxfp4(raw.tobytes(), n, k)
        made = product.quantize(_floats(raw, tensor.type).reshape(n, k))
        return Matrix(made.codes, made.scales)


def _floats(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    if kind in ("F32", "F16"):
        return raw.view("<f4" if kind == "F32" else "<f2").astype(np.float32)
    blocks = raw.reshape(-1, 18 if kind == "Q4_0" else 20)
    head = blocks[:, :-16].copy().view("<f2").astype(np.float32)
    nibbles = blocks[:, -16:]
    # Both halves of a block: low nibbles are its first 16 values.
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    return (values - 8) * head[:, :1] if kind == "Q4_0" else values * head[:, :1] + head[:, 1:2]


def read(path: Path) -> File:
    """Open a GGUF file and read its head.

    Raises:
        ValueError: it is none, is cut short, or says something that cannot be.
        OSError: it cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no GGUF file: it is not a regular file")
    data: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    head = _Header(data, path)
    if bytes(head.take(4)) != b"GGUF":
        raise head.fail("it does not begin with GGUF")
    version = int(head.number("I"))
    if version not in (2, 3):
        raise head.fail(f"it is of version {version}")
    tensors, entries = head.count(), head.count()
    known: dict[str, Any] = {}
    for _ in range(entries):
        name = head.text()
        known[name] = head.value(int(head.number("I")))
    listed = []
    for _ in range(tensors):
        name, dimensions = head.text(), int(head.number("I"))
        if not 1 <= dimensions <= 4:
            raise head.fail(f"tensor {name} has {dimensions} dimensions")
        extents = tuple(int(head.number("Q")) for _ in range(dimensions))
        listed.append((name, extents, int(head.number("I")), int(head.number("Q"))))
    step = known.get("general.alignment", 32)
    if not isinstance(step, int) or not 0 < step <= 1 << 20:
        raise head.fail(f"its alignment is {step!r:.40}")
    start = -(-head.at // step) * step
    found: dict[str, Tensor] = {}
    for name, extents, kind, offset in listed:
        label, size, block = _TYPES.get(kind, (f"type {kind}", 0, 1))
        values = int(np.prod([float(e) for e in extents]))
        if any(e < 1 for e in extents) or values > 1 << 48 or extents[0] % block:
            raise head.fail(f"tensor {name} has the extents {extents}")
        nbytes = values // block * size
        if start + offset + nbytes > len(data):
            raise head.fail(f"tensor {name} lies beyond its end")
        found[name] = Tensor(name, extents[::-1], label, start + offset, nbytes)
    architecture = str(known.get("general.architecture", ""))
    layers = known.get(f"{architecture}.block_count")
    called = known.get("general.name")
    return File(
        path,
        called if isinstance(called, str) and called and called.isprintable() else path.stem,
        architecture,
        layers if isinstance(layers, int) else 0,
        found,
        data,
    )


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
