# SPDX-License-Identifier: Apache-2.0
"""What the tests of installs share: a copy of the tree, virtual environments, a wheelhouse, other interpreters."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, lacking

RUN_TIME = ("numpy", "cffi", "platformdirs", "filelock")
"""What a tuned application needs."""

BUILD = ("setuptools", "cffi", "jinja2", "numpy")
"""What pyproject.toml says that the build needs."""

WHEELHOUSE = (*dict.fromkeys((*RUN_TIME, *BUILD)), "wheel", "py-cpuinfo")

LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "venv", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.pyi", "tk_include", "_tk_*_build.json", ".hypothesis",
    ".pytest_cache", ".mypy_cache", ".ruff_cache",
)  # fmt: skip


@functools.cache
def _snapshot() -> Path:
    """One copy a session, so that an edit meanwhile cannot tell two installs apart."""
    folder = tempfile.mkdtemp(prefix="tunekit-tree-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=LEFT_BEHIND, symlinks=True, dirs_exist_ok=True)
    return Path(folder)


def copy_tree(target: Path) -> Path:
    """The source tree as a clone would have it, with nothing that a build left."""
    shutil.copytree(_snapshot(), target, symlinks=True)
    return target


@functools.cache
def _private() -> Path:
    """A folder for state and cache of this session's installs, where a test names none."""
    folder = tempfile.mkdtemp(prefix="tunekit-user-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def clean(variables: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment less what could colour an install, with changes (None removes a variable)."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TUNEKIT_", "PYTHON", "COV_")) and name not in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "VIRTUAL_ENV")
    }
    # Not the user's own: whoever ran the README's first command has a stamped module there, which every install would load.
    environment["TUNEKIT_HOME"], environment["TUNEKIT_CACHE"] = str(_private() / "state"), str(_private() / "cache")
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    environment["PIP_ROOT_USER_ACTION"] = "ignore"
    for name, value in (variables or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def run(
    command: Sequence[str | Path], variables: Mapping[str, str | None] | None = None, cwd: Path | None = None,
    check: bool = True, timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree; a failure shows all that it said."""
    done = subprocess.run(
        [str(word) for word in command], env=clean(variables), cwd=cwd or "/", text=True, capture_output=True,
        timeout=timeout, stdin=subprocess.DEVNULL, check=False,
    )
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done


@dataclass(frozen=True)
class Wheelhouse:
    """A folder of wheels, and the folders that stand in for an environment with some of them installed."""

    folder: Path
    run_time: Path
    build: Path

    @property
    def variables(self) -> dict[str, str]:
        """Environment in which pip takes everything, isolated builds' requirements too, from the folder."""
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": os.devnull}


@functools.cache
def pip() -> Path:
    """A current pip, in a folder of its own: any interpreter runs it, and environments need none."""
    folder = tempfile.mkdtemp(prefix="tunekit-pip-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    got = run([sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", folder, "pip"], check=False)
    if got.returncode != 0:
        lacking(f"a package index: {got.stderr.strip()[-600:]}")
    return Path(folder) / "pip"


@functools.cache
def fill_wheelhouse(folder: Path) -> Wheelhouse:
    """Download once a session; what is installed from it afterwards needs no network."""
    house = Wheelhouse(folder / "wheels", folder / "run-time", folder / "build")
    got = run([sys.executable, pip(), "download", "-q", "-d", house.folder, *WHEELHOUSE], check=False)
    if got.returncode != 0:
        lacking(f"a package index: {got.stderr.strip()[-600:]}")
    for target, names in ((house.run_time, RUN_TIME), (house.build, (*BUILD, "wheel", "platformdirs", "filelock"))):
        run([sys.executable, pip(), "install", "-q", "--no-compile", "--target", target, *names], house.variables)
    return house


@dataclass(frozen=True)
class Place:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def pip(
        self, *words: str | Path, variables: Mapping[str, str | None] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run pip in that environment."""
        return run([self.python, pip(), *words], variables, check=check)

    def code(
        self, text: str, variables: Mapping[str, str | None] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run code there, outside the source tree and with warnings as errors."""
        return run([self.python, "-W", "error", "-c", text], variables, cwd=self.folder, check=check)

    def stamps(self, variables: Mapping[str, str | None] | None = None) -> dict[str, Any]:
        """Where tunekit was found, and the stamps of its modules."""
        text = (
            "import json, tunekit, tunekit.core\nfrom tunekit import dispatch\n"
            "ks = dispatch.declare_scope('tunekit')\n"
            "print(json.dumps({'file': tunekit.__file__, 'core': getattr(tunekit.core.core(), '__file__', None),"
            " 'modules': {m.name: m.stamp for k in ks for m in dispatch.loaded_modules(k)}}))"
        )
        found: dict[str, Any] = json.loads(self.code(text, variables).stdout)
        return found


def make_place(folder: Path, *paths: Path, python: str | Path = sys.executable) -> Place:
    """A fresh environment without pip in it; ``paths`` stand for what is installed there."""
    run([python, "-m", "venv", "--without-pip", folder])
    place = Place(folder)
    if paths:
        (place.site / "beneath.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    return place


def other_interpreters() -> dict[str, str]:
    """Version to path of the other CPythons, 3.11 or later, that this machine has and that can make environments."""
    names = [shutil.which(f"python3.{minor}") or "" for minor in range(11, 16)]
    names += [str(p) for p in sorted(Path.home().glob(".pyenv/versions/3.1[1-9]*/bin/python3.1[1-9]"))]
    script = ROOT / ".ci" / "python313"
    if script.is_file():  # no part of an sdist
        names.append(run(["bash", script, "--path"], check=False).stdout.strip())
    found: dict[str, str] = {}
    for name in filter(None, names):
        try:
            asked = run(
                [name, "-c", "import sys, venv, sysconfig as s; print('%d.%d' % sys.version_info[:2], s.get_config_var('Py_GIL_DISABLED'))"],
                check=False,
            )
        except OSError:
            continue
        version, _, free_threaded = asked.stdout.strip().partition(" ")
        if asked.returncode == 0 and free_threaded in ("0", "None") and not sys.version.startswith(f"{version}."):
            found.setdefault(version, name)
    return found
