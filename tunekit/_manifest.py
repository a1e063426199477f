# SPDX-License-Identifier: Apache-2.0
"""The per-box manifest: a flat JSON object ``{"kernel": "suffix"}``, one file per scope.

Reading never raises for a bad file: missing, empty, torn or malformed means untuned, with a reason. Writing
locks, merges with what is there (unknown keys are kept), writes beside the file and renames. Nothing of a bad
file is lost: it is kept as ``<file>.bad``.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunekit import paths
from tunekit.cpu import this_box
from tunekit.environment import settings
from tunekit.errors import ManifestError
from tunekit.kernel import Kernel, Scope
from tunekit.rows import by_compiler, split_name

_JSON_NAMES = {list: "an array", str: "text", int: "a number", float: "a number", bool: "true or false"}
_TOO_LARGE = 16 * 1024 * 1024

RECORD_SCHEMA = 1
"""Of the run record; a record of a newer one is named in the status, and never overwritten."""

COMPILER = "@compiler"
"""Ends the key that says which compiler builds a kernel's or a seat's row, where that is not the usual one.

It stands beside the row, which keeps its plain name: a reader that knows nothing of it runs the row as it has it.
"""

_application: Path | None = None


@dataclass(frozen=True)
class Manifest:
    """What a manifest file said.

    Attributes:
        path: the file, or None where there is none to read.
        entries: kernel to suffix; only the well-formed ones.
        faults: kernel to what is wrong with its entry (not text).
        problem: why the whole file is as good as absent, or None.
        exists: whether the file is there at all.
        origin: ``environment``, ``application``, ``user``, ``machine``, or ``shipped`` with a frozen build.
    """

    path: Path | None
    entries: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    exists: bool = False
    origin: str = "user"

    @property
    def label(self) -> str:
        """How a reason names it."""
        if self.origin == "shipped":
            return "this frozen build"
        kind = "application manifest" if self.origin == "application" else "manifest"
        return f"{kind} {self.path}" if self.path else "the manifest"

    def entry(self, kernel: Kernel, seat: str = "") -> str | None:
        """The row for a kernel, or for a seat of it: under ``scope.name`` where that is spelt out, else its name.

        ``suffix@compiler`` where the manifest names a compiler beside it.
        """
        name = seat or kernel.name
        key = f"{kernel.scope.name}.{name}"
        key = key if key in self.entries or key in self.faults else name
        suffix = self.entries.get(key)
        return None if suffix is None else by_compiler(suffix, self.entries.get(key + COMPILER, ""))

    def fault(self, kernel: Kernel, seat: str = "") -> str | None:
        """What is wrong with the entry of a kernel or a seat, or None."""
        name = seat or kernel.name
        key = f"{kernel.scope.name}.{name}"
        if key in self.entries:
            return None
        found = [one for one in (key, name) if one in self.faults]
        return f"entry {found[0]!r}: {self.faults[found[0]]}" if found else None


def parse_manifest(text: str | bytes, path: Path | None = None) -> Manifest:
    """Read a manifest's text. Pure; never raises for bad text."""

    def bad(reason: str) -> Manifest:
        return Manifest(path, problem=reason, exists=True)

    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            return bad("it is not UTF-8 text")
    if not text.strip():
        return bad("it is empty")
    try:
        data = json.loads(text)
    except RecursionError:
        return bad("it is nested too deeply")
    except ValueError as error:
        return bad(f"it is not JSON ({error})")
    if not isinstance(data, dict):
        return bad(f"it holds JSON {_JSON_NAMES.get(type(data), 'null')}, not an object of kernel to row")
    entries = {k: v for k, v in data.items() if isinstance(v, str)}
    faults = {
        k: f"its value is {json.dumps(v)[:40]}, not the name of a row"
        for k, v in data.items()
        if not isinstance(v, str)
    }
    return Manifest(path, entries, faults, exists=True)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file; a problem is in the result, never raised."""
    try:
        data = paths.read_small(path, _TOO_LARGE)
    except FileNotFoundError:
        return Manifest(path)
    except OSError as error:
        return Manifest(path, problem=f"it cannot be read ({error.strerror or error})", exists=True)
    return parse_manifest(data, path)


def file_name(scope: str) -> str:
    return f"{scope}.tune.json"


def user_path(scope: str) -> Path:
    """The file of this user and box for a scope, whether or not it exists."""
    return paths.state_folder(this_box().key) / file_name(scope)


def site_paths(scope: str) -> list[Path]:
    """The machine-wide files of this box for a scope: an administrator's, read and never written by a tuned process.

    One in each folder of the system's configuration, the weightiest first; that one is written.
    """
    return [folder / file_name(scope) for folder in paths.site_folders(this_box().key)]


def application() -> Path | None:
    """The manifest that this process's application declared, or None. ``TUNEKIT_MANIFEST`` overrides it."""
    return _application if settings().manifest is None else None


def set_application(path: Path | None) -> None:
    """Make a file the application's own manifest (see :func:`tunekit.tune_manifest`, which checks that it may)."""
    global _application
    _application = path


def write_path(scope: str) -> Path:
    """The file that is written for a scope: ``TUNEKIT_MANIFEST``, the application's, or the user's.

    Raises:
        ManifestError: ``TUNEKIT_MANIFEST`` is empty, which means no manifest.
    """
    override = settings().manifest
    if override == "":
        raise ManifestError("TUNEKIT_MANIFEST is empty, which means no manifest: there is no file to write")
    return paths.expand(override).absolute() if override else application() or user_path(scope)


def check_writable(path: Path) -> None:
    """Make the folder of a manifest and try it, before minutes of work depend on it.

    Raises:
        ManifestError: nothing can be written there; the message says why and what mends it.
    """
    import tempfile

    try:
        if path.is_dir():
            raise ManifestError(f"{path} is a folder; name a file in TUNEKIT_MANIFEST")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ManifestError(
            f"the manifest cannot be written: {path.parent}: {error.strerror or error}; "
            "set TUNEKIT_HOME to a folder that can be written to"
        ) from error


def layers(scope: str) -> tuple[Manifest, ...]:
    """What a scope's kernels are looked up in, as it is on disk now; the first that has an entry decides.

    ``TUNEKIT_MANIFEST`` alone where it is set (empty: nothing at all), else the application's own manifest where one
    is declared, the user's file of the scope, and the machine's.
    """
    override = settings().manifest
    if override == "":
        return ()
    if override is not None:
        path = paths.expand(override).absolute()
        found = replace(read_manifest(path), origin="environment")
        return (found if found.exists else replace(found, problem="TUNEKIT_MANIFEST names it and it does not exist"),)
    own = application()
    first = () if own is None else (replace(read_manifest(own), origin="application"),)
    machine = [replace(read_manifest(path), origin="machine") for path in site_paths(scope)]
    there = [found for found in machine if found.exists] or machine[:1]
    return (*first, replace(read_manifest(user_path(scope)), origin="user"), *there)


def record_path(manifest: Path) -> Path:
    """The record of the run that wrote a manifest: ``<scope>.tune.run.json`` beside it."""
    stem = manifest.name.removesuffix(".json").removesuffix(".tune")
    return manifest.with_name(f"{stem}.tune.run.json")


def read_record(manifest: Path | None) -> dict[str, Any] | None:
    """The run record beside a manifest, or None (missing or unreadable: a record never decides a row)."""
    if manifest is None:
        return None
    try:
        data = json.loads(paths.read_small(record_path(manifest)))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def aside(path: Path, ending: str) -> Path:
    """A name beside a file that nothing has yet: ``FILE.bad``, ``FILE.bad2``, ..."""
    names = (path.with_name(f"{path.name}{ending}{number if number > 1 else ''}") for number in range(1, 1000))
    return next((name for name in names if not name.exists()), path.with_name(path.name + ending))


def keep_record(path: Path, new: Mapping[str, Any]) -> None:
    """Put a record aside that the new one must not replace: of a newer tunekit, of another box, or unreadable."""
    try:
        text = paths.read_small(path)
    except FileNotFoundError:
        return
    except OSError:
        text = b""  # a folder, a pipe: nothing that was a record
    try:
        old = json.loads(text)
        schema = old.get("schema", RECORD_SCHEMA)
        if isinstance(schema, int) and schema > RECORD_SCHEMA:
            ending = f"schema{schema}"
        elif old.get("box") != new.get("box"):
            ending = "old"
        else:
            return
    except (ValueError, AttributeError, RecursionError):
        ending = "bad"
    os.replace(path, aside(path, f".{ending}"))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its target, flush it to disk, and rename it into place."""
    import tempfile

    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file of the state folder against other writers. Raises ManifestError where that cannot be had."""
    import filelock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(path.with_name(f".{path.name}.lock")), timeout=30):
            yield
    except filelock.Timeout:
        raise ManifestError(f"{path} is locked by another process for 30 s; try again when it has finished") from None
    except OSError as error:
        raise ManifestError(
            f"cannot write {path}: {error.strerror or error}; set TUNEKIT_HOME to a folder that can be written to"
        ) from error


@contextlib.contextmanager
def turn(
    path: Path, over: Callable[[], bool], waiting: Callable[[], object], without: Callable[[Exception], object]
) -> Iterator[bool]:
    """Take turns at what one process should do at a time; False where the turn did not come until ``over()``.

    Args:
        path: the lock file.
        over: whether to give up.
        waiting: called once, where another process has the turn.
        without: called with the reason where no lock can be had: the work goes on without one.
    """
    import filelock

    lock: filelock.BaseFileLock | None = None
    told, got = False, True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(str(path))
        while True:
            try:
                lock.acquire(timeout=0)
                break
            except filelock.Timeout:
                if not told:
                    waiting()
                    told = True
                if over():
                    lock, got = None, False
                    break
                time.sleep(0.1)  # in slices, so that a signal is obeyed at once
    except (OSError, NotImplementedError) as error:
        without(error)
        lock = None
    try:
        yield got
    finally:
        if lock is not None:
            lock.release()


def _sweep(path: Path) -> None:
    """Remove what a writer that was killed left half-written beside the file; the lock is held."""
    for name in (path.name, record_path(path).name):
        for left in path.parent.glob(f".{glob.escape(name)}.*.new"):
            with contextlib.suppress(OSError):
                left.unlink()


def save(path: Path, entries: Mapping[str, str | None], record: Mapping[str, Any] | None = None) -> None:
    """Merge entries into a manifest file (None removes one) and, with them, write the run record.

    Entries for other kernels stay. A file that cannot be read as a manifest is kept as ``<file>.bad``.

    Raises:
        ManifestError: the folder or file cannot be written, or another process holds the lock.
    """
    if path.is_dir():
        raise ManifestError(f"{path} is a folder; name a file in TUNEKIT_MANIFEST")
    with locked(path):
        _sweep(path)
        merged: dict[str, Any] = {}
        old = read_manifest(path)
        if old.exists and old.problem:
            os.replace(path, aside(path, ".bad"))
        elif old.exists:
            merged = json.loads(paths.read_small(path).decode("utf-8-sig"))
        merged.update(entries)
        for name in entries:
            if not name.endswith(COMPILER) and name + COMPILER not in entries:
                merged.pop(name + COMPILER, None)  # it was said of the row that stood there before
        merged = {name: value for name, value in merged.items() if entries.get(name, "") is not None}
        if record is not None:
            keep_record(record_path(path), record)
            # The record first: a manifest whose record is older would be called stale for no reason.
            text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False)
            write_atomically(record_path(path), (text + "\n").encode())
        write_atomically(path, (json.dumps(merged, indent=1, sort_keys=True) + "\n").encode())


def manifest_get(kernel: Kernel) -> str | None:
    """The row that the manifests on disk name for a kernel (``suffix@compiler`` where they name one), or None."""
    return next((suffix for layer in layers(kernel.scope.name) if (suffix := layer.entry(kernel)) is not None), None)


def seats_get(kernel: Kernel) -> dict[str, str]:
    """What the manifests on disk name for a kernel's seats.

    From the first file that names the kernel or one of its seats: the entries of a file belong together.
    """
    for layer in layers(kernel.scope.name):
        found = {seat: suffix for seat in kernel.seats if (suffix := layer.entry(kernel, seat)) is not None}
        if found or layer.entry(kernel) is not None:
            return found
    return {}


def spelt(key: str, name: str | None) -> dict[str, str | None]:
    """The entries that say ``suffix@compiler`` under a key; None removes."""
    suffix, compiler = split_name(name or "")
    return {key: suffix or None, key + COMPILER: compiler or None}


def named_rows(kernel: Kernel) -> list[str]:
    """Every row of the grid that a manifest on disk names for a kernel or a seat of it, each once."""
    named = [layer.entry(kernel, seat) for layer in layers(kernel.scope.name) for seat in ("", *kernel.seats)]
    return [suffix for suffix in dict.fromkeys(named) if suffix is not None and kernel.row(suffix) is not None]


def manifest_set(kernel: Kernel, suffix: str, seats: Mapping[str, str] | None = None) -> Path:
    """Record a kernel's winner in its scope's manifest, and rows of its seats; returns the file.

    A seat that is not named loses its entry, and so follows the kernel's row. ``suffix@compiler`` is the row as that
    compiler builds it.

    Raises:
        ManifestError: a suffix is not in the kernel's grid, or the file cannot be written.
    """
    return manifest_set_many(kernel.scope, {kernel: suffix}, seats={kernel: seats or {}})


def manifest_set_many(
    scope: Scope,
    winners: Mapping[Kernel, str],
    record: Mapping[str, Any] | None = None,
    seats: Mapping[Kernel, Mapping[str, str]] | None = None,
) -> Path:
    """Record several kernels' winners of one scope, and the record of the run, in one write; returns the file.

    Seats as for :func:`manifest_set`.

    Raises:
        ManifestError: a suffix is not in its kernel's grid, or is no row of its seat, or the file cannot be written.
    """
    path = write_path(scope.name)
    # One application file serves all scopes, whose kernels may share a name; a scope's file is its own.
    before = f"{scope.name}." if path == application() else ""
    entries: dict[str, str | None] = {}
    for kernel, suffix in winners.items():
        own = (seats or {}).get(kernel, {})
        for name in (suffix, *own.values()):
            if not kernel.knows(name):
                raise ManifestError(
                    f"kernel {kernel.name!r} has no row {name!r}; see: python -m tunekit status --why-not {kernel.name}"
                )
        for seat, name in own.items():
            if seat not in kernel.seats:
                known = ", ".join(kernel.seats) or "none"
                raise ManifestError(f"kernel {kernel.name!r} has no seat {seat!r}; its seats: {known}")
            if not kernel.same_layout(suffix, name):
                raise ManifestError(
                    f"kernel {kernel.name!r}: the seat {seat} cannot run {name!r} beside {suffix!r}: they read "
                    f"different layouts; name a row that agrees with it"
                )
        for name in (kernel.name, *kernel.seats):
            entries |= spelt(before + name, suffix if name == kernel.name else own.get(name))
    save(path, entries, record)
    return path
