# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, from what the model's file says: byte-level BPE with SmolLM's or GPT-2's way of cutting.

Text is cut into pieces (SmolLM: every digit by itself; then GPT-2's contractions, words, numbers, signs and blanks),
each piece becomes bytes spelled in 256 visible characters, and neighbours merge in the order of the file's merges.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from q8llama.errors import ModelError

CUTS = ("smollm", "gpt-2", "default")
_CONTROL, _USER_DEFINED = 3, 4

# Unicode's White_Space. (str.isspace also counts four separators of ASCII.)
_BLANK = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}
_ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


@functools.cache
def _visible() -> dict[int, str]:
    """Bytes as the characters in which the vocabulary spells them."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def _kind(c: str) -> str:
    if c in _BLANK:
        return "s"
    return "L" if c.isalpha() else "N" if unicodedata.category(c)[0] == "N" else "x"


def _words(text: str) -> Iterator[str]:
    """GPT-2's pattern: ``'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+``."""
    kinds, at = [_kind(c) for c in text], 0
    while at < len(text):
        ending = next((e for e in _ENDINGS if text.startswith(e, at)), "")
        if ending:
            yield ending
            at += len(ending)
            continue
        begin = at + (text[at] == " ")
        if begin < len(text) and kinds[begin] != "s":
            end = begin
            while end < len(text) and kinds[end] == kinds[begin]:
                end += 1
        else:
            end = at
            while end < len(text) and kinds[end] == "s":
                end += 1
            # All blanks, but the last where a word follows: it goes with the word.
            if end < len(text) and end - at > 1:
                end -= 1
        yield text[at:end]
        at = end


def pieces(text: str, cut: str) -> Iterator[str]:
    """The pieces of a text, which join to it."""
    if cut != "smollm":
        yield from _words(text)
        return
    start = 0
    for i, c in enumerate(text):
        if unicodedata.category(c)[0] == "N":
            yield from _words(text[start:i])
            yield c
            start = i + 1
    yield from _words(text[start:])


class Tokenizer:
    """A model's tokenizer.

    Args:
        metadata: of a GGUF file.
        path: how errors name the file.

    Attributes:
        size: of the vocabulary.
        ends: tokens after which an answer is over.

    Raises:
        ModelError: another kind of tokenizer, or one that is not whole.
    """

    def __init__(self, metadata: Mapping[str, Any], path: object) -> None:
        def fail(why: str) -> ModelError:
            return ModelError(f"{path}: its tokenizer cannot be used: {why}")

        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise fail(f"it is of the kind {kind!r}; byte-level BPE ('gpt2') is known")
        self._cut = str(metadata.get("tokenizer.ggml.pre", "default"))
        if self._cut not in CUTS:
            raise fail(f"it cuts text in the way of {self._cut!r}; known are {', '.join(CUTS)}")
        texts = metadata.get("tokenizer.ggml.tokens")
        merges = metadata.get("tokenizer.ggml.merges")
        types = metadata.get("tokenizer.ggml.token_type", [])
        for name, listed in (("tokens", texts), ("merges", merges)):
            if not isinstance(listed, list) or not listed or not all(isinstance(t, str) for t in listed):
                raise fail(f"the file has no list of {name}")
        assert isinstance(texts, list) and isinstance(merges, list)
        if not isinstance(types, list):
            raise fail("the file has no list of types of tokens")
        if types and len(types) != len(texts):
            raise fail(f"{len(texts)} tokens and {len(types)} types of tokens")
        self.size = len(texts)
        self._texts: list[str] = texts
        self._ids = {text: i for i, text in reversed(list(enumerate(texts)))}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        if any(len(pair) != 2 for pair in pairs):
            raise fail("a merge is not of two parts")
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self._special = {texts[i]: i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED) and texts[i]}
        self._split = re.compile("|".join(re.escape(s) for s in sorted(self._special, key=len, reverse=True)) or "(?!)")
        self._bytes = {c: b for b, c in _visible().items()}

        def named(name: str) -> int | None:
            found = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if found is not None and not (isinstance(found, int) and 0 <= found < self.size):
                raise fail(f"its {name} token is {found!r}, and it has {self.size} tokens")
            return found

        self._first = named("bos") if metadata.get("tokenizer.ggml.add_bos_token") else None
        known = (
            named("eos"),
            named("eot"),
            *(self._special.get(t) for t in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")),
        )
        self.ends = frozenset(i for i in known if i is not None)
        template = metadata.get("tokenizer.chat_template")
        self._template = template if isinstance(template, str) else None
        self._path = path
        self._bos, self._eos = named("bos"), named("eos")

    @functools.lru_cache(maxsize=1 << 15)  # noqa: B019  (tokenizers live as long as the process)
    def _merge(self, piece: str) -> tuple[int, ...]:
        parts = [_visible()[b] for b in piece.encode("utf-8", "surrogatepass")]
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in itertools.pairwise(parts)]
            best = min(ranks)
            if best == len(self._ranks):
                break
            merged, i = [], 0
            while i < len(parts):
                if i < len(ranks) and ranks[i] == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        found = []
        for part in parts:
            one = self._ids.get(part)
            if one is not None:
                found.append(one)
            else:  # by its bytes; one that the vocabulary lacks (SmolLM2: some control characters) is left out
                found += [self._ids[c] for c in part if c in self._ids]
        return tuple(found)

    def _plain(self, text: str) -> Iterator[int]:
        for piece in pieces(text, self._cut):
            yield from self._merge(piece)

    def encode(self, text: str, special: bool = False, first: bool = True) -> list[int]:
        """Tokens of a text.

        Args:
            text: any.
            special: whether the names of control tokens in it, such as ``<|im_start|>``, stand for those.
            first: whether it begins a document: a model that wants a token there gets it.
        """
        found = [self._first] if first and self._first is not None else []
        at = 0
        for match in self._split.finditer(text) if special else ():
            found += self._plain(text[at : match.start()])
            found.append(self._special[match.group()])
            at = match.end()
        return [*found, *self._plain(text[at:])]

    def raw(self, token: int) -> bytes:
        """A token's bytes; none for a control token."""
        text = self._texts[token]
        if text in self._special:
            return b""
        return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.raw, tokens)).decode("utf-8", "replace")

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Text as tokens come, never half a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            if text := decoder.decode(self.raw(token)):
                yield text
        if text := decoder.decode(b"", True):
            yield text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation, by the file's own template, up to where the answer begins.

        What people wrote is never read as control tokens.

        Raises:
            ModelError: the file has no template, or it cannot be used.
        """
        if self._template is None:
            raise ModelError(f"{self._path}: it has no chat template; ask it without --chat")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The contents are put in afterwards: a place holder of private characters for each.
        holders = [f"\ue000{i}\ue001" for i in range(len(messages))]
        held = [{**m, "content": h} for m, h in zip(messages, holders, strict=True)]
        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = {
            n: "" if i is None else self._texts[i] for n, i in (("bos_token", self._bos), ("eos_token", self._eos))
        }
        try:
            text = world.from_string(self._template).render(messages=held, add_generation_prompt=True, **names)
        except Exception as error:  # it is a program of the file's author, and may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(f"{self._path}: its chat template cannot be used: {reason}") from error
        found: list[int] = []
        for part in re.split(r"(\ue000\d+\ue001)", text):
            if part in holders:
                found += self.encode(messages[holders.index(part)]["content"], first=False)
            else:
                found += self.encode(part, special=True, first=False)
        return found
