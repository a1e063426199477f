# SPDX-License-Identifier: Apache-2.0
"""Compiling: row objects kept by content, in parallel.

An object's key is its preprocessed text, the argument list, and what compiler and assembler say of themselves, so
nothing is ever bumped by hand. Only objects are kept: "cannot compile" is asked anew each time. The row's own
body is the probe: it is compiled and assembled with the real intrinsics, so an assembler that does not know an
instruction shows here.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import TemplateError, ToolchainError
from tunekit.module import is_cut_short

from .cross import host
from .disassembly import Disassembler, disassemble, find_disassemblers
from .foreign import fingerprint, scan, shared_symbols
from .plan import Job
from .render import render
from .toolchain import Runner, Toolchain

Progress = Callable[[int, int, str], None]

# A line of a unit's C that says: where the compiler has never heard of this flag, leave it out. Such a unit brings the
# flag's instructions as assembly text, or refuses with #error. What the object needs of a CPU stays what it was.
_OPTIONAL = re.compile(r"tunekit-optional-flag: (-m[a-z0-9.\-]+)")
_UNKNOWN = re.compile(r"(?:unrecognized command[- ]line option|unknown argument:?|unsupported option) '(-m[^']+)'")

# What a unit looks for that includes only parts of the compiler's intrinsics (templates/isa/intrinsics.h).
WHOLE = "TUNEKIT_WHOLE_INTRINSICS"


@dataclass(frozen=True)
class Compiled:
    """An object file, or the reason why there is none; ``shared`` are symbols that the unit should keep to itself."""

    job: Job
    path: Path | None
    key: str
    cached: bool
    problem: str | None = None
    shared: tuple[str, ...] = ()


def lanes() -> int:
    """How many compilers run at once: the CPUs that this process may use."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)


def first_error(output: str) -> str:
    """The compiler's first error line, without the path of a temporary file."""
    for line in output.splitlines():
        if re.search(r"\b(fatal )?error\b|Error:|undefined (reference|symbol)|required symbol", line):
            return re.sub(r"^[^\s:]*:(\d+)(:\d+)?: ", r"line \1: ", line).strip()
    return (output.strip().splitlines() or ["it printed nothing"])[0]


def compile_text(
    runner: Runner,
    toolchain: Toolchain,
    text: str,
    flags: Sequence[str],
    folder: Path,
    includes: Sequence[str] = (),
    check: Callable[[Path], None] | None = None,
    declared: str = "",
    passed: str = "",
) -> tuple[Path, str, bool]:
    """Compile C text into an object kept in ``folder``: (object, key, whether it was there already).

    ``declared`` are prototypes that the text must keep to: they come first, on lines of their own. ``passed`` names
    what ``check`` asks beyond the text and the flags: an object that passed less is not taken for one that did.

    A unit that does not compile with the parts of the intrinsics that it names is tried with all of them.

    Raises:
        ToolchainError: with the compiler's first error line.
    """
    more = (folder, includes, check, declared, passed)
    if WHOLE in text and f"-D{WHOLE}" not in flags:
        try:
            return _compile_text(runner, toolchain, text, flags, *more)
        except ToolchainError:
            flags = [*flags, f"-D{WHOLE}"]
    return _compile_text(runner, toolchain, text, flags, *more)


def _compile_text(
    runner: Runner,
    toolchain: Toolchain,
    text: str,
    flags: Sequence[str],
    folder: Path,
    includes: Sequence[str],
    check: Callable[[Path], None] | None,
    declared: str,
    passed: str,
) -> tuple[Path, str, bool]:
    arguments = [*toolchain.command, *toolchain.places, *includes, *flags]
    with tempfile.TemporaryDirectory(prefix=".tk-", dir=folder) as scratch:
        # A short relative name: messages and __FILE__ do not depend on where this runs.
        source = Path(scratch) / "unit.c"
        source.write_text(text, encoding="utf-8")
        if declared:
            (Path(scratch) / "annotations.h").write_text(declared, encoding="utf-8")
            arguments += ["-include", "annotations.h"]
        arguments.append(f"-ffile-prefix-map={scratch}=.")  # no object remembers the folder that it was made in
        command = [*arguments, "-E", "-P", "unit.c"]
        status, output, errors = runner.run(command, cwd=Path(scratch))
        if status != 0:
            optional = set(_OPTIONAL.findall(text)) & set(_UNKNOWN.findall(errors)) & set(flags)
            if not optional:
                raise ToolchainError(first_error(errors), command, status, errors)
            try:
                kept = [flag for flag in flags if flag not in optional]
                return _compile_text(runner, toolchain, text, kept, folder, includes, check, declared, passed)
            except ToolchainError as error:
                reason = f"{first_error(errors)}; and without it: {error.args[0]}"
                raise ToolchainError(reason, command, status, errors) from error
        digest = hashlib.sha256()
        for part in (
            output,
            "\0".join([*toolchain.command, *flags]).encode(),
            toolchain.version.encode(),
            toolchain.assembler.encode(),
            passed.encode(),
        ):
            digest.update(len(part).to_bytes(8, "little") + part)
        key = digest.hexdigest()[:32]
        target = folder / f"{key}.o"
        if target.is_file() and is_object(target):
            return target, key, True
        command = [*arguments, "-c", "unit.c", "-o", "unit.o"]
        status, _, errors = runner.run(command, cwd=Path(scratch))
        if status != 0:
            raise ToolchainError(first_error(errors), command, status, errors)
        made = Path(scratch) / "unit.o"
        if check is not None:
            check(made)
        with open(made, "rb+") as file:
            os.fsync(file.fileno())  # a renamed file that the disk never got would be an empty one after a power loss
        os.replace(made, target)
    return target, key, False


def is_object(path: Path) -> bool:
    """Whether a kept object is whole (it may have been cut short by a full disk)."""
    if not sys.platform.startswith("linux"):
        return path.stat().st_size > 0
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF" and not is_cut_short(path)


def link_check(runner: Runner, toolchain: Toolchain, symbols: Sequence[str]) -> Callable[[Path], None] | None:
    """A check that a row's object defines its functions and calls nothing that is not there.

    One row with an unresolved symbol would otherwise take the whole module down when it is loaded.
    """
    if not sys.platform.startswith("linux"):
        return None  # the two options below are GNU ld's and lld's

    def check(made: Path) -> None:
        wanted = [f"-Wl,--require-defined={symbol}" for symbol in symbols]
        command = [
            *toolchain.command, *toolchain.places, "-shared", "-fno-lto", "-Wl,-z,defs", *wanted,
            str(made), "-o", str(made.with_suffix(".so")), "-lm",
        ]  # fmt: skip
        status, _, errors = runner.run(command)
        if status != 0:
            raise ToolchainError(first_error(errors), command, status, errors)

    return check


class _Shared(ToolchainError):
    """A unit defines symbols that another unit of the module may define, too."""

    def __init__(self, symbols: Sequence[str]) -> None:
        super().__init__(f"not static: {', '.join(symbols)}")
        self.symbols = tuple(symbols)


@functools.lru_cache(maxsize=8)
def disassemblers(arch: str) -> tuple[tuple[Disassembler, ...], str]:
    """What reads objects of an architecture back, and why nothing does where that is so."""
    try:
        return tuple(find_disassemblers(Runner(), arch, host())), ""
    except ToolchainError as error:
        return (), str(error.args[0])


def scan_check(runner: Runner, arch: str, job: Job) -> Callable[[Path], None]:
    """A check that an object holds no instruction which its row's features do not cover: it would be SIGILL somewhere.

    An object that no disassembler here can read passes.
    """

    def check(made: Path) -> None:
        try:
            functions, _ = disassemble(runner, made, arch, disassemblers(arch)[0])
        except ToolchainError:
            return
        for text, needs in scan(functions, arch, job.needs):
            raise ToolchainError(
                f"its object holds the instruction {text!r}, which needs {needs}, and the row does not have that: add "
                f"it to requires= (a target attribute or pragma gets past the flags; see inside= too)"
            )

    return check


def prototypes(job: Job) -> str:
    """What the annotations say of a unit's functions, as C that needs no header (a unit may set feature macros first).

    A template that writes another prototype than its annotations would be called with the wrong registers.
    """
    kernel = job.kernel
    lines = [sig.prototype(kernel.symbol(name, job.suffix, job.alternative)) for name, sig in kernel.functions]
    text = "".join(f"{line};\n" for line in lines)
    return re.sub(r"\b(u?)int(8|16|32|64)_t\b", lambda m: f"__{m[1].upper()}INT{m[2]}_TYPE__", text)


def _hint(error: ToolchainError) -> str:
    """What mends the two mistakes that authors make most."""
    if "conflicting types for" in error.output:
        return "; the template's prototype is not that of the annotations: begin the function with ${ proto(...) }"
    lacking = r"target specific option mismatch|needs isa option|always_inline function .* requires target feature"
    if re.search(lacking, error.output):
        return "; an intrinsic needs a feature that the row does not have: add it to requires="
    return ""


def compile_jobs(
    runner: Runner, toolchain: Toolchain, jobs: Sequence[Job], folder: Path, progress: Progress | None = None
) -> list[Compiled]:
    """Render and compile jobs on all cores, in order of the jobs; a row that fails carries its reason.

    Raises:
        TemplateError: a template cannot be rendered, or defines what is not static: a fault of the family, not of this
            compiler.
    """
    texts = [render(j.kernel, j.row, toolchain.arch, j.alternative, j.features) for j in jobs]

    def one(job: Job, text: str) -> Compiled:
        try:
            symbols = [job.kernel.symbol(name, job.suffix, job.alternative) for name, _ in job.kernel.functions]
            linked, scanned = link_check(runner, toolchain, symbols), scan_check(runner, toolchain.arch, job)

            def check(made: Path) -> None:
                if linked is not None:
                    linked(made)
                others = [s for s in shared_symbols(made) if s not in symbols and not s.startswith("_")]
                if others:
                    raise _Shared(others)
                scanned(made)

            declared = prototypes(job)
            passed = f"{fingerprint()} {' '.join(sorted(job.needs))}" if disassemblers(toolchain.arch)[0] else "unread"
            path, key, cached = compile_text(
                runner, toolchain, text, job.flags, folder, check=check, declared=declared, passed=passed
            )
        except _Shared as error:
            return Compiled(job, None, "", False, error.args[0], error.symbols)
        except ToolchainError as error:
            wanted = " ".join(f"-m{f}" for f in job.features) if toolchain.arch == "x86_64" else " ".join(job.flags[:1])
            reason = f"{toolchain.label}: {error.args[0]} (with {wanted or 'baseline flags'}){_hint(error)}"
            return Compiled(job, None, "", False, reason)
        return Compiled(job, path, key, cached)

    results: dict[int, Compiled] = {}
    with ThreadPoolExecutor(lanes()) as pool:
        futures: dict[Future[Compiled], int] = {
            pool.submit(one, j, t): i for i, (j, t) in enumerate(zip(jobs, texts, strict=True))
        }
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    results[futures[future]] = future.result()
                    if progress is not None:
                        progress(len(results), len(jobs), jobs[futures[future]].label)
        except BaseException:
            for future in pending:
                future.cancel()
            runner.stop()
            raise
    made = [results[i] for i in range(len(jobs))]
    _check_shared(made)
    return made


def _check_shared(made: Sequence[Compiled]) -> None:
    """A helper that is not static is a fault of the family: one day two rows have it, and nothing can be linked."""
    rows: dict[tuple[str, str], list[str]] = {}
    for item in made:
        for symbol in item.shared:
            rows.setdefault((item.job.kernel.key, symbol), []).append(item.job.suffix)
    if rows:
        raise TemplateError(
            "; ".join(
                f"kernel {kernel}, {'rows' if len(found) > 1 else 'row'} {', '.join(dict.fromkeys(found))}: {symbol!r} "
                f"is not static, and every row of the module would define it; make it static"
                for (kernel, symbol), found in rows.items()
            )
        )


__all__ = ["Compiled", "Progress", "TemplateError", "compile_jobs", "compile_text", "first_error", "lanes"]
