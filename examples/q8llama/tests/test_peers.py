# SPDX-License-Identifier: Apache-2.0
"""The comparison of tokens with another program, against one that speaks the same protocol."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
from q8llama import Model, peers

PROGRAM = """
import sys
from q8llama import Model
encode = Model.load(sys.argv[1]).tokenizer.encode
print("ready", flush=True)
count = 0
while line := sys.stdin.buffer.readline():
    what, size = line.split()
    assert what == b"tokens"
    found = encode(sys.stdin.buffer.read(int(size)).decode(), first=False)
    count += 1
    print(*(found[:-1] if count == int(sys.argv[2]) else found), flush=True)
"""


def test_tokens_are_compared_text_by_text(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Model.load(small).tokenizer
    sides = [peers.Side(n, [sys.executable, "-c", PROGRAM, str(small), wrong]) for n, wrong in (("one", "0"), ("other", "3"))]
    assert peers.compare(sides, tokenizer, 20) == 1
    for side in sides:
        side.close()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("text 2 ") and ", other [" in first
    assert rest == ["20 of 20 random texts have the tokens of one", "19 of 20 random texts have the tokens of other"]


def test_random_texts_are_of_every_kind() -> None:
    texts = [peers.random_text(i) for i in range(300)]
    assert texts[:5] == [peers.random_text(i) for i in range(5)] and len(set(texts)) == len(texts)
    every = "".join(texts)
    assert {unicodedata.category(c)[0] for c in every} == set("CLMNPSZ") and not every.isprintable()
    assert all(any(first <= ord(c) < last for c in every) for first, last in peers.BLOCKS)
    assert all(word in every for word in peers.WORDS)


def test_there_must_be_somebody_to_compare_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--texts", "10"], ["--texts", "0", "--llama", "a:b"]):
        monkeypatch.setattr(sys, "argv", ["q8llama.peers", *words])
        with pytest.raises(SystemExit) as ended:
            peers.main()
        assert ended.value.code == 2 and "--texts takes a number of texts" in capsys.readouterr().err
