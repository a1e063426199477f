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
        np.testing.assert_array_equal(tensor.floats(), want)
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
            assert tensor.offset + (0 if tensor.raw is None else tensor.raw.size) <= len(whole)
            assert tensor.raw is None or tensor.raw.size * 8 >= np.prod(tensor.shape)  # 4 bits a value at the least


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "the file is empty"), (b"GGML" + b"\0" * 40, "does not begin with GGUF")]
)
def test_what_is_no_gguf(data: bytes, words: str, write: Any) -> None:
    with pytest.raises(ValueError, match=words):
        gguf.read(write(data))


def test_a_type_that_is_not_read_gives_its_shape(write: Any) -> None:
    data = bytearray(small_model(1))
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 12)  # Q4_K
    with gguf.read(write(bytes(data))) as file:
        tensor = file.tensors["token_embd.weight"]
        assert (tensor.type, tensor.shape) == ("Q4_K", (96, 64)) and file.matrix("token_embd.weight") is None
        with pytest.raises(ValueError, match=r"token_embd.weight is of type Q4_K"):
            tensor.floats()
    data[at : at + 4] = struct.pack("<I", 99)
    assert gguf.read(write(bytes(data))).tensors["token_embd.weight"].type == "number 99"


def test_the_metadata_as_values_and_as_it_stands_in_the_file(write: Any) -> None:
    """Copied entries make a file that says the same."""
    whole = small_model(1)
    with gguf.read(write(whole)) as file:
        assert file.metadata["tokenizer.tokens"] == ["a", "bc"] and file.metadata["numbers"] == [1, 2, 3]
        assert file.metadata["llama.block_count"] == 1
        entries = [file.entry(name) for name in file.metadata]
        assert b"".join(entries) in whole and file.entry("general.name") == entry("general.name", 8, text("tiny"))
    assert not file.tensors
    copy = b"GGUF" + struct.pack("<IQQ", 2, 0, len(entries)) + b"".join(entries)
    assert gguf.read(write(copy)).metadata == file.metadata


@pytest.mark.parametrize("kind", sorted(gguf._TYPES))
def test_any_rows_may_be_asked_for_in_any_order(kind: int, write: Any) -> None:
    with gguf.read(write(small_model(1, kind))) as file:
        tensor = file.tensors["token_embd.weight"]
        whole, order = tensor.floats(), np.array([95, 0, 7, 7])
        assert tensor.raw is not None
        np.testing.assert_array_equal(gguf.floats(tensor.raw[order], tensor.type), whole[order])


def test_corrupt_scales_are_values_like_others(write: Any) -> None:
    data = small_model(1, 8).replace(np.float16(0.01).tobytes(), b"\x00\x7c")
    with gguf.read(write(data)) as file:
        assert not np.isfinite(file.tensors["token_embd.weight"].floats()).all()


def test_two_tensors_of_one_name_are_refused(write: Any) -> None:
    data = small_model(1).replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight")
    with pytest.raises(ValueError, match=r"two tensors are called blk\.0\.attn_q\.weight"):
        gguf.read(write(data))


def one_tensor(extents: tuple[int, ...], kind: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor_entry("t", extents, kind, 0) + b"\0" * 4096


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (one_tensor((0, 4), 0), r"tensor t, F32, has the extents \(0, 4\)"),
        (one_tensor((64, 0), 12), r"tensor t, Q4_K, has the extents"),
        (one_tensor((48, 2), 8), r"tensor t, Q8_0, has the extents \(48, 2\)"),
        (one_tensor((1 << 32, 1 << 32), 12), r"tensor t, Q4_K, has the extents"),
        (one_tensor((1 << 63, 4, 4, 4), 0), r"tensor t, F32, has the extents"),
        (one_tensor((1,) * 5, 0), "tensor t has 5 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), f"it claims {1 << 40} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 25), f"it claims {1 << 25} entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), f"it claims {1 << 60} bytes of text"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 9, struct.pack("<IQ", 8, 1 << 33)), f"it claims {1 << 33} values"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 9, struct.pack("<IQ", 9, 1) * 5000), "it has a value of type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 13, b""), "it has a value of type 13"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_named(data: bytes, words: str, write: Any) -> None:
    with pytest.raises(ValueError, match=f"no GGUF file that can be read here: {words}"):
        gguf.read(write(data))


def test_text_that_is_none_is_refused(write: Any) -> None:
    with pytest.raises(ValueError, match="text that is no UTF-8"):
        gguf.read(write(small_model(1).replace(b"tiny", b"tin\xff")))


def test_a_tensor_that_lies_beyond_the_end_is_named(write: Any) -> None:
    whole = small_model(1)
    with pytest.raises(ValueError, match=rf"cut short: tensor blk\.0\.ffn_down\.weight ends at byte {len(whole)}, the file at"):
        gguf.read(write(whole[:-1]))


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
    assert work * 34 / 32 >= 2 * (500 << 20)
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
    for kind, said in ((8, text("x")), (4, struct.pack("<I", 0)), (4, struct.pack("<I", 48))):
        value = entry("general.alignment", kind, said)
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
