# SPDX-License-Identifier: Apache-2.0
"""Choosing a row: a pure function of declaration, manifest text, features, built rows and environment.

Pin, then policy ``reference``, then the manifest's entry, then the fallback chain, then the reference. A pinned
or recorded row is asked in this order: is it in the grid, declined, built, are its needs met, is its
``requires`` met. Any "no" is the reason, and leads to the fallback chain. Nothing here opens a file or asks the
CPU, so that every box in the world can be tested on this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunekit._manifest import Manifest, parse_manifest
from tunekit.environment import Settings
from tunekit.errors import ManifestError, SettingError
from tunekit.kernel import Kernel
from tunekit.rows import REFERENCE, Row

Needs = frozenset[str]


@dataclass(frozen=True)
class World:
    """What a choice may depend on besides declaration, manifest and settings.

    Attributes:
        arch: the architecture that the process runs on.
        features: the features usable here (CPU and operating system agree, disabled ones removed).
        built: suffix to the needs of its built objects, in the order of its alternatives; ``reference`` is
            there when the portable C reference was built.
        dropped: suffix to the reason why it was not built.
    """

    arch: str
    features: frozenset[str]
    built: Mapping[str, tuple[Needs, ...]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The outcome of selection for one kernel.

    Attributes:
        kernel: ``scope.kernel``.
        suffix: the row, or ``reference``.
        source: ``pin``, ``manifest``, ``fallback`` or ``reference``.
        tier: ``c`` for built code, ``python`` for the Python body.
        reason: why this row, in one sentence.
        alternative: which of the row's built objects.
        warnings: what the operator should hear once per process.
    """

    kernel: str
    suffix: str
    source: str
    tier: str
    reason: str
    alternative: int = 0
    warnings: tuple[str, ...] = ()

    def log_line(self) -> str:
        """The stable, documented line for this choice: ``tunekit: KERNEL <- SUFFIX (SOURCE, TIER): REASON``."""
        return f"tunekit: {self.kernel} <- {self.suffix} ({self.source}, {self.tier}): {self.reason}"


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def refusal(kernel: Kernel, suffix: str, world: World) -> tuple[int, str | None]:
    """Which built object of a row can run here, or why none can: (alternative, None) or (-1, reason)."""
    row = kernel.row(suffix)
    if row is None:
        return -1, f"the grid of {kernel.name} has no row {suffix!r}"
    declined = kernel.refuses(row, world.arch)
    if declined is not None:
        return -1, f"declined: {declined}"
    objects = world.built.get(suffix, ())
    if not objects:
        dropped = world.dropped.get(suffix)
        if dropped:
            return -1, f"not built: {dropped}"
        return (
            -1,
            f"not built yet; build what the manifests name with: python -m tunekit build --scope {kernel.scope.name}",
        )
    requires = kernel.requires(row)
    lacking: list[Needs] = []
    for index, needs in enumerate(objects):
        if needs <= world.features:
            if requires.holds(world.features):
                return index, None
            return -1, f"its requires {row.requires!r} do not hold here: {', '.join(requires.missing(world.features))}"
        lacking.append(needs - world.features)
    return -1, "this CPU lacks " + " or ".join(_list(names) for names in dict.fromkeys(lacking))


def _reference(kernel: Kernel, world: World, source: str, reason: str, warnings: tuple[str, ...] = ()) -> Choice:
    tier = "c" if world.built.get(REFERENCE) else "python"
    return Choice(kernel.key, REFERENCE, source, tier, reason, 0, warnings)


def _fallback(kernel: Kernel, world: World, why: str, warnings: tuple[str, ...] = ()) -> Choice:
    refusals = []
    for suffix in kernel.fallback:
        if suffix == REFERENCE:
            return _reference(kernel, world, "fallback", f"{why}; the fallback chain says reference", warnings)
        alternative, reason = refusal(kernel, suffix, world)
        if reason is None:
            text = f"{why}; first runnable row of the fallback chain"
            return Choice(kernel.key, suffix, "fallback", "c", text, alternative, warnings)
        refusals.append(f"{suffix}: {reason}")
    if not kernel.fallback:
        refusals.append("the kernel declares no fallback chain")
    return _reference(
        kernel, world, "reference", f"{why}; nothing in the fallback chain runs here ({'; '.join(refusals)})", warnings
    )


def _named(kernel: Kernel, suffix: str, source: str, where: str, world: World) -> Choice | str:
    """The choice of a pinned or recorded row, or why it cannot be had."""
    if suffix == REFERENCE:
        return _reference(kernel, world, source, f"{where} names the reference")
    alternative, reason = refusal(kernel, suffix, world)
    if reason is not None:
        return f"{where} names {suffix!r}: {reason}"
    return Choice(kernel.key, suffix, source, "c", f"{where} names it", alternative)


def choose(kernel: Kernel, manifest: Manifest | str | bytes | None, world: World, settings: Settings) -> Choice:
    """Choose a kernel's row.

    Args:
        kernel: the declaration.
        manifest: the scope's manifest, parsed or as text, or None where there is none.
        world: architecture, features and built rows.
        settings: the environment (pin, policy, strict).

    Raises:
        ManifestError: strict about manifests, and the manifest or this kernel's entry cannot be used.
        SettingError: strict about features, and a row of the grid requires an unknown one.
    """
    if "features" in settings.strict:
        unknown = sorted({name for row in kernel.rows for name in kernel.requires(row).unknown()})
        if unknown:
            raise SettingError(f"kernel {kernel.key}: unknown features in requires: {', '.join(unknown)}")
    warnings: list[str] = []
    pinned = settings.pinned(kernel.key) or settings.pinned(kernel.name)
    if pinned is not None:
        found = _named(kernel, pinned, "pin", "TUNEKIT_PIN", world)
        if isinstance(found, Choice):
            return found
        warnings.append(found)
        return _fallback(kernel, world, found, tuple(warnings))
    if settings.policy == "reference":
        return _reference(kernel, world, "reference", "TUNEKIT_POLICY is reference")
    if manifest is None or isinstance(manifest, (str, bytes)):
        manifest = Manifest(None) if manifest is None else parse_manifest(manifest)

    where = f"manifest {manifest.path}" if manifest.path else "the manifest"
    problem: str | None = None
    if manifest.problem:
        problem = f"{where} is not usable: {manifest.problem}"
    elif kernel.name in manifest.faults:
        problem = f"{where}, entry {kernel.name!r}: {manifest.faults[kernel.name]}"
    elif kernel.name in manifest.entries:
        found = _named(kernel, manifest.entries[kernel.name], "manifest", where, world)
        if isinstance(found, Choice):
            return found
        problem = found
    if problem:
        if "manifest" in settings.strict:
            raise ManifestError(f"kernel {kernel.key}: {problem} (TUNEKIT_STRICT has manifest)")
        return _fallback(kernel, world, problem, (problem,))
    if not manifest.exists:
        return _fallback(kernel, world, "no manifest")
    return _fallback(kernel, world, f"{where} has no entry for it")


def row_verdict(kernel: Kernel, row: Row, world: World) -> str | None:
    """Why a row cannot run here, or None. The ``--why-not`` of everything before measuring."""
    return refusal(kernel, row.suffix, world)[1]
