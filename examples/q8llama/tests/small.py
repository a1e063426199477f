# SPDX-License-Identifier: Apache-2.0
"""A cut-down model, written as a GGUF file: two layers of random weights in every type that is read, 300 tokens.

The same bytes everywhere: its numbers are whole numbers of a fixed generator, scaled by powers of two.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from q8llama.tokens import _visible

LAYERS, D, HEADS, KV, HEAD, FF, CONTEXT = 2, 96, 6, 2, 16, 160, 1024
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ġ", "and")]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *_visible().values(), *("".join(m) for m in MERGES)]
TOKENS += [f"<extra{i}>" for i in range(300 - len(TOKENS))]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TYPES = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "MXFP4": 39}


def _raw(count: int, seed: int) -> Any:
    return (np.random.PCG64(seed).random_raw(count) >> np.uint64(40)).astype(np.int64)


def blocks(kind: str, rows: int, columns: int, seed: int) -> bytes:
    """A matrix of values of about +-0.25."""
    raw = _raw(rows * columns, seed)
    if kind in ("F32", "F16"):
        values = ((raw & 0xFFFF) - 0x8000).astype(np.float32) * np.float32(2.0**-17)
        return values.astype("<f4" if kind == "F32" else "<f2").tobytes()
    per = (raw & 255).astype(np.uint8).reshape(-1, 32)
    scale = (((raw.reshape(-1, 32)[:, 0] >> 8) & 63) + 64).astype(np.float32)
    if kind == "Q8_0":
        half = (scale * np.float32(2.0**-16)).astype("<f2").view(np.uint8).reshape(-1, 2)
        return np.concatenate([half, per], axis=1).tobytes()
    nibbles = per[:, :16]
    if kind == "Q4_1":
        head = np.stack([scale * np.float32(2.0**-11), scale * np.float32(-7.5 * 2.0**-11)], 1).astype("<f2").view(np.uint8)
        return np.concatenate([head.reshape(-1, 4), nibbles], axis=1).tobytes()
    exponents = (120 + (raw.reshape(-1, 32)[:, 1] & 3)).astype(np.uint8)[:, None]
    return np.concatenate([exponents, nibbles], axis=1).tobytes()


def tensors(kinds: tuple[str, ...] = ("Q8_0", "Q4_1", "F16", "MXFP4", "F32")) -> list[tuple[str, tuple[int, ...], str, bytes]]:
    """Name, shape, type and bytes of every tensor."""
    q, kv = HEADS * HEAD, KV * HEAD
    shapes = {"attn_q": (q, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_output": (D, q)}
    shapes |= {"ffn_gate": (FF, D), "ffn_up": (FF, D), "ffn_down": (D, FF)}
    found = [("token_embd.weight", (len(TOKENS), D), "Q8_0", blocks("Q8_0", len(TOKENS), D, 1))]
    number = 0
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            number += 1
            kind = kinds[number % len(kinds)]
            found.append((f"blk.{layer}.{name}.weight", shape, kind, blocks(kind, *shape, 100 + number)))
        for name in ("attn_norm", "ffn_norm"):
            number += 1
            values = 1 + ((_raw(D, 200 + number) & 255) - 128).astype("<f4") / 256
            found.append((f"blk.{layer}.{name}.weight", (D,), "F32", values.astype("<f4").tobytes()))
    found.append(("output_norm.weight", (D,), "F32", np.ones(D, "<f4").tobytes()))
    return found


def metadata() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "cut down",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": D,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in TOKENS],
        "tokenizer.ggml.merges": [" ".join(m) for m in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()


def encode(data: dict[str, Any], listed: list[tuple[str, tuple[int, ...], str, bytes]]) -> bytes:
    """A GGUF file."""
    head, body, table = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(data)), b"", b""
    for name, value in data.items():
        head += _text(name) + _value(value)
    for name, shape, kind, raw in listed:
        number = TYPES.get(kind, kind)
        table += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        table += struct.pack("<IQ", number, len(body))
        body += raw + b"\0" * (-len(raw) % 32)
    head += table
    return head + b"\0" * (-len(head) % 32) + body


def write(path: Path) -> Path:
    path.write_bytes(encode(metadata(), tensors()))
    return path


DIGEST = "ebbc8330c19d8e09"
"""Of the logits, on every machine, under every emulator."""

WHOLE = (300, *[1] * 20)
CUTS = (1, 6, 17, 1, 40, 190, 2, 1, 62)
"""Two ways to feed 320 tokens: a prompt and an answer, and pieces of odd sizes, two of which end beside a slice's end."""


def _logits(model: Any, cuts: tuple[int, ...], lanes: int) -> Any:
    """The logits of every token, fed in pieces, with so many lanes, whatever the machine has, for work however small."""
    from tunekit.core import core

    for knob, value in (("target_chunk_work", 1), ("wake_work", 0), ("pretend_lanes", lanes)):
        core().set_knob(knob, value)
    tokens = (_raw(sum(cuts), 9) % len(TOKENS)).astype(np.int32)
    session = model.session(len(tokens))
    return np.concatenate([session.feed(part, every=True) for part in np.split(tokens, np.cumsum(cuts)[:-1])])


def digest(path: Path, lanes: int = 1, cuts: tuple[int, ...] = CUTS) -> dict[str, Any]:
    """Run it twice: what ran, a digest of every logit, and whether other cuts on two lanes gave the same ones."""
    import hashlib

    from q8llama import Model

    model = Model.load(path)
    want = _logits(model, WHOLE, lanes)
    about = model.about()
    again = _logits(model, cuts, 2)
    assert np.isfinite(want).all()
    same = np.array_equal(again.view(np.uint32), want[: len(again)].view(np.uint32))
    return {**about, "digest": hashlib.sha256(want.astype("<f4").tobytes()).hexdigest()[:16], "cut the same": same}


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(digest(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
