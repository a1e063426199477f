# SPDX-License-Identifier: Apache-2.0
"""What ``python -m tunekit verify --execution`` found, kept for the status: which rows were proven here, and how.

One file a scope, ``<scope>.proofs.json``, beside the user's manifest. What passed decides nothing, and a verdict on
code that has changed since is passed over; an object that failed on this CPU is not chosen (:mod:`tunekit._verdicts`).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Protocol

from tunekit import _manifest, _verdicts, dispatch
from tunekit.kernel import Kernel


class Verdict(Protocol):
    """One object of a row and what ran it (``state``: ``passed``, ``failed`` or ``unproven``)."""

    row: str
    arch: str
    features: tuple[str, ...]
    how: str
    state: str
    reason: str


NATIVE = "this CPU"
"""What ran an object that no emulator ran."""


def _code(kernel: Kernel) -> str:
    """What the verdicts are about: the declaration, and this box's own objects of it."""
    grids = [m.name for m in dispatch.loaded_modules(kernel, grid=True) if m.kind == "grid"]
    return ":".join([kernel.digest(), *grids])


def _entry(kernel: Kernel) -> dict[str, Any]:
    entry = _verdicts.read(kernel.scope.name).get(kernel.name)
    if isinstance(entry, dict) and entry.get("code") == _code(kernel) and isinstance(entry.get("rows"), dict):
        return dict(entry["rows"])
    return {}


def save(kernel: Kernel, verdicts: Iterable[Verdict]) -> None:
    """Write the verdicts of a kernel down; those of rows that were not asked this time stay.

    Raises:
        ManifestError: the file cannot be written.
    """
    today = datetime.date.today().isoformat()
    verdicts, scope = list(verdicts), kernel.scope.name
    here = {(v.row, v.features): v.reason if v.state == "failed" else None for v in verdicts if v.how == NATIVE}
    dispatch.judged(kernel, here)
    with _manifest.locked(_verdicts.path_of(scope)):
        rows, fresh = _entry(kernel), dict[str, dict[str, Any]]()
        for v in verdicts:
            name = f"{v.arch}: {', '.join(v.features) or 'baseline'}"
            fresh.setdefault(v.row, {})[name] = {"state": v.state, "how": v.how, "reason": v.reason, "date": today}
        entry = {"code": _code(kernel), "rows": {**rows, **fresh}}
        _verdicts.write(scope, {**_verdicts.read(scope), kernel.name: entry})


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
