# SPDX-License-Identifier: Apache-2.0
"""The model package of examples/q8llama, built as its users build it: its own tests, and what retune does with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import emulate
import pytest
from conftest import ROOT, lacking
from emulate import machine, rows
from filelock import FileLock
from installing import LEFT_BEHIND, copy_tree, run
from measure_fakes import FakeHouse, SimulatedBox
from test_measure_confirm import toy
from test_measure_tuner import run as tune

from tunekit.cpu import this_features
from tunekit.cpu.features import implied
from tunekit.measure import arm
from tunekit.measure.confirm import Arm
from tunekit.measure.fixtures import Chain, Part
from tunekit.measure.gate import Job
from tunekit.measure.race import Deadline
from tunekit.q8 import grid

pytestmark = [pytest.mark.build, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "q8llama"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package built into it, all rows of its own family, once whatever number of workers there is."""
    if not EXAMPLE.is_dir():
        pytest.skip("no checkout: examples are no part of an sdist")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        lacking("a C compiler")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "q8llama"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            source = shutil.copytree(EXAMPLE, folder / "source", ignore=LEFT_BEHIND)
            words = ["setup.py", "-q", "build", "--build-lib", folder / "site", "--build-temp", folder / "build"]
            strict = {"TUNEKIT_STRICT": "compiler", "TUNEKIT_BUILD": "grid"}
            run([sys.executable, *words], strict, cwd=source, timeout=300)
    return folder / "site"


@pytest.fixture(scope="session")
def small(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cut-down model's file."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    python(site, "-c", f"import small, pathlib; small.write(pathlib.Path({str(path)!r}))")
    return path


def python(site: Path, *words: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (site, EXAMPLE / "tests")))
    return run([sys.executable, *words], {"PYTHONPATH": paths, **variables}, timeout=400)


def test_it_passes_its_own_tests(site: Path, q8_cache: Path) -> None:
    words = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", EXAMPLE, EXAMPLE / "tests"]
    done = python(site, "-m", "pytest", *words, TUNEKIT_CACHE=str(q8_cache), PYTHONDONTWRITEBYTECODE="1")
    assert " passed" in done.stdout and " failed" not in done.stdout


def test_emulated_rows_give_the_same_bits(site: Path, small: Path, q8_cache: Path) -> None:
    """Every object that this CPU cannot run, of either family: the model's every logit is what it is on any row."""
    if not emulate.possible():
        pytest.skip("the emulators are written for Linux on x86-64")
    for reason in (machine.why_not(), emulate.why_not()):
        if reason:
            lacking(reason)
    digest = json.loads(python(site, EXAMPLE / "tests" / "small.py", small).stdout)["digest"]
    found = json.loads(python(site, ROOT / "tests" / "q8llama_rows.py", small, TUNEKIT_CACHE=str(q8_cache)).stdout)
    lacks = {row.suffix for row in grid.ROWS for f in grid.targets(row) if f and not implied(f) <= emulate.own()}
    walked = {name.partition(" ")[0] for name in found}
    assert walked >= {f"q8q8={row}" for row in lacks if rows.KERNEL.refuses(rows.KERNEL.row(row), "x86_64") is None}
    assert "avx512f" in emulate.own() or {name.partition("=")[0] for name in walked} == {"q8q8", "attend", "swiglu"}
    for name, said in found.items():
        if "missing" in said:
            assert rows.UNKNOWN.search(said["missing"]), (name, said)
            continue
        kernel, _, suffix = name.partition(" ")[0].partition("=")
        assert said[{"q8q8": "row"}.get(kernel, kernel)] == suffix
        assert (said["digest"], said["cut the same"], said["fault"]) == (digest, True, ""), (name, said)
        assert said["trapped"] or said["calls"], "it was not emulated"


CHAINS = """
import json, sys
from tunekit.q8 import chains
found = chains.chains(sys.argv[1])
print(json.dumps([c.name for c in found] + ["q8llama" in sys.modules]))
"""


def test_retune_asks_it_where_it_is_installed(site: Path, small: Path, tmp_path: Path) -> None:
    light = python(site, "-c", "import sys, tunekit.q8.chains, tunekit.retune; print('q8llama' in sys.modules)")
    assert light.stdout == "False\n"
    assert json.loads(python(site, "-c", CHAINS, small).stdout) == [f"{small.name} (q8llama)", "one layer of a 1B model", True]
    # Where it is not there, or does not load, the products of the same file are what there is.
    (tmp_path / "q8llama").mkdir()
    (tmp_path / "q8llama" / "__init__.py").write_text("raise ImportError('built for another tunekit')\n")
    said = run([sys.executable, "-c", CHAINS, small], {"PYTHONPATH": str(tmp_path)}).stdout
    assert json.loads(said)[0] == "cut down"


def test_a_row_planted_to_win_the_races_and_lose_the_model_is_rejected(
    site: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The races are told that the planted row is a quarter faster; the model is run, by real processes, on real rows.

    The planted row is the reference, the fallback what runs on this box: both load the model and feed it tokens.
    """
    real = {"k1": fallback(), "k2_g2": "reference"}
    monkeypatch.syspath_prepend(str(site))  # what children import from
    job = Job("tunekit.measure.family:load_chain", ("tunekit.q8.kernels", "tunekit", "q8q8", f"{small.name} (q8llama)", str(small)))
    model = Chain("model", (Part("prefill", 1.0), Part("decode", 1.0)), lambda: lambda part: None)
    ran: list[str] = []

    class House(FakeHouse):
        def arm(self, kernel: Any, who: Arm, chain: Chain, *rest: Any) -> Mapping[str, Any]:
            ran.append(real[who.row])
            return arm.run_arm(job, Arm(real[who.row]), {"tunekit.q8q8": real[who.row]}, chain, Deadline(200))

    box = SimulatedBox(1, noise=0.005)
    fake = toy(box)
    house = House()
    house.__dict__.update(fake.__dict__)
    house.chained = [model]
    _, kernel, _ = tune(house, box)
    assert kernel.picks["tile"] == "k2" and house.manifest == {"gemm": "k1"}
    assert kernel.rows["k2_g2"].verdict == "unconfirmed", kernel.rows["k2_g2"]
    [entry] = kernel.confirm
    assert entry.verdict == "rejected", entry
    assert entry.ratio < 0.9 and set(entry.parts) == {"prefill", "decode"}
    assert set(ran) == {real["k1"], "reference"}


PLANTED = """

# Two rows that compute the same: one dawdles everywhere, and one on matrices of the cut-down model's widths alone.
ROWS = (
    tk.perm(suffix="honest", dot="maddubs", width=256, mr=8, kstep=2, requires="avx2,fma"),
    tk.perm(suffix="planted", dot="maddubs", width=256, mr=8, kstep=1, requires="avx2,fma"),
)
FALLBACK = "honest"
"""
DAWDLE = """
    const int32_t waits = ${ {"honest": "16 * nb * ng", "planted": "(nb == 3 || nb == 5) * 2000 * ng"}.get(row, "0") };
    for (volatile int32_t i = 0; i < waits; i++)
        ;
"""


def test_a_row_planted_in_the_grid_wins_the_race_and_loses_the_model(small: Path, tmp_path: Path) -> None:
    """All of it for real: a tunekit with a planted row, the model package built against it, and a retune of both rows."""
    if not {"avx2", "fma"} <= this_features():
        pytest.skip("the planted row is one of AVX2")
    tree, there = copy_tree(tmp_path / "tree"), tmp_path / "there"
    with open(tree / "tunekit/q8/grid.py", "a", encoding="utf-8") as file:
        file.write(PLANTED)
    for name, function in (("tile", "q8q8"), ("gemv", "q8q8_gemv")):
        template = tree / "templates/q8q8" / f"{name}.c.j2"
        text, head = template.read_text(encoding="utf-8"), f'${{ proto("{function}" ~ kind) }}\n{{\n'
        assert text.count(head) == 1
        template.write_text(text.replace(head, head + DAWDLE), encoding="utf-8")
    (tree / "tunekit/templates").symlink_to("../templates")  # before those of an editable install
    example = shutil.copytree(EXAMPLE, tmp_path / "source", ignore=LEFT_BEHIND)
    variables = {"TUNEKIT_STRICT": "compiler", "TUNEKIT_HOME": str(tmp_path / "state"), "PYTHONPATH": str(there)}
    for source in (tree, example):
        words = ["setup.py", "-q", "build", "--build-lib", there, "--build-temp", tmp_path / "build"]
        run([sys.executable, *words], variables, cwd=source, timeout=300)
    words = ["-m", "tunekit.retune", "--scope", "tunekit", "--model", small, "--no-probe", "--progress", "none"]
    for _ in range(5):  # a box whose rows differ from themselves by a quarter believes no lead: as its user would, once more
        done = run([sys.executable, *words], variables, timeout=400)
        if "too noisy" not in done.stdout:
            break
    print(done.stdout)
    assert f"confirm on {small.name} (q8llama): planted rejected" in done.stdout
    (manifest,) = (tmp_path / "state").rglob("tunekit.tune.json")
    assert json.loads(manifest.read_text())["q8q8"] == "honest"
    record = json.loads(manifest.with_name("tunekit.tune.run.json").read_text())["kernels"]["q8q8"]
    assert record["picks"]["tile"] == "planted" and record["rows"]["planted"]["verdict"] == "unconfirmed"
    whole, *seats = record["confirm"]  # a seat that it won, too, is asked for by itself
    assert (whole["challenger"], whole["base"], set(whole["parts"])) == ("planted", "honest", {"prefill", "decode"})
    assert whole["ratio"] < 0.9 and {entry["verdict"] for entry in (whole, *seats)} == {"rejected"}


def fallback() -> str:
    from tunekit.q8 import kernels

    found = str(kernels.q8q8.choice().suffix)
    if found == "reference":
        pytest.skip("no row of this family runs here")
    return found


