# SPDX-License-Identifier: Apache-2.0
"""Quantising activations and multiplying: the public calls, joined to the row chosen for this box.

The arrays are checked here, once; below, everything is a pointer and a size. Where nothing native was built or
chosen, the same calls run on :mod:`tunekit.q8.oracle` and give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.core import core as find_core
from tunekit.errors import AbiError
from tunekit.q8 import grid, kernels, oracle
from tunekit.q8.grid import BLOCK
from tunekit.q8.layout import Layout, layout_of
from tunekit.q8.matrix import Activations, Matrix, as_float32
from tunekit.q8.mx4 import Mxfp4Matrix

if TYPE_CHECKING:
    from tunekit.dispatch import BoundRow

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Native:
    """A built row, ready to be handed to the traversals.

    Attributes:
        suffix: its name.
        layout: what it reads.
        core: ``tunekit._core``.
        row: the capsule with its addresses.
    """

    suffix: str
    layout: Layout
    core: Any
    row: Any


# The row that runs, made ready: (what dispatch chose, the row). Dispatch owns the choice; this saves the binding.
_ready: tuple[Any, Native | None] = (None, None)


def bind(bound: BoundRow) -> Native:
    """Make a built row callable by the traversals.

    Raises:
        AbiError: the compiled row reads another layout than this tunekit's schema says it does, or the core that
            holds the traversals is not built.
    """
    core = find_core()
    if core is None:
        raise AbiError("tunekit._core is not built, and rows of q8q8 run through it; to build: python -m tunekit build")
    layout = layout_of(bound.row)
    mr = bound.call("q8q8_layout")
    compiled = (mr, bound.call("q8q8_kgroup"), bound.call("q8q8_wbias"))
    expected = (layout.mr, layout.kgroup, layout.bias)
    if compiled != expected:
        raise AbiError(
            f"q8q8 row {bound.suffix}: it was compiled for (mr, kgroup, bias) = {compiled}, "
            f"and the schema says {expected}; rebuild with: python -m tunekit build"
        )
    own = ("gemv", "acts_bytes", "prepare", "quantize", "amx_cfg", "f16", "gemv_f16")
    addresses = [bound.address(name) for name in ("q8q8", *(f"q8q8_{name}" for name in own))]
    mx4 = [bound.address(f"q8q8_mx4_{name}") for name in ("gemv", "room", "expand", "tile")]
    numbers = (mr, bound.call("q8q8_tokstep"), grid.groups(bound.row) if bound.row else 1)
    return Native(bound.suffix, layout, core, core.q8_row(*addresses, *numbers, *mx4))


def native() -> Native | None:
    """The row chosen for this box, or None where the Python reference runs. The first call decides."""
    global _ready
    bound = kernels.q8q8.bound()
    last, row = _ready
    if bound is not last:
        row = None if bound is None else bind(bound)
        _ready = (bound, row)
    return row


def quantize(x: NDArray[np.float32]) -> Activations:
    """Quantise activations in blocks of 32 along the last axis; the same bits on every box.

    Args:
        x: (T, K) float32, K a multiple of 32; (K,) is one token. Any strides or byte order; read-only is fine.

    Returns:
        Activations of shape (T, K).

    Raises:
        TypeError: not an array of float32.
        ValueError: another shape.
    """
    source = as_float32("x", x)
    t, k = source.shape if source.ndim == 2 else (1, source.shape[0])
    row = native()
    if row is None or not source.size:
        return Activations._of(*oracle.quantize(source.reshape(t, k)))
    codes = np.empty((t, k), np.int8)
    scales = np.empty((t, k // BLOCK), np.float32)
    row.core.q8_quantize(row.row, codes, scales, source, t, k)
    return Activations._of(codes, scales)


def output(
    out: Any, shape: tuple[int, ...], inputs: tuple[NDArray[Any], ...], named: str = "x"
) -> NDArray[np.float32]:
    """Check ``out`` before anything is computed; ``named`` says in words what ``inputs`` are."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array of float32, not {type(out).__name__}")
    if out.dtype != _FLOAT32:
        raise TypeError(f"out must be native float32, not {out.dtype.str}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, not {out.shape}")
    if not out.flags.c_contiguous or not out.flags.aligned:
        raise ValueError("out must be C-contiguous and aligned")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    # Bounds, not elements: an output is contiguous, so a false alarm takes an output inside the gaps of a strided x.
    if any(np.may_share_memory(out, other) for other in inputs):
        raise ValueError(f"out overlaps {named} in memory; pass a separate array")
    return out


def matmul(
    x: NDArray[np.float32] | Activations, m: Matrix, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Multiply activations by the transpose of a matrix: ``y[t, n] = sum over k of x[t, k] * m[n, k]``.

    Float activations are quantised on the way, exactly as :func:`quantize` does. The result is bit-identical on
    every box, row and number of lanes (see :mod:`tunekit.q8.oracle`); NaN and infinity stay within the token or
    the row of weights that they belong to.

    Args:
        x: (T, K) or (K,) float32, any strides or byte order; or Activations.
        m: the matrix, N rows of K.
        out: where to write: native float32, C-contiguous, of the result's shape, not overlapping x.

    Returns:
        (T, N) float32, or (N,) for a vector; ``out`` where it was given.

    Raises:
        TypeError: not arrays of float32.
        ValueError: shapes that do not fit, or an ``out`` that cannot be written.
    """
    if not isinstance(m, Matrix):
        raise TypeError(f"m must be a Matrix, not {type(m).__name__}; pack(w) makes one from float32 weights")
    # The usual call is checked in C, all at once. What is unusual or wrong is none of its business: it says False, and
    # the way below copies or explains. A choice holds for the process, so the row is not asked for again.
    ready = m._call
    if ready is not None and type(x) is np.ndarray and ready[0] is _ready[1]:
        to = np.empty((*x.shape[:-1], m._n), np.float32) if out is None else out
        if type(to) is np.ndarray and ready[1](ready[2], x, to):
            return to
    n, k = m.shape
    acts = x if isinstance(x, Activations) else None
    source: NDArray[np.float32] | None = None
    inputs: tuple[NDArray[Any], ...]
    if acts is not None:
        given: tuple[int, ...] = acts.shape
        inputs = (acts.codes, acts.scales)
    else:
        source = as_float32("x", x)
        given = source.shape
        inputs = (x, source)  # type: ignore[assignment]  # x is an array, or as_float32 had raised
    if given[-1] != k:
        raise ValueError(f"x of shape {given} does not fit the matrix of shape {(n, k)}: {given[-1]} is not {k}")
    t = given[0] if len(given) == 2 else 1
    shape = (*given[:-1], n)
    y = np.empty(shape, np.float32) if out is None else output(out, shape, inputs)
    if not y.size:
        return y
    if not k:
        y[...] = 0
        return y
    row = native()
    if row is None:
        if acts is not None:
            codes, scales = acts.codes, acts.scales
        elif source is not None:
            codes, scales = oracle.quantize(source.reshape(t, k))
        y[...] = oracle.matmul_codes(codes, scales, m.codes, m.scales).reshape(shape)
        return y
    mx4 = isinstance(m, Mxfp4Matrix)
    first, second = m.nibble_planes(row.layout) if isinstance(m, Mxfp4Matrix) else m.planes(row.layout)
    if m._call is None or m._call[0] is not row:
        m._call = (row, row.core.q8_product, row.core.q8_prepared(row.row, first, second, n, k, mx4))
    if mx4:
        if acts is not None:
            row.core.q8_mx4_matmul_acts(row.row, y, acts.codes, acts.scales, first, second, t, n, k)
        else:
            row.core.q8_mx4_matmul(row.row, y, source, first, second, t, n, k)
    elif acts is not None:
        row.core.q8_matmul_acts(row.row, y, acts.codes, acts.scales, first, second, t, n, k)
    else:
        row.core.q8_matmul(row.row, y, source, first, second, t, n, k)
    return y
