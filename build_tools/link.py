# SPDX-License-Identifier: Apache-2.0
"""Linking: row objects and a cffi-made glue unit to one extension module with a stamp.

A module's name carries the hash of what is in it: two modules of one name would overwrite each other in
``sys.modules``, and a loaded file is never overwritten. The only symbol that a module exports is its init
function.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi
import jinja2
from cffi.recompiler import make_c_source

from tunekit._templates import own_templates
from tunekit.errors import ToolchainError
from tunekit.kernel import ABI, Kernel
from tunekit.module import FORMAT, PREFIX, source_digest
from tunekit.paths import module_suffix
from tunekit.signature import Signature

from .objects import Compiled, compile_text, is_object
from .render import templates_read
from .toolchain import Runner, Toolchain, baseline_flags


def python_includes() -> list[str]:
    """Include options for this interpreter's C headers."""
    folders = dict.fromkeys(sysconfig.get_path(kind) for kind in ("include", "platinclude"))
    return [word for folder in folders if folder for word in ("-I", folder)]


def check_python_headers() -> None:
    """Raises ToolchainError where Python.h is not there, with the package that brings it."""
    folder = sysconfig.get_path("include")
    if not folder or not (Path(folder) / "Python.h").is_file():
        raise ToolchainError(
            f"Python.h is not in {folder}; install this interpreter's headers "
            f"(Debian and Ubuntu: apt-get install python3-dev)"
        )


def link_flags() -> list[str]:
    if sys.platform == "darwin":
        return ["-bundle", "-undefined", "dynamic_lookup"]
    return ["-shared", "-Wl,-z,relro,-z,now", "-Wl,--build-id=none"]


def link(
    runner: Runner, toolchain: Toolchain, objects: Sequence[Path], target: Path, libraries: Sequence[str] = ("-lm",)
) -> None:
    """Link objects to a shared object beside ``target`` and rename it into place. Raises ToolchainError."""
    handle, name = tempfile.mkstemp(prefix=".tk-", suffix=".so.new", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        command = [
            *toolchain.command,
            *toolchain.places,
            "-fno-lto",
            *link_flags(),
            *map(str, objects),
            "-o",
            str(temporary),
            *libraries,
        ]
        status, _, errors = runner.run(command)
        if status != 0:
            raise ToolchainError(f"linking {target.name} failed", command, status, errors)
        temporary.chmod(0o755)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Built:
    """A linked module."""

    path: Path
    stamp: dict[str, Any]


def _c_string(text: str) -> list[str]:
    """The text as short lines of a C string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
    lines, start = [], 0
    while start < len(escaped):
        end = min(start + 100, len(escaped))
        while end < len(escaped) and escaped[end - 1] == "\\":
            end += 1
        lines.append(escaped[start:end])
        start = end
    return lines


def make_stamp(
    kernels: Sequence[Kernel],
    kind: str,
    compiled: Sequence[Compiled],
    declined: dict[str, dict[str, str]],
    toolchain: Toolchain,
) -> dict[str, Any]:
    """The stamp of a module: everything that its loader, its status and its user may want to know, as data."""
    entries: dict[str, Any] = {}
    for kernel in kernels:
        own = [c for c in compiled if c.job.kernel is kernel]
        built = {c.job.suffix for c in own if c.path is not None}
        dropped = {c.job.suffix: str(c.problem) for c in own if c.problem and c.job.suffix not in built}
        entries[kernel.key] = {
            "digest": kernel.digest(),
            "source": source_digest(kernel),
            "rows": [
                {
                    "suffix": c.job.suffix,
                    "alternative": index,
                    "features": list(c.job.features),
                    "needs": sorted(c.job.needs),
                    "flags": list(c.job.flags),
                    "object": c.key,
                }
                for suffix in dict.fromkeys(c.job.suffix for c in own)
                for index, c in enumerate(c for c in own if c.job.suffix == suffix and c.path is not None)
            ],
            "dropped": dropped,
            "declined": declined.get(kernel.key, {}),
            "templates": templates_read(kernel),
        }
    return {
        "format": FORMAT,
        "abi": ABI,
        "kind": kind,
        "arch": toolchain.arch,
        "triple": toolchain.triple,
        "compiler": toolchain.label,
        "compiler_command": list(toolchain.command),
        "kernels": entries,
    }


def _callers(kernel: Kernel) -> list[dict[str, str]]:
    found = []
    for name, signature in kernel.functions:
        types = ", ".join(p.declaration("").rsplit(p.name, 1)[0].strip() for p in signature.parameters) or "void"
        arguments = ", ".join(
            f"({p.declaration('').rsplit(p.name, 1)[0].strip()}){p.name}" if p.is_pointer else p.name
            for p in signature.parameters
        )
        found.append(
            {
                "prototype": "static " + _caller_prototype(kernel, name, signature),
                "returns": signature.returns.c if signature.returns else "void",
                "types": types,
                "arguments": arguments,
            }
        )
    return found


def _caller_prototype(kernel: Kernel, name: str, signature: Signature) -> str:
    parameters = ["uintptr_t tk_function"]
    parameters += [f"{'uintptr_t' if p.is_pointer else p.ctype.c} {p.name}" for p in signature.parameters]
    returns = signature.returns.c if signature.returns else "void"
    return f"{returns} tk_call_{kernel.scope.name}_{name}({', '.join(parameters)})"


def _fpenv() -> str:
    """The text of csrc/fpenv.h: the glue is one self-contained unit wherever it is compiled."""
    return (Path(sys.modules["tunekit"].__path__[0]) / "csrc" / "fpenv.h").read_text(encoding="utf-8")


def build_module(
    runner: Runner,
    toolchain: Toolchain,
    scope: str,
    kernels: Sequence[Kernel],
    kind: str,
    compiled: Sequence[Compiled],
    declined: dict[str, dict[str, str]],
    folder: Path,
    objects: Path,
) -> Built:
    """Make a module from compiled rows in ``folder`` (glue objects are kept in ``objects``), or find it there.

    Raises:
        ToolchainError: no Python.h, or the glue or the link failed.
    """
    check_python_headers()
    stamp = make_stamp(kernels, kind, compiled, declined, toolchain)
    text = json.dumps(stamp, sort_keys=True)
    present = {(c.job.kernel.key, c.job.suffix, c.job.alternative): c for c in compiled if c.path is not None}
    rows = []
    externs = []
    for kernel in kernels:
        for described in stamp["kernels"][kernel.key]["rows"]:
            own = [c for c in present.values() if c.job.kernel is kernel and c.job.suffix == described["suffix"]]
            job = own[described["alternative"]].job
            symbols = [kernel.symbol(function, job.suffix, job.alternative) for function, _ in kernel.functions]
            rows.append(
                {
                    "kernel": kernel.key,
                    "suffix": job.suffix,
                    "alternative": described["alternative"],
                    "symbols": symbols,
                }
            )
            externs += [sig.prototype(symbol) for symbol, (_, sig) in zip(symbols, kernel.functions, strict=True)]
    callers = [caller for kernel in kernels for caller in _callers(kernel)]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        line_statement_prefix="//%",
        variable_start_string="${",
        variable_end_string="}",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    source = environment.from_string(
        own_templates().joinpath("module", "registry.c.j2").read_text(encoding="utf-8")
    ).render(fpenv=_fpenv(), externs=externs, rows=rows, stamp=_c_string(text), callers=callers)
    declared = (
        "typedef struct { const char *kernel; const char *suffix; int alternative; int count;"
        " const uintptr_t *functions; } tk_row;\n"
        "int tk_row_count(void);\nconst tk_row *tk_row_table(void);\nconst char *tk_stamp(void);\n"
        + "".join(_caller_prototype(kernel, n, s) + ";\n" for kernel in kernels for n, s in kernel.functions)
    )
    # The name says what is in it: rows (by the stamp), glue, and who generated the glue.
    content = "\0".join([source, declared, cffi.__version__, toolchain.version])
    name = f"{PREFIX}{scope}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    target = folder / f"{name}{module_suffix()}"
    if target.is_file() and is_object(target):
        return Built(target, stamp)
    ffi = cffi.FFI()
    ffi.cdef(declared)
    with tempfile.TemporaryDirectory(prefix=".tk-", dir=objects) as scratch:
        glue = Path(scratch) / "glue.c"
        make_c_source(ffi, name, source, str(glue))
        path, _, _ = compile_text(
            runner,
            toolchain,
            glue.read_text(encoding="utf-8"),
            [
                *baseline_flags(toolchain.arch),
                "-Wno-unused-parameter",
                "-Wno-cast-function-type",
                "-Wno-missing-field-initializers",
            ],
            objects,
            python_includes(),
        )
    link(runner, toolchain, [path, *(c.path for c in compiled if c.path is not None)], target)
    return Built(target, stamp)


def build_core(runner: Runner, toolchain: Toolchain, sources: Path, target: Path, objects: Path) -> Path:
    """Compile tunekit's own core (``csrc/*.c``) at baseline flags and link it to ``target``. Raises ToolchainError."""
    check_python_headers()
    made = []
    for source in sorted(sources.glob("*.c")):
        path, _, _ = compile_text(
            runner,
            toolchain,
            source.read_text(encoding="utf-8"),
            [*baseline_flags(toolchain.arch), "-pthread", "-DPy_LIMITED_API=0x030B0000"],
            objects,
            ["-I", str(sources.resolve()), f"-ffile-prefix-map={sources.resolve()}=.", *python_includes()],
        )
        made.append(path)
    link(runner, toolchain, made, target, ("-pthread", "-lm"))
    return target
