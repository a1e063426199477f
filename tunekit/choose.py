# SPDX-License-Identifier: Apache-2.0
"""Choosing a row: a pure function of declaration, manifest text, features, built rows and environment.

Pin, then policy ``reference``, then the manifest's entry, then the fallback chain, then the reference. A pinned
or recorded row is asked in this order: is it in the grid, declined, built, are its needs met, is its
``requires`` met. Any "no" is the reason, and leads to the fallback chain. Nothing here opens a file or asks the
CPU, so that every box in the world can be tested on this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunekit._manifest import Manifest, parse_manifest
from tunekit.environment import Settings
from tunekit.errors import ManifestError
from tunekit.kernel import Kernel
from tunekit.rows import REFERENCE, Row, by_compiler, split_name

Needs = frozenset[str]


@dataclass(frozen=True)
class World:
    """What a choice may depend on besides declaration, manifest and settings.

    Attributes:
        arch: the architecture that the process runs on.
        features: the features usable here (CPU and operating system agree, disabled ones removed).
        built: suffix to the needs of its built objects, in the order of its alternatives; ``reference`` is
            there when the portable C reference was built. ``suffix@compiler`` is what that compiler built of it.
        dropped: suffix to the reason why it was not built.
        frozen: the kind of the frozen build that the kernel came with (``reference-only``, ``standalone``), or empty.
        outdated: suffix to a cached module that holds the row as another release of the package had it.
        failed: suffix to what its built objects failed on this box, None for one that failed nothing.
    """

    arch: str
    features: frozenset[str]
    built: Mapping[str, tuple[Needs, ...]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    frozen: str = ""
    outdated: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    def failure(self, suffix: str, alternative: int = 0) -> str | None:
        """What a built object of a row failed here, or None."""
        failed = self.failed.get(suffix, ())
        return failed[alternative] if alternative < len(failed) else None


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
        manifest: the file whose entry decided, or None.
        seats: companions that run another row than the kernel's, each with a choice of its own.
        unseated: companions whose own entry or pin cannot be had, each with the reason; they follow the kernel's row.
        compiler: who built the object that runs, where that was asked for and is not the usual compiler.
    """

    kernel: str
    suffix: str
    source: str
    tier: str
    reason: str
    alternative: int = 0
    warnings: tuple[str, ...] = ()
    manifest: Path | None = None
    seats: Mapping[str, Choice] = field(default_factory=dict)
    unseated: Mapping[str, str] = field(default_factory=dict)
    compiler: str = ""

    @property
    def name(self) -> str:
        """The row, with the compiler where one was asked for: ``suffix@compiler``."""
        return by_compiler(self.suffix, self.compiler)

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
        command = f"python -m tunekit build --scope {kernel.scope.name}"
        outdated = world.outdated.get(suffix)
        if outdated:
            return -1, (
                f"the cache has it from another release of the package, with other templates or declarations "
                f"({outdated}), and that is not run; build this release's with: {command}"
            )
        return -1, f"not built yet; build what the manifests name with: {command}"
    requires = kernel.requires(row)
    lacking: list[Needs] = []
    failed = ""
    for index, needs in enumerate(objects):
        if needs <= world.features:
            if requires.holds(world.features):
                why = world.failure(suffix, index)
                if why is None:
                    return index, None
                failed = failed or _failed(why)
                continue
            return -1, f"its requires {row.requires!r} do not hold here: {', '.join(requires.missing(world.features))}"
        lacking.append(needs - world.features)
    if failed:
        return -1, failed
    return -1, "this CPU lacks " + " or ".join(_list(names) for names in dict.fromkeys(lacking))


def _failed(why: str) -> str:
    return f"it failed a check on this box ({why}); a retune asks it again, and other code is a new row"


def _reference(kernel: Kernel, world: World, source: str, reason: str, warnings: tuple[str, ...] = ()) -> Choice:
    failed = world.failure(REFERENCE)
    tier = "c" if world.built.get(REFERENCE) and failed is None else "python"
    if failed is not None:
        problem = f"the C reference is not run: {_failed(failed)}"
        reason, warnings = f"{reason}; {problem}", (*warnings, problem)
    return Choice(kernel.key, REFERENCE, source, tier, reason, 0, warnings)


def _fallback(kernel: Kernel, world: World, why: str, warnings: tuple[str, ...] = ()) -> Choice:
    refusals = []
    unsound: list[str] = []  # rows that would run here, were they not known to be wrong: of those people must hear
    for suffix in kernel.fallback:
        if suffix == REFERENCE:
            text = "; ".join([why, *unsound, "the fallback chain says reference"])
            return _reference(kernel, world, "fallback", text, (*warnings, *unsound))
        alternative, reason = refusal(kernel, suffix, world)
        if reason is None:
            text = "; ".join([why, *unsound, "first runnable row of the fallback chain"])
            return Choice(kernel.key, suffix, "fallback", "c", text, alternative, (*warnings, *unsound))
        if suffix in world.outdated or any(world.failed.get(suffix, ())):
            unsound.append(f"{suffix} is passed over: {reason}")
        refusals.append(f"{suffix}: {reason}")
    if not kernel.fallback:
        refusals.append("the kernel declares no fallback chain")
    return _reference(
        kernel, world, "reference", f"{why}; nothing in the fallback chain runs here ({'; '.join(refusals)})",
        (*warnings, *unsound),
    )


def _named(kernel: Kernel, suffix: str, source: str, where: str, world: World) -> Choice | str:
    """The choice of a pinned or recorded row, or why it cannot be had.

    A compiler that is named beside the row decides nothing but speed: without its object the usual one's runs.
    """
    if suffix == REFERENCE:
        return _reference(kernel, world, source, f"{where} names the reference")
    row, compiler = split_name(suffix)
    said = f"{where} names it"
    alternative, reason = refusal(kernel, suffix, world)
    if compiler and reason is None:
        said = f"{said}, built by {compiler}"
    elif compiler:
        said = f"{said}, built by {compiler}, which is not to be had ({reason}); the usual compiler's object runs"
        alternative, reason = refusal(kernel, row, world)
        compiler = ""
    if reason is not None:
        return f"{where} names {row!r}: {reason}"
    return Choice(kernel.key, row, source, "c", said, alternative, compiler=compiler)


def _seated(kernel: Kernel, choice: Choice, stack: Sequence[Manifest], world: World, settings: Settings) -> Choice:
    """The choice with those of its seats.

    A seat's own row is asked what the kernel's was, and must read what the kernel's row reads. A seat's pin counts
    before its entry. An entry counts where no file above it, and no pin or policy, names the kernel: the entries of
    one file were found together.
    """
    seats: dict[str, Choice] = {}
    unseated: dict[str, str] = {}
    warned = list(choice.warnings)
    for seat in kernel.seats:
        key = f"{kernel.scope.name}.{seat}"
        named, source, label, layer = settings.pinned(key) or settings.pinned(seat), "pin", "TUNEKIT_PIN", None
        if named is None and choice.source != "pin" and settings.policy != "reference":
            for layer in stack:
                named, source, label = layer.entry(kernel, seat), "manifest", layer.label
                fault = layer.fault(kernel, seat)
                if fault is not None:
                    unseated[seat] = f"{label}, {fault}"
                if named is not None or fault is not None or layer.entry(kernel) is not None:
                    break
        if named is not None and named != choice.name:
            found = _named(kernel, named, source, label, world)
            if isinstance(found, str):
                unseated[seat] = found
            elif choice.tier != "c" or not kernel.same_layout(named, choice.suffix):
                unseated[seat] = f"{label} names {named!r}, which reads another layout than {choice.suffix}"
            else:
                path = layer.path if layer is not None else None
                seats[seat] = replace(found, kernel=key, manifest=path)
        if seat in unseated:
            text = f"{seat} follows it: {unseated[seat]}"
            if layer is None or layer.origin != "shipped":
                warned.append(text)
                if source == "manifest" and "manifest" in settings.strict:
                    raise ManifestError(f"kernel {kernel.key}: {text} (TUNEKIT_STRICT has manifest)")
    return replace(choice, seats=seats, unseated=unseated, warnings=tuple(warned))


def choose(
    kernel: Kernel,
    manifest: Manifest | Sequence[Manifest] | str | bytes | None,
    world: World,
    settings: Settings,
) -> Choice:
    """Choose a kernel's row, and those of its seats.

    Args:
        kernel: the declaration.
        manifest: parsed or as text, or several in the order in which they count, or None where there is none.
        world: architecture, features and built rows.
        settings: the environment (pin, policy, strict).

    Raises:
        ManifestError: strict about manifests, and one of them, or this kernel's entry in it, cannot be used.
    """
    if manifest is None or isinstance(manifest, (str, bytes)):
        manifest = Manifest(None) if manifest is None else parse_manifest(manifest)
    stack = (manifest,) if isinstance(manifest, Manifest) else tuple(manifest)
    choice = _of_kernel(kernel, stack, world, settings)
    return _seated(kernel, choice, stack, world, settings) if kernel.seats else choice


def _of_kernel(kernel: Kernel, stack: Sequence[Manifest], world: World, settings: Settings) -> Choice:
    if world.frozen == "reference-only":
        return _reference(kernel, world, "reference", "this is a reference-only build")
    pinned = settings.pinned(kernel.key) or settings.pinned(kernel.name)
    if pinned is not None:
        found = _named(kernel, pinned, "pin", "TUNEKIT_PIN", world)
        return found if isinstance(found, Choice) else _fallback(kernel, world, found, (found,))
    if settings.policy == "reference":
        return _reference(kernel, world, "reference", "the policy is reference")
    problems: list[str] = []
    warned: list[str] = []
    for layer in stack:
        fault = layer.fault(kernel)
        suffix = layer.entry(kernel)
        if layer.problem:
            problem = f"{layer.label} is not usable: {layer.problem}"
        elif fault is not None:
            problem = f"{layer.label}, {fault}"
        elif suffix is None:
            continue
        else:
            found = _named(kernel, suffix, "manifest", layer.label, world)
            if isinstance(found, Choice):
                return replace(found, warnings=tuple(warned), manifest=layer.path)
            problem = found
        problems.append(problem)
        if layer.origin != "shipped":  # nobody can mend a frozen build; its status says it
            warned.append(problem)
            if "manifest" in settings.strict:
                raise ManifestError(f"kernel {kernel.key}: {problem} (TUNEKIT_STRICT has manifest)")
    if problems:
        return _fallback(kernel, world, "; ".join(problems), tuple(warned))
    there = next((layer for layer in stack if layer.exists), None)
    return _fallback(kernel, world, f"{there.label} has no entry for it" if there else "no manifest")


def row_verdict(kernel: Kernel, row: Row, world: World) -> str | None:
    """Why a row cannot run here, or None. The ``--why-not`` of everything before measuring."""
    return refusal(kernel, row.suffix, world)[1]
