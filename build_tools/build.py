# SPDX-License-Identifier: Apache-2.0
"""Building modules of one declaring file: into an install, or into the user's cache."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tunekit import paths
from tunekit._manifest import named_rows, write_atomically
from tunekit.cpu import this_box
from tunekit.dispatch import index_path, read_index
from tunekit.errors import ToolchainError, TunekitError
from tunekit.kernel import Kernel
from tunekit.module import PREFIX
from tunekit.paths import module_suffix
from tunekit.rows import REFERENCE, split_name

from . import cross
from .link import build_core, build_module
from .objects import WHOLE, Compiled, Progress, compile_jobs, disassemblers
from .plan import Job, plan, row_jobs
from .render import forget_templates, render
from .toolchain import Runner, Toolchain, baseline_flags, find_toolchain

KEPT_RELEASES = 4
"""Releases of one package whose modules of one kind a cache keeps."""


@dataclass
class Report:
    """What a build did.

    Attributes:
        kind: ``fat``, ``grid``, ``stamped``, ``reference-only`` or ``standalone``.
        path: the module, or None where there was nothing to build.
        built: ``kernel: rows`` that are in it.
        dropped: ``kernel: {row: reason}`` for rows that the compiler could not build.
        declined: ``kernel: {row: reason}`` for rows that cannot be emitted for this architecture.
        compiled, cached: objects that were compiled and that were there already.
        seconds: wall time.
        compiler: the first line of its ``--version``.
        unread: why no object was read back for instructions that its row does not have, or empty.
        sources: ``kernel`` to the digest of what its rows were rendered from.
    """

    kind: str
    path: Path | None = None
    built: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, dict[str, str]] = field(default_factory=dict)
    declined: dict[str, dict[str, str]] = field(default_factory=dict)
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0
    compiler: str = ""
    unread: str = ""
    sources: dict[str, str | None] = field(default_factory=dict)


def fat_rows(kernel: Kernel) -> list[str]:
    """The rows of the fat module: the whole fallback chain, whatever this CPU supports."""
    return [suffix for suffix in kernel.fallback if suffix != REFERENCE]


def _build(
    runner: Runner,
    toolchain: Toolchain,
    kernels: Sequence[Kernel],
    kind: str,
    rows: Mapping[str, Collection[str] | None],
    reference: bool,
    folder: Path,
    objects: Path,
    progress: Progress | None,
) -> Report:
    start = time.monotonic()
    forget_templates()  # the stamp names the templates that this build read, as they are now
    report = Report(kind, compiler=toolchain.label)
    jobs: list[Job] = []
    for kernel in kernels:
        found, declined = plan(kernel, toolchain.arch, rows[kernel.key], reference)
        jobs += found
        report.declined[kernel.key] = declined
    compiled = compile_jobs(runner, toolchain, jobs, objects, progress)
    _check_references(compiled)
    built = build_module(
        runner, toolchain, kernels[0].scope.name, kernels, kind, compiled, report.declined, folder, objects
    )
    for key, entry in built.stamp["kernels"].items():
        report.built[key] = list(dict.fromkeys(row["suffix"] for row in entry["rows"]))
        report.dropped[key] = entry["dropped"]
        report.sources[key] = entry["source"]
    report.unread = disassemblers(toolchain.arch)[1]
    report.path = built.path
    report.compiled = sum(c.path is not None and not c.cached for c in compiled)
    report.cached = sum(c.cached for c in compiled)
    report.seconds = time.monotonic() - start
    return report


def _check_references(compiled: Sequence[Compiled]) -> None:
    """Portable C that does not compile at the baseline is a fault of the family, never of a row."""
    for item in compiled:
        if item.job.row is None and item.problem:
            raise ToolchainError(f"the portable C reference of {item.job.kernel.key} does not compile: {item.problem}")


def _wanted(kernels: Sequence[Kernel], kind: str) -> dict[str, Collection[str] | None]:
    if kind == "grid":
        return {k.key: None for k in kernels}
    if kind == "reference-only":
        return {k.key: () for k in kernels}
    return {k.key: fat_rows(k) for k in kernels}


def build_into(
    kernels: Sequence[Kernel],
    folder: Path,
    scratch: Path,
    kind: str = "fat",
    winners: Mapping[str, str] | None = None,
    runner: Runner | None = None,
    progress: Progress | None = None,
) -> Report:
    """Build a declaring file's module into a package folder, as an install does. Older ones are the caller's to remove.

    Args:
        kernels: the kernels of one declaring file.
        folder: where the module goes, beside the declaring file.
        scratch: where objects are kept between builds.
        kind: ``fat``, ``grid``, ``reference-only`` or ``standalone``.
        winners: ``scope.kernel`` and ``scope.seat`` to rows that a standalone build ships beside the fallback chain.

    Raises:
        ToolchainError, TemplateError.
    """
    runner = runner or Runner()
    toolchain = find_toolchain(runner)
    folder.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(kernels, kind)
    for kernel in kernels:
        own = wanted[kernel.key]
        ships = [(winners or {}).get(f"{kernel.scope.name}.{name}", REFERENCE) for name in (kernel.name, *kernel.seats)]
        if own is not None:
            wanted[kernel.key] = [*own, *(suffix for suffix in ships if suffix != REFERENCE)]
    return _build(runner, toolchain, kernels, kind, wanted, True, folder, scratch, progress)


def build_core_into(folder: Path, scratch: Path, sources: Path, runner: Runner | None = None) -> Path:
    """Build ``tunekit._core`` into a folder."""
    runner = runner or Runner()
    toolchain = find_toolchain(runner)
    folder.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    return build_core(runner, toolchain, sources, folder / f"_core{module_suffix()}", scratch)


@contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    import filelock

    with filelock.FileLock(str(folder / ".lock"), timeout=600):
        yield


def _write_index(kernel: Kernel, kind: str, compiler: str, path: Path, report: Report) -> None:
    """Name a module first in its index. Those of other releases stay: environments that have them share this cache."""
    entry = {"file": path.name, "built": report.built, "compiler": report.compiler, "sources": report.sources}
    index = index_path(kernel, kind, compiler)
    others = [e for e in read_index(index) if e["sources"] != entry["sources"]]
    data = {"modules": [entry, *others[: KEPT_RELEASES - 1]]}
    write_atomically(index, (json.dumps(data, indent=1) + "\n").encode())


def build_cached(
    kernels: Sequence[Kernel],
    kind: str,
    rows: Mapping[str, Collection[str]] | None = None,
    runner: Runner | None = None,
    progress: Progress | None = None,
    compiler: str = "",
) -> Report:
    """Build a module of one declaring file's kernels into the user's cache, and name it in the index.

    Args:
        kernels: all kernels of one declaring file.
        kind: ``grid`` (every row), ``stamped`` (the rows given) or ``fat`` (for an install that had no compiler).
        rows: for ``stamped``: ``scope.kernel`` to suffixes.
        compiler: the name of another compiler than the usual one; its module stands beside the usual one's, and holds
            no reference.

    Raises:
        ToolchainError, TemplateError: nothing could be built.
        TunekitError: the cache folder is refused or cannot be written.
    """
    runner = runner or Runner()
    first = kernels[0]
    folder = paths.private_folder(paths.modules_folder(this_box().key, first.scope.name))
    objects = paths.private_folder(paths.objects_folder())
    toolchain = cross.named(runner, compiler) if compiler else find_toolchain(runner)
    reference = kind != "stamped" and not compiler
    wanted: Mapping[str, Collection[str] | None] = (
        {k.key: (rows or {}).get(k.key, ()) for k in kernels} if kind == "stamped" else _wanted(kernels, kind)
    )
    try:
        report = _build(runner, toolchain, kernels, kind, wanted, reference, folder, objects, progress)
        with _cache_lock(folder):
            if report.path is not None:
                _write_index(first, kind, compiler, report.path, report)
                _prune(folder)
    except OSError as error:
        raise TunekitError(
            f"cannot write the cache {folder}: {error.strerror or error}; "
            f"set TUNEKIT_CACHE to a folder that can be written to"
        ) from error
    return report


def build_named(
    kernels: Sequence[Kernel], runner: Runner | None = None, progress: Progress | None = None
) -> list[Report]:
    """Build just the rows that the manifests name for one declaring file's kernels, each by the compiler it names.

    A row whose compiler is not to be had here is built by the usual one. Raises as :func:`build_cached`.
    """
    runner = runner or Runner()
    wanted: dict[str, dict[str, list[str]]] = {}
    for kernel in kernels:
        for suffix, compiler in map(split_name, named_rows(kernel)):
            if compiler:
                try:
                    cross.named(runner, compiler)
                except ToolchainError:
                    compiler = ""
            rows = wanted.setdefault(compiler, {}).setdefault(kernel.key, [])
            rows += [] if suffix in rows else [suffix]
    return [
        build_cached(kernels, "stamped", rows, runner, progress, compiler) for compiler, rows in sorted(wanted.items())
    ]


def _prune(folder: Path) -> None:
    """Remove modules that no index names and that are older than a day (a starting process may still load one)."""
    named = set()
    for index in folder.glob("*.json"):
        try:
            named |= {entry["file"] for entry in read_index(index)}
        except OSError:
            continue
    for path in folder.glob(f"{PREFIX}*{module_suffix()}"):
        try:
            if path.name not in named and time.time() - path.stat().st_mtime > 86400:
                path.unlink()
        except OSError:
            continue


# --- what a person asks to see ---------------------------------------------------------------------------


def _job(kernel: Kernel, suffix: str, arch: str, alternative: int) -> Job:
    row = kernel.row(suffix)
    if suffix == REFERENCE:
        return Job(kernel, None, 0, (), (*baseline_flags(arch), "-O3", *kernel.cflags))
    if row is None:
        raise TunekitError(
            f"kernel {kernel.key} has no row {suffix!r}; see: python -m tunekit status --why-not {kernel.name}"
        )
    jobs = row_jobs(kernel, row, arch)
    if isinstance(jobs, str):
        raise TunekitError(f"row {suffix!r} is declined for {arch}: {jobs}")
    if not 0 <= alternative < len(jobs):
        raise TunekitError(f"row {suffix!r} has {len(jobs)} alternatives, numbered from 0")
    return jobs[alternative]


def row_source(kernel: Kernel, suffix: str, arch: str, alternative: int = 0) -> str:
    """The rendered C of a row (or ``reference``) for an architecture."""
    job = _job(kernel, suffix, arch, alternative)
    return render(kernel, job.row, arch, job.alternative, job.features)


def row_assembly(kernel: Kernel, suffix: str, runner: Runner, toolchain: Toolchain, alternative: int = 0) -> str:
    """The assembly that the compiler makes of a row, with the flags that ship. Raises ToolchainError."""
    job = _job(kernel, suffix, toolchain.arch, alternative)
    text = render(kernel, job.row, toolchain.arch, job.alternative, job.features)
    with tempfile.TemporaryDirectory(prefix="tunekit-") as scratch:
        Path(scratch, "unit.c").write_text(text, encoding="utf-8")
        command = [*toolchain.command, *toolchain.places, *job.flags, f"-D{WHOLE}", "-S", "unit.c", "-o", "unit.s"]
        status, _, errors = runner.run(command, cwd=Path(scratch))
        if status != 0:
            raise ToolchainError(f"row {suffix!r} does not compile", command, status, errors)
        return Path(scratch, "unit.s").read_text(encoding="utf-8", errors="replace")


__all__ = [
    "Report", "build_cached", "build_core_into", "build_into", "build_named", "fat_rows", "row_assembly", "row_source",
]
