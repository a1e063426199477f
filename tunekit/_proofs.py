# SPDX-License-Identifier: Apache-2.0
"""What ``python -m tunekit verify --execution`` found, kept for the status: which rows were proven here, and how.

One file a scope, ``<scope>.proofs.json``, beside the user's manifest. It decides nothing; a verdict on code that has
changed since is passed over.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tunekit import _manifest, dispatch
from tunekit.kernel import Kernel


class Verdict(Protocol):
    """One object of a row and what ran it (``state``: ``passed``, ``failed`` or ``unproven``)."""

    row: str
    arch: str
    features: tuple[str, ...]
    how: str
    state: str
    reason: str


def path_of(scope: str) -> Path:
    """The file of a scope on this box."""
    return _manifest.user_path(scope).with_name(f"{scope}.proofs.json")


def _code(kernel: Kernel) -> str:
    """What the verdicts are about: the declaration, and this box's own objects of it."""
    grids = [m.name for m in dispatch.loaded_modules(kernel, grid=True) if m.kind == "grid"]
    return ":".join([kernel.digest(), *grids])


def _read(scope: str) -> dict[str, Any]:
    try:
        data = json.loads(path_of(scope).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _entry(kernel: Kernel) -> dict[str, Any]:
    entry = _read(kernel.scope.name).get(kernel.name)
    if isinstance(entry, dict) and entry.get("code") == _code(kernel) and isinstance(entry.get("rows"), dict):
        return dict(entry["rows"])
    return {}


def save(kernel: Kernel, verdicts: Iterable[Verdict]) -> None:
    """Write the verdicts of a kernel down; those of rows that were not asked this time stay.

    Raises:
        ManifestError: the file cannot be written.
    """
    today = datetime.date.today().isoformat()
    path = path_of(kernel.scope.name)
    with _manifest.locked(path):
        rows, fresh = _entry(kernel), dict[str, dict[str, Any]]()
        for v in verdicts:
            name = f"{v.arch}: {', '.join(v.features) or 'baseline'}"
            fresh.setdefault(v.row, {})[name] = {"state": v.state, "how": v.how, "reason": v.reason, "date": today}
        data = {**_read(kernel.scope.name), kernel.name: {"code": _code(kernel), "rows": {**rows, **fresh}}}
        _manifest.write_atomically(path, json.dumps(data, indent=1, sort_keys=True).encode() + b"\n")


def mark(kernel: Kernel, suffix: str) -> str | None:
    """What is known of a row's proof, in a few words, or None where nothing was asked since the code last changed."""
    objects: Any = _entry(kernel).get(suffix, {})
    try:
        found = [(name, o["state"], o["how"], o["reason"], o["date"]) for name, o in objects.items()]
    except (AttributeError, KeyError, TypeError):
        return None
    for state, words in (("failed", "FAILED its gates"), ("unproven", "unproven here")):
        bad = [f"{name}: {reason}" for name, found_state, _, reason, _ in found if found_state == state]
        if bad:
            return f"{words} ({'; '.join(bad)})"
    ways = dict.fromkeys(how for _, _, how, _, _ in found)
    return f"proven by {' and '.join(ways)} on {max(date for *_, date in found)}" if ways else None
