# SPDX-License-Identifier: Apache-2.0
"""Finding ``tunekit._core``: beside the package, or in the cache where the install had no compiler.

The cached one lies in a folder named by the hash of its sources, not by the box: the box is known only by asking
the core.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tunekit import paths

SOURCES = Path(__file__).resolve().parent / "csrc"

ABI = 2
"""Of the core's functions: counted up here and in ``csrc/core.c`` when one of them changes."""

_found: list[ModuleType | None] = []


def cached_folder() -> Path:
    """Where a core that is built after the install goes."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.read_bytes())
    digest.update(sys.implementation.cache_tag.encode() if sys.implementation.cache_tag else b"")
    return paths.cache_root() / "core" / f"{sys.platform}-{digest.hexdigest()[:16]}"


def _from_cache() -> ModuleType | None:
    try:
        folder = cached_folder()
        path = folder / f"_core{paths.module_suffix()}"
        if not path.is_file() or paths.distrust(folder) is not None:
            return None
    except OSError:
        return None
    return _load(path)


def _load(path: Path) -> ModuleType | None:
    try:
        spec = importlib.util.spec_from_file_location("tunekit._core", path)
        if spec is None or spec.loader is None:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, ImportError):
        return None
    sys.modules["tunekit._core"] = module
    return module


def adopt(path: Path) -> None:
    """Use a core that was built this moment, where there is none yet (the build of tunekit itself)."""
    if core() is None:
        _found[:] = [_load(path)]


def core() -> Any:
    """The core module, or None where none is built for this tunekit. Found once per process.

    Raises:
        RuntimeError: this is a sub-interpreter.
    """
    if not _found:
        beside: ModuleType | None = None
        try:
            beside = importlib.import_module("tunekit._core")
        except ImportError as error:
            if "subinterpreter" in str(error):  # one with a lock of its own: CPython refuses before the core can
                raise RuntimeError(
                    f"tunekit works in the main interpreter alone ({error}); run it there, or in a process of its own"
                ) from error
        # One of another ABI was left behind by a checkout that is newer or older now: as good as none.
        _found.append(beside if getattr(beside, "abi", None) == ABI else _from_cache())
    return _found[0]


def forget() -> None:
    """Look again (after a build in this process)."""
    _found.clear()
