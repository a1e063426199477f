# SPDX-License-Identifier: Apache-2.0
"""The run record: exact both ways, and firm against what is none."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from tunekit.errors import MalformedManifest
from tunekit.measure.record import KernelRecord, RegimeRecord, RowRecord, RunRecord, merge

REGIME = RegimeRecord(
    "GMAC/s",
    67108864.0,
    ["*"],
    3,
    True,
    0.012,
    0.03,
    {"a": 20, "a#2": 20},
    {"a": 1e-3},
    {"a": 0.001},
    {"a": 0.004},
    ["a"],
    {"a": [1e-3, 1.1e-3], "a#2": [1e-3, 0.9e-3]},
    {"a": [1e-3]},
)
KERNEL = KernelRecord(
    "a",
    None,
    "a",
    "leads",
    True,
    "2026-01-02T03:04:05+00:00",
    "gcc 12",
    {"grid": "x"},
    {"tile": "a"},
    ["noisy"],
    {"a": RowRecord("winner", "leads", 0.5), "b": RowRecord("rejected", "killed by SIGILL")},
    {"tile": REGIME},
)
RUN = RunRecord(
    "toy",
    {"arch": "x86_64", "features": ["avx2"]},
    "Some CPU",
    3,
    "s",
    "e",
    None,
    {"build": 1.5},
    {"toy.k": "x"},
    {"k": KERNEL},
)


def test_round_trip_through_text() -> None:
    assert RunRecord.from_json(json.loads(json.dumps(RUN.to_json(), allow_nan=False))) == RUN


def test_unknown_keys_are_passed_over_and_missing_optional_ones_filled() -> None:
    value = RUN.to_json()
    value["later"] = 1
    del value["kernels"]["k"]["notes"]
    assert RunRecord.from_json(value).kernels["k"].notes == []


def broken() -> list[tuple[str, Any]]:
    cases: list[tuple[str, Any]] = [("object", None), ("object", [1]), ("object", "text"), ("schema", {})]

    def without(change: str, *path: str, to: Any) -> None:
        value: Any = copy.deepcopy(RUN.to_json())
        inner = value
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = to
        cases.append((change, value))

    without("schema 2", "schema", to=2)
    without("record.scope", "scope", to=7)
    without("record.seed", "seed", to=True)
    without("record.box", "box", to=[])
    without("record.kernels.k", "kernels", "k", to=None)
    without("record.kernels.k.rows.a", "kernels", "k", "rows", "a", to={})
    without("record.kernels.k.regimes.tile.work", "kernels", "k", "regimes", "tile", "work", to="much")
    without("record.kernels.k.regimes.tile.final.a", "kernels", "k", "regimes", "tile", "final", "a", to={})
    without(r"tile.final.a\[1\]", "kernels", "k", "regimes", "tile", "final", "a", to=[1.0, float("nan")])
    return cases


@pytest.mark.parametrize(("text", "value"), broken())
def test_what_is_no_record_is_refused_by_name(text: str, value: Any) -> None:
    with pytest.raises(MalformedManifest, match=text):
        RunRecord.from_json(value)


def test_merge_keeps_the_kernels_of_an_older_run_on_the_same_box() -> None:
    other = dataclasses.replace(RUN, kernels={"other": KERNEL}, digests={"toy.other": "y"}, seed=9)
    both = merge(other, RUN)
    assert set(both.kernels) == {"k", "other"} and both.seed == RUN.seed
    assert both.digests == {"toy.k": "x", "toy.other": "y"}
    assert merge(None, RUN) == RUN
    assert merge(dataclasses.replace(other, box={"arch": "m68k"}), RUN) == RUN
    newer = dataclasses.replace(RUN, kernels={"k": dataclasses.replace(KERNEL, winner="b")})
    assert merge(RUN, newer).kernels["k"].winner == "b"


def test_a_brand_that_was_known_stays() -> None:
    old, new = RunRecord("s", {"arch": "x"}, "A Brand"), RunRecord("s", {"arch": "x"}, "unknown")
    assert merge(old, new).brand == "A Brand" and merge(new, old).brand == "A Brand"
    assert merge(old, RunRecord("s", {"arch": "y"}, "unknown")).brand == "unknown"


@pytest.mark.parametrize("number", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_number_that_is_none_is_malformed(number: float) -> None:
    with pytest.raises(MalformedManifest, match="time_limit"):
        RunRecord.from_json({**RunRecord("s", {}).to_json(), "time_limit": number})
