# SPDX-License-Identifier: Apache-2.0
"""Validation of UTF-8. The best row depends on the data, so there are two kernels of one grid, each with its own text.

``lookup`` rows classify every byte by three tables of nibbles (J. Keiser and D. Lemire, "Validating UTF-8 in less than
one instruction per byte", 2020): the same speed whatever the text. The others walk from character to character, and
skip blocks of ASCII: ``skip`` bytes at once (0: none). A lookup row may skip, too.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

import tunekit as tk

SCOPE = tk.Scope("utf8check")

ROWS = [
    tk.perm(skip=0),
    tk.perm(skip=8),
    tk.perm(skip=32, requires="avx2"),
    tk.perm(lookup="avx2", skip=0, requires="avx2"),
    tk.perm(lookup="avx2", skip=32, requires="avx2"),
    tk.perm(lookup="avx2", skip=128, requires="avx2"),
    tk.perm(lookup="neon", skip=0, requires="neon"),
    tk.perm(lookup="neon", skip=16, requires="neon"),
]
FALLBACK = "lookup_avx2_skip32;lookup_neon_skip16;skip8"
CHARACTERS = ("x", "ÿ", "߿", "ࠀ", "퟿", "", "￿", "𐀀", "􏿿")  # the first and last of each length, and around the surrogates
BROKEN = (b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xc3", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xe2\x82", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xf0\x9f\x98", b"\xff", b"\xe2\x82\xac\x80")


def declines(row: tk.Row, target: tk.Target) -> str | None:
    """Which rows cannot be emitted: instructions of another architecture."""
    x86 = row.get("lookup", "none") == "avx2" or (row.get("lookup", "none") == "none" and row["skip"] == 32)
    if x86 and target.arch != "x86_64":
        return "it is written with AVX2"
    return "it is written with NEON" if row.get("lookup", "none") == "neon" and target.arch != "aarch64" else None


def checks() -> list[Any]:
    """Every kind of character and of fault, at every place of a block, on either side of its ends."""
    from tunekit.measure.fixtures import Sample

    found = []
    for number, piece in enumerate([*(c.encode() for c in CHARACTERS), *BROKEN]):
        for before in (0, 1, 29, 30, 31, 127):
            for after in (0, 40):
                text = np.frombuffer(b"a" * before + piece + b"b" * after, np.uint8)
                found.append(Sample(f"piece {number} after {before} before {after}", (text, text.size)))
    everything = np.frombuffer("".join(CHARACTERS * 40).encode(), np.uint8)
    found += [Sample(f"the first {n} bytes", (everything[:n], n)) for n in (0, 5, 64, 95, 96, 97, 333)]
    return found


def _timed(name: str, text: str) -> Any:
    from tunekit.measure.fixtures import Sample

    data = np.frombuffer((text * (1 + 65536 // len(text.encode()))).encode(), np.uint8)
    return Sample(name, (data, data.size), data.size, "GB/s")


LOG = "2026-11-29T12:00:00Z INFO request served in 12 ms, 4096 bytes, status 200\n"
MIXED = "Grüße aus Köln, привет мир, 你好世界, and some plain English between 🙂.\n"


def samples() -> list[Any]:
    """Text of any kind decides."""
    return [*checks(), _timed("mixed", MIXED), _timed("ascii", LOG), _timed("chinese", "天地玄黄宇宙洪荒日月盈昃辰宿列张")]


def ascii_samples() -> list[Any]:
    """Log files decide."""
    return [*checks(), _timed("ascii", LOG), _timed("mixed", MIXED)]


def _valid(text: Any) -> int:
    try:
        text.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        return 0
    return 1


@tk.tune(
    scope=SCOPE,
    template="utf8check/utf8.c.j2",
    reference="utf8check/utf8.c.j2",
    rows=ROWS,
    defaults={"lookup": "none", "skip": 0},
    declines=declines,
    context=lambda row: {"kernel": "valid"},
    fallback=FALLBACK,
    fixtures="utf8check.kernels:samples",
)
def valid(text: Annotated[tk.In[tk.u8], "n"], n: tk.i64) -> tk.i32:
    """1 where the bytes are well-formed UTF-8, else 0."""
    del n
    return _valid(text)


@tk.tune(
    scope=SCOPE,
    template="utf8check/utf8.c.j2",
    reference="utf8check/utf8.c.j2",
    rows=ROWS,
    defaults={"lookup": "none", "skip": 0},
    declines=declines,
    context=lambda row: {"kernel": "valid_ascii"},
    fallback=FALLBACK,
    fixtures="utf8check.kernels:ascii_samples",
)
def valid_ascii(text: Annotated[tk.In[tk.u8], "n"], n: tk.i64) -> tk.i32:
    """The same, tuned for text that is mostly ASCII."""
    del n
    return _valid(text)
