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
import difflib
import importlib
import platform
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import _templates
from tunekit.console import Console, Step
from tunekit.errors import (
    FamilyError,
    ManifestError,
    PolicyError,
    TemplateError,
    ToolchainError,
    TunekitError,
    in_words,
    told,
)
from tunekit.kernel import Kernel
from tunekit.measure import gate, race, racing, stats
from tunekit.measure.competition import Competition, Entrants
from tunekit.measure.confirm import (
    REJECTED,
    UNFINISHED,
    UNUSABLE,
    Arm,
    Crown,
    Times,
    confirm,
    crown,
    settled,
)
from tunekit.measure.family import (
    NoFixtures,
    chains_of,
    declaration_digest,
    fixtures_of,
    pair_name,
    row_digests,
)
from tunekit.measure.fixtures import EVERYTHING, BoundRow, Chain, ConfirmFixtures, Fixtures, check_regimes
from tunekit.measure.journal import Journal, confirm_key
from tunekit.measure.race import Deadline
from tunekit.measure.record import ConfirmRecord, KernelRecord, RowRecord, RunRecord, merge
from tunekit.rows import REFERENCE, by_compiler, compilers_in, split_name

DONE, FAILED, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130

BUILD_SHARE = 0.5
"""Of a time limit, how much the build may use: a grid that was built and never raced chooses nothing."""

CONFIRM_SHARE = 0.4
"""Of what is left after the checks, how much the races leave for confirming who wins them."""

_CHAINS = "its chains"
"""What stands in the place of a chain where the family's code gave none."""

_NO_TIME = "the time limit came first; the next run goes on from there"

_MEASURED = ("winner", "tied", "slower", "unconfirmed")


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

    def impossible(self, kernel: Kernel, suffix: str) -> str | None:
        """Why a row could not run here even if it were built, or None."""
        from tunekit import dispatch

        row = kernel.row(suffix)
        if suffix == REFERENCE:
            return None
        if row is None:
            near = difflib.get_close_matches(suffix, [r.suffix for r in kernel.rows], 3, 0.4)
            return f"the grid of {kernel.key} has no such row" + (f"; near it: {', '.join(near)}" if near else "")
        world, _ = dispatch.world_of(kernel, grid=True)
        declined = kernel.refuses(row, world.arch)
        if declined is not None:
            return f"declined: {declined}"
        alternatives = [frozenset(alternative) - world.features for alternative in kernel.targets(row)]
        lacking = min(alternatives, key=len, default=frozenset()) | {*kernel.requires(row).missing(world.features)}
        return f"this CPU lacks {', '.join(sorted(lacking))}" if lacking else None

    def read_model(self, kernels: Sequence[Kernel], model: str) -> None:
        """Look at the file of ``--model`` before minutes of work depend on it.

        Raises:
            TunekitError: it is no file, or no family of these kernels reads it.
        """
        path = Path(model)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise TunekitError(f"--model {model}: it is not a regular file")
            with open(path, "rb"):
                pass
        except OSError as error:
            raise TunekitError(f"--model {model}: {error.strerror or error}") from error
        reasons = []
        for kernel in kernels:
            try:
                fixtures = self.fixtures(kernel)
                if not isinstance(fixtures, ConfirmFixtures):
                    reasons.append(f"{kernel.key} has no confirm() that could read it")
                    continue
                self.chains(kernel, fixtures, model)
                return
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # an author's own code: what it raises is told in its place
                reasons.append(in_words(error))
        raise TunekitError(f"--model {model}: {'; '.join(dict.fromkeys(reasons)) or 'no kernel reads it'}")

    def compilers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of compilers that a user named, those other than the usual one. Raises TunekitError where one is not here."""
        if not names:
            return ()
        tools = _build_tools()
        try:
            return tuple(tools.others(tools.Runner(), names))
        except ToolchainError as error:
            raise TunekitError(f"--compilers {','.join(names)}: {error.args[0]}") from error

    def build(
        self, kernels: Sequence[Kernel], progress: Callable[[int, int, str], None], compiler: str = ""
    ) -> Built:
        """Build the grid of all kernels of one declaring file, by a compiler (``""``: the usual one).

        An exception of ``progress`` ends the build.
        """
        from tunekit import dispatch

        try:
            tools = _build_tools()
        except ToolchainError as error:
            return Built(problem=str(error))
        runner = tools.Runner()
        try:
            report = tools.build_cached(kernels, "grid", runner=runner, progress=progress, compiler=compiler)
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
        """Build the small modules with just what the manifest names for the kernels of one declaring file."""
        _build_tools().build_named(kernels)

    def grid(self, kernel: Kernel, compilers: Sequence[str]) -> Mapping[str, BoundRow]:
        """Built rows that run here, the C reference among them as ``reference``; those of compilers as ``row@name``."""
        from tunekit import dispatch

        return dispatch.grid_rows(kernel, compilers)

    def why_not(self, kernel: Kernel, compilers: Sequence[str]) -> Mapping[str, str]:
        """The reason for every row that cannot run here."""
        from tunekit import dispatch

        return dispatch.why_not(kernel, compilers)

    def explained(self, kernel: Kernel, why: Mapping[str, str], problem: str) -> Mapping[str, str]:
        """``why`` with the cause where a row's object is missing: the CPU, ``problem``, a cache that is not loaded."""
        from tunekit import dispatch

        world, _ = dispatch.world_of(kernel, grid=True, judged=False)
        cause = problem or dispatch.unloadable(kernel)
        found = dict(why)
        for suffix in why:
            row = kernel.row(suffix)
            if row is None or suffix in world.built or suffix in world.dropped or kernel.refuses(row, world.arch):
                continue
            found[suffix] = self.impossible(kernel, suffix) or (
                f"not built: {cause}" if cause and not split_name(suffix)[1] else why[suffix]
            )
        return found

    def fixtures(self, kernel: Kernel) -> Fixtures:
        """The family's gates and regimes. Raises NoFixtures where it declares none."""
        return fixtures_of(kernel)

    def judged(self, kernel: Kernel, verdicts: Mapping[tuple[str, tuple[str, ...]], str | None]) -> None:
        """Keep which rows failed their checks: such a row is not chosen here. Raises ManifestError."""
        from tunekit import dispatch

        dispatch.judged(kernel, verdicts)

    def job(self, kernel: Kernel) -> gate.Job:
        """How a child process finds the kernel's rows and fixtures."""
        return gate.Job("tunekit.measure.family:load_rows", (kernel.module, kernel.scope.name, kernel.name))

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

    def seats(self, kernel: Kernel) -> Mapping[str, str]:
        """What the manifest names for the kernel's seats now."""
        from tunekit import _manifest

        return _manifest.seats_get(kernel)

    def chains(self, kernel: Kernel, fixtures: Fixtures, model: str | None) -> Sequence[Chain]:
        """What a winner of the kernel is confirmed on (see :func:`tunekit.measure.family.chains_of`)."""
        return chains_of(kernel, fixtures, model)

    def arm(self, kernel: Kernel, arm: Arm, chain: Chain, model: str | None, deadline: Deadline) -> Times:
        """Run one arm in a process of its own. Raises ArmFailed where it scores nothing."""
        from tunekit.measure.arm import run_arm

        job = gate.Job(
            "tunekit.measure.family:load_chain",
            (kernel.module, kernel.scope.name, kernel.name, chain.name, model or ""),
        )
        named = {kernel.name: arm.row, **arm.seats}
        pins = {f"{kernel.scope.name}.{name}": row for name, row in named.items()}
        return run_arm(job, arm, pins, chain, deadline)

    def journal(self, kernel: Kernel, compiler: str, options: Options, compilers: Mapping[str, str]) -> Journal:
        """What earlier runs found out about the kernel on this box, as far as it still counts.

        ``compilers`` are the others than the usual one, name to version line: they count for their own rows alone.
        """
        from tunekit import __version__, paths
        from tunekit.cpu import this_box

        hashes = {name: digest for name, digest in self.hashes(kernel).items() if name != "grid"}
        key = {
            "tunekit": __version__,
            "box": this_box().to_json(),
            "machine": platform.node(),
            "compiler": compiler,
            "declaration": declaration_digest(kernel),
            "templates": hashes,
            "plan": dataclasses.asdict(options.plan),
            "seed": options.seed,
        }
        try:
            folder = paths.private_folder(paths.cache_root() / "journal" / this_box().key)
        except TunekitError:
            return Journal(None, key, row_digests(kernel, compilers))
        return Journal(folder / f"{kernel.key}.json", key, row_digests(kernel, compilers), options.fresh)

    def write(
        self, winners: Mapping[Kernel, str], record: dict[str, Any], seats: Mapping[Kernel, Mapping[str, str]]
    ) -> str:
        """Write one scope's manifest and record; the manifest's path."""
        from tunekit import _manifest

        return str(_manifest.manifest_set_many(next(iter(winners)).scope, winners, record=record, seats=seats))


def _build_tools(name: str = "") -> Any:
    try:
        return importlib.import_module("tunekit.build_tools" + (f".{name}" if name else ""))
    except ImportError as error:
        raise ToolchainError(f"the build tools cannot be imported ({error}); install tunekit with pip") from error


# --- a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a run is asked to do.

    Attributes:
        kernels: names (or ``scope.name``) to tune; empty for all.
        time_limit: seconds for the whole run, or None.
        dry_run: measure and report, write nothing.
        fresh: forget the incumbent and the journal; ties go to the fallback.
        in_process: check and race rows in this process, where no child can be had.
        seed: of the orders of the rounds.
        limits: of the children that check rows.
        plan: of the races.
        model: the file of a model to confirm winners on, or None for what the family finds by itself.
        confirm: a row to confirm as if it had won the races, which are then left out; nothing is written.
        compilers: names of compilers whose rows race beside the usual one's.
    """

    kernels: tuple[str, ...] = ()
    time_limit: float | None = None
    dry_run: bool = False
    fresh: bool = False
    in_process: bool = False
    seed: int = 0
    limits: gate.Limits = field(default_factory=gate.Limits)
    plan: race.Plan = field(default_factory=race.Plan)
    model: str | None = None
    confirm: str | None = None
    compilers: tuple[str, ...] = ()


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
    others = rooms.compilers((*options.compilers, *compilers_in([options.confirm])))
    options = dataclasses.replace(options, compilers=others)
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
    _look_ahead(chosen, options, rooms)
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
                broken.append((scope, f"its code ended the run with {told(error)}"))
    results += [_unusable(scope, problem, options, rooms) for scope, problem in broken]
    console.clear()
    return results


def _look_ahead(chosen: dict[str, list[Kernel]], options: Options, house: House) -> None:
    """Refuse what ``--confirm`` and ``--model`` name, where it cannot be, before anything is built.

    Kernels that cannot run the row to be confirmed are taken out of ``chosen``.

    Raises:
        TunekitError: no kernel has the row, or can run it here; or no family reads the model.
    """
    every = [kernel for kernels in chosen.values() for kernel in kernels]
    if options.confirm is not None and every:
        reasons = {kernel.key: house.impossible(kernel, options.confirm) for kernel in every}
        if None not in reasons.values():
            why = "; ".join(dict.fromkeys(str(reason) for reason in reasons.values()))
            raise TunekitError(f"--confirm {options.confirm}: {why}")
        for scope in list(chosen):
            chosen[scope] = [kernel for kernel in chosen[scope] if reasons[kernel.key] is None]
            if not chosen[scope]:
                del chosen[scope]
    if options.model is not None and every:
        house.read_model([kernel for kernels in chosen.values() for kernel in kernels], options.model)


def _unusable(scope: str, problem: str, options: Options, house: House) -> ScopeResult:
    """The result of a scope of which nothing was tuned."""
    box, brand = house.box()
    record = RunRecord(scope, box, brand, options.seed, _now(), _now(), options.time_limit, {}, {}, {})
    return ScopeResult(record, None, FAILED, problem=problem)


def entrants(
    kernel: Kernel, house: House, fresh: bool, problem: str = "", compilers: Sequence[str] = ()
) -> Entrants | KernelRecord:
    """A kernel's rows before anything ran, or the record that says why nothing can be chosen.

    ``problem`` is why its module was not built, or not to the end. Rows of ``compilers`` enter beside the usual one's,
    and what the manifest names does, whoever built it.
    """
    previous = house.incumbent(kernel)
    named = () if fresh else (previous, *house.seats(kernel).values())
    every = list(dict.fromkeys((*compilers, *compilers_in(named))))

    def asked(name: str) -> bool:
        _, compiler = split_name(name)
        return compiler in ("", *compilers) or name in named

    bound = {name: row for name, row in house.grid(kernel, every).items() if asked(name)}
    why = house.explained(kernel, house.why_not(kernel, every), problem)
    names = [by_compiler(row.suffix, compiler) for row in kernel.rows for compiler in ("", *every)]
    names = [name for name in names if asked(name)]
    rows = {name: RowRecord("unavailable", why.get(name, "")) for name in names}
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
    seats = {seat: s for seat, s in house.seats(kernel).items() if s in bound} if standing is not None else {}
    for suffix in bound:
        rows[suffix] = RowRecord("unmeasured", "not raced")
    order = [REFERENCE, *names]
    rows = {suffix: rows[suffix] for suffix in order if suffix in rows}
    return Entrants(kernel, bound, fallback, standing, previous, rows, seats=seats)


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
        self.others: dict[str, dict[str, str]] = {}
        self.problems: dict[str, str] = {}  # why the usual compiler did not build a module, or not to the end

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
            usual, others = self.compilers.get(kernel.module, ""), self.others.get(kernel.name, {})
            records[kernel.name] = dataclasses.replace(
                entry,
                ended=_now(),
                compiler=others.get(split_name(entry.winner or "")[1], usual),
                hashes=self.house.hashes(kernel),
                usual=usual,
                compilers=others,
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
        manifest = None if self.options.dry_run or self.options.confirm else self.write(record)
        record = dataclasses.replace(record, stages=dict(self.stages.taken))
        chosen = any(r.winner is not None for r in records.values())
        status = FAILED if failed else DONE if chosen else NOTHING
        return ScopeResult(record, manifest, status, tuple(self.notes))

    # --- building

    def build(self) -> None:
        modules = list(dict.fromkeys(kernel.module for kernel in self.kernels))
        todo = [(module, compiler) for module in modules for compiler in ("", *self.options.compilers)]
        whole = self.deadline.share(BUILD_SHARE)
        for at, (module, compiler) in enumerate(todo):
            usual, by = not compiler, f" by {compiler}" if compiler else ""
            if self.deadline.over():  # it came while this run waited for its turn
                if usual:
                    self.problems[module] = _NO_TIME
                continue
            limit = whole.share(1 / (len(todo) - at))
            # All kernels of a file share a module, so all are built even where one is tuned.
            siblings = [k for k in self.house.kernels(self.scope) if k.module == module]

            def progress(done: int, of: int, label: str, limit: Deadline = limit, by: str = by) -> None:
                self.console.step(Step("build", self.scope, "", "", done, of, "objects", f"{label}{by}"))
                if limit.over():
                    raise _BuildTimeUp(f"{done} of {of} objects")

            try:
                built = self.house.build(siblings, progress, compiler)
            except _BuildTimeUp as error:
                if usual:
                    self.problems[module] = _NO_TIME
                self.notes.append(
                    f"the build used up its share of the time limit ({error}), so the rows that were built before "
                    "were raced; the objects stay in the cache, and the next run goes on from there"
                )
                continue
            if usual:
                self.compilers[module], self.problems[module] = built.compiler, built.problem
            if built.problem:
                self.notes.append(f"the grid was not built{by}: {built.problem}")

    # --- one kernel

    def one_kernel(self, kernel: Kernel, deadline: Deadline) -> tuple[KernelRecord, bool]:
        """A kernel's record, and whether its reference or its fallback failed."""
        problem = self.problems.get(kernel.module, "")
        found = entrants(kernel, self.house, self.options.fresh, problem, self.options.compilers)
        if isinstance(found, KernelRecord):
            return found, False
        try:
            fixtures = self.house.fixtures(kernel)
            check_regimes(fixtures.regimes())
        except NoFixtures:
            own = f"; its scope's tuner: python -m {kernel.scope.tuner}" if kernel.scope.tuner else ""
            text = f"not raced: the kernel declares no fixtures={own}"
            _not_raced(found, text)
            return KernelRecord(None, found.previous, found.fallback, text, rows=found.rows), False
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an author's own code, which may even exit
            text = f"its fixtures cannot be used: {in_words(error)}"
            _not_raced(found, "not raced: its fixtures cannot be used")
            return KernelRecord(None, found.previous, found.fallback, text, rows=found.rows), True
        compiler = self.compilers.get(kernel.module, "")
        names = {split_name(name)[1]: row for name, row in found.bound.items()}
        others = {name: row.compiler for name, row in names.items() if name}
        self.others[kernel.name] = others
        journal = self.house.journal(kernel, compiler, self.options, others)
        with self.stages.timed("gate"):
            try:
                reason = self.check(found, journal, deadline)
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
        if self.options.confirm:
            return self.confirm_only(found, journal, fixtures, deadline), False
        try:
            record = self.compete(found, journal, fixtures, deadline)
        except FamilyError as error:
            text = f"its rows cannot be raced: {error}"
            _not_raced(found, f"not raced: {text}")
            return KernelRecord(None, found.previous, found.fallback, text, rows=found.rows), True
        bad = record.winner is None
        return (record if bad else self.keep(found, record)), bad or bool(found.unsound)

    def keep(self, found: Entrants, record: KernelRecord) -> KernelRecord:
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
            record,
            winner=before,
            seats=dict(found.seats),
            reason=reason,
            complete=False,
            rows=rows,
            notes=[*record.notes, note],
        )

    def job(self, kernel: Kernel) -> gate.Job:
        """How a child finds the kernel's rows, those of other compilers among them."""
        job = self.house.job(kernel)
        return dataclasses.replace(job, args=(*job.args, *(f"@{name}" for name in self.others[kernel.name])))

    def remember(self, found: Entrants) -> None:
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

    def check(self, found: Entrants, journal: Journal, deadline: Deadline) -> str | None:
        """Run the gates; None, or why the kernel cannot go on."""
        # First what the rest is compared with, then the incumbent, then the fallback chain, then the others.
        first = [REFERENCE, found.fallback, found.incumbent, *found.kernel.fallback]
        order = [s for s in dict.fromkeys([*first, *found.bound]) if s is not None and s in found.bound]
        if self.options.confirm:
            order = [s for s in order if s in (found.fallback, self.options.confirm)]
        base = [s for s in order if s in (REFERENCE, found.fallback)]
        job = self.job(found.kernel)
        known = {s: gate.Verdict(s, gate.PASSED, "", t) for s in order if (t := journal.passed(s)) is not None}
        for suffix in set(order) & set(journal.pages.lates):
            why = f"{journal.pages.lates[suffix]} (in an earlier run; --fresh asks again)"
            known[suffix] = gate.Verdict(suffix, gate.REJECTED, why)
        if known:
            found.reused.append(f"the checks of {len(known)} rows")
        passed = 0  # of all rows, before those that are asked about now

        def progress(suffix: str, case: str, done: int, of: int) -> None:
            item = f"{suffix}: {case}"
            self.console.step(Step("check", found.kernel.key, "", "", passed + done, len(order), "rows", item))

        def heard(verdict: gate.Verdict) -> None:
            if verdict.state != gate.SKIPPED:
                journal.heard(verdict.suffix, verdict.state == gate.PASSED, verdict.seconds)

        def ask(suffixes: Sequence[str], limit: Deadline) -> dict[str, gate.Verdict]:
            nonlocal passed
            new = [s for s in suffixes if s not in known]
            passed += len(suffixes) - len(new)
            run = gate.gate_rows_here if self.options.in_process else self._gate_rows
            asked = run(job, new, deadline=limit, progress=progress, heard=heard) if new else {}
            passed += len(new)
            return {s: known.get(s) or asked[s] for s in suffixes}

        verdicts = ask(base, deadline)
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
                verdicts.update(ask([after], deadline))
                found.rows[after] = _row_of(verdicts[after])
        for suffix in dict.fromkeys((*(s for s in base if s not in found.unsound), found.fallback)):
            if verdicts[suffix].state != gate.PASSED:
                what = "the reference" if suffix == REFERENCE else f"the fallback {suffix}"
                failed = "failed a check" if verdicts[suffix].state == gate.REJECTED else "was not checked"
                return f"{what} {failed}: {verdicts[suffix].reason}"
        # Half of what is left is for the race: rows that were checked and never timed help nobody.
        rest = ask([s for s in order if s not in verdicts], deadline.share(0.5))
        for suffix, verdict in rest.items():
            found.rows[suffix] = _row_of(verdict)
        verdicts.update(rest)
        found.alive = [s for s in found.bound if s in verdicts and verdicts[s].state == gate.PASSED]
        found.complete = all(v.state != gate.SKIPPED for v in verdicts.values())
        return None

    def _gate_rows(
        self,
        job: gate.Job,
        suffixes: Sequence[str],
        *,
        deadline: Deadline,
        progress: gate.Progress,
        heard: Callable[[gate.Verdict], None],
    ) -> dict[str, gate.Verdict]:
        return gate.gate_rows(
            job, suffixes, limits=self.options.limits, deadline=deadline, progress=progress, heard=heard
        )

    def compete(self, found: Entrants, journal: Journal, fixtures: Fixtures, deadline: Deadline) -> KernelRecord:
        """Race the rows that are left, confirm who won, and decide."""
        regimes = check_regimes(fixtures.regimes())
        where: racing.Course | racing.Here
        if self.options.in_process:
            where = racing.Here(found.bound, regimes, self.clock)
        else:
            where = racing.Course(self.job(found.kernel), self.options.limits)
        with where as course:
            known = Competition(
                found,
                regimes,
                journal,
                self.options.plan,
                self.options.seed,
                course,
                self.stages.timed,
                self.console.step,
            )
            result = known.run(deadline.share(1 - CONFIRM_SHARE))
        if set(course.lost) - course.slow and not self.options.dry_run:
            self.remember(found)

        def record(winner: str | None, reason: str, **more: Any) -> KernelRecord:
            return KernelRecord(
                winner,
                found.previous,
                found.fallback,
                reason,
                rows=found.rows,
                regimes=result.regimes,
                notes=found.notes,
                reused=found.reused,
                **{"complete": False, **more},
            )

        if result.broken:
            return record(None, result.broken)
        if not found.complete:
            found.notes.append("the time limit came first: not every row was measured to the end")
        if result.decision is None:
            winner = found.incumbent or found.fallback
            reason = "too little was measured within the time limit to choose by; this is what ran before"
            found.rows[winner] = dataclasses.replace(found.rows[winner], verdict="winner", reason=reason)
            return record(winner, reason, seats=dict(found.seats) if winner == found.incumbent else {})
        reason = known.judge()
        picks = {pick.regime: pick.winner for pick in result.decision.picks}
        winner = result.decision.winner
        if result.decision.picks[0].held == stats.NOISE:
            # What ran before stays, since nothing can be told here, and that holds for chains of work, too.
            crowned = Crown(winner, dict(found.seats) if winner == found.incumbent else {}, [])
        elif winner == found.fallback and not known.seats(winner):
            crowned = Crown(winner, {}, [])
        else:
            with self.stages.timed("confirm"):
                crowned = self.confirm(found, journal, fixtures, winner, known.seats, deadline)
        verdicts_of = {entry.verdict for entry in crowned.records}
        if crowned.row != result.decision.winner:
            reason = self.dethrone(found, result.decision.winner, crowned)
        if UNFINISHED in verdicts_of:
            found.complete = False
        elif result.quiet and found.complete and all(settled(entry) for entry in crowned.records):
            measured = {s: found.rows[s] for s in known.racers if found.rows[s].verdict in _MEASURED}
            journal.settle(measured, known.racers)
        if journal.problem:
            self.notes.append(f"{journal.problem}; the next run starts from nothing")
        return record(
            crowned.row,
            reason,
            picks=picks,
            complete=found.complete,
            seats=crowned.seats,
            confirm=crowned.records,
        )

    # --- confirming

    def confirm(
        self,
        found: Entrants,
        journal: Journal,
        fixtures: Fixtures,
        winner: str,
        picks: Callable[[str], Mapping[str, str]],
        deadline: Deadline,
    ) -> Crown:
        """Put the race's winner, and what won in its seats, to what applications do."""
        chains: list[Chain] = []
        none = ""

        def put(challenger: Arm, base: Arm, what: str) -> list[ConfirmRecord]:
            nonlocal none
            if not chains and not none:
                none = self.chains(found.kernel, fixtures, chains)
            if none:
                return [ConfirmRecord(_CHAINS, what, challenger.label, base.label, UNUSABLE, none)]
            if challenger.seats and not self.options.in_process:
                reason = self.check_pair(found.kernel, challenger, deadline)
                if reason is not None:
                    return [
                        ConfirmRecord("gate", what, challenger.label, base.label, REJECTED, f"together: {reason}")
                    ]
            done: list[ConfirmRecord] = []
            for chain in chains:
                key = confirm_key(chain.name, [p.work for p in chain.parts], what, challenger.label, base.label)
                old = journal.confirm(key)
                if old is not None:
                    found.reused.append(f"the confirmation of {challenger.label} on {chain.name}")
                    done.append(old)
                else:
                    new = confirm(challenger, base, what, [chain], self.arm_of(found.kernel), deadline, progress)
                    for entry in new:
                        if settled(entry):
                            journal.keep_confirm(key, entry)
                    done += new
                if done and done[-1].verdict in (REJECTED, UNFINISHED):
                    break
            return done

        def progress(chain: str, arm: str, done: int, of: int) -> None:
            self.console.step(Step("confirm", found.kernel.key, chain, "", done, of, "pairs at most", arm))

        crowned = crown(winner, found.fallback, picks, put)
        before = found.incumbent
        ended = any(entry.verdict == UNFINISHED for entry in crowned.records)
        if (ended or none) and crowned.row != winner and before is not None and before in found.alive:
            # A time limit says nothing about a row, and no more does a family's broken code: what ran before goes on.
            return Crown(before, dict(found.seats), crowned.records)
        return crowned

    def chains(self, kernel: Kernel, fixtures: Fixtures, into: list[Chain]) -> str:
        """Get the kernel's chains; empty, or why there are none: its winners stay unconfirmed then."""
        try:
            into.extend(self.house.chains(kernel, fixtures, self.options.model))
            return ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an author's own code, which may even exit
            return in_words(error)

    def arm_of(self, kernel: Kernel) -> Callable[[Arm, Chain], Times]:
        def run(arm: Arm, chain: Chain) -> Times:
            return self.house.arm(kernel, arm, chain, self.options.model, self.deadline)

        return run

    def check_pair(self, kernel: Kernel, arm: Arm, deadline: Deadline) -> str | None:
        """Run the gates on a row with another row in a seat of it; None, or the reason against the pair."""
        name = pair_name(arm.row, arm.seats)
        job = self.job(kernel)
        job = dataclasses.replace(job, args=(*job.args, name))
        verdict = gate.gate_rows(job, [name], limits=self.options.limits, deadline=deadline)[name]
        return None if verdict.state == gate.PASSED else verdict.reason

    def dethrone(self, found: Entrants, challenger: str, crowned: Crown) -> str:
        """Note that the race's winner was not confirmed; the reason why another one runs."""
        about = [entry for entry in crowned.records if entry.what == EVERYTHING]
        last = about[-1] if about else None
        why = f"{last.chain}: {last.reason}" if last is not None else "there is nothing to confirm it with"
        found.rows[challenger] = dataclasses.replace(
            found.rows[challenger], verdict="unconfirmed", reason=f"won the races and not {why}"
        )
        reason = f"{challenger} won the races and was not confirmed ({why})"
        found.rows[crowned.row] = dataclasses.replace(found.rows[crowned.row], verdict="winner", reason=reason)
        found.notes.append(f"{reason}; {crowned.row} is kept")
        return reason

    def confirm_only(self, found: Entrants, journal: Journal, fixtures: Fixtures, deadline: Deadline) -> KernelRecord:
        """``--confirm ROW``: leave out the races, as if the row had won them."""
        row = str(self.options.confirm)
        if row not in found.alive:
            known = found.rows.get(row, RowRecord("", "the grid has no such row"))
            return KernelRecord(None, found.previous, found.fallback, f"{row} cannot be confirmed: {known.reason}")
        found.rows[row] = dataclasses.replace(found.rows[row], reason="put to the confirmation by hand")
        with self.stages.timed("confirm"):
            crowned = self.confirm(found, journal, fixtures, row, lambda row: {}, deadline)
        reason = "confirmed" if crowned.row == row else self.dethrone(found, row, crowned)
        if crowned.row == row:
            found.rows[row] = dataclasses.replace(found.rows[row], verdict="winner", reason=reason)
        return KernelRecord(
            crowned.row,
            found.previous,
            found.fallback,
            reason,
            False,
            rows=found.rows,
            notes=found.notes,
            confirm=crowned.records,
        )

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
            seats = {k: record.kernels[k.name].seats for k in winners}
            path = self.house.write(winners, merge(old, record).to_json(), seats)
        with self.stages.timed("stamp"):
            self.console.step(Step("stamp", self.scope, item="the module with the winners"))
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


def _not_raced(found: Entrants, reason: str) -> None:
    for suffix in found.bound:
        if found.rows[suffix].verdict == "unmeasured":
            found.rows[suffix] = dataclasses.replace(found.rows[suffix], reason=reason)


def _row_of(verdict: gate.Verdict) -> RowRecord:
    kind = {gate.PASSED: "unmeasured", gate.REJECTED: "rejected", gate.SKIPPED: "unmeasured"}[verdict.state]
    reason = verdict.reason or ("the time limit came before its race" if kind == "unmeasured" else "")
    return RowRecord(kind, reason, verdict.seconds)
