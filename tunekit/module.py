# SPDX-License-Identifier: Apache-2.0
"""Loading generated modules: bags of rows with a stamp.

A module carries, as data, what it was made from: format, declaration digests, compiler, flags, each row's needs
and each dropped row's reason. Loading checks the stamp against the declaration in this process and, when it
refuses, names the field that differs. Loading runs no instruction beyond the architecture's baseline.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit import _templates
from tunekit.errors import AbiError, DamagedModule
from tunekit.kernel import ABI, Kernel
from tunekit.paths import module_suffix

FORMAT = 2
"""Version of the stamp and of the registry inside a module."""

PREFIX = "_tk_"

_REBUILD = "rebuild it with: python -m tunekit build"


@dataclass(frozen=True)
class BuiltRow:
    """One built object of one row, inside a loaded module."""

    suffix: str
    alternative: int
    features: tuple[str, ...]
    needs: frozenset[str]
    addresses: tuple[int, ...]
    object: str = ""
    """The key of the object: text, flags, compiler. A verdict on a row is one on this."""


@dataclass(frozen=True)
class LoadedModule:
    """A generated module in this process."""

    name: str
    path: Path
    kind: str
    stamp: Mapping[str, Any]
    lib: Any
    rows: Mapping[str, tuple[BuiltRow, ...]]
    """``scope.kernel`` -> its built objects, alternatives of a row in order."""

    def objects(self, kernel: Kernel) -> dict[str, tuple[BuiltRow, ...]]:
        """Suffix to built objects of a kernel."""
        found: dict[str, tuple[BuiltRow, ...]] = {}
        for row in self.rows.get(kernel.key, ()):
            found[row.suffix] = (*found.get(row.suffix, ()), row)
        return found

    def source(self, kernel: Kernel) -> str | None:
        """The digest of what a kernel's rows were rendered from (see :func:`source_digest`)."""
        found = self.stamp["kernels"].get(kernel.key, {}).get("source")
        return found if isinstance(found, str) else None

    def dropped(self, kernel: Kernel) -> dict[str, str]:
        """Suffix to the reason why it is not in this module although it was asked for."""
        return dict(self.stamp["kernels"].get(kernel.key, {}).get("dropped", {}))

    def caller(self, kernel: Kernel, function: str) -> Callable[..., Any]:
        """The trampoline that calls a function of the kernel by address, floating-point environment set."""
        return getattr(self.lib, f"tk_call_{kernel.scope.name}_{function}")  # type: ignore[no-any-return]


def source_digest(kernel: Kernel) -> str | None:
    """A digest of what a kernel's rows are rendered from: declaration, context and templates, as they are now.

    None where the templates are not on disk, or what an author's ``context`` says cannot be had. It reads files, so
    nothing on the way to a call asks for it unless modules disagree.
    """
    texts = _templates.sources((kernel.template, kernel.reference), Path(kernel.file).parent)
    if texts is None:
        return None
    try:
        contexts = [kernel.context(row) for row in (None, *kernel.rows)]
    except KeyboardInterrupt:
        raise
    except BaseException:  # an author's own code
        return None
    said = json.dumps([kernel.digest(), texts, contexts], sort_keys=True, default=_named)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _named(value: Any) -> str:
    """A context's value as text that is the same in every process: no address of an object."""
    name = getattr(value, "__qualname__", None)
    return str(name) if name else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def check_stamp(stamp: Mapping[str, Any], kernels: Sequence[Kernel], where: str) -> None:
    """Refuse a module that was not made for these declarations by this format.

    Raises:
        AbiError: names the field, what the module has, what is wanted, and the mend.
    """

    def refuse(name: str, have: object, want: object, mend: str) -> None:
        raise AbiError(f"{where}: {name} is {have!r}, this tunekit wants {want!r}; {mend}")

    for name, want in (("format", FORMAT), ("abi", ABI)):
        if stamp.get(name) != want:
            refuse(name, stamp.get(name), want, f"the module was made by another tunekit, {_REBUILD}")
    for kernel in kernels:
        entry = stamp.get("kernels", {}).get(kernel.key)
        if entry is None:
            raise AbiError(f"{where}: it holds no kernel {kernel.key}; {_REBUILD}")
        if entry.get("digest") != kernel.digest():
            refuse(
                f"the declaration digest of {kernel.key}",
                entry.get("digest"),
                kernel.digest(),
                f"the declaration has changed since, {_REBUILD} (or reinstall the package)",
            )


def is_cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its section headers do: mapping such a module kills the process with SIGBUS."""
    if not path.is_file():
        return path.exists()  # to open a pipe would wait for a writer
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] != 2:
            return head[:4] == b"\x7fELF"
        (offset,) = struct.unpack_from("<Q", head, 0x28)
        size, count = struct.unpack_from("<HH", head, 0x3A)
        end: int = offset + size * count
        return end > file.seek(0, 2)


_loaded: dict[Path, LoadedModule] = {}


def load(path: Path, kernels: Sequence[Kernel]) -> LoadedModule:
    """Load a generated module, or return the one already loaded from that file.

    Raises:
        AbiError: it cannot be loaded, or its stamp differs.
    """
    if path in _loaded:
        module = _loaded[path]
        check_stamp(module.stamp, kernels, str(path))
        return module
    name = path.name.partition(".")[0]
    try:
        if is_cut_short(path):
            raise DamagedModule(f"{path}: it cannot be loaded (it is cut short); {_REBUILD}")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise AbiError(f"{path}: it is no extension module of this interpreter")
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
    except AbiError:
        raise
    except (ImportError, OSError, SystemError, AttributeError, ValueError) as error:
        # A damaged file, another architecture, a missing libc symbol. Nothing wider: a signal handler may raise here,
        # a TimeoutError for one, which has no number of the system's.
        if isinstance(error, OSError) and error.errno is None:
            raise
        raise DamagedModule(f"{path}: it cannot be loaded ({error}); {_REBUILD}") from error
    finally:
        sys.modules.pop(name, None)
    ffi, lib = extension.ffi, extension.lib
    try:
        stamp = json.loads(ffi.string(lib.tk_stamp()))
    except (AttributeError, TypeError, ValueError) as error:
        raise AbiError(
            f"{path}: its stamp cannot be read ({error}); {_REBUILD}"
        ) from error
    check_stamp(stamp, kernels, str(path))

    count = int(lib.tk_row_count())
    table = lib.tk_row_table()
    rows: dict[str, list[BuiltRow]] = {}
    described = {
        (key, row["suffix"], row["alternative"]): row
        for key, entry in stamp["kernels"].items()
        for row in entry["rows"]
    }
    for index in range(count):
        entry = table[index]
        key, suffix = ffi.string(entry.kernel).decode(), ffi.string(entry.suffix).decode()
        alternative = int(entry.alternative)
        data = described[key, suffix, alternative]
        addresses = tuple(int(entry.functions[i]) for i in range(int(entry.count)))
        rows.setdefault(key, []).append(
            BuiltRow(suffix, alternative, tuple(data["features"]), frozenset(data["needs"]), addresses, data["object"])
        )
    module = LoadedModule(
        name, path, str(stamp.get("kind", "")), stamp, lib, {key: tuple(found) for key, found in rows.items()}
    )
    _loaded[path] = module
    return module


def find_beside(kernel: Kernel) -> list[Path]:
    """The modules that an install put beside the declaring file, newest first."""
    folder = Path(kernel.file).parent
    found = folder.glob(f"{PREFIX}{kernel.scope.name}_*{module_suffix()}")
    return sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)
