# SPDX-License-Identifier: Apache-2.0
"""Frozen builds: ordinary wheels, installed and run where there is no compiler, no jinja2 and no setuptools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from installing import Place, Wheelhouse, copy_tree, fill_wheelhouse, make_place, run

pytestmark = [pytest.mark.build, pytest.mark.install, pytest.mark.slow]


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    return fill_wheelhouse(tmp_path_factory.getbasetemp() / "wheelhouse")


def make_wheel(builder: Place, house: Wheelhouse, source: Path, target: Path, **variables: str) -> Path:
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source)
    builder.pip(*words, variables={**house.variables, **variables})
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def builder(room: Path, house: Wheelhouse) -> Place:
    return make_place(room / "builder", house.build)


@pytest.fixture(scope="session")
def reference_wheel(room: Path, house: Wheelhouse, builder: Place) -> Path:
    return make_wheel(builder, house, copy_tree(room / "tree"), room / "wheel", TUNEKIT_BUILD="reference-only")


def bare(place: Place, folder: Path) -> dict[str, str]:
    """No compiler in reach, and folders of its own."""
    nothing = folder / "no programs"
    nothing.mkdir(exist_ok=True)
    return {"PATH": str(nothing), "CC": "/nowhere/cc", "TUNEKIT_HOME": str(folder / "state"), "TUNEKIT_CACHE": str(folder / "cache")}


@pytest.fixture(scope="session")
def installed(room: Path, house: Wheelhouse, reference_wheel: Path) -> Place:
    """The reference-only tunekit where nothing is but what runs."""
    place = make_place(room / "installed", house.run_time)
    place.pip("install", "-q", "--no-compile", "--no-deps", reference_wheel, variables=house.variables)
    missing = place.code("import importlib.util as u; print([n for n in ('jinja2', 'setuptools', 'cpuinfo') if u.find_spec(n)])")
    assert missing.stdout.strip() == "[]"
    return place


def test_two_reference_only_builds_are_the_same_bit_for_bit(
    room: Path, house: Wheelhouse, builder: Place, reference_wheel: Path
) -> None:
    tree = copy_tree(room / "another folder with a longer name")
    second = make_wheel(builder, house, tree, room / "second", TUNEKIT_BUILD="reference-only", TZ="Asia/Tokyo", TUNEKIT_HOME=str(room / "x"))
    assert second.name == reference_wheel.name
    assert second.read_bytes() == reference_wheel.read_bytes()


def test_reference_only_runs_the_reference_whatever_is_asked(installed: Place, tmp_path: Path) -> None:
    code = (
        "import numpy as np, sys\nfrom tunekit import q8\nimport tunekit as tk\nfrom tunekit import dispatch\n"
        "tk.policy(missing='error').apply()\n"
        "x = np.cos(np.arange(3 * 64, dtype=np.float32)).reshape(3, 64)\n"
        "w = np.sin(np.arange(5 * 64, dtype=np.float32)).reshape(5, 64)\n"
        "m = q8.pack(w)\n"
        "assert np.array_equal(q8.matmul(x, m), q8.oracle.matmul(q8.quantize(x), m))\n"
        "(k,) = dispatch.kernels('tunekit')\n"
        "c = dispatch.peek(k).choice\n"
        "from tunekit.q8.kernels import q8q8\n"
        "print(c.suffix, c.source, c.tier, c.reason, [s for s, _ in q8q8.variants()], sys.argv, sep='|')"
    )
    own = bare(installed, tmp_path)
    (tmp_path / "m.json").write_text('{"q8q8": "k"}')
    wanted = "reference|reference|c|this is a reference-only build|['reference']|"
    for variables in ({}, {"TUNEKIT_MODE": "test"}, {"TUNEKIT_PIN": "q8q8=dot_madd16_width256_mr16_kstep1_nr5"}, {"TUNEKIT_MANIFEST": str(tmp_path / "m.json")}):
        done = run([installed.python, "-W", "error", "-c", code, "x", "--", "--tune"], {**own, **variables}, cwd=tmp_path)
        assert done.stdout == wanted + "['-c', 'x']\n"
        assert "--tune does nothing here" in done.stderr
    assert not (tmp_path / "state").exists()


def test_reference_only_says_so_in_every_command(installed: Place, tmp_path: Path) -> None:
    own = bare(installed, tmp_path)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return run([installed.python, "-m", "tunekit", *words], own, cwd=tmp_path, check=False)

    status = command("status")
    assert status.returncode == 0
    assert "frozen: tunekit is a reference-only build: policy, --tune and retune do nothing here" in status.stdout
    assert "python -m tunekit.retune" not in status.stdout
    (row,) = json.loads(command("status", "--json").stdout)["kernels"]
    assert (row["frozen"], row["source"], row["manifest"]) == ("reference-only", "reference", None)
    why = command("status", "--why-not", "q8q8", "dot_madd16_width256_mr16_kstep1_nr5").stdout
    assert "this is a reference-only build" in why
    retune = command("retune")
    assert retune.returncode == 3, retune.stderr
    assert "tunekit is a reference-only build" in retune.stderr
    build = command("build")
    assert (build.returncode, "tunekit is a reference-only build" in build.stderr) == (0, True), build.stderr


# --- somebody else's library, standalone -----------------------------------------------------------------


@pytest.fixture(scope="session")
def author(room: Path, house: Wheelhouse, reference_wheel: Path) -> Place:
    """Where the library's author builds: tunekit is installed, with what building needs."""
    place = make_place(room / "author", house.build)
    place.pip("install", "-q", "--no-compile", "--no-deps", reference_wheel, variables=house.variables)
    return place


def boxed(room: Path, house: Wheelhouse, author: Place, name: str, reference_wheel: Path, **variables: str) -> Place:
    """The library built with some variables, and installed where nothing can be built."""
    source = room / f"boxed {name}"
    shutil.copytree(ROOT / "tests" / "packages" / "boxed", source)
    wheel = make_wheel(author, house, source, room / f"wheel {name}", **variables)
    place = make_place(room / f"place {name}", house.run_time)
    place.pip("install", "-q", "--no-compile", "--no-deps", reference_wheel, wheel, variables=house.variables)
    return place


def start(place: Place, folder: Path, *words: str, **variables: str) -> tuple[list[Any], str]:
    own = {**bare(place, folder), **variables}
    done = run([place.folder / "bin" / "boxed", *words], own, cwd=folder)
    found: list[Any] = json.loads(done.stdout)
    return found, done.stderr


@pytest.fixture(scope="session")
def winner(room: Path, house: Wheelhouse, author: Place, reference_wheel: Path) -> Place:
    """Built on a box whose manifest, in the user's state folder, names k2."""
    home = room / "author's state"
    key = author.code("from tunekit import cpu; print(cpu.this_box().key)").stdout.strip()
    (home / key).mkdir(parents=True)
    (home / key / "boxed.tune.json").write_text('{"plus": "k2"}')
    return boxed(room, house, author, "winner", reference_wheel, TUNEKIT_BUILD="standalone", TUNEKIT_HOME=str(home))


def test_standalone_ships_the_winners_of_the_box_it_was_built_on(winner: Place, tmp_path: Path) -> None:
    found, err = start(winner, tmp_path, "x", "--", "y")
    assert found == [7, 2, "k2", "manifest", "this frozen build names it", ["reference"], ["x", "--", "y"]]
    assert err == ""  # no policy: nothing was missing
    # What this user's manifests say is not read, and a grid mode has nothing to show.
    (tmp_path / "m.json").write_text('{"plus": "reference"}')
    for variables in ({"TUNEKIT_MANIFEST": str(tmp_path / "m.json")}, {"TUNEKIT_MODE": "test"}, {"TUNEKIT_POLICY": "error"}):
        assert start(winner, tmp_path, **variables)[0][:6] == found[:6]
    assert start(winner, tmp_path, TUNEKIT_PIN="plus=k1")[0][:4] == [6, 1, "k1", "pin"]
    assert start(winner, tmp_path, TUNEKIT_POLICY="reference")[0][:4] == [5, 0, "reference", "reference"]


def test_standalone_has_a_dead_policy_and_says_so(winner: Place, tmp_path: Path) -> None:
    found, err = start(winner, tmp_path, "x", "--", "--tune")
    assert (found[0], found[6]) == (7, ["x"])
    assert "--tune does nothing here: boxed is a standalone build" in err
    own = bare(winner, tmp_path)
    status = run([winner.python, "-m", "tunekit", "status", "--scope", "boxed"], own, cwd=tmp_path).stdout
    assert "frozen: boxed is a standalone build: policy, --tune and retune do nothing here" in status
    set_one = "from boxed import kernels\nimport tunekit as tk\ntry: kernels.plus.manifest_set('k1')\nexcept tk.ManifestError as e: print(e)"
    assert "boxed is a standalone build" in run([winner.python, "-c", set_one], own, cwd=tmp_path).stdout
    assert not list((tmp_path / "state").rglob("*.tune.json"))


def test_standalone_without_a_manifest_ships_the_fallback_chain(
    room: Path, house: Wheelhouse, author: Place, reference_wheel: Path, tmp_path: Path
) -> None:
    place = boxed(room, house, author, "fallback", reference_wheel, TUNEKIT_BUILD="standalone", TUNEKIT_HOME=str(room / "empty"))
    assert start(place, tmp_path)[0][:4] == [6, 1, "k1", "fallback"]


def test_a_shipped_winner_that_cannot_run_here_leads_to_the_fallback(winner: Place, tmp_path: Path, room: Path) -> None:
    (report,) = winner.site.glob("boxed/_tk_boxed_build.json")
    assert json.loads(report.read_text()) == {"frozen": "standalone", "winners": {"boxed.plus": "k2"}}
    kept = report.read_text()
    try:
        report.write_text(json.dumps({"frozen": "standalone", "winners": {"boxed.plus": "k3"}}))
        found, err = start(winner, tmp_path)
        assert found[:4] == [6, 1, "k1", "fallback"]
        assert "this frozen build names 'k3': not built" in found[4]
        assert err == ""
    finally:
        report.write_text(kept)


def test_reference_only_of_a_third_party(room: Path, house: Wheelhouse, author: Place, reference_wheel: Path, tmp_path: Path) -> None:
    place = boxed(room, house, author, "reference", reference_wheel, TUNEKIT_BUILD="reference-only")
    found, err = start(place, tmp_path, TUNEKIT_MODE="tune")
    assert (found[:4], found[5], err) == ([5, 0, "reference", "reference"], ["reference"], "")


def test_tunekit_itself_standalone_reads_the_boxs_manifest(room: Path, house: Wheelhouse, builder: Place, author: Place, tmp_path: Path) -> None:
    """In its own build tunekit's core is made first, since a manifest lies in a folder that is named by the CPU."""
    key = author.code("from tunekit import cpu; print(cpu.this_box().key)").stdout.strip()
    home = tmp_path / "home"
    (home / key).mkdir(parents=True)
    (home / key / "tunekit.tune.json").write_text('{"q8q8": "reference"}')
    wheel = make_wheel(builder, house, copy_tree(room / "standalone tree"), room / "standalone", TUNEKIT_BUILD="standalone", TUNEKIT_HOME=str(home))
    place = make_place(room / "standalone place", house.run_time)
    place.pip("install", "-q", "--no-compile", "--no-deps", wheel, variables=house.variables)
    code = "from tunekit.q8.kernels import q8q8 as q\nc = q.choice(); print(c.suffix, c.source, c.tier, c.reason, sep='|')"
    done = run([place.python, "-W", "error", "-c", code], {**bare(place, tmp_path), **{k: v for k, v in os.environ.items() if k == "LANG"}})
    assert done.stdout == "reference|manifest|c|this frozen build names the reference\n"
