# SPDX-License-Identifier: Apache-2.0
"""Files that are no models here, each with a reason: cut short anywhere, corrupt, of another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small as make
from q8llama import Model, ModelError


def refused(path: Path, match: str, python: Any = None) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        Model.load(path)
    assert str(path) in str(caught.value)


def changed(**values: Any) -> bytes:
    data = make.metadata()
    for name, value in values.items():
        key = name.replace("__", ".")
        data.pop(key, None)
        if value is not None:
            data[key] = value
    return make.encode(data, make.tensors())


def replaced(name: str, *new: Any) -> bytes:
    return make.encode(make.metadata(), [(t[0], *new) if t[0] == name and new else t for t in make.tensors() if t[0] != name or new])


SPOILT = np.full(make.D * 96, np.nan, "<f4").tobytes()
CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "no GGUF": (lambda: b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "a header alone": (lambda: b"GGUF", "cut short"),
    "version 1": (lambda: b"GGUF\x01\0\0\0" + bytes(16), "version 1"),
    "too many tensors": (lambda: b"GGUF\x03\0\0\0" + b"\xff" * 16, "claims 18446744073709551615 tensors"),
    "text that is none": (lambda: make.encode(make.metadata(), make.tensors()).replace(b"<extra1>", b"\xffextra1>"), "text that is no UTF-8"),
    "another architecture": (lambda: changed(general__architecture="qwen2"), "'qwen2'; 'llama' is known"),
    "no extents": (lambda: changed(llama__block_count=None), "no llama.block_count"),
    "an extent of text": (lambda: changed(llama__block_count="two"), "'two'"),
    "fewer layers": (lambda: changed(llama__block_count=1), "blk.1.* does not use"),
    "more layers": (lambda: changed(llama__block_count=3), "no tensor blk.2.attn_q.weight"),
    "another width": (lambda: changed(llama__feed_forward_length=192), r"ffn_gate.weight has the shape \(160, 96\)"),
    "odd heads": (lambda: changed(llama__attention__head_count_kv=4), "shared out evenly"),
    "scaled positions": (lambda: changed(llama__rope__scaling__type="yarn"), "scales positions"),
    "experts": (lambda: changed(llama__expert_count=8), "mixture of experts"),
    "half turned": (lambda: changed(llama__rope__dimension_count=8), "turns 8 of 16"),
    "sentencepiece": (lambda: changed(tokenizer__ggml__model="llama"), "kind 'llama'"),
    "another cut": (lambda: changed(tokenizer__ggml__pre="qwen2"), "'qwen2'"),
    "no merges": (lambda: changed(tokenizer__ggml__merges=None), "no list of merges"),
    "a vocabulary that does not match": (lambda: changed(tokenizer__ggml__tokens=make.TOKENS[:299], tokenizer__ggml__token_type=[1] * 299), "299 tokens, and token_embd.weight 300 rows"),
    "types that do not match": (lambda: changed(tokenizer__ggml__token_type=[1, 1]), "300 tokens and 2 types"),
    "types that are no list": (lambda: changed(tokenizer__ggml__token_type=7), "no list of types"),
    "angles beyond measure": (lambda: changed(llama__rope__freq_base=1e-30), "corrupt: it turns pairs by"),
    "an end outside": (lambda: changed(tokenizer__ggml__eos_token_id=300), "eos token is 300"),
    "no embedding": (lambda: replaced("token_embd.weight"), "no matrix token_embd.weight"),
    "a missing matrix": (lambda: replaced("blk.1.ffn_up.weight"), "no tensor blk.1.ffn_up.weight"),
    "another format": (lambda: replaced("blk.0.ffn_up.weight", (160, 96), 12, bytes(9000)), "of type Q4_K; F32, F16, Q8_0, Q4_1 and MXFP4"),
    "not finite": (lambda: replaced("blk.0.attn_q.weight", (96, 96), "F32", SPOILT), "corrupt: blk.0.attn_q.weight"),
    "not finite scales": (lambda: replaced("token_embd.weight", (300, 96), "Q8_0", b"\x00\x7c" * 15300), "corrupt: token_embd.weight"),
    "a spoilt norm": (lambda: replaced("output_norm.weight", (96,), "F32", SPOILT[:384]), "corrupt: output_norm.weight"),
    "a bias": (lambda: make.encode(make.metadata(), [*make.tensors(), ("blk.0.attn_q.bias", (96,), "F32", bytes(384))]), "attn_q.bias.* does not use"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_no_model_here_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    made, reason = CASES[name]
    (tmp_path / "model.gguf").write_bytes(made())
    refused(tmp_path / "model.gguf", reason)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = make.encode(make.metadata(), make.tensors())
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(1)
    for length in [*range(1, 40, 3), *rng.integers(40, len(whole) - 1, 60).tolist(), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            Model.load(path)


def test_spoilt_bytes_are_refused_or_read_and_never_crash(tmp_path: Path) -> None:
    whole = bytearray(make.encode(make.metadata(), make.tensors()))
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(2)
    for _ in range(120):
        at, was = int(rng.integers(0, 12000)), bytes(whole)
        whole[at : at + 4] = rng.bytes(4)
        path.write_bytes(whole)
        try:
            Model.load(path)
        except ModelError:
            pass
        whole[:] = was


def test_the_command_says_it_in_one_line(python: Any, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(CASES["another architecture"][0]())
    for path, reason in ((tmp_path / "x.gguf", "'qwen2'"), (tmp_path / "none.gguf", "No such file")):
        done = python("-m", "q8llama", "hello", "--model", path, check=False)
        assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and reason in done.stderr


def test_progress_is_told_to_the_end(small: Path) -> None:
    seen: list[tuple[int, int]] = []
    Model.load(small, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and [d for d, _ in seen] == sorted({d for d, _ in seen})


def test_a_matrix_with_a_scale_that_no_float16_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept with float32 scales, and 10**-12 beside weights of 0.1 gives what 0 gives."""
    found = []
    for name, value in (("tiny", 1e-12), ("none", 0.0)):
        parts = make.tensors()
        at, (title, shape, kind, data) = next((i, t) for i, t in enumerate(parts) if t[2] == "F32" and len(t[1]) == 2)
        values = np.frombuffer(data, "<f4").reshape(shape).copy()
        values[-1, :32] = value
        parts[at] = title, shape, kind, values.tobytes()
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(make.encode(make.metadata(), parts))
        monkeypatch.setattr("q8llama.model.ROWS", 64)  # of the widest group; so its last rows are a part of their own
        seen: list[tuple[int, int]] = []
        model = Model.load(path, lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1][0] == seen[-1][1] and [d for d, _ in seen] == sorted({d for d, _ in seen})
        found.append((model.kept[f"{kind} as Q8_0"], model.session(8).feed([5, 6, 7], every=True)))
    (wide, tiny), (narrow, none) = found
    assert wide == narrow + shape[0] * shape[1] // 32 * 2
    np.testing.assert_allclose(tiny, none, rtol=1e-4, atol=1e-5)
