# SPDX-License-Identifier: Apache-2.0
"""The record of a tuning run, kept beside the manifest: what was measured, on what, and why it came out so.

The record explains; it never chooses. Choosing reads the manifest alone, and the status compares the record's box
and hashes with today's to say whether the manifest is stale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from tunekit._manifest import RECORD_SCHEMA as SCHEMA
from tunekit.cpu.brand import UNKNOWN
from tunekit.errors import MalformedManifest


@dataclass(frozen=True)
class RowRecord:
    """What became of one row.

    Attributes:
        verdict: one of ``winner tied slower unconfirmed rejected unavailable unmeasured``; ``unconfirmed`` won the race
            and not what an application does (see :class:`ConfirmRecord`).
        reason: why, in one sentence; empty for a winner that needs none.
        seconds: how long its gates took.
    """

    verdict: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class RegimeRecord:
    """One regime of one kernel. Times are seconds a call; a name with ``#2`` is the fallback's second entry.

    Attributes:
        unit, work, decides, traffic: as the family declared them (see :class:`tunekit.measure.fixtures.Regime`).
        seed: of the orders of the rounds.
        complete: whether the race ended by its plan and not by the time limit.
        floor, margin: the noise floor of the fallback's pair, and the lead that counted as a win; None where
            nothing was measured.
        calls: calls a window.
        centres, errors, spreads: of the final where the row was in it, else of the screening (levelled samples).
        finalists: who was raced again.
        screening, final: raw samples.
        seat: as the family declared it.
    """

    unit: str
    work: float
    decides: list[str]
    seed: int = 0
    complete: bool = True
    floor: float | None = None
    margin: float | None = None
    calls: dict[str, int] = field(default_factory=dict)
    centres: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)
    finalists: list[str] = field(default_factory=list)
    screening: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, list[float]] = field(default_factory=dict)
    traffic: float = 0.0
    seat: str = ""


@dataclass(frozen=True)
class ConfirmRecord:
    """One chain of an application's work, run by the race's winner and by what it must beat, by turns.

    Attributes:
        chain: its name.
        what: ``"*"`` where the kernel's row was in question, else the seat.
        challenger, base: the two arms: a row, and ``seat=row`` of seats that run others.
        verdict: ``confirmed``, ``rejected``, ``unfinished`` where the time limit came first, or ``unusable`` where the
            base scored nothing.
        reason: why, in one sentence.
        ratio: how many times as fast as the base the challenger was: the median of the pairs; None without a pair.
        margin: the lead that counted as a win.
        ratios: one a pair of processes.
        parts: the ratio of each part alone.
        samples: seconds of each part, by arm (``challenger``, ``base``) and part, one a process: its best pass.
    """

    chain: str
    what: str
    challenger: str
    base: str
    verdict: str
    reason: str = ""
    ratio: float | None = None
    margin: float | None = None
    ratios: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a run; it carries its own date, toolchain and hashes, since a run may cover one kernel only.

    Attributes:
        winner: what the manifest holds after the run, or None where nothing was chosen.
        previous: what it held before, or None.
        fallback: what runs untuned.
        reason: why the winner won, or why nothing was chosen.
        complete: whether every row was gated and raced to the end.
        ended: when, ISO 8601 in UTC.
        compiler: the version line of the one that made the winner.
        hashes: of what its rows were made from: ``grid`` (the declaration) and each ``template NAME``.
        picks: what each deciding regime said.
        notes: what a reader should know (a noisy box, a regime in which the winner loses).
        rows: by suffix, in the order of the declaration.
        regimes: by name, the primary first.
        seats: companions that run another row than the winner, each with that row.
        confirm: what became of the race's winners in whole chains of work, in order; empty where the fallback won.
        reused: what was taken from the journal of an earlier run instead of being measured again, in words.
        usual: the version line of the compiler that made the rows whose names say none.
        compilers: version lines by the names that rows have them by, ``row@name``.
    """

    winner: str | None = None
    previous: str | None = None
    fallback: str | None = None
    reason: str = ""
    complete: bool = True
    ended: str = ""
    compiler: str = ""
    hashes: dict[str, str] = field(default_factory=dict)
    picks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: dict[str, RowRecord] = field(default_factory=dict)
    regimes: dict[str, RegimeRecord] = field(default_factory=dict)
    seats: dict[str, str] = field(default_factory=dict)
    confirm: list[ConfirmRecord] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    usual: str = ""
    compilers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """The contents of ``<scope>.tune.run.json``.

    Attributes:
        scope: whose manifest this explains.
        box: the box as JSON (see :mod:`tunekit.cpu.box`).
        brand: the processor's name for people; nothing depends on it.
        seed: of the run; a run with the same seed on the same times decides the same.
        started, ended: ISO 8601 in UTC.
        time_limit: seconds, or None.
        stages: seconds by stage: ``build``, ``gate``, ``race REGIME``, ``confirm``, ``write``, ``stamp``.
        digests: of the grids, by ``scope.kernel``; another digest today means that the manifest is stale.
        kernels: by name.
    """

    scope: str
    box: dict[str, Any]
    brand: str = UNKNOWN
    seed: int = 0
    started: str = ""
    ended: str = ""
    time_limit: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, KernelRecord] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """As JSON values; exact both ways."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> RunRecord:
        """Read what :meth:`to_json` wrote; unknown keys are passed over.

        Raises:
            MalformedManifest: another schema, a missing key or a value of the wrong type; the message names it.
        """
        if not isinstance(value, dict):
            raise MalformedManifest(f"a run record is a JSON object, not {type(value).__name__}")
        if value.get("schema") != SCHEMA:
            raise MalformedManifest(f"a run record of schema {value.get('schema')!r}; this tunekit reads {SCHEMA}")
        record: RunRecord = read_as(cls, value, "record")
        return record


def read_as(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``: a dataclass, a container of them, or a JSON scalar; unknown keys are passed over.

    Raises:
        MalformedManifest: a missing key or a value of the wrong type; the message begins with ``where``.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise MalformedManifest(f"{where}: expected an object, found {type(value).__name__}")
        hints = get_type_hints(kind)
        found = {}
        for spec in dataclasses.fields(kind):
            if spec.name in value:
                found[spec.name] = read_as(hints[spec.name], value[spec.name], f"{where}.{spec.name}")
            elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise MalformedManifest(f"{where}: {spec.name} is missing")
        return kind(**found)
    origin, inner = get_origin(kind), get_args(kind)
    origin = dict if origin is Mapping else origin
    if origin is list and isinstance(value, list):
        return [read_as(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: read_as(inner[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin not in (list, dict):
        allowed = inner or (kind,)
        if float in allowed and type(value) in (int, float):
            with contextlib.suppress(OverflowError):  # JSON knows integers that no float holds
                if math.isfinite(value):
                    return float(value)
        elif any(type(value) is one for one in allowed):  # exactly: True is no int here
            return value
    raise MalformedManifest(f"{where}: {value!r:.60} has the wrong type")


def merge(old: RunRecord | None, new: RunRecord) -> RunRecord:
    """A run's record together with the kernels that only an older run of the same scope on the same box covered."""
    if old is None or old.scope != new.scope or old.box != new.box:
        return new
    if new.brand == UNKNOWN:  # it was asked for on a busy box: the name that an older run found is the same machine's
        new = dataclasses.replace(new, brand=old.brand)
    return dataclasses.replace(new, digests={**old.digests, **new.digests}, kernels={**old.kernels, **new.kernels})
