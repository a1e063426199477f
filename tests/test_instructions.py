# SPDX-License-Identifier: Apache-2.0
"""The guard against getting slower: instructions of the fallback rows, held to ``benchmarks/instructions.json``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, lacking

from tunekit.errors import ToolchainError


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("instructions")


def held(guard: Any, kind: str, found: dict[str, dict[str, float]]) -> None:
    """Every recorded compiler's counts are within the record; where none of these compilers is recorded, skip."""
    record = guard.load()[kind]
    unknown = [guard.how_to_record(name) for name in found if name not in record]
    print("\n".join(unknown))
    faults = [f"{name}: {f}" for name, counts in found.items() if name in record for f in guard.slower(record[name], counts)]
    mend = 'if this is meant, in the same commit: python benchmarks/instructions.py --record "WHY"'
    assert not faults, "\n".join([*faults, mend])
    if len(unknown) == len(found):
        pytest.skip("; ".join(unknown))


@pytest.fixture
def objects(request: pytest.FixtureRequest, guard: Any) -> Path:
    """Where the grid's objects are, so that few are compiled here."""
    pytest.importorskip("tunekit.build_tools")
    kept: Path = request.getfixturevalue("q8_cache") / "objects"
    return kept


@pytest.mark.build
@pytest.mark.slow
def test_loops_take_no_more_instructions_than_recorded(guard: Any, objects: Path) -> None:
    try:
        found = guard.all_loops(objects)
    except ToolchainError as error:
        lacking(str(error))
    assert found
    assert all(len(counts) > 4 for counts in found.values()), "every fallback row multiplies in a loop"
    held(guard, "loops", found)


@pytest.mark.build
@pytest.mark.slow
def test_fixed_products_take_no_more_instructions_than_recorded(guard: Any, objects: Path) -> None:
    lacks = guard.missing_callgrind()
    if lacks:
        lacking(lacks) if lacks == "valgrind" else pytest.skip(f"needs {lacks}")
    found = guard.all_calls(objects)
    assert found
    assert all(len(counts) >= 5 and min(counts.values()) > 0 for counts in found.values())
    held(guard, "calls", found)


def test_more_than_two_per_cent_is_slower(guard: Any) -> None:
    assert guard.slower({"f": 100}, {"f": 102}) == []
    assert guard.slower({"f": 100}, {"f": 50}) == []
    assert guard.slower({"f": 100}, {"f": 103}) == ["f: 103 instructions, 100 recorded (+3.0 %)"]
    assert guard.slower({}, {"new": 1}) == ["new: not recorded"]
    assert guard.slower({"old": 1}, {}) == ["old: recorded, and no longer there"]


def test_what_a_loop_multiplies(guard: Any) -> None:
    from types import SimpleNamespace

    def loop(*lines: str) -> int:
        return int(guard.macs([SimpleNamespace(name=line.split()[0], text=line) for line in lines]))

    assert loop("vpmaddwd %ymm0,%ymm1,%ymm2", "vpaddd %ymm0,%ymm1,%ymm2") == 16
    assert loop("vpmaddubsw %ymm0,%ymm1,%ymm2", "vpmaddwd %ymm0,%ymm1,%ymm2") == 32, "pair sums count once"
    assert loop("vpdpbusd (%rdi){1to16},%zmm0,%zmm2") == 64
    assert loop("sdot v0.4s, v1.16b, v2.4b[0]", "smmla v0.4s, v1.16b, v2.16b") == 16 + 32


def test_the_record_is_of_these_rows_and_has_reasons(guard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = guard.load()
    assert record["reasons"]
    assert set(record["calls"]) <= set(record["loops"])
    for counts in record["loops"].values():
        known = {name.partition("__")[2] for name in counts}
        assert all(any(name.startswith(row) for row in guard.ROWS) for name in known)
    monkeypatch.setattr(guard, "RECORD", tmp_path / "record.json")
    guard.save(record)
    assert json.loads(guard.RECORD.read_text()) == record
    assert guard.RECORD.read_text() == (ROOT / "benchmarks" / "instructions.json").read_text(), "written by the command"


def test_an_unrecorded_compiler_is_no_failure_and_says_what_to_run(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "load", lambda: {"loops": {"gcc 12 x86_64": {"f": 1.0}}})
    with pytest.raises(pytest.skip.Exception, match='gcc 99 x86_64 is not recorded.*--record "gcc 99 x86_64'):
        held(guard, "loops", {"gcc 99 x86_64": {"f": 9.0}})
    held(guard, "loops", {"gcc 99 x86_64": {"f": 9.0}, "gcc 12 x86_64": {"f": 1.0}})
    with pytest.raises(AssertionError, match="9 instructions, 1 recorded"):
        held(guard, "loops", {"gcc 12 x86_64": {"f": 9.0}})
