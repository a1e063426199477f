# SPDX-License-Identifier: Apache-2.0
"""Reading GGUF, and the chains that are made of it: against the gguf package, and against torn and lying files."""

from __future__ import annotations

import os
import platform
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunekit import q8
from tunekit.q8 import chains, gguf

RNG = np.random.default_rng(3)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor_entry(name: str, extents: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def small_model(layers: int = 2, kind: int = 0, leave_out: str = "") -> bytes:
    """A llama-like model of 64 channels with a tied output, its tensors of one type."""
    shapes = {"token_embd.weight": (64, 96)}
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (64, 64)
        shapes |= {f"blk.{layer}.{name}.weight": (64, 128) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (128, 64)
    shapes.pop(leave_out, None)
    _, size, block = gguf._TYPES[kind]
    table, data = b"", b""
    for name, extents in shapes.items():
        nbytes = extents[0] * extents[1] // block * size
        table += tensor_entry(name, extents, kind, len(data))
        if kind == 0:
            data += RNG.standard_normal(extents[0] * extents[1], dtype=np.float32).tobytes()
        else:
            blocks = RNG.integers(0, 256, (nbytes // size, size), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            if kind == 3:
                blocks[:, 2:4] = np.frombuffer(np.float16(-0.07).tobytes(), np.uint8)
            data += blocks.tobytes()
        data += b"\0" * (-len(data) % 32)
    known = [
        entry("general.architecture", 8, text("llama")),
        entry("general.name", 8, text("tiny")),
        entry("llama.block_count", 4, struct.pack("<I", layers)),
        entry("tokenizer.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
        entry("numbers", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(known)) + b"".join(known) + table
    return head + b"\0" * (-len(head) % 32) + data


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return make


@pytest.mark.parametrize("kind", sorted(gguf._TYPES))
def test_every_type_that_is_read_is_what_the_gguf_package_reads(kind: int, write: Any) -> None:
    theirs = pytest.importorskip("gguf")
    path = write(small_model(1, kind))
    file = gguf.read(path)
    known = {t.name: t for t in theirs.GGUFReader(path).tensors}
    assert set(known) == set(file.tensors)
    for name, tensor in file.tensors.items():
        assert tensor.shape == tuple(int(e) for e in reversed(known[name].shape)) and tensor.type == known[name].tensor_type.name
        want = theirs.quants.dequantize(known[name].data, known[name].tensor_type).reshape(tensor.shape)
        m = file.matrix(name)
        assert m is not None and m.shape == tensor.shape
        got = m.codes * np.repeat(m.scales, 32, axis=1)
        if tensor.type in ("Q8_0", "MXFP4"):
            np.testing.assert_array_equal(got, want)
        else:
            codes, scales = q8.oracle.quantize(want.astype(np.float32))
            np.testing.assert_array_equal(m.codes, codes)
            np.testing.assert_array_equal(m.scales, scales)


def test_the_products_of_a_model_in_order(write: Any) -> None:
    file = gguf.read(write(small_model()))
    names = gguf.products(file)
    assert (file.name, file.architecture, file.layers) == ("tiny", "llama", 2)
    assert names[0] == ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight")
    assert names[1:5] == [
        ("blk.0.attn_output.weight",),
        ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"),
        ("blk.0.ffn_down.weight",),
        ("blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.1.attn_v.weight"),
    ]
    assert len(names) == 9 and names[-1] == ("token_embd.weight",)  # tied: the embedding is the output


@pytest.mark.parametrize("leave_out", ["blk.1.ffn_up.weight", "token_embd.weight"])
def test_another_kind_of_model_is_refused_by_name(leave_out: str, write: Any) -> None:
    with pytest.raises(ValueError, match=f"no llama-like model.*{leave_out} is missing"):
        gguf.products(gguf.read(write(small_model(leave_out=leave_out))))
    with pytest.raises(ValueError, match="no layers"):
        gguf.products(gguf.read(write(small_model(0))))


def test_every_prefix_of_a_file_is_refused_or_whole(write: Any) -> None:
    whole = small_model(1)
    for length in [*range(0, 700, 7), *range(700, len(whole), 997)]:
        with pytest.raises(ValueError, match="no GGUF file that can be read here"):
            gguf.read(write(whole[:length]))


def test_lies_in_the_head_are_refused(write: Any) -> None:
    whole = small_model(1)
    rng = np.random.default_rng(1)
    for _ in range(300):
        torn = bytearray(whole)
        for at in rng.integers(0, 900, 3):
            torn[at] = rng.integers(0, 256)
        try:
            file = gguf.read(write(bytes(torn)))
        except ValueError:
            continue
        for tensor in file.tensors.values():  # whatever was read lies in the file
            assert tensor.offset + tensor.nbytes <= len(whole)


@pytest.mark.parametrize(("data", "words"), [(b"", "cut short"), (b"GGML" + b"\0" * 40, "does not begin with GGUF")])
def test_what_is_no_gguf(data: bytes, words: str, write: Any) -> None:
    with pytest.raises(ValueError, match=words):
        gguf.read(write(data))


def test_a_type_that_is_not_read_gives_its_shape(write: Any) -> None:
    data = bytearray(small_model(1))
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 12)  # Q4_K
    file = gguf.read(write(bytes(data)))
    assert file.tensors["token_embd.weight"].type == "type 12" and file.matrix("token_embd.weight") is None


def test_a_models_chain_runs_all_its_products(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[tuple[int, int]]]] = []

    def watched(x: Any, matrices: Any, bias: Any = None, out: Any = None) -> Any:
        assert [y.shape for y in out] == [(x.shape[0], m.shape[0]) for m in matrices]
        seen.append((x.shape[0], [m.shape for m in matrices]))

    monkeypatch.setattr(chains.fused, "matmul_many", watched)
    monkeypatch.setattr(chains, "ANSWER", 3)
    [chain, large] = chains.chains(str(write(small_model())))
    assert chain.name == "tiny" and large.name == "one layer of a 1B model"
    run = chain.prepare()
    run("prefill")
    # 512 tokens meet every layer, and the last of them the output.
    assert [t for t, _ in seen] == [512] * 8 + [1]
    assert seen[0][1] == [(64, 64)] * 3 and seen[2][1] == [(128, 64)] * 2 and seen[-1][1] == [(96, 64)]
    seen.clear()
    run("decode")
    assert [t for t, _ in seen] == [1] * 27
    layer = 4 * 64 * 64 + 3 * 64 * 128
    assert [p.work for p in chain.parts] == [512 * 2 * layer + 96 * 64, 3 * (2 * layer + 96 * 64)]
    assert [p.decides for p in chain.parts] == [("*",), ("*", "q8q8_gemv")]
    assert [p.decides for p in large.parts] == [("*",), ("q8q8_gemv",)]


def test_the_large_chain_is_larger_than_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "last_cache", lambda: 500 << 20)
    monkeypatch.setattr(chains, "_memory", lambda: 64 << 30)
    work = chains.large_chain().parts[0].work / chains.LARGE_TOKENS
    assert work * 36 / 32 >= 2 * (500 << 20)
    monkeypatch.setattr(chains, "_memory", lambda: 1 << 20)
    assert chains.large_chain().parts[0].work / chains.LARGE_TOKENS == sum(n * k for step in chains.LARGE for n, k in step)
    assert chains.last_cache() >= 1 << 20


def test_synthetic_matrices_are_ordinary() -> None:
    m = chains.synthetic(96, 64, 1)
    assert m.shape == (96, 64) and m.scales_fit_float16
    assert 0.0004 < m.scales.min() < m.scales.max() < 0.0021 and len(np.unique(m.codes)) > 200


# --- before a retune builds anything -----------------------------------------------------------------------


def refusal(path: Path) -> str:
    from tunekit.errors import TunekitError
    from tunekit.tuner import House

    house = House()
    try:
        house.read_model(house.kernels("tunekit"), str(path))
    except TunekitError as error:
        return str(error)
    return ""


def test_a_file_that_is_no_model_is_refused_at_once(write: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        assert refusal(path) == f"--model {path}: it is not a regular file"
        with pytest.raises((ValueError, OSError)):  # and where it became one meanwhile, reading it hangs nobody
            gguf.read(path)
    assert refusal(tmp_path / "none.gguf").endswith("none.gguf: No such file or directory")
    assert "is cut short" in refusal(write(small_model(1)[:600]))
    assert "does not begin with GGUF" in refusal(write(b"\x7fELF" * 30))
    assert "attn_q.weight is missing" in refusal(write(small_model(1, leave_out="blk.0.attn_q.weight")))
    assert refusal(write(small_model(1))) == ""


def test_an_alignment_that_is_none_is_refused(write: Any) -> None:
    for value in (entry("general.alignment", 8, text("x")), entry("general.alignment", 4, struct.pack("<I", 0))):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value
        with pytest.raises(ValueError, match="its alignment is"):
            gguf.read(write(head + b"\0" * 64))


def test_a_row_is_known_to_be_impossible_before_it_is_built() -> None:
    from tunekit.cpu import this_features
    from tunekit.tuner import House

    house = House()
    [kernel] = house.kernels("tunekit")
    usable = this_features()
    for row in kernel.rows:
        why = house.impossible(kernel, row.suffix)
        runs = any(frozenset(alternative) <= usable for alternative in kernel.targets(row))
        assert (why is None) == (runs and kernel.refuses(row, platform.machine()) is None), (row.suffix, why)
    assert house.impossible(kernel, "reference") is None
    near = house.impossible(kernel, kernel.rows[0].suffix + "x")
    assert near is not None and kernel.rows[0].suffix in near
