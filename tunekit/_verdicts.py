# SPDX-License-Identifier: Apache-2.0
"""Objects of rows that failed a check on this box, by the key of the object: choosing passes over them.

They stand in ``<scope>.proofs.json``, beside the user's manifest. The key names text, flags and compiler, so that a
row which was mended, or was built by another compiler, is a new one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit import _manifest, paths
from tunekit.errors import TunekitError

_SECTION = "failed objects"  # no kernel can have that name

_read_last: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}


def path_of(scope: str) -> Path:
    """The file of a scope on this box."""
    return _manifest.user_path(scope).with_name(f"{scope}.proofs.json")


def read(scope: str) -> dict[str, Any]:
    """What the file says; {} where there is none, or none that can be read."""
    try:
        path = path_of(scope)
        found = path.stat()
        stamp = (found.st_mtime_ns, found.st_size)
        if path not in _read_last or _read_last[path][0] != stamp:
            data = json.loads(paths.read_small(path))
            _read_last[path] = (stamp, data if isinstance(data, dict) else {})
        return dict(_read_last[path][1])
    except (OSError, ValueError, RecursionError, TunekitError):
        return {}


def write(scope: str, data: Mapping[str, Any]) -> None:
    """Write the file; the caller holds its lock (:func:`tunekit._manifest.locked`)."""
    path = path_of(scope)
    _manifest.write_atomically(path, json.dumps(data, indent=1, sort_keys=True).encode() + b"\n")
    _read_last.pop(path, None)


def failures(scope: str) -> dict[str, str]:
    """Key of an object to what it failed, in a few words with the day."""
    found = read(scope).get(_SECTION)
    if not isinstance(found, dict):
        return {}
    return {
        key: f"{entry.get('reason')}, {entry.get('date')}" for key, entry in found.items() if isinstance(entry, dict)
    }


def save(scope: str, verdicts: Mapping[str, str | None]) -> None:
    """Write verdicts down: key of an object to what it failed, or None where it passed and an older failure is over.

    Raises:
        ManifestError: the file cannot be written.
    """
    known = failures(scope)
    if not any(reason is not None or key in known for key, reason in verdicts.items()):
        return
    with _manifest.locked(path_of(scope)):
        data = read(scope)
        found = data.get(_SECTION)
        kept = {k: v for k, v in found.items() if k not in verdicts} if isinstance(found, dict) else {}
        today = datetime.date.today().isoformat()
        kept |= {key: {"reason": reason, "date": today} for key, reason in verdicts.items() if reason is not None}
        write(scope, {**data, _SECTION: kept})
