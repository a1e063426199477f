# SPDX-License-Identifier: Apache-2.0
"""Dot products and axpy of float32 vectors, tuned for the box."""

from vecs.kernels import axpy, dot, dots

__all__ = ["axpy", "dot", "dots"]
