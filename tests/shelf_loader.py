# SPDX-License-Identifier: Apache-2.0
"""The shelf of recorded CPUs (``tests/shelf/*.json``): any test may ask what tunekit would do on each of them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from tunekit.cpu.features import usable
from tunekit.cpu.record import CpuRecord

SHELF = Path(__file__).parent / "shelf"
KINDS = ("recorded", "transcribed", "synthetic")


@dataclass(frozen=True)
class ShelfEntry:
    """One recorded CPU, and features that it must and must not offer."""

    name: str
    what: str
    kind: str
    source: str
    record: CpuRecord
    include: frozenset[str]
    exclude: frozenset[str]

    @property
    def features(self) -> frozenset[str]:
        """What the CPU offers, by tunekit's own reading of the record."""
        return usable(self.record)


@functools.cache
def load_shelf() -> dict[str, ShelfEntry]:
    """Every entry by name, in alphabetical order."""
    return {entry.name: entry for entry in map(_load, sorted(SHELF.glob("*.json")))}


def _load(path: Path) -> ShelfEntry:
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["name"] != path.stem or data["kind"] not in KINDS or not data["source"]:
        raise ValueError(f"{path.name}: its name, kind or source is wrong")
    return ShelfEntry(
        name=data["name"],
        what=data["what"],
        kind=data["kind"],
        source=data["source"],
        record=CpuRecord.from_json(data["record"]),
        include=frozenset(data["expect"]["features_include"]),
        exclude=frozenset(data["expect"]["features_exclude"]),
    )
