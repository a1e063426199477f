# SPDX-License-Identifier: Apache-2.0
"""Linking from other packages: one versioned table of C pointers a declaring module, and where its header lies.

The table is the attribute ``_C_API`` of the declaring module, a ``PyCapsule`` of the name ``MODULE._C_API``. It is
made when somebody first asks for it, which is a use: the choice of all the module's kernels is then fixed. It begins
with ``abi``, ``size`` and a hash of every prototype in order; a consumer that was compiled against other ones gets an
error that names both, and no pointer. Only addresses travel: modules export no symbol.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tunekit import dispatch
from tunekit._lock import lock
from tunekit.errors import AbiError, TunekitError
from tunekit.kernel import ABI, Kernel
from tunekit.signature import Signature

FOLDER = "tk_include"
"""The folder beside a declaring file in which its header, .pxd and .pc lie."""

_tables: dict[str, Any] = {}
_makers: dict[str, Callable[[], Any]] = {}


@dataclass(frozen=True)
class Unit:
    """A declaring module as C sees it.

    Attributes:
        module: its dotted name.
        kernels: its kernels, in the order of declaration.
    """

    module: str
    kernels: tuple[Kernel, ...]

    @property
    def name(self) -> str:
        """The name of its header and the prefix of its C names: ``mylib.kernels`` is ``mylib_kernels``."""
        return self.module.replace(".", "_")

    @property
    def capsule(self) -> str:
        return f"{self.module}._C_API"

    @property
    def functions(self) -> tuple[tuple[str, Signature], ...]:
        """Every kernel, each followed by its companions: the order of the table's pointers."""
        return tuple(pair for kernel in self.kernels for pair in kernel.functions)

    @property
    def prototypes(self) -> int:
        """A hash of the table's names and prototypes in order: whatever a consumer relies on is in it."""
        lines = [kernel.name for kernel in self.kernels]
        lines += [signature.prototype(name, "") for name, signature in self.functions]
        return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big")

    @property
    def layout(self) -> str:
        """The table's form, for :mod:`struct`: the head, two texts a kernel, one pointer a function."""
        return "@IIQP" + "P" * (2 * len(self.kernels) + len(self.functions))


def unit_of(module: str) -> Unit:
    """The unit of a declaring module of this process.

    Raises:
        TunekitError: it declares no kernel here.
    """
    found = tuple(kernel for kernel in dispatch.kernels() if kernel.module == module)
    if not found:
        raise TunekitError(f"module {module!r} has declared no kernel in this process; import it first")
    return Unit(module, found)


def _maker(unit: Unit) -> str:
    from tunekit import __version__

    return f"{unit.module} in {unit.kernels[0].file}, tunekit {__version__}"


def capsule(module: str) -> Any:
    """The capsule of a declaring module: what its attribute ``_C_API`` is. Fixes the choice of its kernels.

    Raises:
        AbiError: a kernel of it has no native code here (an ImportError, so that a C consumer's import fails with it).
    """
    with lock:
        if module in _tables:
            return _tables[module][0]
        import ctypes

        unit = unit_of(module)
        texts: list[str] = [_maker(unit)]
        addresses: list[int] = []
        for kernel in unit.kernels:
            binding = dispatch.bind(kernel)
            if binding.bound is None:
                why = dispatch.nothing_built(kernel)
                raise AbiError(f"{unit.capsule}: {kernel.key} has no native code here: {why}")
            texts += [binding.choice.suffix, binding.choice.source]
            addresses += [binding.bound.address(name) for name, _ in kernel.functions]
        kept = [ctypes.create_string_buffer(text.encode()) for text in texts]
        pointers = [ctypes.addressof(text) for text in kept]
        size = struct.calcsize(unit.layout)
        packed = struct.pack(unit.layout, ABI, size, unit.prototypes, *pointers, *addresses)
        table = ctypes.create_string_buffer(packed, size)
        name = ctypes.create_string_buffer(unit.capsule.encode())
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        found = make(ctypes.addressof(table), ctypes.addressof(name), None)
        # C holds the pointers for as long as it likes, so nothing of this is ever given back.
        _tables[module] = (found, table, name, kept)
        return found


class _Declaring(ModuleType):
    """A module with a table of C pointers, which is made when it is asked for."""

    @property
    def _C_API(self) -> Any:
        return _makers[self.__name__]()


def offer(module: str, make: Callable[[], Any] | None = None) -> None:
    """Give a module its attribute ``_C_API``: its table, or what ``make`` returns each time it is asked for."""
    found = sys.modules.get(module)
    _makers[module] = make or (lambda: capsule(module))
    if found is None or isinstance(found, _Declaring):
        return
    kind = type(found)
    found.__class__ = _Declaring if kind is ModuleType else type(kind.__name__, (_Declaring, kind), {})


def get_include(scope: str = "tunekit") -> str:
    """The folder of a scope's C headers, Cython declarations and pkg-config files.

    Args:
        scope: an installed family, or one that is declared in this process; default: tunekit's own, with Q8.

    Raises:
        TunekitError: no such scope, or its package was installed without headers.
    """
    folders = list(dict.fromkeys(Path(kernel.file).parent / FOLDER for kernel in dispatch.declare_scope(scope)))
    found = [folder for folder in folders if folder.is_dir()]
    if len(found) != 1:
        raise TunekitError(
            f"scope {scope!r} has no one folder of headers (looked for {', '.join(map(str, folders))}); "
            f"reinstall its package, or write them with: python -m tunekit header {scope} --to FOLDER"
        )
    return str(found[0])


def _lines(unit: Unit) -> Iterator[str]:
    yield "  uint32_t tk_abi;"
    yield "  uint32_t tk_size;"
    yield "  uint64_t tk_prototypes;"
    yield "  const char *tk_maker;"
    for kernel in unit.kernels:
        yield f"  const char *tk_row_{kernel.name};"
        yield f"  const char *tk_source_{kernel.name};"
    for name, signature in unit.functions:
        yield f"  {signature.prototype(f'(*{name})', '')};"


def table_lines(unit: Unit) -> Sequence[str]:
    """The members of the table in C, one a line."""
    return tuple(_lines(unit))


def cdef(module: str) -> str:
    """The table's type as cffi reads it, for ``ffi.cdef``: ``NAME_api``, NAME being the module with underscores."""
    unit = unit_of(module)
    return "\n".join(["typedef struct {", *table_lines(unit), f"}} {unit.name}_api;"])


def ffi(module: str) -> Any:
    """A cffi ``FFI`` that knows the table's type: ``ffi.include`` it, or cast with it. Needs cffi.

    Types only travel: cffi binds functions of an included module by import order, and addresses need no binding.
    """
    import cffi

    found = cffi.FFI()
    found.cdef(cdef(module))
    return found


def table_address(module: str) -> int:
    """The address of a declaring module's table, for cffi (``ffi.cast("NAME_api *", ...)``) and ctypes.

    Raises:
        AbiError: see :func:`capsule`.
    """
    import ctypes

    capsule(module)
    with lock:
        return ctypes.addressof(_tables[module][1])
