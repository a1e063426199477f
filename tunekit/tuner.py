# SPDX-License-Identifier: Apache-2.0
"""Tuning a scope: build the grid, gate its rows, race them, decide, and write manifest and record once.

:class:`House` holds every call into the other rooms; what is below it is the same for any of them and runs in the
tests on a simulated one. A run that is interrupted leaves the old manifest and no process behind: children and
compilers are ended on the way out, and nothing is written before a scope's last kernel is decided.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import platform
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import _templates
from tunekit.console import Console
from tunekit.errors import (
    FamilyError,
    GateError,
    ManifestError,
    PolicyError,
    TemplateError,
    ToolchainError,
    TunekitError,
)
from tunekit.kernel import Kernel
from tunekit.measure import gate, race, stats
from tunekit.measure.fixtures import EVERYTHING, BoundRow, Fixtures, Regime, check_regimes
from tunekit.measure.race import Deadline
from tunekit.measure.record import KernelRecord, RegimeRecord, RowRecord, RunRecord, merge
from tunekit.rows import REFERENCE
from tunekit.team import threads

DONE, FAILED, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130

BUILD_SHARE = 0.5
"""Of a time limit, how much the build may use: a grid that was built and never raced chooses nothing."""


class NoFixtures(TunekitError):
    """A kernel declares no ``fixtures=``: it is meant to be chosen by hand, and to tune it is no failure."""


# --- the other rooms -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """What building a grid came to; ``problem`` says why there is none, or an incomplete one."""

    compiler: str = ""
    compiled: int = 0
    cached: int = 0
    problem: str = ""


class House:
    """Every call that the tuner makes into the rooms around it."""

    def scopes(self) -> dict[str, str]:
        """Installed scopes, each with its declaring module."""
        from tunekit import dispatch

        return dispatch.installed_scopes()

    def problems(self) -> Sequence[tuple[str, str]]:
        """Installed families that cannot be used: scope and reason. Asked after :meth:`all_kernels`."""
        from tunekit import dispatch

        return [(problem.scope, problem.text) for problem in dispatch.problems()]

    def all_kernels(self) -> Mapping[str, Sequence[Kernel]]:
        """The kernels of every installed scope that can be imported."""
        from tunekit import dispatch

        return dispatch.declare_installed()

    def kernels(self, scope: str) -> Sequence[Kernel]:
        """A scope's kernels, in order of declaration."""
        from tunekit import dispatch

        return dispatch.declare_scope(scope)

    def refuse_to_write(self) -> str | None:
        """Why a result of this process must not go into the usual manifest, or None."""
        from tunekit.environment import settings

        now = settings()
        if now.manifest == "":
            return "TUNEKIT_MANIFEST is empty, which means no manifest: name a file in it, or use --dry-run"
        bent = [
            name
            for name, value in (("TUNEKIT_PIN", now.pin), ("TUNEKIT_DISABLE_FEATURES", now.disable_features))
            if value
        ]
        if bent and not now.manifest:
            return (
                f"{' and '.join(bent)} bends what this box can run, so the result would not be this box's; "
                "unset it, name a file in TUNEKIT_MANIFEST, or use --dry-run"
            )
        return None

    def can_write(self, scope: str) -> None:
        """Make the folder of a scope's manifest and try it, before minutes of work depend on it.

        Raises:
            ManifestError: nothing can be written there; the message says why and what mends it.
        """
        from tunekit import _manifest

        try:
            _manifest.check_writable(_manifest.write_path(scope))
        except TunekitError as error:
            raise ManifestError(f"{error} (nothing was measured; to measure only: --dry-run)") from error

    def frozen(self, kernel: Kernel) -> str:
        """Why nothing tunes a kernel here, or empty."""
        from tunekit import dispatch

        return dispatch.why_frozen(kernel) if dispatch.frozen(kernel) else ""

    @contextlib.contextmanager
    def alone(self, deadline: Deadline, tell: Callable[[str], None]) -> Iterator[bool]:
        """Keep other retunes of this user away from this box meanwhile; False where one was there until the deadline.

        Two that measure at once measure each other. Where no lock file can be had, the run goes on without one.
        """
        from tunekit import _manifest, paths
        from tunekit.cpu import this_box

        def without(error: Exception) -> None:
            tell(f"no lock could be taken against other retunes of this box ({error}); run one at a time")

        # Homes are shared between machines of one kind: the machine's name keeps them out of each other's way.
        host = "".join(c if c.isalnum() else "-" for c in platform.node())[:64]
        try:
            path = paths.state_root() / f".{this_box().key}.{host}.retune.lock"
        except TunekitError as error:
            without(error)
            yield True
            return
        told = "another retune is at work on this box: waiting for its end, since two would disturb both"
        with _manifest.turn(path, deadline.over, lambda: tell(told), without) as got:
            yield got

    def unbuilt(self, kernel: Kernel, suffix: str) -> bool:
        """Whether a row is in the grid and could run here, and only its built object is missing."""
        from tunekit import dispatch

        row = kernel.row(suffix)
        if row is None:
            return False
        world, _ = dispatch.world_of(kernel, grid=True)
        legal = kernel.refuses(row, world.arch) is None and kernel.requires(row).holds(world.features)
        return legal and suffix not in world.built and suffix not in world.dropped

    def build(self, kernels: Sequence[Kernel], progress: Callable[[int, int, str], None]) -> Built:
        """Build the grid of all kernels of one declaring file. An exception of ``progress`` ends the build."""
        from tunekit import dispatch

        try:
            tools = _build_tools()
        except ToolchainError as error:
            return Built(problem=str(error))
        runner = tools.Runner()
        try:
            report = tools.build_cached(kernels, "grid", runner=runner, progress=progress)
        except TemplateError as error:
            if any(_templates.lost((k.template, k.reference), Path(k.file).parent) for k in kernels):
                return Built(problem=str(error))
            raise
        except TunekitError as error:
            # No compiler, or a cache that cannot be written: what the install built can still be raced.
            return Built(problem=str(error))
        finally:
            runner.stop()
        dispatch.forget_modules()
        return Built(report.compiler, report.compiled, report.cached)

    def stamp(self, kernels: Sequence[Kernel]) -> None:
        """Build the small module with just what the manifest names for the kernels of one declaring file."""
        tools = _build_tools()
        named = {kernel.key: self.incumbent(kernel) for kernel in kernels}
        rows = {key: [suffix] for key, suffix in named.items() if suffix is not None and suffix != REFERENCE}
        if rows:
            tools.build_cached(kernels, "stamped", rows=rows)

    def grid(self, kernel: Kernel) -> Mapping[str, BoundRow]:
        """Built rows that run here, the C reference among them as ``reference``."""
        from tunekit import dispatch

        return dispatch.grid_rows(kernel)

    def why_not(self, kernel: Kernel) -> Mapping[str, str]:
        """The reason for every row that cannot run here."""
        from tunekit import dispatch

        return dispatch.why_not(kernel)

    def fixtures(self, kernel: Kernel) -> Fixtures:
        """The family's gates and regimes. Raises NoFixtures where it declares none."""
        return fixtures_of(kernel)

    def judged(self, kernel: Kernel, verdicts: Mapping[tuple[str, tuple[str, ...]], str | None]) -> None:
        """Keep which rows failed their checks: such a row is not chosen here. Raises ManifestError."""
        from tunekit import dispatch

        dispatch.judged(kernel, verdicts)

    def job(self, kernel: Kernel) -> gate.Job:
        """How a child process finds the kernel's rows and fixtures."""
        return gate.Job("tunekit.tuner:load_rows", (kernel.module, kernel.scope.name, kernel.name))

    def incumbent(self, kernel: Kernel) -> str | None:
        """What the manifest names for the kernel now."""
        from tunekit import _manifest

        return _manifest.manifest_get(kernel)

    def box(self) -> tuple[dict[str, Any], str]:
        """This box as JSON, and its processor's name for people."""
        from tunekit.cpu import this_box
        from tunekit.cpu.brand import brand

        return this_box().to_json(), brand()

    def hashes(self, kernel: Kernel) -> dict[str, str]:
        """Hashes of what the kernel's rows are made from."""
        found = {"grid": kernel.digest()}
        with contextlib.suppress(ToolchainError):
            found.update({f"template {n}": d for n, d in _build_tools("render").templates_read(kernel).items()})
        return found

    def record(self, scope: str) -> Any:
        """The record beside the scope's manifest, as JSON values, or None."""
        from tunekit import _manifest

        return _manifest.read_record(_manifest.write_path(scope))

    def write(self, winners: Mapping[Kernel, str], record: dict[str, Any]) -> str:
        """Write one scope's manifest and record; the manifest's path."""
        from tunekit import _manifest

        return str(_manifest.manifest_set_many(next(iter(winners)).scope, winners, record=record))


def _build_tools(name: str = "") -> Any:
    try:
        return importlib.import_module("tunekit.build_tools" + (f".{name}" if name else ""))
    except ImportError as error:
        raise ToolchainError(f"the build tools cannot be imported ({error}); install tunekit with pip") from error


def fixtures_of(kernel: Kernel) -> Fixtures:
    """What ``fixtures="module:attribute"`` of a declaration names; samples as gates and regimes.

    Raises:
        NoFixtures: it names nothing.
        GateError: what it names cannot be found, raises, or is neither fixtures nor samples.
    """
    if not kernel.fixtures:
        raise NoFixtures(f"kernel {kernel.key} declares no fixtures=, so its rows can be neither checked nor timed")
    module, _, attribute = kernel.fixtures.partition(":")
    where = f"kernel {kernel.key}: fixtures={kernel.fixtures!r}"
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        if (callable(found) and not hasattr(found, "gates")) or isinstance(found, type):
            found = found()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an author's own code
        raise GateError(f"{where} raised {type(error).__name__}: {error}") from error
    if isinstance(found, Fixtures):
        return found
    from tunekit.measure import samples

    try:
        listed = list(found)
    except TypeError:
        listed = [found]
    return samples.fixtures_from(kernel, listed, where)


def load_rows(module: str, scope: str, name: str) -> tuple[Mapping[str, BoundRow], Fixtures]:
    """The rows and fixtures of a kernel, in the child process that checks them."""
    importlib.import_module(module)
    from tunekit import dispatch

    kernel = next((k for k in dispatch.kernels(scope) if k.name == name), None)
    if kernel is None:
        raise TunekitError(f"module {module} declares no kernel {name!r} in scope {scope!r}")
    house = House()
    return house.grid(kernel), house.fixtures(kernel)


# --- a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a run is asked to do.

    Attributes:
        kernels: names (or ``scope.name``) to tune; empty for all.
        time_limit: seconds for the whole run, or None.
        dry_run: measure and report, write nothing.
        fresh: forget the incumbent; ties go to the fallback.
        in_process: check rows in this process, where no child can be had.
        seed: of the orders of the rounds.
        limits: of the children that check rows.
        plan: of the races.
    """

    kernels: tuple[str, ...] = ()
    time_limit: float | None = None
    dry_run: bool = False
    fresh: bool = False
    in_process: bool = False
    seed: int = 0
    limits: gate.Limits = field(default_factory=gate.Limits)
    plan: race.Plan = field(default_factory=race.Plan)


@dataclass(frozen=True)
class ScopeResult:
    """One scope's outcome.

    Attributes:
        record: what was measured and decided in this run.
        manifest: the file that was written, or None.
        status: exit status of this scope: 0, 1 or 3.
        notes: problems that belong to no single kernel.
        problem: why nothing of the scope was tuned: its code cannot be imported, or ended the run of its kernels.
    """

    record: RunRecord
    manifest: str | None
    status: int
    notes: tuple[str, ...] = ()
    problem: str = ""


class _BuildTimeUp(Exception):
    """The deadline came during a build."""


class _Stages:
    """Wall seconds by stage."""

    def __init__(self, clock: race.Clock) -> None:
        self.clock = clock
        self.taken: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.taken[name] = self.taken.get(name, 0.0) + self.clock() - start


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold signals back while manifest and record are written, and deliver them afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in signals}
    held = [n for n in signals if callable(before[n]) or before[n] is signal.SIG_DFL]
    for number in held:
        signal.signal(number, lambda seen, frame: came.append(seen))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def select(
    scopes: Sequence[str], options: Options, house: House, broken: list[tuple[str, str]] | None = None
) -> dict[str, list[Kernel]]:
    """The kernels to tune, by scope.

    Args:
        scopes: names of installed scopes; empty for all.
        options: ``kernels`` narrows the choice.
        house: the other rooms.
        broken: gets scope and reason of families that cannot be used, where no kernel was asked for by name.

    Raises:
        TunekitError: no such scope or kernel; the message lists those there are.
    """
    installed = house.scopes()
    for scope in scopes:
        if scope not in installed:
            raise TunekitError(f"no scope {scope!r} is installed; installed: {', '.join(sorted(installed)) or 'none'}")
    unusable: list[tuple[str, str]] = []
    named: dict[str, Sequence[Kernel]] = {}
    for scope in scopes:
        try:
            named[scope] = house.kernels(scope)
        except TunekitError as error:
            unusable.append((scope, str(error)))
    if not scopes:
        named = dict(house.all_kernels())
        unusable += house.problems()
    if broken is not None and (scopes or not options.kernels):
        broken += unusable
    found = {scope: list(kernels) for scope, kernels in named.items()}
    if not options.kernels:
        return {scope: kernels for scope, kernels in found.items() if kernels}
    every = [kernel for kernels in found.values() for kernel in kernels]
    for name in options.kernels:
        if not any(name in (kernel.name, kernel.key) for kernel in every):
            known = ", ".join(kernel.key for kernel in every) or "none"
            raise TunekitError(f"no kernel is called {name!r}; there are: {known}")
    wanted = {
        scope: [k for k in kernels if k.name in options.kernels or k.key in options.kernels]
        for scope, kernels in found.items()
    }
    return {scope: kernels for scope, kernels in wanted.items() if kernels}


def tune(
    scopes: Sequence[str],
    options: Options,
    console: Console,
    house: House | None = None,
    clock: race.Clock = time.perf_counter,
) -> list[ScopeResult]:
    """Tune scopes.

    Args:
        scopes: names; empty for every installed one.
        options: see :class:`Options`.
        console: progress and notes.
        house: the other rooms.
        clock: seconds, for the deadline and the races.

    Raises:
        TunekitError: nothing of that name (see :func:`select`).
        PolicyError: this process must not write (pinned or disabled features), and it is no dry run.
        GateError: no child process can be started, or it cannot load the family.
        ManifestError: the manifest cannot be written; found out before any work.
        KeyboardInterrupt: passed on; the manifests of scopes not yet finished are as they were.
    """
    rooms = house or House()
    reason = None if options.dry_run else rooms.refuse_to_write()
    if reason is not None:
        raise PolicyError(reason)
    deadline = Deadline(options.time_limit, clock)
    broken: list[tuple[str, str]] = []
    chosen = select(scopes, options, rooms, broken)
    for scope in list(chosen):
        reasons = [reason for kernel in chosen[scope] if (reason := rooms.frozen(kernel))]
        chosen[scope] = [kernel for kernel in chosen[scope] if not rooms.frozen(kernel)]
        for reason in dict.fromkeys(reasons):
            console.complain(f"tunekit: {reason}")
        if not chosen[scope]:
            del chosen[scope]
    if not options.dry_run:
        for scope in chosen:
            rooms.can_write(scope)
    results: list[ScopeResult] = []
    # The build is in it too: compilers on every core are the worst neighbours that a measurement can have.
    with rooms.alone(deadline, console.note) as alone:
        for done, (scope, kernels) in enumerate(chosen.items()):
            share = deadline.share(1 / (len(chosen) - done))
            run = _Run(scope, kernels, options, console, rooms, clock, share)
            if not alone:
                run.notes.append("another retune was at work on this box until the time limit: nothing was measured")
            try:
                results.append(run.run())
            except (FamilyError, TemplateError) as error:
                broken.append((scope, str(error)))
            except (KeyboardInterrupt, Exception):
                raise
            except BaseException as error:  # an author's code that exits would end the others' run
                broken.append((scope, f"its code ended the run with {type(error).__name__}: {error}"))
    results += [_unusable(scope, problem, options, rooms) for scope, problem in broken]
    console.clear()
    return results


def _unusable(scope: str, problem: str, options: Options, house: House) -> ScopeResult:
    """The result of a scope of which nothing was tuned."""
    box, brand = house.box()
    record = RunRecord(scope, box, brand, options.seed, _now(), _now(), options.time_limit, {}, {}, {})
    return ScopeResult(record, None, FAILED, problem=problem)


@dataclass
class _Entrants:
    """A kernel's rows on their way through the run.

    Attributes:
        kernel: the declaration.
        bound: rows that can run here.
        fallback: what runs untuned.
        incumbent: what the manifest names, when it can run here and counts.
        previous: what the manifest names.
        rows: verdicts so far.
        alive: rows that passed the gates, in order of declaration.
        unsound: rows of the fallback chain that failed theirs, and so are no fallback.
        notes: for the reader.
    """

    kernel: Kernel
    bound: Mapping[str, BoundRow]
    fallback: str
    incumbent: str | None
    previous: str | None
    rows: dict[str, RowRecord]
    alive: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True


def entrants(kernel: Kernel, house: House, fresh: bool) -> _Entrants | KernelRecord:
    """A kernel's rows before anything ran, or the record that says why nothing can be chosen."""
    previous = house.incumbent(kernel)
    bound, why = house.grid(kernel), house.why_not(kernel)
    rows = {row.suffix: RowRecord("unavailable", why.get(row.suffix, "")) for row in kernel.rows}
    if not any(suffix != REFERENCE for suffix in bound):
        reasons = "; ".join(dict.fromkeys(r.reason for r in rows.values() if r.reason))
        text = f"no row can run on this box: {reasons or 'nothing was built'}"
        return KernelRecord(None, previous, None, text, rows=rows)
    fallback = next((s for s in (*kernel.fallback, REFERENCE) if s in bound), None)
    if fallback is None:
        chain = ";".join(kernel.fallback) or "empty"
        return KernelRecord(
            None,
            previous,
            None,
            f"nothing to compare with: no C reference, and of the fallback chain ({chain}) nothing runs on this box",
            rows=rows,
        )
    standing = previous if previous in bound and not fresh else None
    for suffix in bound:
        rows[suffix] = RowRecord("unmeasured", "not raced")
    order = [REFERENCE, *(row.suffix for row in kernel.rows)]
    rows = {suffix: rows[suffix] for suffix in order if suffix in rows}
    return _Entrants(kernel, bound, fallback, standing, previous, rows)


class _Run:
    """One scope's run."""

    def __init__(
        self,
        scope: str,
        kernels: Sequence[Kernel],
        options: Options,
        console: Console,
        house: House,
        clock: race.Clock,
        deadline: Deadline,
    ) -> None:
        self.scope, self.kernels, self.options = scope, list(kernels), options
        self.console, self.house, self.clock, self.deadline = console, house, clock, deadline
        self.stages = _Stages(clock)
        self.notes: list[str] = []
        self.compilers: dict[str, str] = {}

    def run(self) -> ScopeResult:
        started = _now()
        with self.stages.timed("build"):
            self.build()
        records: dict[str, KernelRecord] = {}
        failed = False
        for done, kernel in enumerate(self.kernels):
            share = self.deadline.share(1 / (len(self.kernels) - done))
            entry, bad = self.one_kernel(kernel, share)
            failed = failed or bad
            records[kernel.name] = dataclasses.replace(
                entry, ended=_now(), compiler=self.compilers.get(kernel.module, ""), hashes=self.house.hashes(kernel)
            )
        box, brand = self.house.box()
        digests = {k.key: records[k.name].hashes.get("grid", "") for k in self.kernels}
        record = RunRecord(
            self.scope,
            box,
            brand,
            self.options.seed,
            started,
            _now(),
            self.options.time_limit,
            dict(self.stages.taken),
            digests,
            records,
        )
        manifest = None if self.options.dry_run else self.write(record)
        record = dataclasses.replace(record, stages=dict(self.stages.taken))
        chosen = any(r.winner is not None for r in records.values())
        status = FAILED if failed else DONE if chosen else NOTHING
        return ScopeResult(record, manifest, status, tuple(self.notes))

    # --- building

    def build(self) -> None:
        modules = list(dict.fromkeys(kernel.module for kernel in self.kernels))
        whole = self.deadline.share(BUILD_SHARE)
        for at, module in enumerate(modules):
            if self.deadline.over():
                return  # it came while this run waited for its turn
            limit = whole.share(1 / (len(modules) - at))
            # All kernels of a file share a module, so all are built even where one is tuned.
            siblings = [k for k in self.house.kernels(self.scope) if k.module == module]

            def progress(done: int, of: int, label: str, limit: Deadline = limit) -> None:
                self.console.progress(f"building {self.scope}: {done}/{of} objects, {label}")
                if limit.over():
                    raise _BuildTimeUp(f"{done} of {of} objects")

            try:
                built = self.house.build(siblings, progress)
            except _BuildTimeUp as error:
                self.notes.append(
                    f"the build used up its share of the time limit ({error}), so the rows that were built before "
                    "were raced; the objects stay in the cache, and the next run goes on from there"
                )
                continue
            self.compilers[module] = built.compiler
            if built.problem:
                self.notes.append(f"the grid was not built: {built.problem}")

    # --- one kernel

    def one_kernel(self, kernel: Kernel, deadline: Deadline) -> tuple[KernelRecord, bool]:
        """A kernel's record, and whether its reference or its fallback failed."""
        found = entrants(kernel, self.house, self.options.fresh)
        if isinstance(found, KernelRecord):
            return found, False
        try:
            fixtures = self.house.fixtures(kernel)
            regimes = check_regimes(fixtures.regimes())
        except NoFixtures:
            own = f"; its scope's tuner: python -m {kernel.scope.tuner}" if kernel.scope.tuner else ""
            text = f"not raced: the kernel declares no fixtures={own}"
            _not_raced(found, text)
            return KernelRecord(None, found.previous, found.fallback, text, rows=found.rows), False
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an author's own code, which may even exit
            what = str(error) if isinstance(error, (TunekitError, ValueError)) else f"{type(error).__name__}: {error}"
            text = f"its fixtures cannot be used: {what}"
            _not_raced(found, "not raced: its fixtures cannot be used")
            return KernelRecord(None, found.previous, found.fallback, text, rows=found.rows), True
        with self.stages.timed("gate"):
            try:
                reason = self.check(found, deadline)
            except FamilyError as error:
                text = f"its rows cannot be checked: {error}"
                _not_raced(found, f"not raced: {text}")
                return KernelRecord(None, found.previous, found.fallback, text, rows=found.rows), True
        if not self.options.dry_run:
            self.remember(found)
        if reason is not None:
            _not_raced(found, f"not raced: {reason}")
            base = (REFERENCE, found.fallback, *found.unsound)
            bad = any(found.rows[s].verdict == "rejected" for s in base if s in found.rows)
            return (
                KernelRecord(None, found.previous, found.fallback, reason, False, rows=found.rows, notes=found.notes),
                bad,
            )
        record, bad = self.compete(found, regimes, deadline)
        return (record if bad else self.keep(found, record)), bad or bool(found.unsound)

    def keep(self, found: _Entrants, record: KernelRecord) -> KernelRecord:
        """The record, with the recorded winner in its place where this run could not measure it.

        A compiler that is gone, a cache that was wiped or a time limit says nothing about a row.
        """
        before = found.previous
        if before is None or self.options.fresh or record.winner in (None, before):
            return record
        if before in found.bound:
            timed = any(before in regime.centres for regime in record.regimes.values())
            why = "the time limit came before its race"
            if timed or found.rows[before].verdict == "rejected":
                return record
        elif self.house.unbuilt(found.kernel, before):
            why = "it is not built here"
        else:
            return record
        reason = f"the recorded winner is kept: it could not be measured, since {why}"
        fastest = record.winner or ""
        rows = dict(record.rows)
        rows[fastest] = dataclasses.replace(
            rows[fastest], verdict="tied", reason=f"best of those that were timed, but {before} was not"
        )
        rows[before] = dataclasses.replace(rows.get(before, RowRecord("")), verdict="winner", reason=reason)
        note = f"{before} keeps its entry: it could not be measured, since {why}; --fresh forgets it"
        return dataclasses.replace(
            record, winner=before, reason=reason, complete=False, rows=rows, notes=[*record.notes, note]
        )

    def remember(self, found: _Entrants) -> None:
        """Keep what the checks said, so that a row which failed is not chosen, with a manifest or without one."""
        verdicts = {
            (suffix, tuple(found.bound[suffix].alternative)): row.reason if row.verdict == "rejected" else None
            for suffix, row in found.rows.items()
            if suffix in found.bound and (row.verdict == "rejected" or suffix in found.alive)
        }
        try:
            self.house.judged(found.kernel, verdicts)
        except TunekitError as error:
            found.notes.append(f"which rows failed was not kept, so an untuned process may still run them: {error}")

    def check(self, found: _Entrants, deadline: Deadline) -> str | None:
        """Run the gates; None, or why the kernel cannot go on."""
        # First what the rest is compared with, then the incumbent, then the fallback chain, then the others.
        first = [REFERENCE, found.fallback, found.incumbent, *found.kernel.fallback]
        order = [s for s in dict.fromkeys([*first, *found.bound]) if s is not None and s in found.bound]
        base = [s for s in order if s in (REFERENCE, found.fallback)]
        job = self.house.job(found.kernel)

        def progress(suffix: str, case: str, done: int, of: int) -> None:
            self.console.progress(f"checking {found.kernel.name}: {done}/{of} rows, {suffix}: {case}")

        ask = gate.gate_rows_here if self.options.in_process else self._gate_rows
        verdicts = ask(job, base, deadline=deadline, progress=progress)
        for suffix, verdict in verdicts.items():
            found.rows[suffix] = _row_of(verdict)
        chain = [s for s in dict.fromkeys([*found.kernel.fallback, REFERENCE]) if s in found.bound]
        while verdicts[found.fallback].state == gate.REJECTED and found.fallback != REFERENCE:
            # A wrong row is no measure of the others, which may be right: the next of the chain is.
            after = next((s for s in chain if s not in verdicts or verdicts[s].state != gate.REJECTED), None)
            if after is None:
                break
            found.unsound.append(found.fallback)
            found.notes.append(f"{found.fallback} failed a check and is no fallback: {verdicts[found.fallback].reason}")
            found.fallback = after
            if after not in verdicts:
                verdicts.update(ask(job, [after], deadline=deadline, progress=progress))
                found.rows[after] = _row_of(verdicts[after])
        for suffix in dict.fromkeys((*(s for s in base if s not in found.unsound), found.fallback)):
            if verdicts[suffix].state != gate.PASSED:
                what = "the reference" if suffix == REFERENCE else f"the fallback {suffix}"
                failed = "failed a check" if verdicts[suffix].state == gate.REJECTED else "was not checked"
                return f"{what} {failed}: {verdicts[suffix].reason}"
        # Half of what is left is for the race: rows that were checked and never timed help nobody.
        rest = ask(job, [s for s in order if s not in verdicts], deadline=deadline.share(0.5), progress=progress)
        for suffix, verdict in rest.items():
            found.rows[suffix] = _row_of(verdict)
        verdicts.update(rest)
        found.alive = [s for s in found.bound if verdicts[s].state == gate.PASSED]
        found.complete = all(v.state != gate.SKIPPED for v in verdicts.values())
        return None

    def _gate_rows(
        self, job: gate.Job, suffixes: Sequence[str], *, deadline: Deadline, progress: gate.Progress
    ) -> dict[str, gate.Verdict]:
        return gate.gate_rows(job, suffixes, limits=self.options.limits, deadline=deadline, progress=progress)

    def compete(self, found: _Entrants, regimes: Sequence[Regime], deadline: Deadline) -> tuple[KernelRecord, bool]:
        """Race the rows that are left and decide."""
        kernel = found.kernel
        args = {s: kernel.full_args(kernel.row(s)) for s in found.bound}
        incumbent = found.incumbent if found.incumbent in found.alive else None
        standings: list[stats.Standing] = []
        readings: dict[str, race.Reading] = {}
        regime_records: dict[str, RegimeRecord] = {}
        picked: str | None = None
        chooses = {p for r in regimes if r.decides != EVERYTHING for p in r.decides}
        for done, regime in enumerate(regimes):
            # The primary's share is double: on it everything else rests.
            weights = len(regimes) - done + (1 if done == 0 else 0)
            share = deadline.share((2 if done == 0 else 1) / weights)
            # On one lane: a race ranks kernels, and other lanes would bring their neighbours' noise into it.
            with self.stages.timed(f"race {regime.name}"), threads(1):
                result = self.race_one(found, regime, share, standings, picked, incumbent, args, chooses)
            for suffix, reason in result.failed.items():
                name = suffix.removesuffix(race.TWIN)
                found.rows[name] = RowRecord("rejected", f"{regime.name}: {reason}", found.rows[name].seconds)
                if name in found.alive:
                    found.alive.remove(name)
            reading = race.read(result, self.options.plan)
            readings[regime.name] = reading
            regime_records[regime.name] = _regime_record(regime, result, reading)
            found.complete = found.complete and result.complete
            if found.fallback not in found.alive:
                reason = f"the fallback {found.fallback} failed while it was timed: {found.rows[found.fallback].reason}"
                return (
                    KernelRecord(
                        None,
                        found.previous,
                        found.fallback,
                        reason,
                        False,
                        rows=found.rows,
                        regimes=regime_records,
                        notes=found.notes,
                    ),
                    True,
                )
            enough = reading.final.get(found.fallback, None)
            if enough is None or enough.count < stats.LEAST_ROUNDS:
                if done == 0:
                    break
                continue
            standings.append(
                stats.Standing(
                    regime.name,
                    regime.decides,
                    _living(reading.final, found.alive),
                    _living(reading.screened, found.alive),
                    reading.margin,
                    reading.cut,
                )
            )
            if done == 0:
                picked = stats.decide(standings, args, incumbent, found.fallback).winner
        # A row may have been rejected in a later regime than the first.
        standings = [
            dataclasses.replace(s, final=_living(s.final, found.alive), screened=_living(s.screened, found.alive))
            for s in standings
        ]
        if not standings:
            winner = incumbent or found.fallback
            reason = "too little was measured within the time limit to choose by; this is what ran before"
            found.rows[winner] = dataclasses.replace(found.rows[winner], verdict="winner", reason=reason)
            record = KernelRecord(
                winner,
                found.previous,
                found.fallback,
                reason,
                False,
                rows=found.rows,
                regimes=regime_records,
                notes=found.notes,
            )
            return record, False
        decision = stats.decide(standings, args, incumbent, found.fallback)
        reason = _judge(found, standings, decision, incumbent, args, chooses)
        _comment(found, regimes, readings, decision.winner, self.options.plan)
        picks = {pick.regime: pick.winner for pick in decision.picks}
        record = KernelRecord(
            decision.winner,
            found.previous,
            found.fallback,
            reason,
            found.complete,
            picks=picks,
            rows=found.rows,
            regimes=regime_records,
            notes=found.notes,
        )
        return record, False

    def race_one(
        self,
        found: _Entrants,
        regime: Regime,
        deadline: Deadline,
        standings: Sequence[stats.Standing],
        picked: str | None,
        incumbent: str | None,
        args: Mapping[str, Mapping[str, object]],
        chooses: set[str],
    ) -> race.RaceResult:
        """Prepare and race one regime."""
        name = found.kernel.name
        base = found.fallback
        entries: dict[str, race.Call] = {}
        failed: dict[str, str] = {}
        twin: race.Call | None = None
        order = [base, *(s for s in found.alive if s != base)]
        for done, suffix in enumerate(order):
            self.console.progress(f"racing {name} at {regime.name}: preparing {done}/{len(order)}, {suffix}")
            if deadline.over():
                break
            try:
                entries[suffix] = regime.prepare(found.bound[suffix])
                if suffix == base:
                    twin = regime.prepare(found.bound[suffix])
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failed[suffix] = f"raised {type(error).__name__} while it was prepared: {error}"
        if base not in entries or twin is None:
            # Before the limit only a fallback that cannot be prepared comes here, and then it is in ``failed``.
            return race.RaceResult(self.options.seed, base, failed=failed, complete=False)
        among: set[str] | None = None
        final = bool(regime.decides)
        group: Callable[[str], Hashable] | None = None
        if regime.decides == EVERYTHING:
            # Rows that differ only in what other regimes choose do the same work in this one.
            if chooses:
                group = _grouping(args, chooses)
        elif final:
            among = set()
            if picked is not None and standings:
                among = set(stats.candidates_for(standings[0], picked, regime.decides, args))
            final = len(among) > 1

        def progress(stage: str, done: int, of: int) -> None:
            self.console.progress(f"racing {name} at {regime.name}: {stage} {done}/{of}, {len(entries)} rows")

        keep = {base} | ({incumbent} if incumbent in entries else set())
        if among is not None:
            keep |= among & set(entries)
        result = race.race(
            entries,
            twin,
            base,
            keep={k for k in keep if k is not None},
            among=among,
            group=group,
            final=final,
            seed=self.options.seed,
            plan=self.options.plan,
            clock=self.clock,
            deadline=deadline,
            progress=progress,
        )
        short = len(entries) + len(failed) < len(order)
        return dataclasses.replace(result, failed={**failed, **result.failed}, complete=result.complete and not short)

    # --- writing

    def write(self, record: RunRecord) -> str | None:
        winners = {k: w for k in self.kernels if (w := record.kernels[k.name].winner) is not None}
        if not winners:
            return None
        try:
            old: RunRecord | None = RunRecord.from_json(self.house.record(self.scope))
        except ManifestError:
            old = None  # none yet, or one that this version does not read
        with self.stages.timed("write"), undisturbed():
            path = self.house.write(winners, merge(old, record).to_json())
        with self.stages.timed("stamp"):
            self.console.progress(f"building {self.scope}: the module with the winners")
            for module in dict.fromkeys(kernel.module for kernel in winners):
                siblings = [k for k in self.house.kernels(self.scope) if k.module == module]
                try:
                    self.house.stamp(siblings)
                except TunekitError as error:
                    self.notes.append(
                        f"the module with the winners was not built ({error}); "
                        f"to build it: python -m tunekit build --scope {self.scope}"
                    )
        return path


def _grouping(args: Mapping[str, Mapping[str, object]], parameters: set[str]) -> Callable[[str], Hashable]:
    def key(name: str) -> Hashable:
        return tuple(stats.equals_without(args, name, parameters))

    return key


def _living(found: Mapping[str, stats.Estimate], alive: Sequence[str]) -> dict[str, stats.Estimate]:
    return {name: e for name, e in found.items() if name in alive}


def _not_raced(found: _Entrants, reason: str) -> None:
    for suffix in found.bound:
        if found.rows[suffix].verdict == "unmeasured":
            found.rows[suffix] = dataclasses.replace(found.rows[suffix], reason=reason)


def _row_of(verdict: gate.Verdict) -> RowRecord:
    kind = {gate.PASSED: "unmeasured", gate.REJECTED: "rejected", gate.SKIPPED: "unmeasured"}[verdict.state]
    reason = verdict.reason or ("the time limit came before its race" if kind == "unmeasured" else "")
    return RowRecord(kind, reason, verdict.seconds)


def _regime_record(regime: Regime, result: race.RaceResult, reading: race.Reading) -> RegimeRecord:
    best = {**reading.screened, **reading.final}
    measured = bool(reading.final)
    return RegimeRecord(
        unit=regime.unit,
        work=regime.work,
        decides=list(regime.decides),
        seed=result.seed,
        complete=result.complete,
        floor=reading.floor if measured else None,
        margin=reading.margin if measured else None,
        calls=dict(result.calls),
        centres={n: e.centre for n, e in best.items()},
        errors={n: e.error for n, e in best.items()},
        spreads={n: e.spread for n, e in best.items()},
        finalists=sorted(n for n in result.final if not n.endswith(race.TWIN)),
        screening={n: list(t) for n, t in result.screening.items()},
        final={n: list(t) for n, t in result.final.items()},
    )


def percent(ratio: float) -> str:
    """``+9.1 %`` for 1.091; ``-0.0`` is not a number that people want to read."""
    value = round(100 * (ratio - 1), 1)
    return f"{value if value else 0.0:+.1f} %"


def _judge(
    found: _Entrants,
    standings: Sequence[stats.Standing],
    decision: stats.Decision,
    incumbent: str | None,
    args: Mapping[str, Mapping[str, object]],
    chooses: set[str],
) -> str:
    """Give every measured row its verdict; the reason why the winner won."""
    by_name = {standing.regime: standing for standing in standings}
    for name in standings[0].screened:
        kin = [n for n in stats.equals_without(args, name, chooses) if n in decision.picks[0].among]
        verdict, reason = _verdict(name, kin, by_name, standings[0], decision)
        found.rows[name] = dataclasses.replace(found.rows[name], verdict=verdict, reason=reason)
    winner, last = decision.winner, decision.picks[-1]
    margin = f"{100 * by_name[last.regime].margin:.1f} %"
    if last.held == stats.NOISE:
        reason = f"too noisy at {last.regime} (margin {margin}): what ran before is kept"
    elif last.held == stats.BEST:
        reason = f"what ran before is kept: no lead over it at {last.regime} shows in the best samples"
    elif winner == found.fallback == decision.picks[0].winner:
        reason = f"the fallback; no row leads it by more than {100 * standings[0].margin:.1f} %"
    elif winner == incumbent and len(last.band) > 1:
        reason = f"the incumbent, within the margin of {margin} of the fastest"
    elif len(decision.picks) > 1:
        reason = f"of the rows that {decision.picks[0].regime} cannot tell apart, the one for {last.regime}"
    elif len(last.band) > 1:
        reason = f"leads the fallback; first by name of {len(last.band)} rows within the margin of {margin}"
    else:
        reason = f"leads every other row by more than {margin}"
    found.rows[winner] = dataclasses.replace(found.rows[winner], verdict="winner", reason=reason)
    return reason


def _verdict(
    name: str,
    kin: Sequence[str],
    by_name: Mapping[str, stats.Standing],
    primary: stats.Standing,
    decision: stats.Decision,
) -> tuple[str, str]:
    """What became of a measured row that did not win: by the last regime that had it in question.

    ``kin`` are the primary's finalists that do the same work there as this row.
    """
    for pick in reversed(decision.picks):
        if name in pick.among:
            standing = by_name[pick.regime]
            if pick.held == stats.NOISE:
                return "tied", f"too noisy at {pick.regime} to tell (margin {100 * standing.margin:.1f} %)"
            if name in pick.band:
                if pick.held == stats.BEST:
                    return "tied", f"its lead at {pick.regime} does not show in the best samples"
                return "tied", f"within the margin of {100 * standing.margin:.1f} % at {pick.regime}"
            fastest = min(standing.final[other].centre for other in pick.among)
            return "slower", f"{percent(standing.final[name].centre / fastest)} time at {pick.regime}"
    fastest = min(e.centre for e in primary.screened.values())
    behind = percent(primary.screened[name].centre / fastest)
    if decision.picks[0].held == stats.NOISE:
        return "tied", f"too noisy at {primary.regime} to tell (margin {100 * primary.margin:.1f} %)"
    tied = [other for other in kin if other in decision.picks[0].band]
    if tied:
        return "tied", f"does at {primary.regime} what {tied[0]} does"
    return "slower", f"{behind} time at {primary.regime} in the screening"


def _comment(
    found: _Entrants, regimes: Sequence[Regime], readings: Mapping[str, race.Reading], winner: str, plan: race.Plan
) -> None:
    """Notes that a reader of the table should see beside it."""
    for regime in regimes:
        reading = readings.get(regime.name)
        if reading is None or not reading.final:
            continue
        if regime.decides and reading.margin > stats.CEILING:
            found.notes.append(
                f"too noisy at {regime.name}: the fallback differs from itself by up to {100 * reading.floor:.1f} %, "
                f"and above {100 * stats.CEILING:.0f} % no lead is believed; retune when the box is quiet"
            )
        elif regime.decides and reading.floor > plan.least_margin:
            found.notes.append(
                f"noisy at {regime.name}: the fallback differs from itself by up to {100 * reading.floor:.1f} %, "
                f"so only a lead of more than that counts"
            )
        best = {**reading.screened, **reading.final}
        if winner != found.fallback and winner in best and found.fallback in best:
            ratio = best[found.fallback].centre / best[winner].centre
            if ratio < 1 - reading.margin:
                found.notes.append(f"the winner is slower than the fallback at {regime.name} ({percent(ratio)})")
    if not found.complete:
        found.notes.append("the time limit came first: not every row was measured to the end")
