# SPDX-License-Identifier: Apache-2.0
"""Compilers for proofs: gcc and clang of this machine, for its own architecture and for others."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tunekit.errors import ToolchainError

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
    own = host()
    found: list[Toolchain] = []
    missing: list[str] = []
    for name in names:
        for arch in TRIPLES:
            usual = _same_as_builds(runner, name) if arch == own else None
            if usual is not None:
                found.append(usual)
                continue
            fault = f"no {name} for {arch}"
            for command in _commands(name, arch, own):
                try:
                    toolchain = find_toolchain(runner, {"CC": command})
                    if toolchain.arch == arch and arch != own:
                        _needs_headers(runner, toolchain)
                except ToolchainError as error:
                    fault = f"no {name} for {arch}: {error.args[0]}"
                    continue
                if toolchain.arch == arch:
                    found.append(toolchain)
                    fault = ""
                    break
            if fault:
                missing.append(fault)
    return found, missing


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
