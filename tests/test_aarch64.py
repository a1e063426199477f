# SPDX-License-Identifier: Apache-2.0
"""AArch64 without the silicon: the package is cross-built and runs inside an AArch64 CPython under qemu-user.

Two installs, made with the shipped sources and flags: one with the whole grid, whose every row must pass the family's
own gates bit by bit and give the model of examples/q8llama its bits, and a plain one, on which three CPUs must choose
three different rows and the contract tests run.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, lacking
from installing import LEFT_BEHIND, clean, copy_tree, pip, run

from tunekit.q8 import grid

pytestmark = [pytest.mark.aarch64, pytest.mark.build]

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
INSIDE = Path(__file__).parent / "aarch64_inside.py"
LEGS = [leg for leg in grid.LEGS if leg.arch == "aarch64"]
ROWS = [row.suffix for row in grid.ROWS if grid.leg_of(row) in LEGS and grid.number(row, "mr") >= 4]
SMMLA = [row.suffix for row in grid.ROWS if row.suffix in ROWS and grid.value(row, "dot") == "smmla"]


@pytest.fixture(scope="session")
def machine() -> Path:
    """The folder of the AArch64 system: ``tree/`` and ``site/``."""
    if platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this machine is AArch64: test_q8_rows.py runs its rows natively")
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            lacking(f"{program}; run: .ci/aarch64 --tools")
    script = ROOT / ".ci" / "aarch64"
    if not script.is_file():
        pytest.skip("no checkout: .ci/aarch64 is no part of an sdist")
    if run(["bash", script, "--check"], check=False).returncode:
        lacking("an AArch64 system; run: .ci/aarch64")
    return Path(run(["bash", script, "--path"]).stdout.strip())


def cross(machine: Path) -> dict[str, str]:
    """Environment in which a build is one for the AArch64 system."""
    headers = machine / "tree/usr/include"
    (python,) = headers.glob("python3.*")
    return {"CC": COMPILER, "CPPFLAGS": shlex.join([f"-I{python}", f"-I{headers}"])}


def package(machine: Path, kind: str) -> dict[str, str]:
    """The same for a whole package (``kind``: TUNEKIT_BUILD)."""
    return {**cross(machine), "_PYTHON_HOST_PLATFORM": "linux-aarch64", "TUNEKIT_BUILD": kind, "TUNEKIT_STRICT": "compiler"}


class Arm:
    """An AArch64 CPython with tunekit installed in it."""

    def __init__(self, machine: Path, site: Path) -> None:
        self.machine, self.site = machine, site
        (self.python,) = (machine / "tree/usr/bin").glob("python3.??")

    def command(self, cpu: str, *arguments: str | Path) -> list[str]:
        return [EMULATOR, "-cpu", cpu, "-L", str(self.machine / "tree"), str(self.python), *map(str, arguments)]

    def script(self, path: Path, cpu: str) -> Path:
        """A program of the host that stands for the interpreter: qemu-user starts children on the host."""
        paths = shlex.quote(f"{self.site}:{self.machine / 'site'}")
        path.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={paths}${{PYTHONPATH:+:$PYTHONPATH}}\nexec {shlex.join(self.command(cpu))} \"$@\"\n",
            encoding="utf-8",
        )
        path.chmod(0o755)
        return path

    def environment(self, **more: str) -> dict[str, str]:
        return clean({"PYTHONPATH": f"{self.site}:{self.machine / 'site'}", "PYTHONDONTWRITEBYTECODE": "1", **more})

    def start(self, cpu: str, *words: str, cwd: Path | None = None, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(cpu, INSIDE, *words),
            env=self.environment(**more),
            cwd=cwd or self.site,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def answers(*processes: subprocess.Popen[str], timeout: float = 400) -> list[dict[str, Any]]:
    """The JSON objects that processes print on their last lines."""
    found = []
    for process in processes:
        output, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"{process.args}\n{output[-6000:]}\n{errors[-6000:]}"
        found.append(json.loads(output.rstrip().rpartition("\n")[2]))
    return found


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("aarch64") / "tree")


def install(machine: Path, tree: Path, kind: str, folder: Path) -> Arm:
    """Build an AArch64 wheel of the tree (``kind``: TUNEKIT_BUILD) and install it as pip would there."""
    quiet = ["-q", "--no-deps", "--no-index"]
    run([sys.executable, pip(), "wheel", *quiet, "--no-build-isolation", "-w", folder, tree], package(machine, kind), timeout=400)
    (wheel,) = folder.glob("*-linux_aarch64.whl")
    words = ["--platform", "linux_aarch64", "--only-binary=:all:", "--no-compile", "--target", folder / "site"]
    run([sys.executable, pip(), "install", *quiet, *words, wheel])
    return Arm(machine, folder / "site")


@pytest.fixture(scope="session")
def whole_grid(machine: Path, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    return install(machine, tree, "grid", tmp_path_factory.mktemp("aarch64-grid"))


@pytest.fixture(scope="session")
def plain(whole_grid: Arm, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """What ``pip install`` gives (after the grid: their objects are the same)."""
    return install(whole_grid.machine, tree, "fat", tmp_path_factory.mktemp("aarch64-fat"))


# --- rows ------------------------------------------------------------------------------------------------


def gated(arm: Arm, cpu: str, rows: Sequence[str]) -> dict[str, list[str]]:
    """What the gates say of rows: row to reasons, those that run there only. Two processes share the work."""
    halves = [part for part in (rows[::2], rows[1::2]) if part]
    found: dict[str, list[str]] = {}
    for part in answers(*(arm.start(cpu, "gates", *half) for half in halves)):
        found.update(part)
    return found


@pytest.fixture(scope="session")
def on_max(whole_grid: Arm) -> dict[str, list[str]]:
    return gated(whole_grid, "max", ["reference", *ROWS])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["reference", *ROWS])
def test_every_row_passes_its_gates(on_max: dict[str, list[str]], suffix: str) -> None:
    assert suffix in on_max, "not built, or refused"
    assert not on_max[suffix], "\n".join(on_max[suffix])


def test_a_cpu_without_i8mm_runs_the_other_rows(whole_grid: Arm) -> None:
    few = ["kstep4_nrsplit2", "mr8_budget", SMMLA[0]]
    found, said = answers(whole_grid.start("neoverse-n1", "gates", *few), whole_grid.start("neoverse-n1", "choice"))
    assert found == {few[0]: [], few[1]: []}
    assert set(said["runnable"]) == {"reference", *ROWS} - set(SMMLA)
    assert all("i8mm" in said["why_not"][suffix] for suffix in SMMLA)


@pytest.mark.parametrize(
    ("cpu", "suffix", "runs"),
    [
        ("cortex-a53", "kstep2", False),
        ("cortex-a72", SMMLA[0], False),
        ("neoverse-n1", "kstep2", True),
        ("neoverse-n1", SMMLA[0], False),
        ("max", SMMLA[0], True),
    ],
)
def test_the_instructions_are_really_there(whole_grid: Arm, cpu: str, suffix: str, runs: bool) -> None:
    """Called below the dispatcher, on a CPU that lacks its instruction, a row must die: nothing else computed it."""
    process = whole_grid.start(cpu, "by-address", suffix)
    output, errors = process.communicate(timeout=100)
    assert output.startswith("prepared\n"), errors
    assert process.returncode == (0 if runs else -signal.SIGILL), errors


# --- the model that is linked to it ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_has_the_same_bits_on_every_row(whole_grid: Arm, tmp_path: Path) -> None:
    """examples/q8llama, built as the package is: its C calls the rows, and its own family has rows of NEON."""
    example = ROOT / "examples" / "q8llama"
    source = shutil.copytree(example, tmp_path / "source", ignore=LEFT_BEHIND)
    words = ["setup.py", "-q", "build", "--build-lib", tmp_path / "site", "--build-temp", tmp_path / "build"]
    run([sys.executable, *words], package(whole_grid.machine, "grid"), cwd=source, timeout=300)
    paths = [whole_grid.site, whole_grid.machine / "site", tmp_path / "site", example / "tests"]
    path = ":".join(map(str, paths))
    (said,) = answers(whole_grid.start("max", "model", str(tmp_path / "small.gguf"), PYTHONPATH=path))
    own = {f"attend=isa_neon_block{b}_deep{d}" for b, d in ((3, 3), (4, 4), (6, 3))} | {f"swiglu=isa_neon_deep{d}" for d in (1, 2)}
    assert set(said["rows"]) == {f"{k}=reference" for k in ("q8q8", "attend", "swiglu")} | {f"q8q8={r}" for r in ROWS} | own
    for name, ran in said["rows"].items():
        kernel, _, row = name.partition("=")
        assert ran[{"q8q8": "row"}.get(kernel, kernel)] == row
        assert (ran["digest"], ran["cut the same"]) == (said["digest"], True), name


# --- the install -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "chosen"),
    [
        ("max", "dot_smmla_mr8_kstep1_nr4"),
        ("neoverse-n1", "mr8_kstep1_nr4"),
        ("cortex-a53", "reference"),
    ],
)
def test_an_install_chooses_by_hwcap(plain: Arm, cpu: str, chosen: str) -> None:
    # The second: where the operator takes a feature away.
    said, less = answers(plain.start(cpu, "choice"), plain.start(cpu, "choice", TUNEKIT_DISABLE_FEATURES="i8mm"))
    assert (said["arch"], said["chosen"], said["tier"]) == ("aarch64", chosen, "c"), said["reason"]
    assert less["chosen"] == ("mr8_kstep1_nr4" if cpu == "max" else chosen)
    assert said["exact"] and less["exact"]
    assert Path(said["module"]).is_relative_to(plain.site)
    assert "neon" in said["features"]


CONTRACT = (
    "test_declare.py", "test_rows.py", "test_signature.py", "test_requires.py", "test_cpu_this.py", "test_q8_matrix.py",
    "test_q8_product.py",
)  # fmt: skip
"""Files whose tests start nothing."""

WITH_CHILDREN = (
    "test_status_cli.py::test_status_names_row_source_and_reason",
    "test_status_cli.py::test_build_stamps_what_the_manifest_names",
    "test_status_cli.py::test_each_choice_is_logged_in_its_stable_form",
)
"""Tests that start interpreters and build a family: inside, with the cross compiler."""


@pytest.mark.slow
def test_an_install_passes_the_contract_tests(plain: Arm, tmp_path: Path) -> None:
    tests = ROOT / "tests"
    words = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    runs = []
    for name, selected in (("alone", CONTRACT), ("children", WITH_CHILDREN)):
        script = plain.script(tmp_path / f"python-{name}", "max")
        variables = {
            **cross(plain.machine),
            "AARCH64_PYTHON": str(script),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / name),
        }
        runs.append(plain.start("max", "tests", *words, f"--basetemp={tmp_path / name}", *selected, cwd=tests, **variables))
    for process in runs:
        output, errors = process.communicate(timeout=400)
        assert json.loads(output.rstrip().rpartition("\n")[2]) == {"status": 0}, output[-6000:] + errors[-3000:]
        assert " passed" in output and " failed" not in output
