# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours of packed bit vectors by Hamming distance, as a search over binary embeddings asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnear.kernels import distances, nearest

__all__ = ["distances", "nearest", "search"]


def search(query: NDArray[np.uint8], base: NDArray[np.uint8], k: int) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """The ``k`` vectors nearest to a query: indices and distances, nearest first, ties by index.

    Args:
        query: (bytes,) uint8.
        base: (n, bytes) uint8, C-contiguous.
        k: 1 to n.
    """
    found = np.empty(len(base), np.uint32)
    distances(found, query, base, *base.shape)
    order = np.argsort(found, kind="stable")[:k]
    return order, found[order]
