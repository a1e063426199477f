# SPDX-License-Identifier: Apache-2.0
"""What one lane of this box can do at most: the ceilings of the report's roofline.

Small C programs (``csrc/ceiling/ceiling.c``), one for each dot instruction that this CPU has, are compiled by the
family's own toolchain and run as processes of their own: a bad one ends itself alone. A leg that cannot be measured has
a reason in its place; no figure here comes from a data sheet.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit import paths
from tunekit.core import SOURCES
from tunekit.cpu import this_cpu, this_features
from tunekit.errors import ToolchainError, TunekitError

SOURCE = SOURCES / "ceiling" / "ceiling.c"

WINDOW_MS = 2
"""Milliseconds of a window; the best of fifty counts."""

MEMORY_BYTES = 256 << 20
READ_BYTES = (32 << 10, 256 << 10, 1 << 20, 8 << 20, 32 << 20, MEMORY_BYTES)
"""Sizes that are read again and again: about the first and second caches, two of the last one, and the memory."""

_LIMIT = 30.0  # seconds for one program


@dataclass(frozen=True)
class Leg:
    """A way of multiplying bytes: the C file's name of it, the architecture, features, and instructions in words."""

    name: str
    arch: str
    number: int
    features: tuple[str, ...]
    instructions: str


# fmt: off
LEGS: tuple[Leg, ...] = (
    Leg("madd16",      "x86_64",  1, ("avx2",),                          "vpmaddwd + vpaddd, 256 bits"),
    Leg("maddubs",     "x86_64",  2, ("avx2",),                          "vpmaddubsw + vpmaddwd + vpaddd, 256 bits"),
    Leg("avxvnni",     "x86_64",  3, ("avx2", "avxvnni"),                "vpdpbusd, 256 bits"),
    Leg("avx512vnni",  "x86_64",  4, ("avx512f", "avx512vnni"),          "vpdpbusd, 512 bits"),
    Leg("avxvnniint8", "x86_64",  5, ("avx2", "avxvnniint8"),            "vpdpbssd, 256 bits"),
    Leg("amx-int8",    "x86_64",  6, ("amx-tile", "amx-int8"),           "tdpbssd"),
    Leg("sdot",        "aarch64", 7, ("dotprod",),                       "sdot, 128 bits"),
    Leg("smmla",       "aarch64", 8, ("dotprod", "i8mm"),                "smmla, 128 bits"),
)
# fmt: on

Ask = Callable[[int, Sequence[str], Sequence[str]], list[float]]
"""Compile and run one program: (number of the leg, features, arguments) to the numbers that it prints."""


def measure(ask: Ask, arch: str, features: frozenset[str], memory: int | None) -> dict[str, Any]:
    """The ceilings of one lane.

    Args:
        ask: compiles and runs; raises TunekitError with a reason.
        arch: the architecture.
        features: what this CPU may use.
        memory: bytes of memory that are free now, or None where that is not known.

    Returns:
        ``gmacs``: billions of multiply-accumulates a second by leg; ``instructions``: each leg's, in words;
        ``read_gbs``: billions of bytes read a second by size in bytes; ``missing``: a reason by leg or ``read``.
    """
    found: dict[str, Any] = {"gmacs": {}, "instructions": {}, "read_gbs": {}, "missing": {}}
    for leg in LEGS:
        if leg.arch != arch or not set(leg.features) <= features:
            continue
        try:
            found["gmacs"][leg.name] = ask(leg.number, leg.features, ())[0]
            found["instructions"][leg.name] = leg.instructions
        except TunekitError as error:
            found["missing"][leg.name] = str(error.args[0])
    sizes = [size for size in READ_BYTES if memory is None or 2 * size <= memory]
    try:
        widest = ("avx2",) if arch == "x86_64" and "avx2" in features else ()
        rates = ask(0, widest, [str(size) for size in sizes])
        found["read_gbs"] = {str(size): rate for size, rate in zip(sizes, rates, strict=True) if rate > 0}
    except TunekitError as error:
        found["missing"]["read"] = str(error.args[0])
    return found


def _free() -> int | None:
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def here() -> dict[str, Any]:
    """The ceilings of this box as :func:`measure` gives them, with ``compiler``; or ``problem``: why there are none."""
    try:
        from tunekit.build_tools import Runner, find_toolchain
        from tunekit.build_tools.toolchain import row_flags

        runner = Runner()
        toolchain = find_toolchain(runner)
        own = paths.private_folder(paths.cache_root() / "ceilings")
    except (TunekitError, ImportError) as error:
        return {"problem": str(error.args[0])}
    with tempfile.TemporaryDirectory(prefix=".tk-", dir=own) as folder:

        def ask(number: int, features: Sequence[str], arguments: Sequence[str]) -> list[float]:
            program = Path(folder) / f"ceiling{number}"
            flags = [*row_flags(toolchain.arch, features), f"-DTK_LEG={number}"]
            command = [*toolchain.command, *toolchain.places, *flags, str(SOURCE), "-o", str(program)]
            status, _, errors = runner.run(command)
            if status != 0:
                from tunekit.build_tools.objects import first_error

                raise ToolchainError(f"{toolchain.label} cannot build it: {first_error(errors)}", command, status)
            return run_program([str(program), str(WINDOW_MS), *arguments], 1 if not arguments else len(arguments))

        return {"compiler": toolchain.label, **measure(ask, this_cpu().arch, this_features(), _free())}


def run_program(command: Sequence[str], count: int) -> list[float]:
    """The numbers that a program prints.

    Raises:
        TunekitError: it cannot start, dies, hangs, or prints anything else; the message is the reason.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT)
    except OSError as error:
        raise TunekitError(f"its program cannot run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        raise TunekitError(f"its program did not end within {_LIMIT:.0f} s") from None
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise TunekitError(f"its program failed: {why[0]}")
    try:
        numbers = [float(word) for word in done.stdout.split()]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise TunekitError(f"its program printed {done.stdout.strip()[:60]!r}")
    return numbers


def lines(found: dict[str, Any]) -> list[str]:
    """What was measured, to read."""
    if "problem" in found:
        return [f"ceilings of one lane: not measured: {found['problem']}"]
    sums = ", ".join(f"{leg} {rate:.0f}" for leg, rate in found["gmacs"].items()) or "none"
    read = ", ".join(f"{size_name(int(size))} {rate:.0f}" for size, rate in found["read_gbs"].items()) or "none"
    told = [f"ceilings of one lane: {sums} GMAC/s; reading {read} GB/s"]
    return told + [f"no ceiling of {leg}: {why}" for leg, why in found["missing"].items()]


def size_name(size: int) -> str:
    """``32 KiB``, ``256 MiB``."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
