# SPDX-License-Identifier: Apache-2.0
"""What is multiplied: matrices with known values in every peer's format, activations, and the right result.

A :class:`Work` is a list of products that one call of a peer does in order, each a matrix by activations; its
multiply-accumulates are what a rate counts. Hot is one product. Streamed is as many matrices of a shape as together
take four times the last cache, all by the same activations, as the layers of a model are read. A chain is a
model's matrices in a model's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from tunekit import q8

BLOCK = 32
SHAPES = {
    "1B kv": (2048, 512),
    "1B qo": (2048, 2048),
    "1B w13": (2048, 8192),
    "1B w2": (8192, 2048),
    "135M qo": (576, 576),
    "135M kv": (576, 192),
    "135M w13": (576, 1536),
    "135M w2": (1536, 576),
    "135M head": (576, 49152),
}
"""K x N of what is measured by default; SmolLM2-135M's are all of its matrices."""

LAYERS = 30
LAYER = ("135M qo", "135M kv", "135M kv", "135M qo", "135M w13", "135M w13", "135M w2")


class Weights:
    """(N, K) weights as Q8_0 or MXFP4 blocks: their bytes, codes and scales, and the float32 that they mean."""

    def __init__(self, k: int, n: int, form: str, seed: int = 1) -> None:
        self.k, self.n, self.form = k, n, form
        rng = np.random.default_rng((seed, k, n))
        if form == "q8_0":
            part = min(n, 2048)  # more rows repeat these
            block = q8.pack(rng.standard_normal((part, k), dtype=np.float32))
            raw = np.frombuffer(block.to_q8_0(), np.uint8)
            self.blocks = np.tile(raw, -(-n // part))[: n * k // BLOCK * 34]
            table = self.blocks.reshape(n, k // BLOCK, 34)
            self.codes = np.ascontiguousarray(table[:, :, 2:]).view(np.int8).reshape(n, k)
            self.scales = np.ascontiguousarray(table[:, :, :2]).view(np.float16)[..., 0].astype(np.float32)
        else:
            table = rng.integers(0, 256, (n, k // BLOCK, 17), dtype=np.uint8)
            table[:, :, 0] = rng.integers(118, 124, (n, k // BLOCK))
            self.blocks = table.reshape(-1)
            nibbles = np.ascontiguousarray(table[:, :, 1:]).reshape(n, k // 2)
            self.codes, self.scales = q8.oracle.mxfp4(nibbles, np.ascontiguousarray(table[:, :, 0]))

    @cached_property
    def floats(self) -> np.ndarray:
        """(N, K) float32."""
        blocks = self.codes.reshape(self.n, -1, BLOCK) * self.scales[:, :, None]
        return blocks.reshape(self.n, self.k).astype(np.float32, copy=False)


class Turned:
    """The same rows in another order, made when asked for and not kept: no two matrices of a work are equal, so that
    a peer that stores equal constants once has to store them all."""

    def __init__(self, whole: Weights, by: int) -> None:
        self.whole, self.k, self.n, self.form, self.by = whole, whole.k, whole.n, whole.form, by % whole.n

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in ("blocks", "codes", "scales", "floats"):
            raise AttributeError(name)
        rows = getattr(self.whole, name).reshape(self.n, -1)
        turned = np.roll(rows, self.by, axis=0)
        return turned.reshape(-1) if name == "blocks" else turned


@dataclass
class Work:
    """Products in order: ``steps`` are pairs of indices into ``weights`` and ``acts``."""

    weights: list[Weights | Turned]
    acts: list[np.ndarray]
    steps: list[tuple[int, int]]

    @property
    def macs(self) -> int:
        return sum(self.acts[a].shape[0] * self.weights[w].k * self.weights[w].n for w, a in self.steps)


_made: dict[tuple[int, int, str], Weights] = {}


def weights(k: int, n: int, form: str) -> Weights:
    key = (k, n, form)
    if key not in _made:
        if len(_made) > 2:
            _made.clear()
        _made[key] = Weights(k, n, form)
    return _made[key]


def activations(t: int, k: int) -> np.ndarray:
    return np.random.default_rng((2, t, k)).standard_normal((t, k), dtype=np.float32)


def product(k: int, n: int, t: int, form: str, copies: int = 1) -> Work:
    w = weights(k, n, form)
    return Work([Turned(w, i) for i in range(copies)], [activations(t, k)], [(i, 0) for i in range(copies)])


@cache
def _model() -> dict[str, Weights]:
    return {name: Weights(*SHAPES[name], "q8_0") for name in dict.fromkeys((*LAYER, "135M head"))}


def chain(tokens: int) -> Work:
    """SmolLM2-135M's products of a prefill of so many tokens, or of one token; its head sees the last token alone."""
    names = [*LAYER * LAYERS, "135M head"]
    kinds = _model()
    widths = sorted({SHAPES[name][0] for name in LAYER})
    acts = [activations(tokens, k) for k in widths] + [activations(1, SHAPES["135M head"][0])]
    steps = [(i, widths.index(SHAPES[name][0])) for i, name in enumerate(names[:-1])] + [(len(names) - 1, len(widths))]
    return Work([Turned(kinds[name], i) for i, name in enumerate(names)], acts, steps)


def error_of(work: Work, results: Callable[[int], Any]) -> float:
    """The worst relative error (2-norm) of a call's results against float32, over some tokens of every shape."""
    worst, seen = 0.0, set()
    for index, (w, a) in enumerate(work.steps):
        known, x = work.weights[w], work.acts[a]
        if (known.k, known.n, x.shape[0]) in seen and index != len(work.steps) - 1:
            continue
        seen.add((known.k, known.n, x.shape[0]))
        tokens = sorted({0, x.shape[0] // 2, x.shape[0] - 1})
        right = x[tokens] @ known.floats.T
        found = np.asarray(results(index)).reshape(x.shape[0], known.n)[tokens]
        error = float(np.linalg.norm(found - right) / np.linalg.norm(right))
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst
