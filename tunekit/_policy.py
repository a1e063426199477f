# SPDX-License-Identifier: Apache-2.0
"""The policy rail: what an application does on a box for which a library in it has no winners yet.

:func:`policy` guards an entry point. Under ``auto`` it runs each missing scope's tuner in a child and then starts the
process again, once: a fresh process has the winners in every module, whatever this one has used already. Four things
keep that from going round in circles: a process tree starts again at most once, and only after something was written
that was missing; a tuner's own process has no policy; one process at a time tunes a scope, and the others wait for it;
and where replacing the process would kill its host (a REPL, a notebook, a worker), ``auto`` only warns.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunekit import _manifest, core, cpu, dispatch
from tunekit._lock import lock
from tunekit.console import Console, seconds
from tunekit.dispatch import Binding
from tunekit.environment import POLICIES, settings
from tunekit.errors import DeclarationError, PolicyError, TunekitError, TunekitWarning
from tunekit.kernel import Kernel

if TYPE_CHECKING:
    import subprocess

Function = TypeVar("Function", bound=Callable[..., Any])

RESTART = 3
"""Exit status of ``restart`` after a scope was tuned."""

_TUNE = "--tune"
_BAR = "*" * 78
_PR_SET_PDEATHSIG = 1

# Programs that run an application inside themselves, by a module that only they load.
_HOSTS = {
    "ipykernel": "a Jupyter kernel", "_pytest.main": "pytest", "unittest.__main__": "unittest",
    "gunicorn.arbiter": "gunicorn", "uwsgi": "uWSGI", "mod_wsgi": "mod_wsgi", "celery.bin.worker": "Celery",
    "mpi4py.MPI": "an MPI process", "pydevd": "a debugger", "debugpy": "a debugger",
}  # fmt: skip

_DEBUGGERS = ("pdb", "trace", "ipdb", "pudb")
"""Modules that run a program inside themselves: its restart would be another session of theirs."""


# --- how this process was started ------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A process as it was when tunekit was imported: what a fresh one is started with."""

    words: tuple[str, ...]
    folder: str | None
    environ: Mapping[str, str]
    process: int
    complains: bool
    """Whether there is a standard error: where it was closed, descriptor 2 is whatever file was opened next."""

    @classmethod
    def now(cls) -> Start:
        try:
            folder: str | None = os.getcwd()  # noqa: PTH109 (a path that is text, and a folder that may be gone)
        except OSError:
            folder = None
        words, complains = tuple(getattr(sys, "orig_argv", ())), sys.__stderr__ is not None
        return cls(words, folder, dict(os.environ), os.getpid(), complains)


_START = Start.now()


@dataclass(frozen=True)
class CommandLine:
    """``python FLAGS PROGRAM ARGUMENTS``, taken apart.

    Attributes:
        flags: options of the interpreter.
        kind: ``script``, ``module``, ``code``, ``stdin``, or ``none`` where it names no program.
        head: everything before the application's own arguments, without the interpreter itself.
        arguments: the application's.
    """

    flags: tuple[str, ...]
    kind: str
    head: tuple[str, ...]
    arguments: tuple[str, ...]


def take_apart(words: Sequence[str]) -> CommandLine:
    """Find the program in an interpreter's command line, ``sys.orig_argv``. Pure."""
    flags: list[str] = []
    at = 1

    def made(kind: str, end: int) -> CommandLine:
        return CommandLine(tuple(flags), kind, tuple(words[1:end]), tuple(words[end:]))

    while at < len(words):
        word = words[at]
        if word == "-":
            return made("stdin", at + 1)
        if not word.startswith("-"):
            return made("script", at + 1)
        if word == "--":
            return made("script", at + 2) if at + 1 < len(words) else made("none", at + 1)
        if word.startswith("--"):
            several = 2 if word == "--check-hash-based-pycs" else 1
            flags += words[at : at + several]
            at += several
            continue
        for place, letter in enumerate(word[1:], start=1):
            if letter in "cm":
                if place > 1:
                    flags.append(word[:place])
                return made("code" if letter == "c" else "module", at + (1 if word[place + 1 :] else 2))
            if letter in "WX":
                several = 1 if word[place + 1 :] else 2
                flags += words[at : at + several]
                at += several
                break
        else:
            flags.append(word)
            at += 1
    return made("none", len(words))


def without_tune(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Arguments less ``--tune`` after the first ``--`` (and less that ``--`` where nothing else follows). Pure."""
    if "--" not in arguments:
        return list(arguments), False
    at = list(arguments).index("--")
    rest = [word for word in arguments[at + 1 :] if word != _TUNE]
    found = len(rest) < len(arguments) - at - 1
    if not found:
        return list(arguments), False
    return [*arguments[:at], *(["--", *rest] if rest else [])], True


def _forked() -> bool:
    """Whether this process was forked and never exec'd a program of its own (a worker of a server, a daemon)."""
    if os.getpid() != _START.process:
        return True
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return bool(int(fields[6]) & 0x40)  # PF_FORKNOEXEC
    except (OSError, ValueError, IndexError):
        return False


def _embedded() -> str | None:
    """The program that this interpreter is a part of, or None where it is a program itself."""
    if not sys.executable or not _START.words:
        return "another program"
    try:
        own = os.readlink("/proc/self/exe")  # noqa: PTH115
    except OSError:
        return None  # no Linux
    return None if os.path.realpath(sys.executable) == os.path.realpath(own) else own


def _sub_interpreter() -> bool:
    """Whether this interpreter is not the process's first: it alone may have signal handlers."""
    import signal

    handler = signal.getsignal(signal.SIGTERM)
    try:
        if handler is not None:  # one that was not set by Python cannot be set again
            signal.signal(signal.SIGTERM, handler)
    except ValueError:
        return True
    return False


def why_no_restart() -> str | None:
    """Why this process must not be replaced by a fresh one, or None where it may."""
    if os.name != "posix":
        return "a process cannot be replaced on this system"
    if getattr(sys, "frozen", False) or hasattr(sys, "_MEIPASS"):
        return "this is a frozen executable"
    main = sys.modules.get("__main__")
    if hasattr(main, "__compiled__"):
        return "this is a compiled executable"
    host = _embedded()
    if host is not None:
        return f"the interpreter is embedded in {host}"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "this is an interactive interpreter"
    for name, label in _HOSTS.items():
        if name in sys.modules:
            return f"this runs inside {label}"
    if hasattr(builtins, "get_ipython"):
        return "this runs inside IPython"
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return "this is a multiprocessing worker"
    if _forked():
        return "this is a forked worker"
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread"
    if _sub_interpreter():
        return "this is a sub-interpreter"
    line = take_apart(_START.words)
    if line.kind == "module" and line.head[-1].removeprefix("-m") in _DEBUGGERS:
        return "this runs in a debugger"
    if line.kind == "stdin" or (line.kind == "none" and line.head == line.flags):
        return "the program came from standard input"
    if "again" in settings().rail:
        return "this process tree was started again once already"
    return None


# --- what is missing, and what mends it ------------------------------------------------------------------


def is_missing(scope: str) -> bool:
    """Whether no manifest that counts here names a row of the grid for any kernel of a scope (a torn one names none).

    A name that the grid does not have is none: the library was given other rows since.
    """
    entries = ((kernel, layer.entry(kernel)) for kernel in dispatch.kernels(scope) for layer in _manifest.layers(scope))
    return not any(suffix is not None and kernel.knows(suffix) for kernel, suffix in entries)


def _scopes() -> list[str]:
    """The scopes of this process that a policy is about: those that did not come in a frozen build."""
    return list(dict.fromkeys(kernel.scope.name for kernel in dispatch.kernels() if not dispatch.frozen(kernel)))


def _modules(scope: str) -> list[str]:
    """Options that tell tunekit's own commands where a scope without an entry point is declared."""
    if scope in dispatch.installed_scopes():
        return []
    return [word for name in dict.fromkeys(k.module for k in dispatch.kernels(scope)) for word in ("--module", name)]


def tuner_words(scope: str) -> list[str]:
    """What follows ``python`` in the command that tunes a scope.

    Raises:
        PolicyError: the scope has no tuner, or one that no other process could run.
    """
    kernels = dispatch.kernels(scope)
    tuner = kernels[0].scope.tuner
    if tuner:
        return ["-m", tuner]
    if not any(kernel.fixtures for kernel in kernels):
        raise PolicyError(
            f"scope {scope} cannot be tuned: it declares neither a tuner (tunekit.Scope(..., tuner='package.module')) "
            f"nor fixtures= on a kernel; add one, or apply another policy than auto or restart"
        )
    if any(kernel.module == "__main__" for kernel in kernels):
        raise PolicyError(
            f"scope {scope} cannot be tuned: its kernels are declared in the program itself, which its tuner cannot "
            f"import; move them to a module"
        )
    return ["-m", "tunekit.retune", "--scope", scope, *_modules(scope)]


def _own_path() -> set[str]:
    """Folders that any interpreter of this installation looks for modules in."""
    import site
    import sysconfig

    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return own | {*site.getsitepackages(), site.getusersitepackages()}


def _further_path() -> str:
    """``sys.path`` beyond what any interpreter of this installation has: the program's folder, and what was added."""
    import sysconfig

    own = _own_path()
    library = sysconfig.get_path("stdlib")
    kept = []
    for entry in sys.path:
        path = os.path.join(_START.folder or "", entry) if entry else _START.folder  # noqa: PTH118
        if path and path not in own and not path.startswith((f"{library}{os.sep}", f"{library}.zip")):
            zipped = path.endswith(f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
            kept += [] if zipped else [path]
    return os.pathsep.join(dict.fromkeys(kept))


def _out_of_reach(words: Sequence[str]) -> str | None:
    """Why ``-m MODULE`` cannot be found by a child under this interpreter's flags, or None where it can.

    The folders that an application adds to its path reach a child by PYTHONPATH, which ``-E`` and ``-I`` forbid.
    """
    import importlib.machinery

    further = _further_path().split(os.pathsep) if sys.flags.ignore_environment else []
    own = [entry for entry in sys.path if entry and entry not in further]
    name = words[1].partition(".")[0]
    if not any(further) or importlib.machinery.PathFinder.find_spec(name, own) is not None:
        return None
    return f"module {name} lies in a folder that python -E and -I keep from a child"


def _tuner_variables(scope: str) -> dict[str, str]:
    return {"TUNEKIT_MODE": "tune", "TUNEKIT_MANIFEST": str(_manifest.user_path(scope))}


def command_of(scope: str) -> str:
    """The shell command that tunes a scope, as a person would type it.

    Raises:
        PolicyError: there is none (see :func:`tuner_words`).
    """
    import shlex

    words = tuner_words(scope)
    variables = _tuner_variables(scope) if dispatch.kernels(scope)[0].scope.tuner else {}
    own_command = words[1] == "tunekit.retune" and len(words) == 4
    further = "" if own_command else _further_path()
    if further:
        variables["PYTHONPATH"] = further
    prefix = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    # Started by hand from anywhere, like the child: without the working directory on its path.
    return " ".join([*prefix, shlex.join([sys.executable or "python", *(["-P"] if further else []), *words])])


def untuned(scope: str) -> str:
    """What a banner and an error say of a scope: that it is untuned, where that was looked up, and the mend."""
    paths = " and ".join(str(layer.path) for layer in _manifest.layers(scope))
    problems = [f"; {m.path} is not usable: {m.problem}" for m in _manifest.layers(scope) if m.problem]
    try:
        mend = f"to tune it: {command_of(scope)}"
    except PolicyError as error:
        mend = str(error)
    return f"scope {scope} is untuned on this box: no row for it in {paths}{''.join(problems)}; {mend}"


def _say(text: str) -> None:
    Console().complain(f"tunekit: {text}")


def _banner(scopes: Sequence[str], why: str = "") -> None:
    lines = [f"tunekit: {untuned(scope)}" for scope in scopes]
    if why:
        lines.append(f"tunekit: {why}")
    Console().complain("\n".join([_BAR, *lines, _BAR]))


# --- running a tuner -------------------------------------------------------------------------------------


class _Ended(BaseException):
    """A signal that would have ended this process came while a tuner ran."""


@contextlib.contextmanager
def _obedient() -> Iterator[None]:
    """Let signals that end a process end the tuner before they end this one; handlers are as before afterwards."""
    import signal

    before: dict[int, Any] = {}

    ended: list[int] = []

    def handle(number: int, frame: object) -> None:
        ended.append(number)
        if len(ended) == 1:  # a second one must not interrupt the stopping, which takes 3 s at most
            raise _Ended

    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # a sub-interpreter has no signals; nothing is tuned there
                before[number] = signal.signal(number, handle)
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    if ended:
        signal.raise_signal(ended[0])


def _dies_with_parent() -> Callable[[], None] | None:
    """What a child does before its program starts, so that a killed application leaves no tuner behind (Linux)."""

    if sys.platform != "linux":
        return None
    import ctypes
    import signal

    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a child with all that it started in its own session (a daemon of its has left that)."""
    import signal
    import subprocess

    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3.0)
    finally:  # impatience (a second Ctrl-C) too
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run(words: Sequence[str], variables: Mapping[str, str], limit: float | None) -> str | None:
    """Run ``python WORDS`` as a child; None when it ended with 0, else what became of it.

    Its standard output goes to our standard error: an application's own output may be data.
    """
    import signal
    import subprocess

    environment = {**os.environ, "TUNEKIT_RAIL": ",".join(sorted({*settings().rail, "tuner"})), **variables}
    further = _further_path()
    if further:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [further, os.environ.get("PYTHONPATH")]))
    out = subprocess.DEVNULL
    if _START.complains:
        with contextlib.suppress(OSError):
            os.fstat(2)
            out = 2
    # -P: the working directory is on the child's path where it is on ours, and then by PYTHONPATH.
    command = [sys.executable, *take_apart(_START.words).flags, "-P", *words]
    try:
        process = subprocess.Popen(
            command, env=environment, cwd=_START.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True, preexec_fn=_dies_with_parent(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"could not be started ({error})"
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        _stop(process)
        return f"was stopped after {seconds(limit or 0)}, the policy's time limit"
    except BaseException:
        _stop(process)
        raise
    if status < 0:
        _stop(process)  # what it started may be alive
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with status {status}" if status else None


def _alone(scope: str, limit: float | None) -> contextlib.AbstractContextManager[bool]:
    """Keep other applications from tuning a scope meanwhile; False where another was at it until the time limit."""
    start = time.monotonic()
    return _manifest.turn(
        _manifest.user_path(scope).with_name(f".{scope}.policy.lock"),
        lambda: limit is not None and time.monotonic() - start > limit,
        lambda: _say(f"another application is tuning scope {scope} on this box: waiting for its winners"),
        # Both tune then, and the file of either is whole.
        lambda error: _say(f"scope {scope}: no lock could be taken against other applications that tune it ({error})"),
    )


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What differs after a file was written (writers replace it)."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _needs_build(scope: str) -> bool:
    """Whether a manifest names a row of a scope that is legal here and that nobody has built."""
    for kernel in dispatch.kernels(scope):
        world, _ = dispatch.world_of(kernel, grid=True)
        for suffix in (_manifest.manifest_get(kernel), *_manifest.seats_get(kernel).values()):
            row = kernel.row(suffix) if suffix else None
            if row is None or row.suffix in world.built or row.suffix in world.dropped:
                continue
            if kernel.refuses(row, world.arch) is None and kernel.requires(row).holds(world.features):
                return True
    return False


def _build(scope: str) -> None:
    """Build what the manifest names, in a child; a failure is said, and leaves the fallback."""
    problem = _run(["-m", "tunekit", "build", "--quiet", "--scope", scope, *_modules(scope)], {}, None)
    if problem:
        _say(f"what the manifest of scope {scope} names could not be built: the build {problem}")
    core.forget()
    cpu.forget()
    dispatch.forget_modules()


def _tune(scope: str, forced: bool, limit: float | None) -> bool:
    """Tune a scope; whether its manifest now holds what was missing (or, forced, was written again)."""
    words = tuner_words(scope)
    if core.core() is None:
        _build(scope)  # a box is known by its core, and the manifest's place by the box
    path = _manifest.user_path(scope)
    try:
        _manifest.check_writable(path)
        before = _signature(path)
        with _alone(scope, limit) as ours:
            if not ours:
                _say(f"scope {scope}: the other application is not done: running on the fallback")
                return False
            changed = _signature(path) != before
            if changed and not is_missing(scope):
                _say(f"scope {scope} was tuned by the other application")
                return True
            if unreachable := _out_of_reach(words):
                _say(f"scope {scope} is not tuned: {unreachable}; to tune it: {command_of(scope)}")
                return False
            again = forced and not is_missing(scope)
            what = "tuning it again" if again else "it is untuned on this box: tuning it, once"
            _say(f"scope {scope}: {what}: {command_of(scope)}")
            start = time.monotonic()
            problem = _run(words, _tuner_variables(scope), limit)
            took = seconds(time.monotonic() - start)
            written = _signature(path) != before and not is_missing(scope)
            if not written:
                unread = next((f" ({m.problem})" for m in _manifest.layers(scope) if m.problem), "")
                _say(
                    f"scope {scope}: its tuner {problem or 'ended with status 0'} and wrote no winner to "
                    f"{path}{unread}: running on the fallback"
                )
                return False
            _say(f"scope {scope}: tuned in {took}" + (f", although its tuner {problem}" if problem else ""))
            dispatch.forget_modules()
            if _needs_build(scope):
                _build(scope)
            return True
    except (OSError, TunekitError) as error:
        _say(f"scope {scope} is not tuned: {error}")
        return False


def _reachable(line: CommandLine) -> tuple[str, ...] | None:
    """The head of the command line that finds this very program from the folder of the start; None where none does.

    That folder is the one at the import of tunekit: a program that left its first one before is told by where it lies.
    """
    main = sys.modules.get("__main__")
    if line.kind == "script":
        word = line.head[-1]
        if os.path.exists(os.path.join(_START.folder or "", word)):  # noqa: PTH110, PTH118
            return line.head
        file = os.path.abspath(getattr(main, "__file__", None) or word)  # noqa: PTH100
        if os.path.basename(file) == "__main__.py" and os.path.basename(word) != "__main__.py":  # noqa: PTH119
            file = os.path.dirname(file)  # noqa: PTH120
        return (*line.head[:-1], file) if os.path.exists(file) else None  # noqa: PTH110
    if line.kind == "module" and not sys.flags.safe_path:
        first = os.path.realpath(sys.path[0]) if sys.path else ""  # the working directory that Python itself began in
        installed = [*_START.environ.get("PYTHONPATH", "").split(os.pathsep), *_own_path(), _START.folder or ""]
        origin = getattr(getattr(main, "__spec__", None), "origin", None) or ""
        if _within(os.path.realpath(origin), first) and first not in map(os.path.realpath, filter(None, installed)):
            return None
    return line.head


def _within(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _start_again() -> None:
    """Replace this process by a fresh one, with the same arguments less ``--tune``; returns only where that fails."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    line = take_apart(_START.words)
    head = _reachable(line)
    if head is None:
        _say(
            f"the process is not started again: from {_START.folder}, where it was when tunekit was imported, its "
            f"program is not found; this one goes on, the next has the winners"
        )
        return
    words = [sys.executable, *head, *without_tune(line.arguments)[0]]
    environment = {**_START.environ, "TUNEKIT_RAIL": ",".join(sorted({*settings().rail, "again"}))}
    now = Start.now().folder
    try:
        if _START.folder is not None:
            os.chdir(_START.folder)
        os.execve(sys.executable, words, environment)
    except OSError as error:
        if now is not None:
            os.chdir(now)
        _say(f"the process could not be started again ({error}): this one goes on, the next has the winners")


# --- the guard -------------------------------------------------------------------------------------------

_guarded: str | None = None


def _off() -> str | None:
    """Why no policy is in force in this process, or None."""
    now = settings()
    if "tuner" in now.rail:
        return "this is a tuner's process"
    if now.mode != "normal":
        return f"TUNEKIT_MODE is {now.mode}"
    if now.manifest is not None:
        return "TUNEKIT_MANIFEST is set"
    kernels = dispatch.kernels()
    if kernels and not _scopes():
        return dispatch.why_frozen(kernels[0])
    return None


def _bent() -> str | None:
    """Why a result of this process would not be this box's, or None."""
    now = settings()
    names = [n for n, v in (("TUNEKIT_PIN", now.pin), ("TUNEKIT_DISABLE_FEATURES", now.disable_features)) if v]
    return f"{' and '.join(names)} bends what this box can run" if names else None


def _late(value: str, seen: set[str]) -> Callable[[Kernel, Binding], None]:
    """What happens at the first use of a library that was imported after the guard: at most a banner or an error."""

    def check(kernel: Kernel, binding: Binding) -> None:
        scope = kernel.scope.name
        if scope in seen or dispatch.frozen(kernel) or not is_missing(scope):
            return
        if value == "error":
            raise PolicyError(untuned(scope))
        seen.add(scope)
        why = f"{value} acts as warn for it: it was imported after the policy was applied" if value != "warn" else ""
        _banner([scope], why)

    return check


def _once(missing: str, limit: float | None) -> None:
    """Apply the first policy of a process; later ones do nothing, unless the first stopped with an error."""
    global _guarded
    with lock:
        if _guarded is not None:
            return
        _guarded = missing
    try:
        _apply(missing, limit)
    except BaseException:
        _guarded = None
        raise


def _apply(missing: str, limit: float | None) -> None:
    """Do what the policy says; see :func:`policy`."""
    kept, forced = without_tune(sys.argv[1:])
    sys.argv[1:] = kept
    value = settings().policy or missing
    off = _off()
    if off is None and forced and settings().policy in ("fallback", "reference"):
        off = f"TUNEKIT_POLICY is {value}"
    if off is not None and forced:
        _say(f"--tune does nothing here: {off}")
        forced = False
    if off is None and settings().policy not in ("fallback", "reference"):
        dispatch.how_to_tune = "start it again with: -- --tune"
    if off is not None or (value == "fallback" and not forced):
        return
    scopes = _scopes()
    if forced and not scopes:
        _say("--tune does nothing here: no tuned library is imported yet; apply the policy after the imports")
    lacking = [scope for scope in scopes if is_missing(scope)]
    why = ""
    if forced or (value in ("auto", "restart") and lacking):
        reason = why_no_restart() or _bent()
        if reason is None:
            done = [_tune(scope, forced, limit) for scope in (scopes if forced else lacking)]
            if any(done):
                if value == "restart":
                    _say("tuned for this box: please start it again, without --tune")
                    raise SystemExit(RESTART)
                _start_again()
            lacking = [scope for scope in lacking if is_missing(scope)]
        elif forced:
            _say(f"--tune does nothing here: {reason}")
        if reason is not None and value in ("auto", "restart"):
            why = f"{value} acts as warn here: {reason}"
    if value == "reference":
        dispatch.reference_everywhere()
        os.environ["TUNEKIT_POLICY"] = value  # workers that are started fresh are part of the same baseline
        return
    if lacking and value == "error":
        raise PolicyError("\n".join(untuned(scope) for scope in lacking))
    if lacking and (value == "warn" or why):
        _banner(lacking, why)
    if value != "fallback":
        dispatch.first_use = _late(value, set(lacking))


class Guard:
    """A policy, ready to be put on an entry point (as a decorator) or to be applied here and now."""

    def __init__(self, missing: str, time_limit: float | None) -> None:
        self._missing, self._limit, self._used = missing, time_limit, False

    def __call__(self, function: Function) -> Function:
        """The function, with the policy applied before its first call in a process."""
        self._used = True
        if not callable(function):
            raise DeclarationError(
                f"the policy was put on {function!r}, which is no function; write @tunekit.policy(...) above one, or "
                f"tunekit.policy(...).apply()"
            )

        @functools.wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            self.apply()
            return function(*arguments, **named)

        return guarded  # type: ignore[return-value]

    def apply(self) -> None:
        """Apply the policy now.

        Raises:
            PolicyError: ``error`` and a scope is untuned; or something is to be tuned that has no tuner.
            SettingError: a ``TUNEKIT_*`` variable holds a value that is not legal.
            SystemExit: with status 3, ``restart`` after it tuned.
        """
        self._used = True
        with _obedient() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
            _once(self._missing, self._limit)

    def __del__(self) -> None:
        if not getattr(self, "_used", True):
            warnings.warn(
                "tunekit.policy(...) was made and never applied; put it on a function, or call .apply()",
                TunekitWarning,
                stacklevel=2,
            )


def policy(*, missing: str = "fallback", time_limit: float | None = 3600.0) -> Guard:
    """What this application does where a library in it is untuned on this box.

    ``@tunekit.policy(missing="auto")`` above an entry point, or ``tunekit.policy(missing="auto").apply()`` after the
    imports. The first guard that is reached in a process counts. ``TUNEKIT_POLICY`` overrides the value, and ``--tune``
    after ``--`` on the application's command line tunes in any case.

    Args:
        missing: ``fallback`` runs on the fallback, silently; ``warn`` says so, with the command that tunes; ``error``
            stops with the same words; ``auto`` runs each missing scope's tuner in a child and starts the process
            again; ``restart`` does that and ends with status 3 instead; ``reference`` runs reference bodies.
        time_limit: seconds after which a tuner is stopped (or the wait for another application's), or None.

    Raises:
        DeclarationError: an unknown value; the message names the legal ones.
    """
    if missing not in POLICIES:
        raise DeclarationError(f"policy missing={missing!r} is not legal; it takes one of: {', '.join(POLICIES)}")
    number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if time_limit is not None and not (number and time_limit > 0):
        raise DeclarationError(f"policy time_limit={time_limit!r} is not a positive number of seconds, nor None")
    return Guard(missing, time_limit)
