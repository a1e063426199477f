# SPDX-License-Identifier: Apache-2.0
"""Dispatch: joins declaration, manifest, CPU and modules into a choice, at first use, once.

Rows are looked up in the stamped module (the winners of this box), then in the fat module (what the install
built), then in the cached grid. Nothing is chosen at import. A choice, once made, holds for the process, for the
kernel with all its companions; fetching an address is a use.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunekit import _manifest, _templates, _verdicts, module, paths, team
from tunekit._lock import lock
from tunekit.choose import Choice, World, choose, refusal
from tunekit.cpu import this_box, this_cpu, this_features
from tunekit.cpu.features import KNOWN_FEATURES, suggestion
from tunekit.environment import Settings, settings
from tunekit.errors import (
    AbiError,
    ChoiceError,
    DamagedModule,
    DeclarationError,
    ManifestError,
    SettingError,
    TunekitError,
    TunekitWarning,
    told,
)
from tunekit.kernel import Kernel
from tunekit.module import BuiltRow, LoadedModule
from tunekit.rows import REFERENCE, Row, by_compiler, compilers_in
from tunekit.signature import CType, Parameter, Signature, bind_names, check_call, quick_check

log = logging.getLogger("tunekit")
log.addHandler(logging.NullHandler())

_HERE = Path(__file__).resolve().parent

_kernels: dict[str, Kernel] = {}
_functions: dict[str, tuple[TunedFunction, ...]] = {}
_bindings: dict[str, Binding] = {}
_modules: dict[str, tuple[LoadedModule, ...]] = {}
_outdated: dict[str, dict[str, str]] = {}
_problems: dict[tuple[str, str], str] = {}
_said: set[str] = set()
_families: dict[str, str] = {}
_reference_everywhere = False

FROZEN = ("reference-only", "standalone")
"""Kinds of build that neither demand nor run tuning."""

how_to_tune = "python -m tunekit.retune"
"""The command that tunes, as a running application names it."""

first_use: Callable[[Kernel, Binding], None] | None = None
"""Called with each choice before it is fixed: where an application's policy hears of libraries imported late."""


def warn_once(message: str) -> None:
    """Say something to the operator, once per process."""
    with lock:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(message, TunekitWarning, stacklevel=3)


# --- the kernels of this process -------------------------------------------------------------------------


def register(kernel: Kernel, functions: Sequence[TunedFunction]) -> None:
    """Enter a declaration (see :func:`tunekit.tune`, which refuses a second one of the same name)."""
    with lock:
        _kernels[kernel.key] = kernel
        _functions[kernel.key] = tuple(functions)


def functions_of(kernel: Kernel) -> dict[str, TunedFunction]:
    """The kernel and its companions by name, as callers hold them."""
    with lock:
        return {function.__name__: function for function in _functions[kernel.key]}


def kernels(scope: str | None = None) -> tuple[Kernel, ...]:
    """The kernels declared in this process, of one scope or all, in the order of declaration."""
    with lock:
        return tuple(k for k in _kernels.values() if scope is None or k.scope.name == scope)


@dataclass(frozen=True)
class Problem:
    """An installed family that cannot be used: its scope, the module that declares it, and why."""

    scope: str
    module: str
    text: str


def installed_scopes() -> dict[str, str]:
    """Scope to declaring module of every installed family: tunekit's own, and entry points ``tunekit.families``."""
    import importlib.metadata  # for tools only: it takes as long to import as half of tunekit

    found = {"tunekit": "tunekit.q8.kernels", **_families}
    owners: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group="tunekit.families"):
        declared = point.value.partition(":")[0]
        owner = f"{point.dist.name} ({declared})" if point.dist is not None else declared
        if found.setdefault(point.name, declared) != declared:
            first = owners.get(point.name, found[point.name])
            text = (
                f"two installed packages declare the scope {point.name!r}: {first} and {owner}; they would "
                f"share one manifest, so the second is left out; uninstall one, or rename its scope"
            )
            _problems[point.name, declared] = text
            warn_once(f"tunekit: {text}")
        owners.setdefault(point.name, owner)
    return found


def add_family(name: str) -> None:
    """Import a declaring module whose package has no entry point, and count its scopes among the installed ones.

    Raises:
        TunekitError: it cannot be imported, or declares no kernel.
    """
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody else's code, which may even exit
        what = str(error) if isinstance(error, ImportError) else told(error)
        raise TunekitError(f"--module {name}: it cannot be imported ({what}); name it as Python imports it") from error
    found = {k.scope.name: k.module for k in kernels() if k.module == name}
    if not found:
        raise TunekitError(f"--module {name}: it declares no kernel; name the module that has @tunekit.tune in it")
    _families.update(found)


def declare_scope(scope: str) -> tuple[Kernel, ...]:
    """Import the declaring module of an installed scope and return its kernels.

    Raises:
        TunekitError: no such scope (the message lists those installed), or its module cannot be imported.
    """
    already = kernels(scope)
    if already:
        return already
    installed = installed_scopes()
    if scope not in installed:
        raise TunekitError(f"no scope {scope!r} is installed; installed: {', '.join(sorted(installed))}")
    try:
        importlib.import_module(installed[scope])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody else's code
        raise TunekitError(
            f"scope {scope!r}: its declaring module {installed[scope]} cannot be imported "
            f"({told(error)}); reinstall or uninstall its package"
        ) from error
    if not kernels(scope):
        raise TunekitError(
            f"scope {scope!r}: its entry point names {installed[scope]}, which declares no kernel of that scope; the "
            f"entry point's name must be that of the scope"
        )
    return kernels(scope)


def declare_installed() -> dict[str, tuple[Kernel, ...]]:
    """The kernels of every installed scope. One that cannot be imported is named in a warning, and left out.

    :func:`problems` says which were.
    """
    found = {}
    for scope, declared in sorted(installed_scopes().items()):
        try:
            found[scope] = declare_scope(scope)
            _problems.pop((scope, declared), None)
        except TunekitError as error:
            _problems[scope, declared] = str(error)
            warn_once(f"tunekit: {error}")
    return found


def problems() -> tuple[Problem, ...]:
    """The installed families that :func:`declare_installed` had to leave out."""
    return tuple(Problem(scope, declared, text) for (scope, declared), text in sorted(_problems.items()))


def find_kernel(name: str) -> Kernel:
    """A kernel by name or ``scope.name`` among the installed families.

    Raises:
        TunekitError: unknown or ambiguous; the message lists the known ones.
    """
    declare_installed()
    found = [k for k in kernels() if name in (k.key, k.name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(k.key for k in kernels())
    raise TunekitError(
        f"{'several kernels are' if found else 'no kernel is'} called {name!r}; known: {known}; those of a package "
        f"without an entry point are found with --module, its declaring module as Python imports it"
    )


# --- modules ---------------------------------------------------------------------------------------------


def index_path(kernel: Kernel, kind: str, compiler: str = "") -> Path:
    """The small file that names the cached module of a kind (grid, stamped, fat) for a declaring module.

    Modules by another compiler than the usual one are of kinds of their own: their rows have the same names.
    """
    kind = by_compiler(kind, compiler)
    return paths.modules_folder(this_box().key, kernel.scope.name) / f"{kernel.module}.{kind}.json"


def read_index(path: Path) -> list[dict[str, Any]]:
    """The modules that an index names, newest first, each with the rows in it and the digests of their sources."""
    try:
        found = json.loads(paths.read_small(path))["modules"]
        return [
            e
            for e in found
            if isinstance(e["file"], str)
            and "/" not in e["file"]
            and isinstance(e["built"], dict)
            and isinstance(e["sources"], dict)
        ]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return []


class _Release:
    """What a declaring file's rows are rendered from, in the package that this process imported.

    A cache outlives the package that filled it, and environments share it. What the install built says which release
    this is; where it built nothing, or its templates have changed since (an editable install), the files on disk do.
    """

    def __init__(self, siblings: tuple[Kernel, ...], beside: LoadedModule | None) -> None:
        self.siblings, self.beside = siblings, beside

    @functools.cached_property
    def on_disk(self) -> dict[str, str | None]:
        return {kernel.key: module.source_digest(kernel) for kernel in self.siblings}

    def made(self, sources: Mapping[str, Any]) -> bool:
        """Whether a module with these digests was made from it."""
        if self.beside is not None and all(sources.get(k.key) == self.beside.source(k) for k in self.siblings):
            return True
        return all(v is not None and sources.get(key) == v for key, v in self.on_disk.items())


def _cached(kernel: Kernel, kind: str, release: _Release, compiler: str = "") -> LoadedModule | None:
    index = index_path(kernel, kind, compiler)
    entries = read_index(index)
    if not entries:
        return None
    reason = paths.distrust(index.parent)
    if reason is not None:
        _unloadable[index] = f"cached modules are not loaded: {reason}"
        warn_once(f"tunekit: {_unloadable[index]}")
        return None
    entry = next((e for e in entries if release.made(e["sources"])), None)
    if entry is None:
        for key, rows in entries[0]["built"].items():
            names = [by_compiler(suffix, compiler) for suffix in rows]
            _outdated.setdefault(key, {}).update(dict.fromkeys(names, entries[0]["file"]))
        return None
    if not (index.parent / entry["file"]).is_file():
        return None
    try:
        return module.load(index.parent / entry["file"], release.siblings)
    except DamagedModule as error:
        _unloadable[index] = str(error)
        if hasattr(os, "ST_NOEXEC") and os.statvfs(index.parent).f_flag & os.ST_NOEXEC:
            _unloadable[index] = (
                f"code in the cache {paths.cache_root()} cannot be loaded: its file system is mounted noexec; "
                "set TUNEKIT_CACHE to a folder elsewhere"
            )
        warn_once(f"tunekit: {_unloadable[index]}")
        return None
    except AbiError as error:
        # A changed declaration outdates a cached module; that is no news, the next build replaces it.
        log.info("tunekit: %s", error)
        return None


def _beside(kernel: Kernel, siblings: tuple[Kernel, ...]) -> LoadedModule | None:
    faults = []
    for path in module.find_beside(kernel):
        try:
            return module.load(path, siblings)
        except AbiError as error:
            faults.append(error)  # another declaring file of this scope may have its module in the same folder
    for fault in faults:
        warn_once(f"tunekit: {fault}")
    return None


def loaded_modules(kernel: Kernel, grid: bool = False, compiler: str = "") -> tuple[LoadedModule, ...]:
    """The modules in which a kernel's rows are looked up, in order; with the grid module only when asked.

    With a compiler: those that it built beside the usual one's.
    """
    with lock:
        unit = by_compiler(f"{kernel.scope.name}:{kernel.module}:{grid}", compiler)
        if unit not in _modules:
            siblings = tuple(k for k in _kernels.values() if (k.scope, k.module) == (kernel.scope, kernel.module))
            if frozen(kernel):  # what it ships is all there is
                found = [None if compiler else _beside(kernel, siblings)]
            elif compiler:
                release = _Release(siblings, _beside(kernel, siblings))
                found = [_cached(kernel, kind, release, compiler) for kind in ("stamped", *(("grid",) if grid else ()))]
            else:
                beside = _beside(kernel, siblings)
                release = _Release(siblings, beside)
                found = [_cached(kernel, "stamped", release), beside or _cached(kernel, "fat", release)]
                if grid:
                    found.append(_cached(kernel, "grid", release))
            _modules[unit] = tuple(m for m in found if m is not None)
        return _modules[unit]


_unloadable: dict[Path, str] = {}  # by index: why a module that was built is not loaded


def unloadable(kernel: Kernel) -> str:
    """Why a kernel's grid module, which was built, is not loaded; empty where it is, or where there is none."""
    loaded_modules(kernel, grid=True)
    return _unloadable.get(index_path(kernel, "grid"), "")


def forget_modules() -> None:
    """Look for modules again (after a build in this process). Choices that were made stay."""
    with lock:
        _modules.clear()
        _outdated.clear()
        _unloadable.clear()
        _reports.clear()


_reports: dict[Path, Mapping[str, Any]] = {}


def build_report(kernel: Kernel) -> Mapping[str, Any]:
    """What the install said beside the declaring file: why nothing was built, or that the build is frozen; or {}."""
    path = build_report_path(kernel)
    with lock:
        if path not in _reports:
            try:
                data = json.loads(paths.read_small(path))
            except (OSError, ValueError, RecursionError):
                data = {}
            _reports[path] = data if isinstance(data, dict) else {}
        return _reports[path]


def frozen(kernel: Kernel) -> str:
    """``reference-only`` or ``standalone`` where the kernel came in a frozen build, else empty."""
    kind = build_report(kernel).get("frozen")
    return str(kind) if kind in FROZEN else ""


def why_frozen(kernel: Kernel) -> str:
    """One sentence for every command that a frozen build refuses."""
    return (
        f"{kernel.scope.name} is a {frozen(kernel)} build: what it runs was fixed when it was built, and nothing tunes "
        f"or builds it here; to tune it, install it without TUNEKIT_BUILD={frozen(kernel)}"
    )


def world_of(
    kernel: Kernel, grid: bool = False, judged: bool = True, compilers: Collection[str] = ()
) -> tuple[World, dict[str, tuple[tuple[LoadedModule, BuiltRow], ...]]]:
    """What a kernel's choice depends on here, and where each built row lies.

    With ``judged`` off nothing is known of failed checks: a tuner asks every row again. Rows that ``compilers`` built
    beside the usual one are there as ``suffix@compiler``.
    """
    rows: dict[str, tuple[tuple[LoadedModule, BuiltRow], ...]] = {}
    dropped: dict[str, str] = {}
    for loaded in loaded_modules(kernel, grid):
        for suffix, objects in loaded.objects(kernel).items():
            rows.setdefault(suffix, tuple((loaded, built) for built in objects))
        for suffix, reason in loaded.dropped(kernel).items():
            dropped.setdefault(suffix, reason)
    for compiler in compilers:
        for loaded in loaded_modules(kernel, grid, compiler=compiler):
            for suffix, objects in loaded.objects(kernel).items():
                rows.setdefault(by_compiler(suffix, compiler), tuple((loaded, built) for built in objects))
            for suffix, reason in loaded.dropped(kernel).items():
                dropped.setdefault(by_compiler(suffix, compiler), reason)
    built = {suffix: tuple(b.needs for _, b in found) for suffix, found in rows.items()}
    left = {s: r for s, r in dropped.items() if s not in built}
    with lock:
        outdated = {s: file for s, file in _outdated.get(kernel.key, {}).items() if s not in built and s not in left}
    known = _verdicts.failures(kernel.scope.name) if judged and not frozen(kernel) else {}
    failed = {s: tuple(known.get(b.object) for _, b in found) for s, found in rows.items()} if known else {}
    world = World(this_cpu().arch, this_features(), built, left, frozen(kernel), outdated, failed)
    return world, rows


def judged(kernel: Kernel, verdicts: Mapping[tuple[str, tuple[str, ...]], str | None]) -> None:
    """Keep what checks said of built rows on this box: (name, features) to what failed, or None for a pass.

    A row that failed is not chosen here until it is built from other code or passes.

    Raises:
        ManifestError: it cannot be written down.
    """
    _, rows = world_of(kernel, grid=True, judged=False, compilers=compilers_in(name for name, _ in verdicts))
    keys = {(s, built.features): built.object for s, found in rows.items() for _, built in found}
    _verdicts.save(kernel.scope.name, {keys[name]: why for name, why in verdicts.items() if keys.get(name)})


# --- bound rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundRow:
    """A built row that can run here: addresses and checked calls of the kernel and its companions.

    Attributes:
        kernel: the declaration.
        suffix: the row's name, or ``reference`` for the portable C reference.
        row: the row, or None for the reference.
        source: where the choice came from (``grid`` for a row that was asked for by name).
        module: the module that holds it.
        built: the object inside that module.
        seats: seats that run another row than this one, each with that row.
    """

    kernel: Kernel
    suffix: str
    row: Row | None
    source: str
    module: LoadedModule
    built: BuiltRow
    seats: Mapping[str, BoundRow] = field(default_factory=dict)

    @property
    def alternative(self) -> tuple[str, ...]:
        """The features that this object was compiled with."""
        return self.built.features

    @property
    def compiler(self) -> str:
        """The first line of its compiler's ``--version``."""
        return str(self.module.stamp.get("compiler", ""))

    def _index(self, name: str) -> tuple[int, Signature]:
        for index, (function, signature) in enumerate(self.kernel.functions):
            if function == name:
                return index, signature
        known = ", ".join(n for n, _ in self.kernel.functions)
        raise ChoiceError(f"kernel {self.kernel.key} has no function {name!r}; it has {known}")

    def of(self, name: str) -> BoundRow:
        """The row that a function runs: that of its seat where it has one, else this one."""
        return self.seats.get(self.kernel.seat_of(name), self) if self.seats else self

    def address(self, name: str) -> int:
        """The C address of the kernel or one of its companions."""
        index, _ = self._index(name)
        return self.of(name).built.addresses[index]

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the row with arrays for pointers.

        Raises:
            TypeError, ValueError: an argument does not fit the signature.
        """
        index, signature = self._index(name)
        checked = check_call(f"{name} ({self.of(name).suffix})", signature, arguments)
        return call_native(self, name, index, signature, checked)

    def ready(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """A call whose arguments are checked now and never again, for timing: it costs what the call itself does.

        The function keeps the arrays alive. Raises as :meth:`call`.
        """
        index, signature = self._index(name)
        checked = check_call(f"{name} ({self.suffix})", signature, arguments)
        runs = self.of(name)
        call = runs.module.caller(self.kernel, name)
        values = [
            value.__array_interface__["data"][0] if p.is_pointer else value
            for p, value in zip(signature.parameters, checked, strict=True)
        ]
        made = functools.partial(call, runs.built.addresses[index], *values)
        made.__dict__["arrays"] = checked  # they live as long as the call
        return made


def call_native(bound: BoundRow, name: str, index: int, signature: Signature, checked: list[Any]) -> Any:
    """Call with arguments that :func:`check_call` has passed."""
    values = [
        value.__array_interface__["data"][0] if p.is_pointer else value
        for p, value in zip(signature.parameters, checked, strict=True)
    ]
    runs = bound.of(name)
    result = runs.module.caller(runs.kernel, name)(runs.built.addresses[index], *values)
    del checked  # the arrays stay alive until here
    return result


# --- choices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binding:
    """A choice in force: the choice and, on the C tier, the row that runs."""

    choice: Choice
    bound: BoundRow | None
    layers: tuple[_manifest.Manifest, ...]


def _bound(
    kernel: Kernel,
    suffix: str,
    alternative: int,
    source: str,
    rows: Mapping[str, tuple[tuple[LoadedModule, BuiltRow], ...]],
) -> BoundRow:
    loaded, built = rows[suffix][alternative]
    return BoundRow(kernel, built.suffix, kernel.row(suffix), source, loaded, built)


def _decide(kernel: Kernel) -> Binding:
    """Make a kernel's choice now, without fixing it."""
    environment = replace(settings(), policy=REFERENCE) if _reference_everywhere else settings()
    layers = shipped(kernel) if frozen(kernel) else _manifest.layers(kernel.scope.name)
    named: list[str | None] = []
    for seat in ("", *kernel.seats):
        name = seat or kernel.name
        named.append(environment.pinned(f"{kernel.scope.name}.{name}") or environment.pinned(name))
        named += [layer.entry(kernel, seat) for layer in layers]
    compilers = compilers_in(named)
    world, rows = world_of(kernel, compilers=compilers)
    # The grid's module is large: it is loaded for a row that nothing else holds, and where there is nothing else.
    if not loaded_modules(kernel) or any(s not in (None, REFERENCE) and s not in world.built for s in named):
        world, rows = world_of(kernel, grid=True, compilers=compilers)
    choice = choose(kernel, layers, world, environment)
    bound = None
    if choice.tier == "c":
        bound = _bound(kernel, choice.name, choice.alternative, choice.source, rows)
        if choice.seats:
            bound = seated(
                bound, {n: _bound(kernel, c.name, c.alternative, c.source, rows) for n, c in choice.seats.items()}
            )
    return Binding(choice, bound, layers)


def seated(bound: BoundRow, seats: Mapping[str, BoundRow]) -> BoundRow:
    """A row whose companions of these names run other rows; the caller has seen that their layouts agree."""
    return replace(bound, seats=dict(seats))


def shipped(kernel: Kernel) -> tuple[_manifest.Manifest, ...]:
    """The winners that a standalone build carries."""
    winners = build_report(kernel).get("winners", {})
    entries = {k: v for k, v in winners.items() if isinstance(v, str)} if isinstance(winners, dict) else {}
    return (_manifest.Manifest(None, entries, exists=True, origin="shipped"),)


def used() -> tuple[str, ...]:
    """The kernels whose choice has been made, and so is fixed for the process."""
    with lock:
        return tuple(_bindings)


def reference_everywhere() -> None:
    """Run reference bodies from now on, whatever manifests say.

    Raises:
        ChoiceError: a kernel has been used on another row already.
    """
    global _reference_everywhere
    with lock:
        other = [key for key, binding in _bindings.items() if binding.choice.suffix != REFERENCE]
        if other:
            raise ChoiceError(
                f"the policy reference comes too late: {', '.join(other)} has been used already, and a choice holds "
                f"for the process; apply the policy before the first call, or start with TUNEKIT_POLICY=reference"
            )
        _reference_everywhere = True


def declare_application(path: Path) -> None:
    """Put an application's manifest above those of the scopes.

    Raises:
        ChoiceError: a kernel has been used already.
        DeclarationError: another file was declared before.
    """
    with lock:
        if settings().manifest is not None:
            return  # it decides alone, and the application's is never read
        before = _manifest.application()
        if before == path:
            return
        if before is not None:
            raise DeclarationError(
                f"the application manifest is declared twice in this process: {before} and {path}; keep one"
            )
        if _bindings:
            raise ChoiceError(
                f"the application manifest {path} comes too late: {', '.join(_bindings)} has been used already, and a "
                f"choice holds for the process; call tunekit.tune_manifest before the first use of a kernel"
            )
        _manifest.set_application(path)


def peek(kernel: Kernel) -> Binding:
    """The choice in force, or the one that the first use would make. Fixes nothing."""
    with lock:
        return _bindings.get(kernel.key) or _decide(kernel)


def bind(kernel: Kernel) -> Binding:
    """The choice in force; made and fixed at the first call.

    Raises:
        ManifestError, SettingError: where ``TUNEKIT_STRICT`` makes a fault an error.
    """
    binding = _bindings.get(kernel.key)
    if binding is not None:
        return binding
    with lock:
        binding = _bindings.get(kernel.key)
        if binding is None:
            binding = _decide(kernel)
            if first_use is not None:
                first_use(kernel, binding)
            _announce(kernel, binding)
            for problem in team.start():
                warn_once(f"tunekit: {problem}")
            _bindings[kernel.key] = binding  # last: who finds it needs no lock, and finds the team ready
    return binding


def _announce(kernel: Kernel, binding: Binding) -> None:
    choice = binding.choice
    for made in (choice, *choice.seats.values()):
        log.info("%s", made.log_line())
        if "choice" in settings().log:
            print(made.log_line(), file=sys.stderr)
    for name in sorted(settings().disable_features - KNOWN_FEATURES):
        meant = suggestion(name)
        hint = f" (did you mean {meant!r}?)" if meant else ""
        if "features" in settings().strict:
            raise SettingError(f"TUNEKIT_DISABLE_FEATURES names {name!r}, which is no feature{hint}")
        warn_once(f"tunekit: TUNEKIT_DISABLE_FEATURES names {name!r}, which is no feature{hint}; it disables nothing")
    for message in choice.warnings:
        warn_once(f"tunekit: {kernel.key} runs on {choice.suffix}: {message}")
    if choice.tier == "python" and choice.reason != "the policy is reference" and settings().mode == "normal":
        warn_once(
            f"tunekit: {kernel.key} runs on its Python reference, which is correct and slow: {nothing_built(kernel)}"
        )


def nothing_built(kernel: Kernel) -> str:
    """Why a kernel has no native code here, in one sentence with the mend."""
    if shadowed():
        return (
            f"this process imported the checkout {_HERE.parent}, which holds no built module and hides the installed "
            f"package; start it from another folder, or install the checkout: pip install -e {_HERE.parent}"
        )
    reason = build_report(kernel).get("problem")
    if reason is None:
        reason = "no module was built for it" if not loaded_modules(kernel) else "no built row runs on this CPU"
    if frozen(kernel):
        return f"{reason}; {why_frozen(kernel)}"
    if _templates.lost((kernel.template, kernel.reference), Path(kernel.file).parent):
        return f"{reason}, and nothing can be built: its templates are not on disk; install its package as files"
    words = f"--scope {kernel.scope.name}"
    if kernel.scope.name not in installed_scopes():
        words += f" --module {kernel.module}"
    return f"{reason}; to build: python -m tunekit build {words}"


def shadowed() -> bool:
    """Whether this tunekit is a checkout that nobody installed: its templates and build tools are not in the package.

    A checkout in the working directory comes before site-packages, and so hides an installed tunekit.
    """
    return (_HERE.parent / "setup.py").is_file() and importlib.util.find_spec("tunekit.templates") is None


def build_report_path(kernel: Kernel) -> Path:
    """What the install left beside the declaring file when it could not build the module."""
    return Path(kernel.file).parent / f"{module.PREFIX}{kernel.scope.name}_build.json"


def untuned_row(kernel: Kernel) -> str:
    """What would run here with no manifest, pin or policy: the first runnable row of the chain, or the reference."""
    world, _ = world_of(kernel, grid=True)
    return choose(kernel, None, world, Settings()).suffix


# --- the grid --------------------------------------------------------------------------------------------


def grid_rows(kernel: Kernel, compilers: Sequence[str] = ()) -> dict[str, BoundRow]:
    """Every built row that can run here, by suffix: the C reference first, then rows in order of declaration.

    Those that failed a check before are among them. What other compilers built of a row follows it as
    ``suffix@compiler``.
    """
    world, rows = world_of(kernel, grid=True, judged=False, compilers=compilers)
    found: dict[str, BoundRow] = {}
    if world.built.get(REFERENCE):
        found[REFERENCE] = _bound(kernel, REFERENCE, 0, "grid", rows)
    for name in _names(kernel, compilers):
        alternative, reason = refusal(kernel, name, world)
        if reason is None:
            found[name] = _bound(kernel, name, alternative, "grid", rows)
    return found


def why_not(kernel: Kernel, compilers: Sequence[str] = ()) -> dict[str, str]:
    """Name to reason for every row that cannot run here: declined, not built, or a feature that is missing."""
    world, _ = world_of(kernel, grid=True, judged=False, compilers=compilers)
    names = _names(kernel, compilers)
    return {name: reason for name in names if (reason := refusal(kernel, name, world)[1]) is not None}


def _names(kernel: Kernel, compilers: Sequence[str]) -> list[str]:
    return [by_compiler(row.suffix, compiler) for row in kernel.rows for compiler in ("", *compilers)]


# --- what callers hold -----------------------------------------------------------------------------------


def _ctype(kind: CType) -> Any:
    import ctypes

    if not kind.is_integer:
        return ctypes.c_float if kind.size == 4 else ctypes.c_double
    return getattr(ctypes, f"c_{kind.dtype}")


def _address(array: Any) -> int:
    """The address of a contiguous array: cffi's way, the quickest of those that NumPy and cffi have."""
    global _buffers
    if _buffers is None:
        ffi = importlib.import_module("_cffi_backend").FFI()  # which generated modules need anyway
        _buffers = (ffi.from_buffer, ffi.cast, ffi.typeof("size_t"))
    from_buffer, cast, size = _buffers
    return int(cast(size, from_buffer(array)))


_buffers: tuple[Any, Any, Any] | None = None


class TunedFunction:
    """A tuned function or a companion: called like the function that was decorated.

    On the C tier a call checks its arguments (``TypeError``, ``ValueError``) and runs the chosen row with the GIL
    released; on the Python tier it runs the decorated body, with the same checks.
    """

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        self.__wrapped__ = function
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        self.signature = signature
        self._kernel: Kernel | None = None
        self._index = 0
        self._quick: Callable[..., tuple[Any, ...] | None] | None = None
        self._native: tuple[BoundRow | None, Any, int] = (None, None, 0)

    def attach(self, kernel: Kernel, index: int) -> None:
        """Join the function to its kernel (done by :func:`tunekit.tune`)."""
        self._kernel, self._index = kernel, index

    @property
    def kernel(self) -> Kernel:
        if self._kernel is None:
            raise ChoiceError(
                f"companion {self.__name__!r} belongs to no kernel; name it in companions=[...] of tunekit.tune"
            )
        return self._kernel

    def __reduce__(self) -> str:
        return self.__qualname__  # by name, as functions are

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named:
            arguments = bind_names(self.__name__, self.signature, arguments, named)
        if self._kernel is not None and len(arguments) == len(self.signature.parameters):
            if self._quick is None:
                self._quick = quick_check(self.signature, _address)
            values = self._quick(*arguments)
            bound = None if values is None else bind(self._kernel).bound
            if values is not None and bound is not None:
                last, call, address = self._native
                if last is not bound:
                    runs = bound.of(self.__name__)
                    call = runs.module.caller(runs.kernel, self.__name__)
                    address = runs.built.addresses[self._index]
                    self._native = (bound, call, address)
                return call(address, *values)
        checked = check_call(self.__name__, self.signature, arguments)
        if self._kernel is not None:
            bound = bind(self._kernel).bound
            if bound is not None:
                return call_native(bound, self.__name__, self._index, self.signature, checked)
        return self.__wrapped__(*checked)

    def bound(self) -> BoundRow | None:
        """The row that runs, or None on the Python tier. Fixes the choice."""
        return bind(self.kernel).bound

    def choice(self) -> Choice:
        """The choice that is in force, or that the first use would make."""
        return peek(self.kernel).choice

    def address(self) -> int:
        """The C address of this function in the chosen row. Fixes the choice.

        Raises:
            ChoiceError: nothing native is built here.
        """
        bound = self.bound()
        if bound is None:
            raise ChoiceError(f"{self.kernel.key} has no native code here: {nothing_built(self.kernel)}")
        return bound.address(self.__name__)

    def c_function(self) -> Any:
        """This function in the chosen row as a ctypes function, for numba, SciPy's LowLevelCallable and ctypes itself.

        Pointers are ``void *`` and nothing is checked. Fixes the choice.

        Raises:
            ChoiceError: nothing native is built here.
        """
        import ctypes

        def kind(p: Parameter) -> Any:
            return ctypes.c_void_p if p.is_pointer else _ctype(p.ctype)

        returns = self.signature.returns
        result = None if returns is None else _ctype(returns)
        made = ctypes.CFUNCTYPE(result, *(kind(p) for p in self.signature.parameters))
        return made(self.address())

    def variants(self) -> list[tuple[str, Variant]]:
        """(suffix, :class:`Variant`) pairs. Normal mode: the reference alone. Grid modes: it, then every row in order.

        A row that declined, was not built or cannot run here behaves exactly as the reference. A frozen build has the
        reference alone in every mode.
        """
        found = [(REFERENCE, Variant(self, REFERENCE, None))]
        if settings().mode != "normal" and not frozen(self.kernel):
            rows = grid_rows(self.kernel)
            found += [(row.suffix, Variant(self, row.suffix, rows.get(row.suffix))) for row in self.kernel.rows]
        return found

    def __repr__(self) -> str:
        owner = f" of {self._kernel.key}" if self._kernel else ""
        return f"<tuned function {self.__name__}{owner}>"


class Variant:
    """One row of a function, called by name: ``gemm__kstep2``. Using it fixes no choice.

    Attributes:
        suffix: the row, or ``reference``.
        bound: the built row, or None where the reference's body runs: for the reference itself, and for a row that
            declined, was not built or cannot run here.
    """

    def __init__(self, function: TunedFunction, suffix: str, bound: BoundRow | None) -> None:
        self.suffix, self.bound = suffix, bound
        self.__name__ = f"{function.__name__}__{suffix}"
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        function = self._function
        if self.bound is not None:
            return self.bound.call(function.__name__, *arguments)
        return function.__wrapped__(*check_call(function.__name__, function.signature, arguments))

    def address(self) -> int:
        """The C address; of the portable C reference where the row itself cannot run.

        Raises:
            ChoiceError: nothing native is built here.
        """
        kernel = self._function.kernel
        native = self.bound or grid_rows(kernel).get(REFERENCE)
        if native is None:
            raise ChoiceError(f"{kernel.key} has no native code here: {nothing_built(kernel)}")
        return native.address(self._function.__name__)

    def __repr__(self) -> str:
        return f"<variant {self.__name__}>"


class Tuned(TunedFunction):
    """A tuned kernel: what :func:`tunekit.tune` returns."""

    def manifest_get(self) -> str | None:
        """The row that the scope's manifest names for this kernel (``suffix@compiler`` where it does), or None."""
        return _manifest.manifest_get(self.kernel)

    def manifest_set(self, suffix: str, seats: Mapping[str, str] | None = None) -> Path:
        """Record a row as this box's winner, and rows of seats (companion to row); the next process uses them.

        A seat that is not named follows the kernel's row. Raises ManifestError.
        """
        if frozen(self.kernel):
            raise ManifestError(why_frozen(self.kernel))
        return _manifest.manifest_set(self.kernel, suffix, seats)
