# SPDX-License-Identifier: Apache-2.0
"""The grid, its names, and the one decline predicate, over every row and every attainable target."""

from __future__ import annotations

import pytest

import tunekit as tk
from tunekit.cpu.features import implied
from tunekit.kernel import Target
from tunekit.q8 import grid
from tunekit.q8.layout import layout_of
from tunekit.q8.legality import advice, declines, registers
from tunekit.rows import Row, check_grid, parse_suffix, vocabulary_of

AVX2 = Target("x86_64", features=frozenset({"avx2", "fma", "f16c"}))
VNNI = frozenset({"avxvnni", "avxvnniint8", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-tile", "amx-int8"})
SPR = Target("x86_64", features=AVX2.features | VNNI)
ARM = Target("aarch64", features=frozenset({"dotprod", "i8mm"}))
BARE = Target("x86_64")
OTHER = Target("riscv64")
TARGETS = (AVX2, SPR, ARM, BARE, OTHER)


def row(**args: int | str) -> Row:
    return tk.perm(**args)


# The seeds' 49 rows: number, name, then dot, width, mr, kstep, nrsplit, gkstep, bias, kgroup, and their requires.
# fmt: off
SEEDS: tuple[tuple[int, str, str, int, int, int, int, int, int, int, str], ...] = (
    (1, "kstep1", "sdot", 128, 4, 1, 4, 1, 0, 4, ""),
    (2, "kstep2", "sdot", 128, 4, 2, 4, 1, 0, 4, ""),
    (3, "kstep4", "sdot", 128, 4, 4, 4, 1, 0, 4, ""),
    (4, "kstep2_nrsplit2", "sdot", 128, 4, 2, 2, 1, 0, 4, ""),
    (5, "kstep1_nrsplit2", "sdot", 128, 4, 1, 2, 1, 0, 4, ""),
    (6, "kstep4_nrsplit2", "sdot", 128, 4, 4, 2, 1, 0, 4, ""),
    (7, "kstep1_nrsplit2_mr8", "sdot", 128, 8, 1, 2, 1, 0, 4, ""),
    (8, "kstep2_nrsplit2_mr8", "sdot", 128, 8, 2, 2, 1, 0, 4, ""),
    (9, "kstep4_nrsplit2_mr8", "sdot", 128, 8, 4, 2, 1, 0, 4, ""),
    (10, "kstep2_gkstep2", "sdot", 128, 4, 2, 4, 2, 0, 4, ""),
    (11, "kstep2_gkstep4", "sdot", 128, 4, 2, 4, 4, 0, 4, ""),
    (12, "kstep4_nrsplit2_mr8_gkstep2", "sdot", 128, 8, 4, 2, 2, 0, 4, ""),
    (13, "kstep4_nrsplit2_mr8_gkstep4", "sdot", 128, 8, 4, 2, 4, 0, 4, ""),
    (14, "dot_maddubs_width256_mr8_kstep2", "maddubs", 256, 8, 2, 4, 1, 0, 4, "avx2"),
    (15, "dot_maddubs_width256_mr8_kstep4_nrsplit2", "maddubs", 256, 8, 4, 2, 1, 0, 4, ""),
    (16, "dot_vpdpbusd_width256_mr8_kstep2", "vpdpbusd", 256, 8, 2, 4, 1, 0, 4, ""),
    (17, "dot_vpdpbusd_width256_mr8_kstep4_nrsplit2", "vpdpbusd", 256, 8, 4, 2, 1, 0, 4, ""),
    (18, "dot_vpdpbusd_width256_mr16_kstep2_nrsplit2", "vpdpbusd", 256, 16, 2, 2, 1, 0, 4, ""),
    (19, "dot_vpdpbssd_width256_mr8_kstep2", "vpdpbssd", 256, 8, 2, 4, 1, 0, 4, ""),
    (20, "dot_maddubs_width512_mr16_kstep2", "maddubs", 512, 16, 2, 4, 1, 0, 4, ""),
    (21, "dot_vpdpbusd_width512_mr16_kstep2", "vpdpbusd", 512, 16, 2, 4, 1, 0, 4, ""),
    (22, "dot_vpdpbusd_width512_mr16_kstep4_nrsplit2", "vpdpbusd", 512, 16, 4, 2, 1, 0, 4, ""),
    (23, "dot_vpdpbusd_width512_mr32_kstep2_nrsplit2", "vpdpbusd", 512, 32, 2, 2, 1, 0, 4, ""),
    (24, "dot_vpdpbusd_width256_mr8_kstep2_gkstep2", "vpdpbusd", 256, 8, 2, 4, 2, 0, 4, ""),
    (25, "dot_vpdpbusd_width512_mr16_kstep2_gkstep2", "vpdpbusd", 512, 16, 2, 4, 2, 0, 4, ""),
    (26, "dot_vpdpbusd_width256_mr8_kstep2_bias128", "vpdpbusd", 256, 8, 2, 4, 1, 128, 4, ""),
    (27, "dot_vpdpbusd_width256_mr8_kstep2_gkstep2_bias128", "vpdpbusd", 256, 8, 2, 4, 2, 128, 4, "avxvnni|avx512vnni"),
    (28, "dot_vpdpbusd_width512_mr16_kstep2_bias128", "vpdpbusd", 512, 16, 2, 4, 1, 128, 4, ""),
    (29, "dot_vpdpbusd_width512_mr16_kstep2_gkstep2_bias128", "vpdpbusd", 512, 16, 2, 4, 2, 128, 4, "avx512vnni,avx512bw"),
    (30, "dot_vpdpbusd_width512_mr16_kstep4_nrsplit2_bias128", "vpdpbusd", 512, 16, 4, 2, 1, 128, 4, ""),
    (31, "dot_maddubs_width256_mr8_kstep2_bias128", "maddubs", 256, 8, 2, 4, 1, 128, 4, ""),
    (32, "dot_smmla_mr4_kstep2", "smmla", 128, 4, 2, 4, 1, 0, 8, "i8mm"),
    (33, "dot_smmla_mr4_kstep2_nrsplit2", "smmla", 128, 4, 2, 2, 1, 0, 8, "i8mm"),
    (34, "dot_smmla_mr8_kstep2_nrsplit2", "smmla", 128, 8, 2, 2, 1, 0, 8, "i8mm"),
    (35, "dot_smmla_mr8_kstep4_nrsplit2", "smmla", 128, 8, 4, 2, 1, 0, 8, "i8mm"),
    (36, "dot_smmla_mr8_kstep2_nrsplit2_gkstep2", "smmla", 128, 8, 2, 2, 2, 0, 8, "i8mm"),
    (37, "dot_amx_int8_width512_mr16_kstep1_nrsplit1", "amx_int8", 512, 16, 1, 1, 1, 0, 4, "amx-int8"),
    (38, "dot_amx_int8_width512_mr16_kstep1_nrsplit2", "amx_int8", 512, 16, 1, 2, 1, 0, 4, "amx-int8"),
    (39, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_gkstep2", "amx_int8", 512, 16, 1, 2, 2, 0, 4, "amx-int8"),
    (40, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_pipe1", "amx_int8", 512, 16, 1, 2, 1, 0, 4, "amx-int8"),
    (41, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_latch1", "amx_int8", 512, 16, 1, 2, 1, 0, 4, "amx-int8"),
    (42, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_bias128", "amx_int8", 512, 16, 1, 2, 1, 128, 4, "amx-int8"),
    (43, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_pipe1_latch1", "amx_int8", 512, 16, 1, 2, 1, 0, 4, "amx-int8"),
    (44, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_pipe1_bias128", "amx_int8", 512, 16, 1, 2, 1, 128, 4, "amx-int8"),
    (45, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_latch1_bias128", "amx_int8", 512, 16, 1, 2, 1, 128, 4, "amx-int8"),
    (46, "dot_amx_int8_width512_mr16_kstep1_nrsplit2_pipe1_latch1_bias128", "amx_int8", 512, 16, 1, 2, 1, 128, 4, "amx-int8"),
    (47, "mr8_budget", "sdot", 128, 8, 2, 4, 1, 0, 4, ""),
    (48, "mr2_lanes", "sdot", 128, 2, 2, 4, 1, 0, 4, ""),
    (49, "dot_vpdpbusd", "vpdpbusd", 128, 4, 2, 4, 1, 0, 4, ""),
)
# fmt: on
DECLINED = {"dot_maddubs_width256_mr8_kstep2_bias128", "mr2_lanes", "dot_vpdpbusd"}


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed[1])
def test_seed_rows_keep_their_names_and_meaning(seed: tuple[int | str, ...]) -> None:
    found = next(r for r in grid.ROWS if r.suffix == seed[1])
    names = ("dot", "width", "mr", "kstep", "nrsplit", "gkstep", "bias")
    assert tuple(grid.value(found, n) for n in names) == seed[2:9]
    assert layout_of(found).kgroup == seed[9]
    assert found.requires == seed[10]
    assert grid.number(found, "nr") == 0
    for flag in ("pipe", "latch"):
        assert grid.number(found, flag) == (f"{flag}1" in found.suffix)


def test_seed_rows_are_all_there() -> None:
    assert [seed[0] for seed in SEEDS] == list(range(1, 50))


def test_names_are_unique_and_read_back() -> None:
    check_grid("q8q8", grid.ROWS)
    vocabulary = vocabulary_of(grid.ROWS)
    for r in grid.ROWS:
        if r.suffix not in ("mr8_budget", "mr2_lanes"):  # named by hand
            assert parse_suffix(r.suffix, vocabulary) == r.args


def test_arguments_are_known() -> None:
    for r in grid.ROWS:
        assert set(dict(r.args)) <= set(grid.DEFAULTS), r.suffix


def test_x86_rows_write_their_arguments_in_one_order() -> None:
    order = ["dot", "width", "mr", "kstep", "nrsplit", "nr", "gkstep", "gstreams", "gahead", "pipe", "latch", "bias"]
    for r in grid.ROWS:
        if r.get("dot", "sdot") not in ("sdot", "smmla"):  # the seeds' own rows of 128 bits do not
            assert [name for name, _ in r.args] == [n for n in order if n in dict(r.args)]


def test_no_two_rows_are_the_same_code() -> None:
    full = {tuple(grid.tokstep(r) if n == "nr" else grid.value(r, n) for n in grid.DEFAULTS) for r in grid.ROWS}
    assert len(full) == len(grid.ROWS)


def test_fallback_is_in_the_grid_and_runnable() -> None:
    chain = grid.FALLBACK.split(";")
    by_name = {r.suffix: r for r in grid.ROWS}
    for name in chain:
        leg = grid.leg_of(by_name[name])
        assert leg
        assert declines(by_name[name], Target(leg.arch, features=frozenset(leg.needs[0]))) is None
        # A default that is built and not understood would be chosen by its needs alone; the seeds' last one is.
        assert by_name[name].requires or leg.arch == "aarch64"
    # The seeds' chain, in its order, is part of ours.
    seeds = [
        "dot_vpdpbusd_width512_mr16_kstep2_gkstep2_bias128",
        "dot_vpdpbusd_width256_mr8_kstep2_gkstep2_bias128",
        "dot_maddubs_width256_mr8_kstep2",
        "kstep2",
    ]
    assert [name for name in chain if name in seeds] == seeds


@pytest.mark.parametrize("r", grid.ROWS, ids=lambda r: r.suffix)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.arch}-{len(t.features)}")
def test_every_row_on_every_target(r: Row, target: Target) -> None:
    reason = declines(r, target)
    leg = grid.leg_of(r)
    can = leg and target.arch == leg.arch and any(target.features.issuperset(n) for n in leg.needs)
    if r.suffix in DECLINED or not can:
        assert reason and not reason.endswith(".")
    else:
        assert reason is None


@pytest.mark.parametrize("r", grid.ROWS, ids=lambda r: r.suffix)
def test_targets_are_what_the_leg_needs(r: Row) -> None:
    leg = grid.leg_of(r)
    assert grid.targets(r) == (leg.needs if leg else ())
    if leg and r.suffix not in DECLINED:
        assert [declines(r, Target(leg.arch, features=frozenset(t))) for t in grid.targets(r)] == [None] * len(leg.needs)


NEEDS = {
    ("maddubs", 256): [{*AVX2.features}],
    ("madd16", 256): [{*AVX2.features}],
    ("vpdpbusd", 256): [{*AVX2.features, "avxvnni"}, {*AVX2.features, "avx512f", "avx512vl", "avx512vnni"}],
    ("vpdpbssd", 256): [{*AVX2.features, "avxvnniint8"}],
    ("maddubs", 512): [{*AVX2.features, "avx512f", "avx512bw"}],
    ("vpdpbusd", 512): [{*AVX2.features, "avx512f", "avx512bw", "avx512vnni"}],
}


@pytest.mark.parametrize(("dot", "width"), NEEDS, ids=str)
def test_needs_of_the_x86_legs_are_minimal(dot: str, width: int) -> None:
    """No CPU is shut out by a feature that nothing in the object uses: the closure is these and what avx2 implies."""
    base = implied(AVX2.features)
    found = grid.targets(row(dot=dot, width=width, mr=width // 32))
    assert [implied(t) - base | AVX2.features for t in found] == NEEDS[dot, width]


def test_declined_rows_say_why() -> None:
    by_name = {r.suffix: r for r in grid.ROWS}
    assert "saturates" in str(declines(by_name["dot_maddubs_width256_mr8_kstep2_bias128"], AVX2))
    assert "mr 2 is not a multiple of the 4 rows" in str(declines(by_name["mr2_lanes"], ARM))
    assert "no 128-bit leg vpdpbusd" in str(declines(by_name["dot_vpdpbusd"], SPR))


@pytest.mark.parametrize(
    ("r", "target", "words"),
    [
        (row(kstep=2), AVX2, "aarch64"),
        (row(dot="smmla", mr=4, kstep=2), SPR, "aarch64"),
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
        (row(dot="madd16", width=256, mr=16, bias=128), AVX2, "signed"),
        (row(dot="madd16", width=256, mr=8), AVX2, "multiple of the 16 rows"),
        (row(dot="vpdpbssd", width=256, mr=8, bias=128), SPR, "signed"),
        (row(dot="maddubs", width=256, mr=8), BARE, "avx2+fma+f16c"),
        (row(dot="maddubs", width=256, mr=8), Target("x86_64", features=frozenset({"avx2", "fma"})), "avx2+fma+f16c"),
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
