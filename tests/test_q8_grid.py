# SPDX-License-Identifier: Apache-2.0
"""The grid, its names, and the one decline predicate, over every row and every attainable target."""

from __future__ import annotations

import pytest

import tunekit as tk
from tunekit.kernel import Target
from tunekit.q8 import grid
from tunekit.q8.legality import advice, declines, registers
from tunekit.rows import Row, check_grid, parse_suffix, vocabulary_of

AVX2 = Target("x86_64", features=frozenset({"avx2", "fma"}))
VNNI = frozenset({"avxvnni", "avxvnniint8", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-tile", "amx-int8"})
SPR = Target("x86_64", features=AVX2.features | VNNI)
ARM = Target("aarch64", features=frozenset({"dotprod", "i8mm"}))
BARE = Target("x86_64")
OTHER = Target("riscv64")
TARGETS = (AVX2, SPR, ARM, BARE, OTHER)


def row(**args: int | str) -> Row:
    return tk.perm(**args)


def test_seed_rows_keep_their_names_and_numbers() -> None:
    names = [r.suffix for r in grid.ROWS]
    assert names[:3] == [
        "dot_maddubs_width256_mr8_kstep2",
        "dot_maddubs_width256_mr8_kstep4_nrsplit2",
        "dot_maddubs_width256_mr8_kstep2_bias128",
    ]
    assert grid.ROWS[0].requires == "avx2"


def test_names_are_unique_and_read_back() -> None:
    check_grid("q8q8", grid.ROWS)
    vocabulary = vocabulary_of(grid.ROWS)
    for r in grid.ROWS:
        assert parse_suffix(r.suffix, vocabulary) == r.args


def test_arguments_are_known_and_written_in_one_order() -> None:
    order = ["dot", "width", "mr", "kstep", "nrsplit", "nr", "gkstep", "bias"]
    assert list(grid.DEFAULTS) == order
    for r in grid.ROWS:
        assert [name for name, _ in r.args] == [n for n in order if n in dict(r.args)]


def test_no_two_rows_are_the_same_code() -> None:
    full = {tuple(grid.tokstep(r) if n == "nr" else grid.value(r, n) for n in grid.DEFAULTS) for r in grid.ROWS}
    assert len(full) == len(grid.ROWS)


def test_fallback_is_in_the_grid_and_runnable() -> None:
    chain = grid.FALLBACK.split(";")
    by_name = {r.suffix: r for r in grid.ROWS}
    assert chain[-1] == "dot_maddubs_width256_mr8_kstep2"
    for name in chain:
        assert declines(by_name[name], AVX2) is None
        assert by_name[name].requires


@pytest.mark.parametrize("r", grid.ROWS, ids=lambda r: r.suffix)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.arch}-{len(t.features)}")
def test_every_row_on_every_target(r: Row, target: Target) -> None:
    reason = declines(r, target)
    leg = grid.leg_of(r)
    assert leg is not None and leg.written
    can = target.arch == leg.arch and any(target.features.issuperset(n) for n in leg.needs)
    if r.get("bias", 0) or not can:
        assert reason and not reason.endswith(".")
    else:
        assert reason is None


@pytest.mark.parametrize("r", grid.ROWS, ids=lambda r: r.suffix)
def test_targets_are_what_the_leg_needs(r: Row) -> None:
    assert grid.targets(r) == (("avx2", "fma"),)
    if not r.get("bias", 0):
        assert [declines(r, Target("x86_64", features=frozenset(t))) for t in grid.targets(r)] == [None]


def test_biased_maddubs_declines_because_it_saturates() -> None:
    assert "saturates" in str(declines(grid.ROWS[2], AVX2))


@pytest.mark.parametrize(
    ("r", "target", "words"),
    [
        (row(kstep=2), AVX2, "aarch64"),
        (row(kstep=2), ARM, "yet"),
        (row(dot="smmla", mr=4, kstep=2), ARM, "yet"),
        (row(dot="smmla", mr=4, kstep=2), SPR, "aarch64"),
        (row(dot="vpdpbusd", width=256, mr=8, kstep=2), SPR, "yet"),
        (row(dot="vpdpbusd", width=256, mr=8, kstep=2, bias=128), SPR, "yet"),
        (row(dot="vpdpbssd", width=256, mr=8, kstep=2), SPR, "yet"),
        (row(dot="maddubs", width=512, mr=16, kstep=2), SPR, "yet"),
        (row(dot="amx_int8", width=512, mr=16, kstep=1, nrsplit=2), SPR, "yet"),
        (row(dot="amx_int8", width=512, mr=16, kstep=2, nrsplit=2), SPR, "kstep 2"),
        (row(dot="vpdpbusd"), SPR, "no 128-bit leg vpdpbusd"),
        (row(dot="vpdpbssd", width=512, mr=16), SPR, "no 512-bit leg"),
        (row(mr=2), ARM, "mr 2"),
        (row(mr=6), ARM, "mr 6"),
        (row(dot="maddubs", width=256, mr=12, kstep=2), AVX2, "multiple of the 8 rows"),
        (row(dot="maddubs", width=256, mr=64, kstep=2), AVX2, "mr 64"),
        (row(dot="maddubs", width=256, mr=8, kstep=3), AVX2, "kstep 3"),
        (row(dot="maddubs", width=256, mr=8, gkstep=8), AVX2, "gkstep 8"),
        (row(dot="maddubs", width=256, mr=8, nrsplit=3), AVX2, "nrsplit 3"),
        (row(dot="maddubs", width=256, mr=8, nr=9), AVX2, "nr 9"),
        (row(dot="maddubs", width=256, mr=8, bias=64), AVX2, "bias 64"),
        (row(dot="madd16", width=256, mr=8, bias=128), AVX2, "signed"),
        (row(dot="vpdpbssd", width=256, mr=8, bias=128), SPR, "signed"),
        (row(dot="maddubs", width=256, mr=8), BARE, "avx2+fma"),
        (row(dot="maddubs", width=256, mr=8), Target("x86_64", features=frozenset({"avx2"})), "avx2+fma"),
    ],
)
def test_reasons(r: Row, target: Target, words: str) -> None:
    assert words in str(declines(r, target))


def test_register_budget_is_advice_and_no_veto() -> None:
    budget = tk.perm(suffix="mr8_budget", mr=8, kstep=2)
    assert registers(budget) == (50 - 16, 32)
    assert "34 vector registers, and there are 32" in str(advice(budget))
    over = row(dot="maddubs", width=256, mr=16, kstep=1, nr=5)
    assert advice(over) and declines(over, AVX2) is None
    assert over.suffix in {r.suffix for r in grid.ROWS}
    assert advice(row(dot="maddubs", width=256, mr=16, kstep=1, nr=4)) is None
    assert advice(row(dot="madd16", width=256, mr=16, kstep=1, nr=6)) is None
    assert advice(row(dot="vpdpbusd")) is None


def test_tokens_per_tile() -> None:
    assert grid.tokstep(grid.ROWS[0]) == 4
    assert grid.tokstep(grid.ROWS[1]) == 4  # two passes of two
    assert grid.tokstep(row(dot="madd16", width=256, mr=16, kstep=1, nr=5)) == 5


def test_arguments_must_be_numbers() -> None:
    with pytest.raises(TypeError, match="mr must be a whole number"):
        grid.number(tk.perm(mr="eight"), "mr")
