# SPDX-License-Identifier: Apache-2.0
"""Am I tuned, and if not, why not? One row per tuned kernel, one answer per row of its grid."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunekit import _manifest, _proofs, _templates, dispatch
from tunekit.choose import refusal
from tunekit.cpu import this_box, this_cpu
from tunekit.cpu.features import why_not as feature_why_not
from tunekit.errors import TunekitError
from tunekit.kernel import Kernel
from tunekit.rows import REFERENCE

log = logging.getLogger("tunekit")


@dataclass(frozen=True)
class StatusRow:
    """One tuned kernel: what runs, where the choice came from, and why.

    Attributes:
        kernel, scope: its names.
        suffix: the row that runs, or ``reference``.
        source: ``pin``, ``manifest``, ``fallback`` or ``reference``.
        tier: ``c`` or ``python``.
        reason: one sentence.
        manifest: the file that was read (or would be written), or None.
        stale: fields in which the manifest's record differs from this box, grid, templates, compiler and tunekit.
        module: the module that holds the row, or None.
        frozen: ``reference-only`` or ``standalone`` where the kernel came in a frozen build, else empty.
        seats: companions with a row of their own, each with row, source and reason.
        unseated: companions whose own entry is not used, each with the reason.
        compiler: what built the row that runs (the first line of its ``--version``), or empty.
    """

    kernel: str
    scope: str
    suffix: str
    source: str
    tier: str
    reason: str
    manifest: str | None
    stale: tuple[str, ...]
    module: str | None
    frozen: str = ""
    seats: dict[str, dict[str, str]] = field(default_factory=dict)
    unseated: dict[str, str] = field(default_factory=dict)
    compiler: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def staleness(kernel: Kernel, manifest: Path | None, compiler: str = "") -> tuple[str, ...]:
    """The fields in which the record beside a manifest differs from here; () where none does, or there is no record.

    Args:
        kernel: whose grid and templates are compared.
        manifest: the file whose entry counts.
        compiler: what made the row that runs; empty to compare none.
    """
    record = _manifest.read_record(manifest)
    if record is None:
        return ()
    found = []
    schema = record.get("schema", _manifest.RECORD_SCHEMA)
    if schema != _manifest.RECORD_SCHEMA:
        found.append(f"record schema: {schema!r} there, {_manifest.RECORD_SCHEMA} here")
    box = record.get("box")
    own = this_box().to_json()
    if isinstance(box, dict):
        found += [
            f"box.{name}: {box.get(name)!r} there, {own[name]!r} here" for name in own if box.get(name) != own[name]
        ]
    digests = record.get("digests")
    if isinstance(digests, dict) and kernel.key in digests and digests[kernel.key] != kernel.digest():
        found.append(f"grid of {kernel.name}: {digests[kernel.key]} there, {kernel.digest()} here")
    kernels = record.get("kernels")
    entry = kernels.get(kernel.name) if isinstance(kernels, dict) else None
    if not isinstance(entry, dict):
        return tuple(found)
    hashes = entry.get("hashes")
    for name, digest in sorted(hashes.items()) if isinstance(hashes, dict) else ():
        kind, _, template = name.partition(" ")
        if kind == "template" and (now := _templates.changed(template, Path(kernel.file).parent, digest)):
            found.append(f"template {template}: {digest} there, {now} here")
    there = entry.get("compiler")
    if there and compiler and there != compiler:
        found.append(f"compiler: {there!r} there, {compiler!r} here")
    return tuple(found)


def status_of(kernel: Kernel) -> StatusRow:
    """The status of one kernel. Fixes no choice."""
    binding = dispatch.peek(kernel)
    choice = binding.choice
    frozen = dispatch.frozen(kernel)
    path = choice.manifest or next((m.path for m in binding.layers if m.exists), None)
    if path is None and not frozen:
        path = next((m.path for m in binding.layers if m.origin in ("environment", "user")), None)
    reason = choice.reason
    if choice.tier == "python" and not dispatch.loaded_modules(kernel):
        reason = f"{reason}; {dispatch.nothing_built(kernel)}"
    compiler = binding.bound.compiler if binding.bound else ""
    return StatusRow(
        kernel.name,
        kernel.scope.name,
        choice.suffix,
        choice.source,
        choice.tier,
        reason,
        str(path) if path else None,
        staleness(kernel, path, compiler),
        str(binding.bound.module.path) if binding.bound else None,
        frozen,
        {n: {"suffix": c.suffix, "source": c.source, "reason": c.reason} for n, c in choice.seats.items()},
        dict(choice.unseated),
        compiler,
    )


def status() -> list[StatusRow]:
    """One row per tuned kernel that is declared in this process."""
    return [status_of(kernel) for kernel in dispatch.kernels()]


def log_status(application: str) -> None:
    """Log, at INFO level, how many kernels run tuned and what each runs; nothing when there is none."""
    rows = status()
    if not rows:
        return
    tuned = sum(row.source == "manifest" for row in rows)
    log.info("%s: %d/%d kernels tuned for this box", application, tuned, len(rows))
    for row in rows:
        log.info("%s: %s.%s: %s (%s)", application, row.scope, row.kernel, row.suffix, row.source)
        for name, seat in row.seats.items():
            log.info("%s: %s.%s: %s (%s)", application, row.scope, name, seat["suffix"], seat["source"])
    if tuned < len(rows):
        log.info("%s: to tune this box: %s", application, dispatch.how_to_tune)


def explain_row(kernel: Kernel, suffix: str) -> str:
    """Why a row is, or is not, the one that runs: legality, compiler, feature, operating system, gate, race, proof.

    Raises:
        TunekitError: the grid has no such row.
    """
    choice = dispatch.peek(kernel).choice
    answers = [_choice_of(kernel, suffix)]
    answers += [f"it runs as {n} ({c.source}): {c.reason}" for n, c in choice.seats.items() if c.suffix == suffix]
    if choice.suffix == suffix:
        answers += [f"{n} follows it: {why}" for n, why in choice.unseated.items()]
    proof = _proofs.mark(kernel, suffix)
    return "; ".join([*answers, proof] if proof else answers)


def _choice_of(kernel: Kernel, suffix: str) -> str:
    if not kernel.knows(suffix):
        raise TunekitError(
            f"kernel {kernel.key} has no row {suffix!r}; its rows: {', '.join(r.suffix for r in kernel.rows)}"
        )
    choice = dispatch.peek(kernel).choice
    if dispatch.frozen(kernel) and choice.suffix != suffix:
        return f"{choice.suffix} runs ({choice.source}): {choice.reason}; {dispatch.why_frozen(kernel)}"
    if choice.suffix == suffix:
        return f"it runs ({choice.source}): {choice.reason}"
    if suffix == REFERENCE:
        return f"it is the reference; {choice.suffix} runs instead ({choice.source}): {choice.reason}"
    row = kernel.row(suffix)
    world, _ = dispatch.world_of(kernel, grid=True)
    _, reason = refusal(kernel, suffix, world)
    if reason is not None:
        # A missing feature has two quite different causes; say which.
        lacking = [f for f in sorted(_features(kernel, suffix)) if f not in world.features]
        causes = [f"{f}: {why}" for f in lacking if (why := feature_why_not(this_cpu(), f)) is not None]
        disabled = [f for f in lacking if feature_why_not(this_cpu(), f) is None]
        causes += [f"{f}: disabled by TUNEKIT_DISABLE_FEATURES" for f in disabled]
        if reason.startswith(("this CPU lacks", "its requires")) and causes:
            return f"{reason} ({'; '.join(causes)})"
        return reason
    measured = _measured(kernel, suffix)
    if measured is not None:
        return f"{measured}; {choice.suffix} runs ({choice.source})"
    where = "the fallback chain" if row and suffix in kernel.fallback else "the grid"
    return (
        f"it can run here and no race is on record for it; {choice.suffix} runs ({choice.source}, {choice.reason}); "
        f"it stands in {where}; to race it: python -m tunekit.retune --kernel {kernel.name}"
    )


def _features(kernel: Kernel, suffix: str) -> set[str]:
    row = kernel.row(suffix)
    if row is None:
        return set()
    found = {feature for alternative in kernel.targets(row) for feature in alternative}
    return found | {name for alternative in kernel.requires(row).alternatives() for name in alternative}


def _measured(kernel: Kernel, suffix: str) -> str | None:
    """What the last retune said about a row, or None."""
    layers = dispatch.peek(kernel).layers
    record = next((r for m in layers if (r := _manifest.read_record(m.path)) is not None), None)
    if record is None:
        return None
    try:
        entry = record["kernels"][kernel.name]["rows"][suffix]
        return f"retune: {entry['verdict']}" + (f": {entry['reason']}" if entry.get("reason") else "")
    except (KeyError, TypeError):
        return None


def explain_all(kernel: Kernel) -> dict[str, str]:
    """Suffix to answer for the reference and every row of a kernel's grid."""
    return {suffix: explain_row(kernel, suffix) for suffix in (REFERENCE, *(row.suffix for row in kernel.rows))}
