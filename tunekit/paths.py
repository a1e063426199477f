# SPDX-License-Identifier: Apache-2.0
"""Where manifests and built modules live.

State (manifests) and cache (objects, modules) are apart, so that wiping a cache loses no winner. Both lie in a
folder named by the box, because homes are shared between machines. A cache folder that others can write to, or
that is a symbolic link, is refused: its modules would be loaded into this process.
"""

from __future__ import annotations

import errno
import importlib.machinery
import os
import stat
from pathlib import Path

from tunekit.environment import settings
from tunekit.errors import TunekitError


def expand(name: str) -> Path:
    """A path from a setting, ``~`` expanded; ``~USER`` of a user that nobody knows is a name like any other."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def read_small(path: Path, most: int = 64 << 20) -> bytes:
    """A file that belongs to this package, whole.

    Raises:
        OSError: it cannot be read, holds more than ``most`` bytes, or is no regular file (to open a pipe would wait
            for a writer); ``strerror`` says which.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return data


def _root(override: str | None, variable: str, kind: str) -> Path:
    if override:
        path = expand(override)
        if path.exists() and not path.is_dir():
            raise TunekitError(f"{variable}={override!r} is not a folder; name a folder or unset it")
        return path.absolute()
    import platformdirs

    try:
        found = platformdirs.user_state_dir("tunekit") if kind == "state" else platformdirs.user_cache_dir("tunekit")
        user = Path(found)
    except RuntimeError:
        user = Path()
    if not user.is_absolute():
        import tempfile

        # No HOME and no passwd entry: platformdirs raises, or leaves a relative path, which must not be taken for
        # one below the working directory.
        return Path(tempfile.gettempdir()) / f"tunekit-{os.getuid() if hasattr(os, 'getuid') else 'user'}" / kind
    return user


def state_root() -> Path:
    """The folder of this user's manifests (``TUNEKIT_HOME`` moves it)."""
    return _root(settings().home, "TUNEKIT_HOME", "state")


def cache_root() -> Path:
    """The folder of this user's built objects and modules (``TUNEKIT_CACHE`` moves it)."""
    return _root(settings().cache, "TUNEKIT_CACHE", "cache")


def state_folder(box: str) -> Path:
    """The folder of a box's manifests (``box``: its key)."""
    return state_root() / box


def site_folders(box: str) -> list[Path]:
    """The machine-wide, read-only folders of manifests that an administrator may fill, in the order of their weight."""
    import platformdirs

    found = platformdirs.site_config_dir("tunekit", multipath=True).split(os.pathsep)
    return [Path(folder) / box for folder in dict.fromkeys(found)]


def objects_folder() -> Path:
    """Where compiled row objects are kept, by content."""
    return cache_root() / "objects"


def modules_folder(box: str, scope: str) -> Path:
    """Where a box's grid, stamped and late-built fat modules of a scope are kept."""
    return cache_root() / "modules" / box / scope


def module_suffix() -> str:
    """The file name ending of generated modules in this interpreter."""
    for ending in importlib.machinery.EXTENSION_SUFFIXES:
        if "abi3" in ending:
            return ending
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def distrust(folder: Path) -> str | None:
    """Why modules in a folder must not be loaded or written, or None.

    Refused: a symbolic link, and a folder that belongs to somebody else or that others can write to. Walks from
    the cache root down, so that a trap anywhere below it is seen.
    """
    root = cache_root()
    chain = [root]
    try:
        parts = folder.relative_to(root).parts
    except ValueError:
        chain, parts = [folder], ()
    for part in parts:
        chain.append(chain[-1] / part)
    for path in chain:
        try:
            found = path.lstat()
        except OSError:
            return None  # not there yet: nothing to load; whoever makes it makes it private
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a symbolic link; name the folder itself in TUNEKIT_CACHE"
        if not stat.S_ISDIR(found.st_mode):
            return f"{path} is not a folder; remove it or name another in TUNEKIT_CACHE"
        if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user (uid {found.st_uid}); name your own folder in TUNEKIT_CACHE"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} can be written to by others; run: chmod go-w {path}"
    return None


def private_folder(folder: Path) -> Path:
    """Make a folder (and what is missing above it) that only this user can write to; refuse an unsafe one.

    Raises:
        TunekitError: it cannot be made, or :func:`distrust` has a reason.
    """
    reason = distrust(folder)
    if reason is None:
        missing = []
        probe = folder
        try:
            while not probe.exists() and probe != probe.parent:
                missing.append(probe)
                probe = probe.parent
            for path in reversed(missing):
                path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise TunekitError(
                f"cannot make the folder {folder}: {error.strerror or error}; "
                f"set TUNEKIT_CACHE and TUNEKIT_HOME to folders that can be written to"
            ) from error
        reason = distrust(folder)
    if reason is not None:
        raise TunekitError(f"cache folder refused: {reason}")
    return folder
