# SPDX-License-Identifier: Apache-2.0
"""A llama-like model in float32 NumPy, written from the architecture alone: what the forward pass is held against.

It shares with q8llama the reading of the file and nothing of what is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tunekit.q8 import gguf


class Plain:
    """The model of a GGUF file, all weights in float32."""

    def __init__(self, path: Path) -> None:
        with gguf.read(path) as file:
            self.meta = {k: v for k, v in file.metadata.items() if k.startswith("llama.")}
            self.w = {name: t.floats() for name, t in file.tensors.items()}

    def number(self, name: str) -> Any:
        return self.meta[f"llama.{name}"]

    def norm(self, x: Any, w: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.number("attention.layer_norm_rms_epsilon"))) * w

    def turned(self, x: Any) -> Any:
        """(tokens, heads, head), pairs side by side as the file has them."""
        t, _, head = x.shape
        angle = np.arange(t)[:, None] * self.number("rope.freq_base") ** (-np.arange(0, head, 2) / head)
        c, s = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        out = np.empty_like(x)
        out[..., ::2], out[..., 1::2] = x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s
        return out

    def logits(self, tokens: Any) -> Any:
        """(tokens, vocabulary) float32."""
        w, t = self.w, len(tokens)
        heads, kv = self.number("attention.head_count"), self.number("attention.head_count_kv")
        head = w["blk.0.attn_q.weight"].shape[0] // heads
        x = w["token_embd.weight"][tokens]
        later = np.triu(np.full((t, t), -np.inf, np.float32), 1)
        for layer in range(self.number("block_count")):
            at = f"blk.{layer}."
            n = self.norm(x, w[at + "attn_norm.weight"])
            q, k, v = ((n @ w[f"{at}attn_{name}.weight"].T).reshape(t, -1, head) for name in "qkv")
            q, k = self.turned(q), self.turned(k)
            out = np.empty_like(q)
            for h in range(heads):
                s = q[:, h] @ k[:, h * kv // heads].T / np.float32(np.sqrt(head)) + later
                p = np.exp(s - s.max(-1, keepdims=True))
                out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h * kv // heads]
            x = x + out.reshape(t, -1) @ w[at + "attn_output.weight"].T
            n = self.norm(x, w[at + "ffn_norm.weight"])
            gate = n @ w[at + "ffn_gate.weight"].T
            with np.errstate(over="ignore"):
                x = x + (gate / (1 + np.exp(-gate)) * (n @ w[at + "ffn_up.weight"].T)) @ w[at + "ffn_down.weight"].T
        x = self.norm(x, w["output_norm.weight"])
        return x @ w.get("output.weight", w["token_embd.weight"]).T


def log_softmax(logits: Any) -> Any:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def compare(ours: Any, plain: Any, tokens: Any) -> dict[str, float]:
    """Perplexities, mean Kullback-Leibler divergence, and how often the likeliest token is the same."""
    a, b = log_softmax(plain), log_softmax(ours)
    nxt = np.asarray(tokens[1:])
    return {
        "perplexity": float(np.exp(-b[np.arange(len(nxt)), nxt].mean())),
        "float32": float(np.exp(-a[np.arange(len(nxt)), nxt].mean())),
        "kl": float((np.exp(a) * (a - b)).sum(-1).mean()),
        "top1": float((a.argmax(-1) == b.argmax(-1)).mean()),
    }
