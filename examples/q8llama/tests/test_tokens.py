# SPDX-License-Identifier: Apache-2.0
"""Texts and their tokens: against values of llama.cpp, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from q8llama.tokens import pieces

CUT = {
    "Hello world": ["Hello", " world"],
    "it's we'll I'D 're": ["it", "'s", " we", "'ll", " I", "'", "D", " '", "re"],
    "a  b\n\n c \t": ["a", " ", " b", "\n\n", " c", " \t"],
    "in 2024, 3x": ["in", " ", "2", "0", "2", "4", ",", " ", "3", "x"],
    "x²  ½!": ["x", "²", "  ", "½", "!"],
    " ?!a": [" ?!", "a"],
    "日本語 と漢字\u3000。": ["日本語", " と漢字", "\u3000", "。"],
    "": [],
    "   ": ["   "],
}


@pytest.mark.parametrize("text", CUT)
def test_how_text_is_cut(text: str) -> None:
    assert list(pieces(text, "smollm")) == CUT[text]


def test_gpt2_keeps_numbers_together() -> None:
    assert list(pieces("in 2024, x", "gpt-2")) == ["in", " 2024", ",", " x"]


TOKENS = {
    "Hello world": [19556, 905],
    "it's we'll I'D 're don't": [269, 506, 392, 3060, 339, 23, 52, 637, 257, 1326, 982],
    "a  b\n\n c \t x\r\n": [81, 216, 278, 1116, 265, 216, 197, 1792, 2738],
    "in 2024, 3x5=15 and 1.000": [254, 216, 34, 32, 34, 36, 28, 216, 35, 104, 37, 45, 33, 37, 284, 216, 33, 30, 32, 32, 32],
    "x²  ½! ⅷ": [104, 19133, 256, 16738, 17, 216, 173, 223, 132],
    "日本語 と漢字\u3000。": [23274, 115, 40993, 179, 120, 248, 46673, 118, 177, 137, 112, 36518, 12109, 218, 19076],
    "Grüße aus Köln, привет мир 🙂": [27302, 7170, 34878, 85, 253, 376, 659, 7466, 34115, 28, 21985, 46879, 16464, 32547, 41337, 7872, 9175, 47526],
    "def f(x):\n    return x**2  # squared\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 27402, 198],
    "\u00a0nbsp\u2003em\x1csep": [15442, 94, 32093, 321, 221, 391, 213, 29070],
    "   leading": [256, 2899],
    "a\x14b": [81, 82],  # a byte that the vocabulary lacks
}
"""As llama.cpp has them; and so it had 3000 random texts."""


def test_tokens_are_those_of_llama_cpp(model: Any) -> None:
    for text, want in TOKENS.items():
        assert model.tokenizer.encode(text) == want, text


def test_any_text_comes_back(model: Any) -> None:
    rng = np.random.default_rng(5)
    ranges = [(32, 127), (0xA0, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F700)]
    for _ in range(200):
        text = "".join(chr(int(rng.integers(*ranges[int(rng.integers(0, 4))]))) for _ in range(20))
        tokens = model.tokenizer.encode(text)
        assert model.tokenizer.decode(tokens) == "".join(model.tokenizer.stream(tokens)) == text


def test_half_a_character_waits(model: Any) -> None:
    tokens = model.tokenizer.encode("🙂")
    assert len(tokens) > 1 and list(model.tokenizer.stream(tokens)) == ["🙂"]
    assert model.tokenizer.decode(tokens[:1]) == "�"


def test_control_tokens_are_read_only_where_asked(model: Any) -> None:
    encode = model.tokenizer.encode
    assert encode("<|im_end|>", special=True) == [2] and 2 not in encode("<|im_end|>")
    assert model.tokenizer.decode([1, 2]) == ""


def test_a_conversation_is_what_the_template_says(model: Any) -> None:
    t = model.tokenizer
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> there"}]
    tokens = t.chat(asked)
    want = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi "
    assert tokens[: len(t.encode(want, special=True))][:-1] == t.encode(want, special=True)[:-1]
    assert tokens.count(2) == 2 and tokens[-4:] == t.encode("<|im_start|>assistant\n", special=True)
    assert t.chat(asked[1:])[:3] == t.encode("<|im_start|>system\n", special=True)  # the template's own
