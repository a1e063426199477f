# SPDX-License-Identifier: Apache-2.0
"""Llama-like language models on tunekit's Q8 products: the same tokens on every CPU, row and number of lanes."""

from q8llama.errors import ModelError
from q8llama.model import Model, Session, greedy, sampler

__all__ = ["Model", "ModelError", "Session", "greedy", "sampler"]
