# SPDX-License-Identifier: Apache-2.0
"""Run code of instruction sets that this CPU lacks, inside the process that tests it: trap and emulate.

``with trapping() as trap:`` performs AVX-VNNI and VNNI-INT8 (VEX encodings) and AMX tile instructions in a SIGILL
handler (trap.c); ``trap.retired()`` counts what it performed. A CPU that has an instruction runs it itself, and
then it is not counted. What a signal handler cannot perform, AVX-512, :mod:`emulate.machine` executes. Nothing here
fools the dispatcher: :func:`bind` makes a row callable below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EMULATED = frozenset({"avxvnni", "avxvnniint8", "amx-tile", "amx-int8"})
"""Features whose instructions (as this project uses them) the handler performs."""

_depth = 0  # of open trapping() contexts

_HERE = Path(__file__).resolve().parent


def compile_c(text: str, name: str, *flags: str) -> ctypes.CDLL:
    """Compile C to a shared object and load it.

    Raises:
        RuntimeError: no compiler, or it refuses; with its first lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / f"{name}.c", Path(folder) / f"{name}.so"
        source.write_text(text)
        command = ["cc", "-O2", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", *flags]
        try:
            done = subprocess.run(
                [*command, str(source), "-o", str(target)], capture_output=True, text=True, timeout=120
            )
        except OSError as error:
            raise RuntimeError(f"no C compiler: {error}") from error
        if done.returncode:
            raise RuntimeError(done.stderr[:2000])
        return ctypes.CDLL(str(target))  # stays mapped when the file is gone


class Trap:
    """The loaded handler."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.trap_name.restype = ctypes.c_char_p
        library.trap_retired.restype = ctypes.c_uint64
        self._names = [library.trap_name(i).decode() for i in range(library.trap_mnemonics())]

    def install(self) -> None:
        """Take over SIGILL; whoever had it gets it back from :meth:`remove`, or for what is not emulated."""
        if self._library.trap_install() != 0:
            raise RuntimeError("the CPU or the system gives a signal handler no AVX state to work on")

    def remove(self) -> None:
        self._library.trap_remove()

    def palette(self) -> int:
        """The palette of this thread's tiles; 0: not configured."""
        return int(self._library.trap_palette())

    def retired(self) -> Counter[str]:
        """Instructions performed since the library was loaded, by mnemonic."""
        return Counter({name: int(self._library.trap_retired(i)) for i, name in enumerate(self._names)})

    def during(self, call: Any, *arguments: Any) -> Counter[str]:
        """Instructions performed by one call."""
        before = self.retired()
        call(*arguments)
        return self.retired() - before


def possible() -> bool:
    """Whether this is a system that the emulators are written for."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def why_not() -> str | None:
    """Why nothing can be emulated here, or None."""
    if not possible():
        return "the handler is written for Linux on x86-64"
    try:
        _load()
    except RuntimeError as error:
        return str(error)
    return None


@functools.cache
def _load() -> Trap:
    text = (_HERE / "trap.c").read_text()
    return Trap(compile_c(text, "trap", "-O3", "-std=c11", "-Wall", "-Wextra", "-Werror"))


@contextlib.contextmanager
def trapping() -> Iterator[Trap]:
    """Emulate while the context is open, or the outermost of several.

    Raises:
        RuntimeError: see :func:`why_not`.
    """
    global _depth
    trap = _load()
    trap.install()
    _depth += 1
    try:
        yield trap
    finally:
        _depth -= 1
        if not _depth:
            trap.remove()


def native() -> frozenset[str]:
    """Of :data:`EMULATED`, what this CPU runs itself, so that nothing is trapped or counted."""
    from tunekit.cpu import this_features

    return EMULATED & this_features()


def own() -> frozenset[str]:
    """The features that rows are taken to have natively here.

    With EMULATE_ALL=1 in the environment, as if the CPU had no AVX-512: what a machine with AVX2 alone would prove.
    """
    from tunekit.cpu import this_features

    have = frozenset(this_features())
    if os.environ.get("EMULATE_ALL", "") in ("", "0"):
        return have
    return frozenset(name for name in have if not name.startswith(("avx512", "avx10")))


def bind(kernel: Any, suffix: str, features: tuple[str, ...] = (), more: frozenset[str] = EMULATED) -> Any:
    """A built row as a BoundRow although this CPU lacks features of it, to be called while trapping.

    The grid module is asked below the dispatcher, which hands out no row whose needs are not met.

    Args:
        kernel: the declaration.
        suffix: the row.
        features: which object is wanted, where a row has several: the one compiled with all of these.
        more: features that an emulator adds to those of this CPU.

    Raises:
        LookupError: the row is not built, or wants more than what there is.
    """
    from tunekit import dispatch
    from tunekit.cpu import this_features

    row = kernel.row(suffix)
    have = this_features() | more
    reason = "not built"
    for loaded in dispatch.loaded_modules(kernel, grid=True):
        reason = loaded.dropped(kernel).get(suffix, reason)
        for built in loaded.objects(kernel).get(suffix, ()):
            if not set(features) <= set(built.features):
                continue
            if built.needs <= have:
                return dispatch.BoundRow(kernel, suffix, row, "emulated", loaded, built)
            reason = f"beyond the emulators: {', '.join(sorted(built.needs - have))}"
    raise LookupError(f"{suffix}: {reason}")
