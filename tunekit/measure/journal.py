# SPDX-License-Identifier: Apache-2.0
"""What a run found out so far, kept in the cache: an interrupted run goes on, and a second measures only what is new.

Nothing chooses by a journal; manifests alone do that. It counts only where everything that times depend on is as it
was: box and machine, compiler, templates, the declaration but its rows, the fixtures' file, tunekit itself, the plan
and the seed. Each row has a digest of its own, so that a row that was added, or whose arguments changed, is new and
the others are not. A row that failed a check is asked again each time, one that ended the process of a race or hung in
it is not, and what was measured on a noisy box is measured again. ``--fresh`` forgets the journal.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunekit import paths
from tunekit._manifest import write_atomically
from tunekit.errors import MalformedManifest
from tunekit.measure.race import RaceResult
from tunekit.measure.record import ConfirmRecord, RowRecord, read_as
from tunekit.rows import split_name

SCHEMA = 1


@dataclasses.dataclass
class Pages:
    """The contents of a journal.

    Attributes:
        key: what must be the same for it to count.
        digests: of the rows that it speaks of.
        gates: rows that passed every check, with the seconds that this took.
        lates: rows that passed them and then ended the process of a race, or hung in it, with the reason.
        races: results by regime.
        confirms: pairs of arms on a chain, each under its :func:`confirm_key`.
        outcome: what became of each row that was measured, once a run came to its end on a quiet box.
        racers: who was in the races that led there.
    """

    key: dict[str, Any] = dataclasses.field(default_factory=dict)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    gates: dict[str, float] = dataclasses.field(default_factory=dict)
    lates: dict[str, str] = dataclasses.field(default_factory=dict)
    races: dict[str, RaceResult] = dataclasses.field(default_factory=dict)
    confirms: dict[str, ConfirmRecord] = dataclasses.field(default_factory=dict)
    outcome: dict[str, RowRecord] = dataclasses.field(default_factory=dict)
    racers: list[str] = dataclasses.field(default_factory=list)
    schema: int = SCHEMA


def confirm_key(chain: str, works: Sequence[float], what: str, challenger: str, base: str) -> str:
    """Under what a confirmation is kept: the chain with the work of its parts, and who met whom about what."""
    return json.dumps([chain, list(works), what, challenger, base])


class Journal:
    """A kernel's journal.

    Args:
        path: its file, or None to remember nothing beyond this run.
        key: what times depend on, as JSON values.
        digests: of the rows as they are now.
        fresh: forget what is there.
    """

    def __init__(
        self, path: Path | None, key: Mapping[str, Any], digests: Mapping[str, str], fresh: bool = False
    ) -> None:
        self.path = path
        self.problem = ""
        now = json.loads(json.dumps(dict(key)))
        old = None if fresh or path is None else _read(path)
        if old is None or old.key != now:
            old = Pages(key=now)
        # Of compilers that are not in question this time, what was found stays, unless the row itself is another.
        asked = {split_name(name)[1] for name in digests}
        digests = {
            **digests,
            **{
                name: digest
                for name, digest in old.digests.items()
                if split_name(name)[1] not in asked
                and (row := split_name(name)[0]) in digests
                and old.digests.get(row) == digests[row]
            },
        }
        self.pages = _current(old, digests)
        self.pages.digests = dict(digests)

    def _save(self) -> None:
        if self.path is None:
            return
        try:
            write_atomically(self.path, json.dumps(dataclasses.asdict(self.pages)).encode())
        except OSError as error:
            self.problem = f"the journal cannot be written: {self.path}: {error.strerror or error}"
            self.path = None

    # --- gates

    def passed(self, suffix: str) -> float | None:
        """The seconds that a row's checks took when it passed them, or None."""
        return self.pages.gates.get(suffix)

    def heard(self, suffix: str, passed: bool, seconds: float) -> None:
        """A verdict of the gates; a later one counts."""
        if passed:
            self.pages.gates[suffix] = seconds
        elif self.pages.gates.pop(suffix, None) is None:
            return
        self._save()

    # --- races

    def late(self, suffix: str, reason: str) -> None:
        """A row ended the process of a race or hung in it; the first reason stays."""
        if self.pages.lates.setdefault(suffix, reason) is reason:
            self._save()

    def known(self, alive: Collection[str]) -> dict[str, RowRecord]:
        """What became of rows that need no race again."""
        return {name: row for name, row in self.pages.outcome.items() if name in alive}

    def race(
        self, regime: str, entrants: Collection[str], final: Collection[Collection[str]], base: str
    ) -> RaceResult | None:
        """A finished race of just these entrants in whose final one of each group in ``final`` was, or None."""
        found = self.pages.races.get(regime)
        if found is None or found.base != base or not found.complete or found.failed:
            return None
        if {name.partition("#")[0] for name in found.screening} != set(entrants):
            return None
        return found if all(set(group) & set(found.final) for group in final) else None

    def keep_race(self, regime: str, result: RaceResult) -> None:
        """Remember a race that came to its end."""
        self.pages.races[regime] = result
        self._save()

    def settle(self, outcome: Mapping[str, RowRecord], racers: Sequence[str]) -> None:
        """Remember the end of a run: who was measured, and what became of them."""
        self.pages.outcome = {**self.pages.outcome, **outcome}
        self.pages.racers = list(racers)
        self._save()

    # --- confirmations

    def confirm(self, key: str) -> ConfirmRecord | None:
        """What two arms came to, or None."""
        return self.pages.confirms.get(key)

    def keep_confirm(self, key: str, record: ConfirmRecord) -> None:
        """Remember a confirmation that came to its end."""
        self.pages.confirms[key] = record
        self._save()


def _read(path: Path) -> Pages | None:
    try:
        data = json.loads(paths.read_small(path))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            return None
        pages: Pages = read_as(Pages, data, "journal")
        return pages
    except (OSError, ValueError, RecursionError, MalformedManifest):
        return None  # torn, or of another tunekit: it is as good as none


def _current(pages: Pages, digests: Mapping[str, str]) -> Pages:
    """The pages without what they say of rows that are no longer what they were."""
    gone = {name for name, digest in pages.digests.items() if digests.get(name) != digest}
    if not gone:
        return pages

    def clean(names: Collection[str]) -> bool:
        return not gone & {name.partition("#")[0] for name in names}

    def arms(record: ConfirmRecord) -> list[str]:
        return [word.rpartition("=")[2] for word in f"{record.challenger} {record.base}".split()]

    return Pages(
        pages.key,
        dict(digests),
        {name: seconds for name, seconds in pages.gates.items() if name not in gone},
        {name: reason for name, reason in pages.lates.items() if name not in gone},
        {regime: race for regime, race in pages.races.items() if clean(race.screening)},
        {key: record for key, record in pages.confirms.items() if clean(arms(record))},
        {name: row for name, row in pages.outcome.items() if name not in gone},
        [] if not clean(pages.racers) else pages.racers,
    )
