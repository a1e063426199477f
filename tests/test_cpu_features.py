# SPDX-License-Identifier: Apache-2.0
"""The feature table: every shelf entry decodes as stated, and why_not says which part of the truth is missing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shelf_loader import ShelfEntry, load_shelf

from tunekit.cpu.features import (
    FEATURES,
    KNOWN_FEATURES,
    STATES,
    TABLES,
    ArmFeature,
    X86Feature,
    implied,
    suggestion,
    usable,
    wants_tiles,
    why_not,
    without,
)
from tunekit.cpu.record import CpuRecord

SHELF = load_shelf()
ENTRIES = pytest.mark.parametrize("entry", SHELF.values(), ids=SHELF.keys())
X86 = [row for row in TABLES["x86_64"].values() if isinstance(row, X86Feature)]
ARM = [row for row in TABLES["aarch64"].values() if isinstance(row, ArmFeature)]
NAMES = st.sampled_from(sorted(KNOWN_FEATURES))


def record_with(*names: str, xcr0: int | None = 0x602E7, tiles: bool | None = True) -> CpuRecord:
    """An x86-64 record with exactly these features' bits set (and OSXSAVE unless xcr0 is None)."""
    words: dict[tuple[int, int], list[int]] = {}
    for leaf in (0, 1, 7, 0x1E, 0x24, 0x80000000, 0x80000001):
        words[leaf, 0] = [0, 0, 0, 0]
    words[7, 1] = [0, 0, 0, 0]
    words[0x1E, 1] = [0, 0, 0, 0]
    words[0, 0][0], words[7, 0][0], words[0x1E, 0][0], words[0x80000000, 0][0] = 0x24, 2, 1, 0x80000008
    words[1, 0][2] = 0 if xcr0 is None else 1 << 27
    for name in names:
        row = TABLES["x86_64"][name]
        assert isinstance(row, X86Feature)
        if row.version:
            words[row.leaf, row.subleaf][row.register] = max(words[row.leaf, row.subleaf][row.register], row.version)
            words[7, 1][3] |= 1 << 19
        else:
            words[row.leaf, row.subleaf][row.register] |= 1 << row.bit
    leaves = {key: (a, b, c, d) for key, (a, b, c, d) in words.items()}
    return CpuRecord("x86_64", leaves, xcr0=xcr0, tiles=tiles)


# ---- the shelf


def test_the_shelf_is_wide_enough() -> None:
    assert len(SHELF) >= 21
    assert {"x86_64", "aarch64"} <= {entry.record.arch for entry in SHELF.values()}
    assert any(entry.kind == "recorded" for entry in SHELF.values())


@ENTRIES
def test_shelf_entry_decodes(entry: ShelfEntry) -> None:
    assert entry.include <= KNOWN_FEATURES
    assert entry.exclude <= KNOWN_FEATURES
    assert entry.include <= entry.features
    assert not entry.exclude & entry.features


@ENTRIES
def test_why_not_agrees_with_usable(entry: ShelfEntry) -> None:
    for name in KNOWN_FEATURES:
        reason = why_not(entry.record, name)
        assert (reason is None) == (name in entry.features), name
        if reason is not None:
            assert name in reason


@ENTRIES
def test_usable_sets_are_closed(entry: ShelfEntry) -> None:
    assert implied(entry.features) == entry.features


@ENTRIES
def test_record_round_trip(entry: ShelfEntry) -> None:
    assert CpuRecord.from_json(entry.record.to_json()) == entry.record


# ---- the table


def test_no_two_rows_read_the_same_bit() -> None:
    x86 = [(r.leaf, r.subleaf, r.register, r.bit, r.version) for r in X86]
    assert len(set(x86)) == len(x86)
    arm = [(r.hwcap, r.hwcap2) for r in ARM]
    assert len(set(arm)) == len(arm)


def test_implied_names_stay_inside_their_architecture() -> None:
    for table in TABLES.values():
        for row in table.values():
            assert implied([row.name]) <= table.keys()
    # implied() does not know the architecture, so a name of both may bring nothing along.
    for name in TABLES["x86_64"].keys() & TABLES["aarch64"].keys():
        assert all(not table[name].implies for table in TABLES.values())


def test_a_wider_state_is_never_implied_by_a_narrower_one() -> None:
    for row in X86:
        for name in row.implies:
            base = FEATURES[name]
            assert isinstance(base, X86Feature)
            assert "amx" in row.name or STATES[base.state] & ~STATES[row.state] == 0


@pytest.mark.parametrize("row", X86, ids=lambda row: row.name)
def test_every_x86_feature_needs_its_own_bit(row: X86Feature) -> None:
    needs = implied([row.name])
    assert row.name in usable(record_with(*needs))
    without_it = record_with(*(needs - {row.name}))
    assert row.name not in usable(without_it)
    assert "the CPU lacks" in (why_not(without_it, row.name) or "")


@pytest.mark.parametrize("row", X86, ids=lambda row: row.name)
def test_every_x86_feature_needs_what_it_builds_on(row: X86Feature) -> None:
    for base in row.implies:
        if FEATURES[base] in X86 and row.version and base.startswith("avx10"):
            continue  # one number: a CPU of version 2 is of version 1
        record = record_with(*(implied([row.name]) - {base}))
        assert row.name not in usable(record)
        reason = why_not(record, row.name) or ""
        assert base in reason


@pytest.mark.parametrize("row", [r for r in X86 if r.state != "none"], ids=lambda row: row.name)
def test_every_vector_feature_needs_its_state(row: X86Feature) -> None:
    names = implied([row.name])
    mask = STATES[row.state]
    for bit in (b for b in range(32) if mask >> b & 1):
        record = record_with(*names, xcr0=0x602E7 & ~(1 << bit))
        assert row.name not in usable(record)
        assert f"it takes {mask:#x}" in (why_not(record, row.name) or "")
    hidden = record_with(*names, xcr0=None)
    assert row.name not in usable(hidden)
    assert "OSXSAVE is clear" in (why_not(hidden, row.name) or "")


@pytest.mark.parametrize("row", ARM, ids=lambda row: row.name)
def test_every_arm_feature_needs_each_of_its_bits(row: ArmFeature) -> None:
    rows = [TABLES["aarch64"][name] for name in implied([row.name])]
    hwcap = sum({1 << b for r in rows if isinstance(r, ArmFeature) for b in r.hwcap})
    hwcap2 = sum({1 << b for r in rows if isinstance(r, ArmFeature) for b in r.hwcap2})
    whole = CpuRecord("aarch64", hwcap=hwcap, hwcap2=hwcap2)
    assert row.name in usable(whole)
    for bit in row.hwcap:
        assert row.name not in usable(replace(whole, hwcap=hwcap & ~(1 << bit)))
    for bit in row.hwcap2:
        short = replace(whole, hwcap2=hwcap2 & ~(1 << bit))
        assert row.name not in usable(short)
        assert "AT_HWCAP2" in (why_not(short, row.name) or "")


def test_avx10_needs_its_announcement() -> None:
    record = record_with(*implied(["avx10.2"]))
    assert {"avx10.1", "avx10.2"} <= usable(record)
    quiet = dict(record.leaves) | {(7, 1): (*record.registers(7, 1)[:3], 0)}
    assert "avx10.1" not in usable(replace(record, leaves=quiet))


# ---- sentences


def test_why_not_sentences() -> None:
    haswell = SHELF["haswell"].record
    assert why_not(haswell, "avx2") is None
    assert why_not(haswell, "avx512f") == "the CPU lacks avx512f (CPUID leaf 0x7.0 EBX bit 16 is clear)"
    assert why_not(haswell, "dotprod") == "dotprod belongs to aarch64; this machine is x86_64"
    assert why_not(haswell, "avx99") == "avx99 is an unknown feature"
    assert why_not(haswell, "avx512_vnni") == "avx512_vnni is an unknown feature (tunekit calls it avx512vnni)"
    assert why_not(SHELF["cortex-a53"].record, "dotprod") == "the CPU lacks dotprod (AT_HWCAP bit 20 is clear)"
    assert why_not(SHELF["riscv64"].record, "aes") == "aes belongs to x86_64 and aarch64; this machine is riscv64"
    assert "XCR0 is 0x2e7, it takes 0x60000" in (why_not(SHELF["sapphire-rapids-no-xcr0"].record, "amx-int8") or "")
    assert why_not(SHELF["sapphire-rapids-refused"].record, "amx-int8") == (
        "the kernel refused the AMX tile permission that amx-int8 needs"
    )
    assert "never asked" in (why_not(SHELF["sapphire-rapids-not-asked"].record, "amx-tile") or "")
    assert "OSXSAVE is clear" in (why_not(SHELF["guest-without-xsave"].record, "avx2") or "")
    assert "XCR0 is 0x3, it takes 0x6" in (why_not(SHELF["guest-without-ymm"].record, "avx2") or "")


def test_a_recorded_xcr0_without_osxsave_counts_for_nothing() -> None:
    record = replace(SHELF["guest-without-xsave"].record, xcr0=0xE7)
    assert "avx2" not in usable(record)


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        ("AVX2", "avx2"),
        ("avx512_vnni", "avx512vnni"),
        ("avx_vnni", "avxvnni"),
        ("sse4_2", "sse4.2"),
        ("amx_int8", "amx-int8"),
        ("asimddp", "dotprod"),
        ("fullfp16", "fp16"),
        ("asimd", "neon"),
        ("quantum", None),
        ("", None),
    ],
)
def test_suggestions(other: str, ours: str | None) -> None:
    assert suggestion(other) == ours


# ---- sets


@given(st.frozensets(NAMES))
def test_implied_is_a_closure(names: frozenset[str]) -> None:
    closed = implied(names)
    assert names <= closed
    assert implied(closed) == closed


def test_implied_chains() -> None:
    assert {"avx512f", "avx2", "fma", "f16c", "avx", "sse4.2", "popcnt", "sse2"} <= implied(["avx512vl"])
    assert implied(["mystery"]) == {"mystery"}
    assert implied([]) == frozenset()


@given(st.frozensets(NAMES), st.frozensets(NAMES))
def test_without_leaves_nothing_that_builds_on_the_disabled(have: frozenset[str], gone: frozenset[str]) -> None:
    left = without(have, gone)
    assert left <= have
    assert not implied(left) & gone
    assert all(implied([name]) & gone for name in have - left)


def test_without_takes_dependants_along() -> None:
    left = without(SHELF["zen5"].features, {"avx512f", "no-such-feature"})
    assert "avx2" in left and "avxvnni" in left
    assert not any(name.startswith("avx512") for name in left)


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("sapphire-rapids-not-asked", True),
        ("sapphire-rapids", False),
        ("sapphire-rapids-refused", False),
        ("sapphire-rapids-no-xcr0", False),
        ("sapphire-rapids-ymm-only", False),
        ("zen5", False),
        ("neoverse-v2", False),
        ("riscv64", False),
    ],
)
def test_tiles_are_asked_for_only_where_they_may_be_had(name: str, asks: bool) -> None:
    assert wants_tiles(SHELF[name].record) is asks


def test_one_vnni_instruction_two_encodings() -> None:
    """The trap of the family: each encoding faults on the other's parts."""
    have = {name: entry.features & {"avxvnni", "avx512vnni"} for name, entry in SHELF.items()}
    assert have["alder-lake"] == {"avxvnni"}
    assert have["zen4"] == have["cascade-lake"] == {"avx512vnni"}
    assert have["zen5"] == have["sapphire-rapids"] == {"avxvnni", "avx512vnni"}
    assert have["zen3"] == have["haswell"] == set()


@given(st.frozensets(st.sampled_from([row.name for row in X86])), st.sampled_from([None, 3, 7, 0xE7, 0x602E7]))
def test_usable_is_monotone_in_the_state(names: frozenset[str], xcr0: int | None) -> None:
    for tiles in (None, False, True):
        less = usable(record_with(*names, xcr0=xcr0, tiles=tiles))
        assert less <= usable(record_with(*names, xcr0=0x602E7, tiles=True))
        assert less <= names


def test_states_nest() -> None:
    order = ["none", "ymm", "zmm"]
    for low, high in itertools.pairwise(order):
        assert STATES[low] & STATES[high] == STATES[low]
