# SPDX-License-Identifier: Apache-2.0
"""Matrix products of 8-bit blocks (Q8_0 weights, Q8 activations), exact and bit-identical on every box.

>>> from tunekit import q8
>>> m = q8.pack(w)                  # (N, K) float32 -> Matrix
>>> m = q8.from_q8_0(blocks, n, k)  # ggml's bytes; so does q8.from_mxfp4, and keeps the weights four bits wide
>>> y = q8.matmul(x, m)             # (T, K) or (K,) float32 -> (T, N) or (N,) float32
>>> a = q8.quantize(x)              # quantise once, multiply often
>>> y = q8.matmul(a, m, out=y)
>>> q, k, v = q8.matmul_many(x, [mq, mk, mv])   # one set of activations, one dispatch
>>> q8.oracle.matmul(a, m)          # the executable specification, NumPy only; the same bits

Importing chooses nothing: the first product decides which row runs, for the whole process.
"""

from __future__ import annotations

from tunekit import linking
from tunekit.q8 import capi, oracle
from tunekit.q8.fused import matmul_experts, matmul_many
from tunekit.q8.matrix import Activations, Matrix, from_q8_0, pack
from tunekit.q8.mx4 import from_mxfp4
from tunekit.q8.product import matmul, quantize

linking.offer(__name__, capi.capsule)  # for C: tunekit_q8.h

__all__ = [
    "Activations",
    "Matrix",
    "from_mxfp4",
    "from_q8_0",
    "matmul",
    "matmul_experts",
    "matmul_many",
    "oracle",
    "pack",
    "quantize",
]
