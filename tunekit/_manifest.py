# SPDX-License-Identifier: Apache-2.0
"""The per-box manifest: a flat JSON object ``{"kernel": "suffix"}``, one file per scope.

Reading never raises for a bad file: missing, empty, torn or malformed means untuned, with a reason. Writing
locks, merges with what is there (unknown keys are kept), writes beside the file and renames. Nothing of a bad
file is lost: it is kept as ``<file>.bad``.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import paths
from tunekit.cpu import this_box
from tunekit.environment import settings
from tunekit.errors import ManifestError
from tunekit.kernel import Kernel, Scope

_JSON_NAMES = {list: "an array", str: "text", int: "a number", float: "a number", bool: "true or false"}
_TOO_LARGE = 16 * 1024 * 1024


@dataclass(frozen=True)
class Manifest:
    """What a manifest file said.

    Attributes:
        path: the file, or None where there is none to read.
        entries: kernel to suffix; only the well-formed ones.
        faults: kernel to what is wrong with its entry (not text).
        problem: why the whole file is as good as absent, or None.
        exists: whether the file is there at all.
    """

    path: Path | None
    entries: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    exists: bool = False


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
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            return Manifest(path, problem="it cannot be read (it is not a regular file)", exists=True)
        with open(path, "rb") as file:
            data = file.read(_TOO_LARGE + 1)
    except FileNotFoundError:
        return Manifest(path)
    except OSError as error:
        return Manifest(path, problem=f"it cannot be read ({error.strerror or error})", exists=True)
    if len(data) > _TOO_LARGE:
        return Manifest(path, problem="it is larger than 16 MiB", exists=True)
    return parse_manifest(data, path)


def file_name(scope: str) -> str:
    return f"{scope}.tune.json"


def user_path(scope: str) -> Path:
    """The file of this user and box for a scope, whether or not it exists."""
    return paths.state_folder(this_box().key) / file_name(scope)


def manifest_path(scope: str) -> Path | None:
    """The file that is read for a scope: ``TUNEKIT_MANIFEST``, the user's, or the machine's. None = no manifest."""
    override = settings().manifest
    if override is not None:
        return Path(override).expanduser().absolute() if override else None
    own = user_path(scope)
    try:
        if own.exists():
            return own
        site = paths.site_folder(this_box().key) / file_name(scope)
        return site if site.exists() else own
    except OSError:  # a folder that may not be searched; reading says so
        return own


def write_path(scope: str) -> Path:
    """The file that is written for a scope. Raises ManifestError where ``TUNEKIT_MANIFEST`` is empty."""
    override = settings().manifest
    if override == "":
        raise ManifestError("TUNEKIT_MANIFEST is empty, which means no manifest: there is no file to write")
    return Path(override).expanduser().absolute() if override else user_path(scope)


def load(scope: str) -> Manifest:
    """The manifest of a scope as it is on disk now."""
    path = manifest_path(scope)
    if path is None:
        return Manifest(None)
    manifest = read_manifest(path)
    if settings().manifest and not manifest.exists:
        return Manifest(path, problem="TUNEKIT_MANIFEST names it and it does not exist")
    return manifest


def record_path(manifest: Path) -> Path:
    """The record of the run that wrote a manifest: ``<scope>.tune.run.json`` beside it."""
    stem = manifest.name.removesuffix(".json").removesuffix(".tune")
    return manifest.with_name(f"{stem}.tune.run.json")


def read_record(scope: str) -> dict[str, Any] | None:
    """The run record beside a scope's manifest, or None (missing or unreadable: a record never decides a row)."""
    path = manifest_path(scope)
    if path is None:
        return None
    try:
        data = json.loads(record_path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


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


def save(path: Path, entries: Mapping[str, str], record: Mapping[str, Any] | None = None) -> None:
    """Merge entries into a manifest file and, with them, write the run record.

    Entries for other kernels stay. A file that cannot be read as a manifest is kept as ``<file>.bad``.

    Raises:
        ManifestError: the folder or file cannot be written, or another process holds the lock.
    """
    if path.is_dir():
        raise ManifestError(f"{path} is a folder; name a file in TUNEKIT_MANIFEST")
    with locked(path):
        merged: dict[str, Any] = {}
        old = read_manifest(path)
        if old.exists and old.problem:
            os.replace(path, path.with_name(path.name + ".bad"))
        elif old.exists:
            merged = json.loads(path.read_bytes().decode("utf-8-sig"))
        merged.update(entries)
        if record is not None:
            # The record first: a manifest whose record is older would be called stale for no reason.
            text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False)
            write_atomically(record_path(path), (text + "\n").encode())
        write_atomically(path, (json.dumps(merged, indent=1, sort_keys=True) + "\n").encode())


def manifest_get(kernel: Kernel) -> str | None:
    """The suffix that the manifest on disk names for a kernel, or None."""
    return load(kernel.scope.name).entries.get(kernel.name)


def manifest_set(kernel: Kernel, suffix: str) -> Path:
    """Record a kernel's winner in its scope's manifest; returns the file.

    Raises:
        ManifestError: the suffix is not in the kernel's grid, or the file cannot be written.
    """
    return manifest_set_many(kernel.scope, {kernel: suffix})


def manifest_set_many(scope: Scope, winners: Mapping[Kernel, str], record: Mapping[str, Any] | None = None) -> Path:
    """Record several kernels' winners of one scope, and the record of the run, in one write; returns the file.

    Raises:
        ManifestError: a suffix is not in its kernel's grid, or the file cannot be written.
    """
    for kernel, suffix in winners.items():
        if not kernel.knows(suffix):
            raise ManifestError(
                f"kernel {kernel.name!r} has no row {suffix!r}; see: python -m tunekit status --why-not {kernel.name}"
            )
    path = write_path(scope.name)
    save(path, {kernel.name: suffix for kernel, suffix in winners.items()}, record)
    return path
