# SPDX-License-Identifier: Apache-2.0
"""Where a report's figures come from: run records beside manifests, and the ceilings in the box profile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import _manifest, dispatch, paths, team
from tunekit.cpu import this_box
from tunekit.cpu.box import Box
from tunekit.cpu.brand import UNKNOWN, brand
from tunekit.errors import ManifestError, TunekitError
from tunekit.measure.record import RunRecord


@dataclass(frozen=True)
class Source:
    """One scope's record.

    Attributes:
        path: the file.
        record: what it says.
        foreign: how the box that it was measured on differs from this one; empty where it does not.
        ceilings: of the box (see :mod:`tunekit.ceilings`); {} where none were measured or the box is another.
    """

    path: Path
    record: RunRecord
    foreign: tuple[str, ...] = ()
    ceilings: Mapping[str, Any] = field(default_factory=dict)


def read(path: Path) -> RunRecord:
    """A run record from its file.

    Raises:
        TunekitError: it is not there, cannot be read, is torn or is no record; the message says what mends it.
    """
    mend = "to make a new one: python -m tunekit.retune"
    try:
        text = paths.read_small(path)
    except FileNotFoundError:
        raise TunekitError(f"there is no run record {path}; {mend}") from None
    except OSError as error:
        raise TunekitError(f"the run record {path} cannot be read: {error.strerror or error}") from error
    try:
        return RunRecord.from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise TunekitError(f"the run record {path} is torn or no JSON ({error}); {mend}") from error
    except ManifestError as error:
        raise TunekitError(f"the run record {path} cannot be used: {error}; {mend}") from error


def differences(box: Mapping[str, Any]) -> tuple[str, ...]:
    """How a recorded box differs from this one."""
    try:
        return tuple(this_box().differences(Box.from_json(box)))
    except ValueError as error:
        return (str(error),)


def source(path: Path) -> Source:
    """The record in a file, with the ceilings that belong to it. Raises TunekitError, see :func:`read`."""
    record = read(path)
    foreign = differences(record.box)
    if record.brand == UNKNOWN and not foreign:
        record = dataclasses.replace(record, brand=brand())  # nobody had the time to say it then
    found = {} if foreign else team.profile().measured.get("ceilings")
    return Source(path, record, foreign, found if isinstance(found, dict) else {})


def of_scope(scope: str) -> Path | None:
    """The record of the manifest that counts for a scope: the first that is there, or None."""
    paths = [_manifest.record_path(layer.path) for layer in _manifest.layers(scope) if layer.path is not None]
    return next((path for path in paths if path.exists()), None)


def collect(scope: str | None, file: Path | None) -> tuple[list[Source], list[str]]:
    """The records to report, and a sentence for each that cannot be used.

    Args:
        scope: one installed scope, or None for all.
        file: a record to read instead.

    Raises:
        TunekitError: there is nothing to report; the message names the command that makes a record.
    """
    if file is not None:
        return [source(file)], []
    if scope is not None:
        dispatch.declare_scope(scope)  # which names the installed ones where there is no such scope
    found, problems = [], []
    for name in [scope] if scope is not None else sorted(dispatch.installed_scopes()):
        path = of_scope(name)
        if path is None:
            continue
        try:
            found.append(source(path))
        except TunekitError as error:
            problems.append(str(error))
    if not found:
        only = f" --scope {scope}" if scope is not None else ""
        what = f"the scope {scope}" if scope is not None else "any installed scope"
        raise TunekitError(
            "; ".join(problems)
            or f"there is no record of a retune of {what} on this box; to make one: python -m tunekit.retune{only}"
        )
    return found, problems
