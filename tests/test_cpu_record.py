# SPDX-License-Identifier: Apache-2.0
"""CpuRecord: an exact JSON round trip, absent leaves, and errors that name the field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit.cpu.record import CpuRecord

WORD = st.integers(0, 2**32 - 1)
DWORD = st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    CpuRecord,
    arch=st.text(min_size=1, max_size=12),
    leaves=st.dictionaries(st.tuples(WORD, st.integers(0, 2**31)), st.tuples(WORD, WORD, WORD, WORD), max_size=8),
    xcr0=st.none() | DWORD,
    tiles=st.none() | st.booleans(),
    hwcap=DWORD,
    hwcap2=DWORD,
    midr=st.none() | DWORD,
)


@given(RECORDS)
def test_json_round_trip_is_exact(record: CpuRecord) -> None:
    again = CpuRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert again == record
    assert hash(again) == hash(record)
    assert again.to_json() == record.to_json()


def test_a_leaf_past_the_maximum_is_absent() -> None:
    # Intel answers leaf 0x24 of a CPU whose last leaf is 0x20 with the last leaf's data.
    record = CpuRecord("x86_64", {(0, 0): (0x20, 0, 0, 0), (0x20, 0): (1, 2, 3, 4), (0x24, 0): (1, 2, 3, 4)})
    assert record.registers(0x20) == (1, 2, 3, 4)
    assert record.registers(0x24) == (0, 0, 0, 0)


def test_an_extended_leaf_past_its_maximum_is_absent() -> None:
    ones = (1, 1, 1, 1)
    record = CpuRecord("x86_64", {(0, 0): (0x20, 0, 0, 0), (0x80000000, 0): (0x80000001, 0, 0, 0),
                                  (0x80000001, 0): ones, (0x80000008, 0): ones})  # fmt: skip
    assert record.registers(0x80000001) == ones
    assert record.registers(0x80000008) == (0, 0, 0, 0)


@pytest.mark.parametrize("leaf", [0x07, 0x1E])
def test_a_subleaf_past_the_count_is_absent(leaf: int) -> None:
    ones = (1, 1, 1, 1)
    leaves = {(0, 0): (0x20, 0, 0, 0), (leaf, 0): (1, 0, 0, 0), (leaf, 1): ones, (leaf, 2): ones}
    record = CpuRecord("x86_64", leaves)
    assert record.registers(leaf, 1) == ones
    assert record.registers(leaf, 2) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"arch": ""}, "arch"),
        ({"arch": None}, "arch"),
        ({"xcr0": 7}, "xcr0"),
        ({"xcr0": "0x7"}, "xcr0"),
        ({"xcr0": "-7"}, "xcr0"),
        ({"hwcap": "1" * 17}, "hwcap"),
        ({"midr": ""}, "midr"),
        ({"tiles": 1}, "tiles"),
        ({"leaves": []}, "leaves"),
        ({"leaves": {"7": ["0"] * 4}}, "'7'"),
        ({"leaves": {"x.0": ["0"] * 4}}, "x.0"),
        ({"leaves": {"00000007.0": ["0"] * 3}}, "00000007.0"),
        ({"leaves": {"00000007.0": ["100000000", "0", "0", "0"]}}, "00000007.0"),
    ],
)
def test_malformed_json_names_the_field(change: dict[str, object], field: str) -> None:
    data: dict[str, object] = {"arch": "x86_64", "leaves": {}, "xcr0": None, "tiles": None, "hwcap": "0", "hwcap2": "0"}
    with pytest.raises(ValueError, match=field):
        CpuRecord.from_json(data | change)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_json_of_another_shape_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        CpuRecord.from_json(data)
