# SPDX-License-Identifier: Apache-2.0
"""Compilers for proofs: gcc and clang of this machine, for its own architecture and for others."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunekit.errors import ToolchainError
from tunekit.rows import is_compiler

from .toolchain import Runner, Toolchain, find_toolchain

TRIPLES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Architectures that rows are proven for, and what their cross tools begin with."""

DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
"""What Debian calls them."""


def host() -> str:
    """This machine's architecture."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def versioned(program: str) -> list[str]:
    """``program`` and its numbered kin (``clang-19``) on PATH: the plain name first, then the newest."""
    numbered = re.compile(rf"{re.escape(program)}-(\d+)$")
    found: dict[str, int] = {}
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:
            continue
        found.update({name: int(match[1]) for name in names if (match := numbered.match(name))})
    plain = [program] if shutil.which(program) else []
    return plain + sorted(found, key=lambda name: -found[name])


def _same_as_builds(runner: Runner, name: str) -> Toolchain | None:
    """The compiler that builds use, where it is of the kind that was asked for: its objects are there already."""
    try:
        toolchain = find_toolchain(runner)
    except ToolchainError:
        return None
    return toolchain if toolchain.family == name and toolchain.arch == host() else None


def _commands(name: str, arch: str, own: str) -> list[str]:
    """What to call to compile for ``arch`` with the compiler that a user calls ``name``, best first."""
    names = versioned(name) or ([name] if shutil.which(name) else [])
    if arch == own:
        return names
    triple = TRIPLES[arch]
    if "clang" in Path(name).name:
        return [f"{found} --target={triple}" for found in names]
    return versioned(f"{triple}-{name}")


def find_toolchains(runner: Runner, names: Sequence[str] = ("gcc", "clang")) -> tuple[list[Toolchain], list[str]]:
    """The compilers of these names that are here, for each architecture that they can compile for.

    Returns:
        The compilers, and a sentence for each (name, architecture) that there is none for.
    """
    found: list[Toolchain] = []
    missing: list[str] = []
    for name in names:
        for arch in TRIPLES:
            one = _find(runner, name, arch, {})
            if isinstance(one, str):
                missing.append(one)
            else:
                found.append(one)
    return found, missing


def _find(runner: Runner, name: str, arch: str, environ: Mapping[str, str]) -> Toolchain | str:
    """The compiler of a name for an architecture, or a sentence that says why there is none."""
    own = host()
    usual = _same_as_builds(runner, name) if arch == own else None
    if usual is not None:
        return usual
    fault = f"no {name} for {arch}"
    for command in _commands(name, arch, own):
        try:
            toolchain = find_toolchain(runner, {**environ, "CC": command})
            if toolchain.arch == arch and arch != own:
                _needs_headers(runner, toolchain)
        except ToolchainError as error:
            fault = f"no {name} for {arch}: {error.args[0]}"
            continue
        if toolchain.arch == arch:
            return toolchain
    return fault


def named(runner: Runner, name: str) -> Toolchain:
    """This machine's compiler of a name, as builds would use it. Raises ToolchainError where it is not to be had."""
    if not is_compiler(name):
        raise ToolchainError(f"{name!r} is no name of a compiler; name it as it is called on PATH, such as clang")
    found = _find(runner, name, host(), os.environ)
    if isinstance(found, str):
        known = name.startswith(("gcc", "clang"))
        package = f" (Debian and Ubuntu: apt-get install {name})" if known else ", or name gcc or clang"
        raise ToolchainError(f"{found} is on PATH; install it{package}, or leave it out")
    return found


def others(runner: Runner, names: Sequence[str]) -> dict[str, Toolchain]:
    """Of compilers named by a user, those that are not the one that builds here anyway.

    Raises:
        ToolchainError: one is not to be had, or two names are of one compiler.
    """

    def identity(toolchain: Toolchain) -> tuple[str, str, str]:
        # ``--version`` begins with the name that it was called by.
        return toolchain.family, toolchain.triple, toolchain.version.partition(" ")[2]

    known = {identity(find_toolchain(runner)): ""}
    found: dict[str, Toolchain] = {}
    for name in dict.fromkeys(names):
        toolchain = named(runner, name)
        first = known.setdefault(identity(toolchain), name)
        if first == name:
            found[name] = toolchain
        elif first:
            raise ToolchainError(f"{first} and {name} are both {toolchain.label!r}; name it once")
    return found


def _needs_headers(runner: Runner, toolchain: Toolchain) -> None:
    command = [*toolchain.command, "-E", "-x", "c", "-"]
    status, _, errors = runner.run(command, stdin=b"#include <math.h>\n#include <string.h>\n")
    if status != 0:
        triple = TRIPLES[toolchain.arch]
        raise ToolchainError(
            f"{toolchain.label} finds no C library headers for {triple} "
            f"(Debian and Ubuntu: apt-get install libc6-dev-{DEBIAN[toolchain.arch]}-cross)",
            command,
            status,
            errors,
        )
