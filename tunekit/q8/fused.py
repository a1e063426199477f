# SPDX-License-Identifier: Apache-2.0
"""Several products in one dispatch: matrices that share their activations, and experts that share out the tokens.

A layer's query, key and value matrices meet the same activations. Multiplied one by one, each quantises them anew
and each is a rendezvous of all lanes; together they are quantised once, and the lanes meet once. The bits are those
of the single products.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tunekit.q8 import oracle
from tunekit.q8.matrix import Activations, Matrix, as_float32
from tunekit.q8.mx4 import Mxfp4Matrix
from tunekit.q8.product import Native, native, output


def _matrices(matrices: Any) -> list[Matrix]:
    found = list(matrices)
    for i, m in enumerate(found):
        if not isinstance(m, Matrix):
            raise TypeError(f"matrices[{i}] must be a Matrix, not {type(m).__name__}; pack(w) makes one from float32")
    if not found:
        raise ValueError("matrices is empty")
    for i, m in enumerate(found):
        if m.shape[1] != found[0].shape[1]:
            raise ValueError(
                f"matrices[{i}] of shape {m.shape} has another K than matrices[0] of shape {found[0].shape}"
            )
    return found


def _activations(x: Any, k: int) -> tuple[Activations | NDArray[np.float32], tuple[int, ...], tuple[Any, ...]]:
    """The activations, their shape, and the arrays that no output may overlap."""
    if isinstance(x, Activations):
        source: Activations | NDArray[np.float32] = x
        given: tuple[int, ...] = x.shape
        inputs: tuple[Any, ...] = (x.codes, x.scales)
    else:
        plain = as_float32("x", x)
        source, given, inputs = plain, plain.shape, (x, plain)
    if given[-1] != k:
        raise ValueError(f"x of shape {given} does not fit matrices with K = {k}")
    return source, given, inputs


def _biases(bias: Any, matrices: Sequence[Matrix]) -> list[NDArray[np.float32] | None]:
    if bias is None:
        return [None] * len(matrices)
    found = list(bias)
    if len(found) != len(matrices):
        raise ValueError(f"there are {len(matrices)} matrices and {len(found)} biases; None stands for no bias")
    checked: list[NDArray[np.float32] | None] = []
    for i, (b, m) in enumerate(zip(found, matrices, strict=True)):
        if b is not None:
            if not isinstance(b, np.ndarray) or b.dtype.newbyteorder("=") != np.float32:
                kind = b.dtype if isinstance(b, np.ndarray) else type(b).__name__
                raise TypeError(f"bias[{i}] must be an array of float32, not {kind}")
            if b.shape != (m.shape[0],):
                raise ValueError(f"bias[{i}] must have shape {(m.shape[0],)}, not {b.shape}")
            b = np.require(b.view(np.ndarray), np.float32, ["C", "A"])
        checked.append(b)
    return checked


def _reference(
    source: Activations | NDArray[np.float32], m: Matrix, bias: NDArray[np.float32] | None, t0: int, t1: int
) -> NDArray[np.float32]:
    if isinstance(source, Activations):
        codes, scales = source.codes, source.scales
    else:
        codes, scales = oracle.quantize(source.reshape(-1, m.shape[1]))
    y = oracle.matmul_codes(codes[t0:t1], scales[t0:t1], m.codes, m.scales)
    with np.errstate(all="ignore"):
        return y if bias is None else y + bias


def _region(
    row: Native, m: Matrix, y: NDArray[np.float32], bias: NDArray[np.float32] | None, t0: int, t1: int
) -> tuple[Any, ...]:
    mx4 = isinstance(m, Mxfp4Matrix)
    first, second = m.nibble_planes(row.layout) if isinstance(m, Mxfp4Matrix) else m.planes(row.layout)
    return y, first, second, bias, m.shape[0], t0, t1, mx4


def _run(
    row: Native, source: Activations | NDArray[np.float32], t: int, k: int, regions: list[tuple[Any, ...]]
) -> None:
    if isinstance(source, Activations):
        row.core.q8_regions(row.row, None, source.codes, source.scales, t, k, tuple(regions))
    else:
        row.core.q8_regions(row.row, source, None, None, t, k, tuple(regions))


def matmul_many(
    x: NDArray[np.float32] | Activations,
    matrices: Sequence[Matrix],
    bias: Sequence[NDArray[np.float32] | None] | None = None,
    out: Sequence[NDArray[np.float32]] | None = None,
) -> list[NDArray[np.float32]]:
    """Multiply one set of activations by several matrices, in one dispatch: query, key and value; gate and up.

    ``result[i]`` has the bits of ``matmul(x, matrices[i])``, plus ``bias[i]`` in one float32 addition.

    Args:
        x: (T, K) or (K,) float32, any strides or byte order; or Activations.
        matrices: one or more, N_i rows of K each, in any mixture of formats.
        bias: for each matrix (N_i,) float32, or None.
        out: for each matrix where to write: native float32, C-contiguous, (T, N_i) or (N_i,), apart from each
            other and from x.

    Returns:
        For each matrix (T, N_i) float32, or (N_i,) for a vector.

    Raises:
        TypeError: not arrays of float32, or no matrices.
        ValueError: shapes that do not fit, no matrix at all, or an ``out`` that cannot be written.
    """
    every = _matrices(matrices)
    k = every[0].shape[1]
    source, given, inputs = _activations(x, k)
    biases = _biases(bias, every)
    shapes = [(*given[:-1], m.shape[0]) for m in every]
    if out is None:
        results = [np.empty(shape, np.float32) for shape in shapes]
    else:
        wanted = list(out)
        if len(wanted) != len(every):
            raise ValueError(f"there are {len(every)} matrices and {len(wanted)} outputs")
        added = tuple(b for b in biases if b is not None)
        results = [
            output(y, shape, (*inputs, *added, *wanted[:i]), "x, a bias or another output")
            for i, (y, shape) in enumerate(zip(wanted, shapes, strict=True))
        ]
    t = given[0] if len(given) == 2 else 1
    row = native()
    if row is None:
        for y, m, b in zip(results, every, biases, strict=True):
            y[...] = _reference(source, m, b, 0, t).reshape(y.shape)
    elif t:
        _run(row, source, t, k, [_region(row, m, y, b, 0, t) for y, m, b in zip(results, every, biases, strict=True)])
    return results


def matmul_experts(
    x: NDArray[np.float32] | Activations,
    matrices: Sequence[Matrix],
    offsets: Sequence[SupportsIndex],
    bias: Sequence[NDArray[np.float32] | None] | None = None,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Multiply each run of tokens by a matrix of its own, in one dispatch: the experts of a mixture.

    ``result[offsets[e]:offsets[e + 1]]`` has the bits of ``matmul(x[offsets[e]:offsets[e + 1]], matrices[e])``, plus
    ``bias[e]`` in one float32 addition.

    Args:
        x: (T, K) float32 or Activations, tokens sorted by expert.
        matrices: E matrices of one shape (N, K).
        offsets: E + 1 whole numbers from 0 to T, ascending; an expert without tokens has two that are equal.
        bias: for each expert (N,) float32, or None.
        out: where to write: native float32, C-contiguous, (T, N), apart from x.

    Returns:
        (T, N) float32; ``out`` where it was given.

    Raises:
        TypeError: not arrays of float32, no matrices, no whole numbers.
        ValueError: shapes or offsets that do not fit, or an ``out`` that cannot be written.
    """
    every = _matrices(matrices)
    n, k = every[0].shape
    for e, m in enumerate(every):
        if m.shape[0] != n:
            raise ValueError(f"matrices[{e}] has {m.shape[0]} rows and matrices[0] has {n}: experts have one shape")
    source, given, inputs = _activations(x, k)
    if len(given) != 2:
        raise ValueError(f"x must have shape (T, K), not {given}")
    t = given[0]
    ends = [operator.index(o) for o in offsets]
    whole = len(ends) == len(every) + 1 and ends[0] == 0 and ends[-1] == t
    if not whole or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"offsets must be {len(every) + 1} ascending numbers from 0 to {t}, not {ends}")
    biases = _biases(bias, every)
    added = tuple(b for b in biases if b is not None)
    y = np.empty((t, n), np.float32) if out is None else output(out, (t, n), (*inputs, *added), "x or a bias")
    row = native()
    runs = [(every[e], biases[e], ends[e], ends[e + 1]) for e in range(len(every)) if ends[e] < ends[e + 1]]
    if row is None:
        for m, b, t0, t1 in runs:
            y[t0:t1] = _reference(source, m, b, t0, t1)
    elif runs:
        _run(row, source, t, k, [_region(row, m, y, b, t0, t1) for m, b, t0, t1 in runs])
    return y
