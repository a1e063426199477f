# SPDX-License-Identifier: Apache-2.0
"""The house of DESIGN section 3: floors that import downwards only, and a light run-time path."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_python

# A room may import rooms of its own floor or below. Rooms of one floor are listed from the bottom up.
# fmt: off
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_early", "_lock", "errors", "environment", "signature", "console"),                 # ground
    ("_templates", "paths", "core", "cpu", "rows"),                                        # data rooms
    ("_profile", "team", "kernel", "_manifest", "_verdicts", "choose", "module"),                             # run-time rooms
    ("dispatch",),                                                           # join
    ("_optin", "linking", "declare", "_proofs", "_status", "_policy"),       # author and application
    ("build_tools",),                                                        # beside
    ("q8",),                                                                 # clients
    ("measure", "tuner"),                                                    # tuner
    ("_new", "verify", "ceilings", "probe", "retune", "manifests", "report", "doctor", "__main__"),                            # top
)
# fmt: on
ORDER = {room: (floor, index) for floor, rooms in enumerate(FLOORS) for index, room in enumerate(rooms)}
# build_tools stands beside the floors: these alone may import it, and only inside functions.
MAY_BUILD = {"_optin", "tuner", "__main__", "retune", "verify", "ceilings", "doctor", "build_tools"}
# Families bring fixtures, and the vocabulary of fixtures imports nothing of ours: a client may use that one module.
CLIENT_MAY_USE = {"tunekit.measure.fixtures"}
# Light run-time rooms must not pull these in.
HEAVY = {"jinja2", "setuptools", "cpuinfo", "cffi", "pycparser"}


def room_of(name: str) -> str | None:
    """The room of a module name, or None when it is not ours."""
    parts = name.split(".")
    if parts[0] == "build_tools":
        return "build_tools"
    if parts[0] != "tunekit":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path, package: str) -> list[tuple[str, bool]]:
    """Every module that a file imports, and whether at the top (which excludes TYPE_CHECKING)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    base = ".".join([*package.split(".")[: len(package.split(".")) - child.level + 1], base]).rstrip(
                        "."
                    )
                found.append((base, top))
                if base in ("tunekit", "tunekit.build_tools", "build_tools"):
                    found.extend((f"{base}.{alias.name}", top) for alias in child.names)
            walk(child, inner)

    walk(tree, True)
    return found


def sources() -> list[tuple[Path, str, str]]:
    """(file, its room, its package) of everything that is installed."""
    found = []
    for path in sorted((ROOT / "tunekit").rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        package = ".".join(relative.parts[:-1])
        room = relative.parts[1] if len(relative.parts) > 1 else "__init__"
        found.append((path, room, package))
    found += [(path, "build_tools", "build_tools") for path in sorted((ROOT / "build_tools").glob("*.py"))]
    return found


def is_submodule(name: str) -> bool:
    base = ROOT / "tunekit" / name.split(".")[1]
    return (
        base.with_suffix(".py").exists() or base.is_dir() or name.split(".")[1] in ("build_tools", "templates", "_core")
    )


def test_every_room_has_its_floor() -> None:
    rooms = {room for _, room, _ in sources()} - {"__init__"}
    assert rooms == set(ORDER)


@pytest.mark.parametrize(("path", "room", "package"), sources(), ids=lambda v: v.name if isinstance(v, Path) else "")
def test_a_room_imports_only_rooms_below_it(path: Path, room: str, package: str) -> None:
    if room == "__init__":
        return
    for name, top in imports_of(path, package):
        target = room_of(name)
        if target in (None, room) or target not in ORDER or name in CLIENT_MAY_USE:
            continue
        if target == "build_tools":
            assert room in MAY_BUILD, f"{path.name} imports {name}: only {sorted(MAY_BUILD)} may build"
            assert not top or room == "build_tools", f"{path.name} imports {name} at the top"
            continue
        below, own = ORDER[target], ORDER[room]
        assert below[0] < own[0] or (below[0] == own[0] and below[1] < own[1]), (
            f"{path.name} ({room}) imports {name} ({target}), which is not below it"
        )


@pytest.mark.parametrize(("path", "room", "package"), sources(), ids=lambda v: v.name if isinstance(v, Path) else "")
def test_run_time_rooms_name_no_heavy_import(path: Path, room: str, package: str) -> None:
    if room in {"build_tools", "measure", "tuner", "retune", "verify", "doctor", "report", "__main__"} or path.name == "brand.py":
        return
    heavy = {name.split(".")[0] for name, _ in imports_of(path, package)} & HEAVY
    if path.name == "linking.py":
        heavy -= {"cffi"}  # for a consumer that asks for its types by cffi
    assert not heavy, f"{path.name} imports {heavy}"


def test_importing_and_calling_stays_light() -> None:
    done = run_python(
        "import sys, tunekit\n"
        "first = sorted(m for m in sys.modules if m.split('.')[0] in "
        "{'subprocess','tempfile','jinja2','setuptools','cpuinfo','numpy','cffi','platformdirs','filelock','pycparser'} "
        "or m.startswith(('tunekit.build_tools','tunekit.measure','tunekit.tuner')))\n"
        "import numpy as np; from tunekit import q8\n"
        "m = q8.pack(np.ones((8, 32), np.float32)); q8.matmul(np.ones((2, 32), np.float32), m)\n"
        "then = sorted(m for m in sys.modules if m.split('.')[0] in {'jinja2','setuptools','cpuinfo','filelock','pycparser'} "
        "or m.startswith(('tunekit.build_tools','tunekit.tuner')) or m in ('tunekit.measure.gate','tunekit.measure.race'))\n"
        "print(first, then)"
    )
    assert done.stdout.strip() == "[] []", done.stdout + done.stderr


def test_no_public_function_shares_the_name_of_a_submodule() -> None:
    import tunekit

    modules = {path.stem for path in (ROOT / "tunekit").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(tunekit.__all__)


def test_every_source_file_says_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for pattern in (
            "tunekit/**/*.py",
            "build_tools/*.py",
            "tests/**/*.py",
            "tunekit/csrc/*",
            "templates/**/*",
            "examples/**/*",
        )
        for path in ROOT.glob(pattern)
        if path.is_file()
        and path.suffix in (".py", ".c", ".h", ".j2")
        and not {"tk_include", "build"} & set(path.parts)  # generated
        and "SPDX-License-Identifier" not in path.read_text(encoding="utf-8")[:300]
        and path.name not in ("toy.c.j2", "registry.c.j2")
    ]
    assert missing == []


def test_the_environment_page_is_the_table_in_the_code() -> None:
    from tunekit.environment import environment_table

    assert environment_table() in (ROOT / "docs/environment.md").read_text(encoding="utf-8")


def test_the_team_page_has_the_table_of_knobs_and_the_core_knows_them() -> None:
    from tunekit import core
    from tunekit._profile import KNOBS, knob_table

    assert knob_table() in (ROOT / "docs/team.md").read_text(encoding="utf-8")
    own = core.core()
    if own is not None:
        known = own.knobs()
        for knob in KNOBS:
            assert knob.name == "threads" or known[knob.name] == knob.default, knob.name


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)\n```", readme, re.S)
    assert "tunekit.retune" in blocks[0]
    assert "status" in blocks[0]
    assert "pytest" in blocks[1]
    assert blocks[0].count("\n") == blocks[1].count("\n") == 0
    assert sys.version_info >= (3, 11)
