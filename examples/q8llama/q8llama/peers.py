# SPDX-License-Identifier: Apache-2.0
"""q8llama beside llama.cpp and ik_llama.cpp, on the same Q8_0 file, in turns in one run.

    python -m q8llama.peers --llama INCLUDE:LIBRARIES --ik INCLUDE:LIBRARIES [--threads 1 2] [--shapes 135M 1B]
    python -m q8llama.peers --llama INCLUDE:LIBRARIES --texts 3000

INCLUDE is one or more folders with ``llama.h`` and ``ggml.h``, separated by commas; LIBRARIES those with
``libllama.so`` and its ggml. A small C program is compiled against each and driven through a pipe; it lives in a
process of its own, as q8llama does, and whoever's turn it is not waits. Each turn is a prompt of 512 tokens from an
empty cache to the logits of its last token, then 32 tokens one by one. Rates are of the best turn, and so is the ratio;
in brackets the median of the rounds' own ratios. The file is SmolLM2's with all matrices in Q8_0, or random weights in
the shapes of a model of a billion parameters. With ``--texts`` nothing is timed: each side reads so many random texts,
and a text whose tokens are not q8llama's is printed; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from q8llama.model import installed_model, read_file
from q8llama.tokens import Tokenizer
from tunekit.q8 import gguf

PROMPT, ANSWER = 512, 32
LARGE = {"block_count": 16, "embedding_length": 2048, "feed_forward_length": 8192, "attention.head_count": 32}
LARGE |= {"attention.head_count_kv": 8, "rope.dimension_count": 64}


def _entries(file: gguf.File) -> dict[str, bytes]:
    """The metadata's entries as they stand in the file."""
    return {name: file.entry(name) for name in file.metadata}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


Listed = list[tuple[str, tuple[int, ...], int, int]]


def _write(path: Path, entries: dict[str, bytes], listed: Listed, data: Iterator[bytes]) -> None:
    """A GGUF file: tensors as (name, shape, ggml's type, bytes), and their bytes in that order."""
    table, at = b"", 0
    for name, shape, kind, size in listed:
        table += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape[::-1], kind, at)
        at += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(entries)) + b"".join(entries.values()) + table
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % 32))
        for raw in data:
            out.write(raw + bytes(-len(raw) % 32))


def whole_q8_0(source: Path, path: Path) -> Path:
    """The model with every matrix in Q8_0."""
    from tunekit import q8

    with gguf.read(source) as file:
        entries = {**_entries(file), "general.file_type": _text("general.file_type") + struct.pack("<II", 4, 7)}
        tensors = list(file.tensors.values())

        def sized() -> Listed:
            found = []
            for t in tensors:
                values = int(np.prod(t.shape))
                found.append((t.name, t.shape, *((8, values // 32 * 34) if len(t.shape) == 2 else (0, values * 4))))
            return found

        def data() -> Iterator[bytes]:
            for t in tensors:
                assert t.raw is not None
                if t.type == "Q8_0":
                    yield t.raw.tobytes()
                else:
                    values = t.floats()
                    yield q8.pack(values).to_q8_0() if len(t.shape) == 2 else values.tobytes()

        _write(path, entries, sized(), data())
    return path


def large_q8_0(source: Path, path: Path) -> Path:
    """Random weights in the shapes of Llama 3.2 1B, with another model's vocabulary."""
    with gguf.read(source) as file:
        entries = _entries(file)
        vocabulary = file.tensors["token_embd.weight"].shape[0]
    for name, value in LARGE.items():
        entries[f"llama.{name}"] = _text(f"llama.{name}") + struct.pack("<II", 4, value)
    d, ff, kv = 2048, 8192, 512
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, d), "output_norm.weight": (d,)}
    for i in range(LARGE["block_count"]):
        own = {"attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d)}
        own |= {"ffn_gate": (ff, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}
        shapes |= {f"blk.{i}.{n}.weight": s for n, s in own.items()}
        shapes |= {f"blk.{i}.{n}.weight": (d,) for n in ("attn_norm", "ffn_norm")}
    listed = [(n, s, 8, int(np.prod(s)) // 32 * 34) if len(s) == 2 else (n, s, 0, s[0] * 4) for n, s in shapes.items()]

    def data() -> Iterator[bytes]:
        rng = np.random.default_rng(1)
        for shape in shapes.values():
            if len(shape) == 1:
                yield np.ones(shape, "<f4").tobytes()
                continue
            blocks = rng.integers(0, 256, (int(np.prod(shape)) // 32, 34), np.uint8)
            blocks[:, :2] = rng.uniform(0.0001, 0.0004, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
            yield blocks.tobytes()

    _write(path, entries, listed, data())
    return path


class Side:
    """A process that runs a model when it is told to."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._line().strip() != "ready":
            raise OSError(f"{name} does not start (exit status {self._process.wait()})")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    def _ask(self, what: str, text: bytes) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()
        said = self._line()
        if not said:
            raise OSError(f"{self.name} died at {what} (exit status {self._process.wait()})")
        return said

    def ask(self, what: str, count: int) -> float:
        """Seconds that ``prefill`` or ``decode`` of so many tokens took."""
        return float(self._ask(what, f"{what} {count}\n".encode()))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        raw = text.encode()
        return [int(token) for token in self._ask("tokens", f"tokens {len(raw)}\n".encode() + raw).split()]

    def close(self) -> None:
        self._process.communicate()


def compiled(place: str, folder: Path, name: str, *flags: str) -> str:
    """The C program against a peer's headers and libraries."""
    include, _, libraries = place.partition(":")
    source, program = Path(__file__).with_name("peer.c"), folder / name
    command = ["cc", "-O2", *flags, *(f"-I{i}" for i in include.split(",")), str(source), "-o", str(program)]
    for folder_ in libraries.split(","):
        command += [f"-L{folder_}", f"-Wl,-rpath,{folder_}", f"-Wl,-rpath-link,{folder_}"]
    ggml = ["-lggml"] if flags else ["-lggml", "-lggml-base", "-lggml-cpu"]
    subprocess.run([*command, "-lllama", *ggml], check=True)
    return str(program)


def serve(path: str, threads: int) -> None:
    """q8llama's side of the pipe."""
    import tunekit
    from q8llama import Model, bench

    with tunekit.threads(threads):
        session = Model.load(path).session(PROMPT + ANSWER)
        tokens = (1000 + 37 * np.arange(PROMPT) % 40000).astype(np.int32)
        print("ready", flush=True)
        for line in sys.stdin:
            what, count = line.split()
            if what == "prefill":
                took = bench.prefill(session, tokens[: int(count)])
            else:
                took = bench.decode(session, int(count))
            print(f"{took:.9f}", flush=True)


def measure(sides: list[Side], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by side and part, in turns, the order reversed from round to round; one round is thrown away."""
    found: dict[str, dict[str, list[float]]] = {s.name: {"prefill": [], "decode": []} for s in sides}
    for round_ in range(rounds + 1):
        for side in sides if round_ % 2 else sides[::-1]:
            for what, count in (("prefill", PROMPT), ("decode", ANSWER)):
                took = side.ask(what, count)
                if round_:
                    found[side.name][what].append(took)
            time.sleep(0.3)  # until the threads of this side have stopped
    return found


def report(shape: str, threads: int, found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    lines = []
    for name, times in found.items():
        line: dict[str, Any] = {"shape": shape, "threads": threads, "side": name}
        for part, count in (("prefill", PROMPT), ("decode", ANSWER)):
            ratios = [b / a for a, b in zip(found["q8llama"][part], times[part], strict=True)]
            line[part] = count / min(times[part])
            line[f"{part} ratio"] = min(times[part]) / min(found["q8llama"][part])
            line[f"{part} median"] = median(ratios)
        lines.append(line)
        rates = f"{shape:<5}{threads:>3}  {name:<14}{line['prefill']:>9.1f} tokens/s{line['decode']:>9.1f} tokens/s"
        ahead = [f"{line[f'{p} ratio']:.2f}x ({line[f'{p} median']:.2f}x)" for p in ("prefill", "decode")]
        print(rates + ("" if name == "q8llama" else f"   q8llama: {ahead[0]}, {ahead[1]}"), flush=True)
    return lines


WORDS = (
    "the", " quick", "'s", "'re", "'LL", " don't", "\n", "\r\n", "\t", "  ", "    ", " \n ", "1234", " 3.14", "x²",
    "日本語", "\u00a0", "\u3000", "\u200b", "e\u0301", "<|im_end|>", "def f(x):", " привет", "🙂", "👩\u200d💻", " -- ",
)  # fmt: skip
BLOCKS = ((0x20, 0x7F), (0x01, 0x250), (0x370, 0xE80), (0x2000, 0x2C00), (0x3000, 0xD7A4), (0xF900, 0x20000))
"""Ranges of characters, each as likely as another."""


def random_text(number: int) -> str:
    """A text of words, blanks and characters of many scripts; the same one for a number everywhere."""
    rng = np.random.default_rng([11, number])
    parts: list[str] = []
    for _ in range(int(rng.integers(1, 40))):
        if rng.random() < 0.4:
            parts.append(WORDS[int(rng.integers(len(WORDS)))])
        else:
            drawn = map(chr, rng.integers(*BLOCKS[int(rng.integers(len(BLOCKS)))], int(rng.integers(1, 6))))
            # What has no meaning yet is a letter in one version of Unicode and nothing in another.
            parts += (c for c in drawn if unicodedata.category(c) != "Cn")
    return "".join(parts)


def compare(sides: list[Side], tokenizer: Tokenizer, count: int) -> int:
    """Print what differs from q8llama's tokens in so many random texts; how many texts did."""
    differ = dict.fromkeys((side.name for side in sides), 0)
    for number in range(count):
        text = random_text(number)
        ours = tokenizer.encode(text, first=False)
        for side in sides:
            if (theirs := side.tokens(text)) != ours:
                differ[side.name] += 1
                print(f"text {number} {text!r}: q8llama {ours}, {side.name} {theirs}")
    for name, found in differ.items():
        print(f"{count - found} of {count} random texts have the tokens of {name}")
    return sum(differ.values())


def main() -> int:
    """Run the command."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--llama", metavar="INCLUDE:LIBRARIES")
    parser.add_argument("--ik", metavar="INCLUDE:LIBRARIES")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=["135M", "1B"], choices=["135M", "1B"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, metavar="N", help="compare the tokens of N random texts instead")
    parser.add_argument("--folder", type=Path, help="where the files are kept (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.texts is not None and (options.texts < 1 or not (options.llama or options.ik)):
        parser.error("--texts takes a number of texts, and --llama or --ik to hold them against")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        programs = {}
        if options.llama:
            programs["llama.cpp"] = compiled(options.llama, Path(scratch), "llama")
        if options.ik:
            programs["ik_llama.cpp"] = compiled(options.ik, Path(scratch), "ik", "-DIK")
        if options.texts:
            path = installed_model()
            with read_file(path) as file:
                tokenizer = Tokenizer(file.metadata, path)
            sides = [Side(n, [p, str(path), "1", "512"]) for n, p in programs.items()]
            differ = compare(sides, tokenizer, options.texts)
            for side in sides:
                side.close()
            return 1 if differ else 0
        print(f"shape threads side{'prefill':>17}{'decode':>19}")
        for shape in options.shapes:
            path = folder / f"{shape}-Q8_0.gguf"
            if not path.exists():
                (whole_q8_0 if shape == "135M" else large_q8_0)(installed_model(), path)
            for threads in options.threads:
                sides = [Side("q8llama", [sys.executable, "-m", "q8llama.peers", "--serve", str(path), str(threads)])]
                sides += [Side(n, [p, str(path), str(threads), "1024"]) for n, p in programs.items()]
                lines += report(shape, threads, measure(sides, options.rounds))
                for side in sides:
                    side.close()
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
