# SPDX-License-Identifier: Apache-2.0
"""The box: identity decoded from raw words, a safe key, and differences field by field."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shelf_loader import ShelfEntry, load_shelf

from tunekit.cpu.box import Box, box_of
from tunekit.cpu.record import CpuRecord

SHELF = load_shelf()
ENTRIES = pytest.mark.parametrize("entry", SHELF.values(), ids=SHELF.keys())


@pytest.mark.parametrize(
    ("name", "vendor", "family", "model", "stepping", "core"),
    [
        ("nehalem", "GenuineIntel", 6, 26, 2, ""),
        ("haswell", "GenuineIntel", 6, 60, 3, ""),
        ("cascade-lake", "GenuineIntel", 6, 85, 7, ""),
        ("sapphire-rapids", "GenuineIntel", 6, 143, 8, ""),
        ("alder-lake", "GenuineIntel", 6, 151, 2, "P"),
        ("arrow-lake", "GenuineIntel", 6, 198, 2, "P"),
        ("arrow-lake-e-core", "GenuineIntel", 6, 198, 2, "E"),
        ("zen2", "AuthenticAMD", 23, 71, 0, ""),
        ("zen3", "AuthenticAMD", 25, 33, 0, ""),
        ("zen4", "AuthenticAMD", 25, 97, 2, ""),
        ("zen4-guest", "AuthenticAMD", 25, 17, 1, ""),
        ("zen5", "AuthenticAMD", 26, 68, 0, ""),
        ("qemu-unknown-model", "TCGTGTCGCGTC", 15, 6, 1, ""),
        ("cortex-a53", "Arm", 0xD03, 0, 4, ""),
        ("neoverse-n1", "Arm", 0xD0C, 3, 1, ""),
        ("neoverse-v1", "Arm", 0xD40, 1, 1, ""),
        ("apple-m1", "Apple", 0x22, 1, 1, ""),
        ("apple-m4", "unknown", 0, 0, 0, ""),
        ("riscv64", "unknown", 0, 0, 0, ""),
    ],
)
def test_identity(name: str, vendor: str, family: int, model: int, stepping: int, core: str) -> None:
    box = box_of(SHELF[name].record)
    assert (box.vendor, box.family, box.model, box.stepping, box.core) == (vendor, family, model, stepping, core)
    assert box.arch == SHELF[name].record.arch


def test_a_family_without_extended_model_ignores_its_bits() -> None:
    # Family 5 (0x5): the extended fields are reserved and must not leak into family or model.
    record = CpuRecord("x86_64", {(0, 0): (1, 0, 0, 0), (1, 0): (0x0FFF0543, 0, 0, 0)})
    box = box_of(record)
    assert (box.family, box.model, box.stepping) == (5, 4, 3)
    assert box.vendor == "unknown"


def test_an_unknown_implementer_is_named_by_its_number() -> None:
    assert box_of(CpuRecord("aarch64", midr=0x7F0F1230)).vendor == "implementer7f"


@ENTRIES
def test_key_is_readable_and_safe(entry: ShelfEntry) -> None:
    key = box_of(entry.record).key
    assert re.fullmatch(r"[A-Za-z0-9_.]+(-[A-Za-z0-9_.]+){5}", key)
    assert re.search(r"-[0-9a-f]{8}$", key)
    assert len(key) < 80


@given(st.text(max_size=16), st.text(max_size=16))
def test_no_vendor_string_escapes_a_folder(arch: str, vendor: str) -> None:
    key = Box(arch, vendor, 1, 2, 3, ()).key
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", key)
    assert not key.startswith(".")


def test_key_follows_the_features() -> None:
    rapids = box_of(SHELF["sapphire-rapids"].record)
    assert rapids.key != box_of(SHELF["sapphire-rapids-refused"].record).key
    assert rapids.key.startswith("x86_64-GenuineIntel-6-143-8-")
    assert box_of(SHELF["arrow-lake"].record).key == box_of(SHELF["arrow-lake-e-core"].record).key


@ENTRIES
def test_json_round_trip(entry: ShelfEntry) -> None:
    box = box_of(entry.record)
    assert Box.from_json(json.loads(json.dumps(box.to_json()))) == box
    assert box.differences(box) == []


def test_differences_field_by_field() -> None:
    here, there = box_of(SHELF["zen5"].record), box_of(SHELF["zen4"].record)
    found = here.differences(there)
    assert "family: 26 here, 25 there" in found
    assert "model: 68 here, 97 there" in found
    assert any("avxvnni" in line and line.endswith("only here") for line in found)
    assert not any(line.startswith(("arch", "vendor", "core")) for line in found)
    back = there.differences(here)
    assert any("avxvnni" in line and line.endswith("only there") for line in back)
    assert replace(here, core="P").differences(here) == ["core: P here, none there"]


@pytest.mark.parametrize("field", ["arch", "vendor", "family", "model", "stepping", "features", "core"])
def test_malformed_json_names_the_field(field: str) -> None:
    data = box_of(SHELF["zen5"].record).to_json() | {field: [None]}
    with pytest.raises(ValueError, match=field):
        Box.from_json(data)
    with pytest.raises(ValueError, match="JSON object"):
        Box.from_json([])
