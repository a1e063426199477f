# SPDX-License-Identifier: Apache-2.0
"""The C compiler: finding it, naming it, running it.

Only tunekit decides which instructions an object may hold. From ``CC`` everything is kept but the flags that
select instructions, optimisation, link-time optimisation and warnings; from ``CFLAGS``, ``CPPFLAGS`` and
``LDFLAGS`` only what says where things are. Commands are argument lists throughout, so that no path needs quoting.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import ToolchainError

TIMEOUT = 300.0
"""Seconds after which a compiler is taken for hung."""

# With an argument of their own in the next word, or attached.
_PLACES = (
    "-I", "-isystem", "-idirafter", "-iquote", "-isysroot", "--sysroot", "-B", "-D", "-U", "-L", "-target", "--target",
)
# -f stands for fast-math in its many spellings, -flto, -fprofile, -fshort-enums and more that would change a row.
_DROPPED = ("-m", "-O", "-f", "-W", "-w", "-g", "-std", "-ansi", "-pedantic")
_DROPPED_WITH_NEXT = ("-x", "-Xclang", "-Xassembler", "-Xpreprocessor", "-Xlinker")
_KEPT = (
    "-m64", "-mabi", "-fuse-ld", "-fsanitize", "-fno-sanitize", "-fno-omit-frame-pointer", "-fplugin",
    "-ffile-prefix-map", "-fdebug-prefix-map", "-fmacro-prefix-map",
)


class Runner:
    """Runs commands and, when asked, kills all that still run: an interrupted build leaves no child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(
        self, command: Sequence[str], cwd: Path | None = None, stdin: bytes | None = None
    ) -> tuple[int, bytes, str]:
        """Run a command: (status, standard output, error output). Raises ToolchainError where it cannot start."""
        environment = {**os.environ, "LC_ALL": "C"}
        with self._lock:
            if self._stopped:
                raise ToolchainError("the build was stopped")
            try:
                process = subprocess.Popen(
                    command, cwd=cwd, env=environment, start_new_session=True,
                    stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            except OSError as error:
                raise ToolchainError(f"cannot run {command[0]!r}: {error.strerror or error}", command) from error
            self._running.add(process)
        try:
            output, errors = process.communicate(stdin, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise ToolchainError(f"{command[0]!r} did not finish in {TIMEOUT:.0f} s", command) from None
        except BaseException:
            _kill(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return process.returncode, output, errors.decode(errors="replace")

    def stop(self) -> None:
        """Kill what runs and start nothing more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the driver's own children (cc1, as) too
    except (OSError, AttributeError):
        process.kill()
    process.wait()


@dataclass(frozen=True)
class Toolchain:
    """A compiler that answered.

    Attributes:
        command: the program with its kept arguments.
        places: include paths, definitions and the like from the environment.
        version: what ``--version`` printed.
        assembler: what the assembler's ``--version`` printed.
        family: ``gcc`` or ``clang``.
        triple: what ``-dumpmachine`` printed.
        arch: architecture by its predefined macros (``x86_64``, ``aarch64``, else the triple's first word).
    """

    command: tuple[str, ...]
    places: tuple[str, ...]
    version: str
    assembler: str
    family: str
    triple: str
    arch: str

    @property
    def label(self) -> str:
        """The first line of ``--version``."""
        return self.version.partition("\n")[0]


def split(text: str) -> list[str]:
    """Split a flags variable like a shell; text that cannot be split is an error that names the variable's mend."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ToolchainError(
            f"the compiler flags {text!r} cannot be split into words ({error}); mend the quotes"
        ) from error


def keep_program(words: Sequence[str]) -> tuple[str, ...]:
    """The words of ``CC`` less those that are tunekit's to decide: instructions, optimisation, arithmetic, warnings."""
    kept: list[str] = []
    before = ""
    for word in words:
        dropped = word.startswith(_DROPPED) and not word.startswith(_KEPT)
        if not dropped and word not in _DROPPED_WITH_NEXT and before not in _DROPPED_WITH_NEXT:
            kept.append(word)
        before = word
    return tuple(kept)


def keep_places(words: Sequence[str]) -> tuple[str, ...]:
    """Of ``CFLAGS`` and its kind, what says where things are."""
    kept: list[str] = []
    following = False
    for word in words:
        if following:
            kept.append(word)
            following = False
        elif word in _PLACES:
            kept.append(word)
            following = True
        elif word.startswith(_PLACES):
            kept.append(word)
    return tuple(kept)


def _candidates(environ: Mapping[str, str]) -> list[list[str]]:
    named = environ.get("CC", "").strip()
    if named:
        return [split(named)]
    found = []
    configured = split(str(sysconfig.get_config_var("CC") or ""))
    if configured and shutil.which(configured[0]):
        found.append(configured)
    return found + [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]


_MEND = "install one (Debian and Ubuntu: apt-get install gcc libc6-dev), or name it in CC"


def find_toolchain(runner: Runner, environ: Mapping[str, str] | None = None) -> Toolchain:
    """Find a working C compiler.

    Raises:
        ToolchainError: none is there, or the one that ``CC`` names does not work.
    """
    environ = os.environ if environ is None else environ
    places: list[str] = []
    for variable in ("CPPFLAGS", "CFLAGS", "LDFLAGS"):
        places += keep_places(split(environ.get(variable, "")))
    candidates = _candidates(environ)
    if not candidates:
        raise ToolchainError(f"no C compiler found (looked for cc, gcc, clang); {_MEND}")
    faults = []
    for words in candidates:
        command = keep_program(words)
        if not command:
            raise ToolchainError(f"CC={shlex.join(words)!r} names no program; {_MEND}")
        try:
            return _ask(runner, command, tuple(places))
        except ToolchainError as error:
            faults.append(error)
    first = faults[0]
    raise ToolchainError(
        f"the C compiler {shlex.join(first.command[:1] or candidates[0])} does not work: {first.args[0]}; {_MEND}",
        first.command, first.status, first.output,
    )


def _ask(runner: Runner, command: tuple[str, ...], places: tuple[str, ...]) -> Toolchain:
    def answer(*arguments: str, stdin: bytes | None = None) -> str:
        line = [*command, *arguments]
        status, output, errors = runner.run(line, stdin=stdin)
        if status != 0:
            raise ToolchainError(f"{' '.join(arguments)} ended with status {status}", line, status, errors)
        return output.decode(errors="replace")

    version = answer("--version").strip()
    macros = answer("-dM", "-E", "-x", "c", "-", stdin=b"")
    triple = answer("-dumpmachine").strip()
    if "#define __x86_64__ 1" in macros and "#define __ILP32__" not in macros:
        arch = "x86_64"
    elif "#define __aarch64__ 1" in macros and "#define __ILP32__" not in macros:
        arch = "aarch64"
    else:
        arch = triple.partition("-")[0] or "unknown"
    family = "clang" if "#define __clang__ 1" in macros else "gcc"
    assembler = ""
    try:
        program = answer("-print-prog-name=as").strip() or "as"
        assembler = runner.run([program, "--version"])[1].decode(errors="replace").strip()
    except ToolchainError:
        pass  # clang assembles by itself; its own version says which
    return Toolchain(command, places, version, assembler, family, triple, arch)


# --- flags -----------------------------------------------------------------------------------------------

COMMON = (
    "-std=c11", "-fPIC", "-fvisibility=hidden", "-fno-lto", "-g0", "-ffp-contract=off", "-fno-math-errno",
    "-Werror=return-type", "-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-psabi",
)
"""Every object of ours. ``-ffp-contract=off``: the float fold is written out, so that its bits do not depend on it."""

BASELINE = {"x86_64": ("-march=x86-64", "-mtune=generic"), "aarch64": ("-march=armv8-a",)}
"""The instruction set of everything that is not a row."""


def baseline_flags(arch: str) -> tuple[str, ...]:
    return (*BASELINE.get(arch, ()), "-O2", *COMMON)


def row_flags(arch: str, features: Sequence[str]) -> tuple[str, ...]:
    """The flags of a row object that is compiled for these features and nothing else."""
    if arch == "aarch64":
        # armv8.2-a is where the assemblers that people have accept the dot product at all.
        names = [{"neon": "simd", "fhm": "fp16fml", "rdm": "rdma"}.get(f, f) for f in features]
        base = "armv8.2-a" if set(names) - {"simd", "crc", "aes"} else "armv8-a"
        return (f"-march={base}" + "".join(f"+{n}" for n in names), "-O3", *COMMON)
    return (*BASELINE.get(arch, ()), *(f"-m{f}" for f in features), "-O3", *COMMON)
