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

import pytest
from conftest import ROOT, lacking
from installing import LEFT_BEHIND, run
from measure_fakes import FakeHouse, SimulatedBox
from test_measure_confirm import toy
from test_measure_tuner import run as tune

from tunekit.measure import arm
from tunekit.measure.confirm import Arm
from tunekit.measure.fixtures import Chain, Part
from tunekit.measure.gate import Job
from tunekit.measure.race import Deadline

pytestmark = [pytest.mark.build, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "q8llama"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package built into it."""
    if not EXAMPLE.is_dir():
        pytest.skip("no checkout: examples are no part of an sdist")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        lacking("a C compiler")
    folder = tmp_path_factory.mktemp("q8llama")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=LEFT_BEHIND)
    words = ["setup.py", "-q", "build", "--build-lib", folder / "site", "--build-temp", folder / "build"]
    run([sys.executable, *words], {"TUNEKIT_STRICT": "compiler"}, cwd=source, timeout=300)
    return folder / "site"


@pytest.fixture(scope="session")
def small(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cut-down model's file."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    python(site, "-c", f"import small, pathlib; small.write(pathlib.Path({str(path)!r}))")
    return path


def python(site: Path, *words: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    # Each folder has a conftest; a script of ours finds this one.
    paths = os.pathsep.join(map(str, (site, *([ROOT / "tests"] if words[1] == EMULATED else []), EXAMPLE / "tests")))
    return run([sys.executable, *words], {"PYTHONPATH": paths, **variables}, timeout=400)


def test_it_passes_its_own_tests(site: Path, q8_cache: Path) -> None:
    words = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", EXAMPLE, EXAMPLE / "tests"]
    done = python(site, "-m", "pytest", *words, TUNEKIT_CACHE=str(q8_cache), PYTHONDONTWRITEBYTECODE="1")
    assert " passed" in done.stdout and " failed" not in done.stdout


EMULATED = """
import json, sys; from pathlib import Path
import emulate, small, tunekit
from emulate.rows import KERNEL
from tunekit.q8 import grid, product
from tunekit.cpu.features import implied
every = [(r, f) for r in grid.ROWS for f in grid.targets(r) if implied(f) & emulate.EMULATED]
items = list({(r["dot"], r.get("bias", 0)): (r, f) for r, f in every if r["dot"] != "amx_int8"}.values())  # one of a kind
own = product.bind
row, features = items[int(sys.argv[2])]
try:
    bound = emulate.bind(KERNEL, row.suffix, features, emulate.EMULATED)
except LookupError:
    bound = None
if bound is None or not bound.built.needs <= emulate.own() | emulate.EMULATED:
    print(json.dumps({"row": "", "count": len(items)}))
else:
    native = own(bound)
    product.native = lambda: native
    with emulate.trapping() as trap, tunekit.threads(1):
        said = small.digest(Path(sys.argv[1]))
        print(json.dumps({**said, "row": row.suffix, "count": len(items), "retired": sum(trap.retired().values())}))
"""


def test_emulated_rows_give_the_same_bits(site: Path, small: Path, q8_cache: Path) -> None:
    """The rows of VEX encodings, by trap and emulate: the model's every logit is what it is on any row."""
    import emulate

    if not emulate.possible():
        pytest.skip("the handler is written for Linux on x86-64")
    if reason := emulate.why_not():
        lacking(f"no emulation here: {reason}")
    digest = json.loads(python(site, EXAMPLE / "tests" / "small.py", small).stdout)["digest"]
    seen, at, count = {}, 0, 1
    while at < count:
        said = json.loads(python(site, "-c", EMULATED, small, at, TUNEKIT_CACHE=str(q8_cache)).stdout)
        count, at = said["count"], at + 1
        if said["row"] and said["row"] not in seen:
            seen[said["row"]] = said["digest"]
            assert said["retired"] or emulate.native()
    assert len(seen) >= 2 and set(seen.values()) == {digest}, seen


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


def fallback() -> str:
    from tunekit.q8 import kernels

    found = str(kernels.q8q8.choice().suffix)
    if found == "reference":
        pytest.skip("no row of this family runs here")
    return found


