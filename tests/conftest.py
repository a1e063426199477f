# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test may use: private state and cache folders, a fresh dispatcher, child processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(Path(__file__).resolve().parent))


TOGETHER = {"test_aarch64.py", "test_emission.py"}
"""Files whose tests share something that is costly to make: each runs in one worker."""


def pytest_configure() -> None:
    """Have signals as a terminal gives them: a shell's ``&`` and ``nohup`` leave some ignored, and children inherit that."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out files of :data:`TOGETHER` whole and other tests one by one (the mark xdist_group does nothing in pytest 9.2)."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if Path(file).name in TOGETHER else nodeid

    return Scheduling(config, log)


def lacking(what: str) -> NoReturn:
    """A tool that a check needs is missing: fatal in CI, a reason to skip elsewhere."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"CI needs {what}")
    pytest.skip(f"needs {what}")


def processes(pattern: str) -> list[str]:
    """The command lines of running processes that match, this one's left out. (A bare Debian has no pgrep.)"""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if entry.name != str(os.getpid()) and re.search(pattern, line):
            found.append(line)
    return found


TOY_ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tests"), "PYTHONWARNINGS": "error::SyntaxWarning"}


def forget_everything() -> None:
    """Bring the process back to the state before its first choice (tests only: nothing outside may do this)."""
    from tunekit import _manifest, _policy, core, cpu, dispatch, environment, team
    from tunekit._lock import lock

    environment._settings = None
    _manifest.set_application(None)
    _policy._guarded = None
    with lock:
        dispatch._bindings.clear()
        dispatch._modules.clear()
        dispatch._outdated.clear()
        dispatch._said.clear()
        dispatch._reports.clear()
        dispatch._families.clear()
        dispatch._problems.clear()
        dispatch._reference_everywhere = False
        dispatch.first_use = None
        dispatch.how_to_tune = "python -m tunekit.retune"
    team.forget()
    core.forget()
    cpu.forget()


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the user's own state or cache, or sees a TUNEKIT_ variable of the shell."""
    for name in list(os.environ):
        if name.startswith("TUNEKIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TUNEKIT_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    forget_everything()
    yield tmp_path
    forget_everything()


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set TUNEKIT_ variables (None removes one) and start afresh."""

    def change(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(f"TUNEKIT_{name}", raising=False)
            else:
                monkeypatch.setenv(f"TUNEKIT_{name}", value)
        forget_everything()

    return change


@pytest.fixture(scope="session")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the toy family's fat and grid modules are built, once per session."""
    folder = tmp_path_factory.mktemp("toycache")
    code = (
        "from tunekit import dispatch; import toy.kernels; from tunekit.build_tools import build_cached\n"
        "ks = dispatch.kernels('toyscope')\n"
        "build_cached(ks, 'fat'); build_cached(ks, 'grid')"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(folder)})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def rail_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with all rows of the two libraries of the policy tests, built once per session."""
    folder = tmp_path_factory.mktemp("railcache")
    code = (
        "from tunekit import dispatch; import alpha, beta; from tunekit.build_tools import build_cached\n"
        "for scope in ('alpha', 'beta'):\n"
        "    build_cached(dispatch.kernels(scope), 'fat'); build_cached(dispatch.kernels(scope), 'grid')"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(folder), "PYTHONPATH": str(ROOT / "tests" / "rail")})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def machine(rail_cache: Path, tmp_path: Path) -> Any:
    """An untuned box on which applications are started (see rails.Machine)."""
    from rails import Machine

    return Machine(tmp_path, rail_cache)


@pytest.fixture(scope="session")
def q8_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the whole grid of the family, built once per session, whatever number of workers it has."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "q8cache"
    code = (
        "from tunekit import dispatch; import tunekit.q8.kernels; from tunekit.build_tools import build_cached\n"
        "report = build_cached(dispatch.kernels('tunekit'), 'grid'); print(report)"
    )
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            if objects := os.environ.get("CI_OBJECTS"):  # compiled earlier in this run; found by content, or not
                shutil.copytree(objects, folder / "objects")
            done = run_python(code, {"TUNEKIT_CACHE": str(folder)}, timeout=600)
            if done.returncode:
                shutil.rmtree(folder)
                lacking(f"a compiler that builds the grid: {done.stderr.strip()[-300:]}")
    return folder


@pytest.fixture
def toy(toy_cache: Path, environ: Callable[..., None]) -> Any:
    """The toy family's declaring module, its modules built."""
    import toy.kernels as kernels

    environ(CACHE=str(toy_cache))
    return kernels


def run_python(
    code: str, variables: Mapping[str, str] | None = None, *, cwd: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that can import tunekit and the toy family."""
    environment = {**os.environ, **TOY_ENVIRONMENT, **(variables or {})}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=cwd or ROOT / "tests",
        text=True,
        capture_output=True,
        timeout=timeout,
    )
