# SPDX-License-Identifier: Apache-2.0
"""Sdist, wheel and editable, isolated and not: every form of install gives the same rows, and nothing beside them."""

from __future__ import annotations

import email
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, lacking
from installing import (
    RUN_TIME,
    Place,
    Wheelhouse,
    copy_tree,
    fill_wheelhouse,
    make_place,
    other_interpreters,
    pip,
    run,
)

pytestmark = [pytest.mark.build, pytest.mark.install, pytest.mark.slow]

@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("install")


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    return fill_wheelhouse(tmp_path_factory.getbasetemp() / "wheelhouse")


@pytest.fixture(scope="session")
def tree(room: Path) -> Path:
    return copy_tree(room / "tree")


@pytest.fixture(scope="session")
def builder(room: Path, house: Wheelhouse) -> Place:
    """An environment with the build requirements, for what is built without isolation."""
    return make_place(room / "builder", house.build)


@pytest.fixture(scope="session")
def sdist(room: Path, tree: Path, builder: Place) -> Path:
    code = f"import setuptools.build_meta as b; print('made', b.build_sdist({str(room / 'sdist')!r}))"
    run([builder.python, "-W", "error:::setuptools", "-c", code], cwd=tree)
    (found,) = (room / "sdist").iterdir()
    return found


def _wheel(place: Path) -> Path:
    (found,) = place.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def wheel_of_sdist(room: Path, sdist: Path, house: Wheelhouse) -> Path:
    """From the sdist, in build isolation."""
    run([sys.executable, pip(), "wheel", "-q", "--no-deps", "-w", room / "isolated", sdist], house.variables)
    return _wheel(room / "isolated")


@pytest.fixture(scope="session")
def wheel_of_tree(room: Path, tree: Path, builder: Place, house: Wheelhouse) -> Path:
    """From the tree, without isolation."""
    builder.pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", room / "direct", tree, variables=house.variables)
    return _wheel(room / "direct")


@pytest.fixture(scope="session")
def complete(room: Path, wheel_of_sdist: Path, house: Wheelhouse) -> Place:
    """The wheel of the sdist, installed with all that it requires."""
    place = make_place(room / "complete")
    place.pip("install", "-q", "--no-compile", wheel_of_sdist, variables=house.variables)
    return place


@pytest.fixture(scope="session")
def direct(room: Path, wheel_of_tree: Path, house: Wheelhouse) -> Place:
    """The wheel of the tree in an environment that holds what a tuned application needs and no more."""
    place = make_place(room / "run-time-alone", house.run_time)
    place.pip("install", "-q", "--no-compile", "--no-deps", wheel_of_tree, variables=house.variables)
    return place


@pytest.fixture(scope="session")
def editable(room: Path, house: Wheelhouse) -> Place:
    """Editable, in build isolation, from a tree of its own."""
    place = make_place(room / "editable", house.build)
    place.pip("install", "-q", "--no-deps", "-e", copy_tree(room / "editable tree"), variables=house.variables)
    return place


@pytest.fixture(scope="session")
def editable_alone(room: Path, house: Wheelhouse) -> Place:
    """Editable, without isolation."""
    place = make_place(room / "editable-alone", house.build)
    tree = copy_tree(room / "second tree")
    place.pip("install", "-q", "--no-deps", "--no-build-isolation", "-e", tree, variables=house.variables)
    return place


@pytest.fixture(params=["complete", "direct", "editable", "editable_alone"])
def install(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


def test_every_form_gives_the_same_modules(install: Place, direct: Place) -> None:
    found, wanted = install.stamps(), direct.stamps()
    assert not Path(found["file"]).is_relative_to(ROOT)
    assert found["core"], "no core was built"
    # The stamp holds rows, flags, needs, compiler and the content hash of each object.
    assert found["modules"] == wanted["modules"]
    ((name, stamp),) = found["modules"].items()
    entry = stamp["kernels"]["tunekit.q8q8"]
    assert re.fullmatch(r"_tk_tunekit_[0-9a-f]{12}", name)
    assert entry["dropped"] == {}
    assert "reference" in [row["suffix"] for row in entry["rows"]]
    if stamp["arch"] == "x86_64":
        assert len(entry["rows"]) > 1


def test_nothing_lands_at_the_top_of_site_packages(install: Place) -> None:
    top = {p.name for p in install.site.iterdir() if not p.name.endswith(".dist-info")}
    assert not top & {"templates", "build_tools", "tests", "examples", "benchmarks", "docs", "setup.py"}
    code = "import importlib.util as u; print([n for n in ('templates', 'build_tools', 'tests', 'toy') if u.find_spec(n)])"
    assert install.code(code).stdout.strip() == "[]"


def test_what_retune_needs_is_inside_the_package(install: Place) -> None:
    code = (
        "import importlib.util as u, json, pathlib\n"
        "def held(name):\n"
        "    (folder,) = map(pathlib.Path, u.find_spec(f'tunekit.{name}').submodule_search_locations)\n"
        "    return [str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file() and '__pycache__' not in p.parts]\n"
        "print(json.dumps({n: held(n) for n in ('templates', 'build_tools')}))"
    )
    found = json.loads(install.code(code).stdout)
    for name in ("templates", "build_tools"):
        wanted = {
            str(p.relative_to(ROOT / name)) for p in (ROOT / name).rglob("*") if p.is_file() and "__pycache__" not in p.parts
        }
        assert set(found[name]) == wanted


def test_import_is_light(install: Place) -> None:
    code = (
        "import sys; before = set(sys.modules); import tunekit\n"
        "heavy = ('jinja2', 'setuptools', 'distutils', 'cpuinfo', 'numpy', 'cffi', 'build_tools')\n"
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in heavy"
        " or m.startswith(('tunekit.build_tools', 'tunekit.measure', 'tunekit.templates'))))"
    )
    assert install.code(code).stdout.strip() == "[]"


def test_the_wheel_runs_without_the_tools_of_building(direct: Place) -> None:
    code = (
        "import importlib.util as u, sys\nassert not [n for n in ('jinja2', 'setuptools', 'cpuinfo') if u.find_spec(n)]\n"
        "import numpy as np\nfrom tunekit import q8\n"
        "x = np.cos(np.arange(7 * 96, dtype=np.float32)).reshape(7, 96)\n"
        "m = q8.pack(np.sin(np.arange(48 * 96, dtype=np.float32)).reshape(48, 96))\n"
        "y = q8.matmul(x, m)\n"
        "assert np.array_equal(y, q8.oracle.matmul(q8.quantize(x), m))\n"
        "assert not [n for n in sys.modules if n.startswith(('tunekit.build_tools', 'tunekit.measure.'))]\n"
        "print(y.shape)"
    )
    assert direct.code(code).stdout.strip() == "(7, 48)"
    done = run([direct.python, "-W", "error", "-m", "tunekit", "status"], cwd=direct.folder)
    assert "tunekit.q8q8" in done.stdout


def test_building_without_the_tools_of_building_says_what_is_missing(direct: Place, tmp_path: Path) -> None:
    done = run([direct.python, "-m", "tunekit", "build", "--grid"], {"TUNEKIT_CACHE": str(tmp_path / "c")}, check=False)
    assert done.returncode != 0
    assert "jinja2" in done.stderr


def test_the_wheel_is_tagged_for_the_stable_abi(wheel_of_sdist: Path, wheel_of_tree: Path) -> None:
    assert wheel_of_sdist.name == wheel_of_tree.name
    assert re.fullmatch(r"tunekit_native-[0-9.]+-cp311-abi3-(linux|macosx)_\w+\.whl", wheel_of_tree.name)
    with zipfile.ZipFile(wheel_of_tree) as archive:
        (text,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        wheel = email.message_from_string(text)
        assert wheel["Root-Is-Purelib"] == "false"
        modules = [n for n in archive.namelist() if n.endswith(".so")]
    assert len(modules) == 2
    assert all(n.endswith(".abi3.so") for n in modules)


def test_the_wheel_holds_the_package_alone(wheel_of_sdist: Path, wheel_of_tree: Path) -> None:
    contents = []
    for wheel in (wheel_of_sdist, wheel_of_tree):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            contents.append({n: archive.read(n) for n in names if n.startswith("tunekit/") and not n.endswith(".so")})
            (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
            (top,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/top_level.txt"))
        assert {n.split("/")[0] for n in names} == {"tunekit", f"tunekit_native-{email.message_from_string(metadata)['Version']}.dist-info"}
        assert top.split() == ["tunekit"]
        assert "tunekit/py.typed" in names
        assert any(n.endswith(("/licenses/LICENSE", ".dist-info/LICENSE")) for n in names)
        assert not [n for n in names if re.search(r"(^|/)(tests?|__pycache__)/|\.(pyc|o|new)$", n)]
    assert contents[0] == contents[1]
    for path in (ROOT / "tunekit").rglob("*"):
        if path.suffix in (".py", ".c", ".h", ".typed"):
            assert str(path.relative_to(ROOT)) in contents[0]


def test_nothing_requires_the_distribution_that_somebody_else_owns(complete: Place) -> None:
    code = (
        "import importlib.metadata as m, re\n"
        "print(sorted(d.metadata['Name'] for d in m.distributions()))\n"
        "print([r for d in m.distributions() for r in d.requires or () if re.match(r'tunekit\\b(?!-)', r)])\n"
        "print(m.version('tunekit-native'), m.metadata('tunekit-native')['Requires-Python'])"
    )
    names, requires, version = complete.code(code).stdout.splitlines()
    assert "'tunekit-native'" in names
    assert "'tunekit'" not in names
    assert requires == "[]"
    import tunekit

    assert version == f"{tunekit.__version__} >=3.11"


def test_the_sdist_holds_all_that_builds_documents_and_tests_it(sdist: Path, tree: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {n.partition("/")[2] for n in archive.getnames() if not archive.getmember(n).isdir()}
    wanted = {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()}
    built = {n for n in wanted if re.search(r"\.so$|(^|/)build/|\.egg-info/|__pycache__", n)}
    not_for_users = {n for n in wanted if n.startswith(".")}
    assert wanted - built - not_for_users - held == set()
    assert not [n for n in held if re.search(r"\.(so|pyc|o)$|_build\.json$|tune\.json$", n)]


def test_one_wheel_serves_every_cpython(wheel_of_tree: Path, direct: Place, room: Path) -> None:
    others = other_interpreters()
    if not others:
        pytest.skip("no other CPython from 3.11 on is here")
    for version, python in others.items():
        if version not in ("3.11", "3.13"):
            continue
        place = make_place(room / f"python{version}", python=python)
        got = place.pip("install", "-q", "--no-compile", "--only-binary", ":all:", *RUN_TIME, check=False)
        if got.returncode != 0:
            lacking(f"a package index: {got.stderr.strip()[-600:]}")
        place.pip("install", "-q", "--no-compile", "--no-deps", wheel_of_tree)
        assert place.stamps()["modules"] == direct.stamps()["modules"]
        code = (
            "import sys, numpy as np\nfrom tunekit import q8\nfrom tunekit import dispatch\n"
            "y = q8.matmul(np.ones((2, 64), np.float32), q8.pack(np.ones((16, 64), np.float32)))\n"
            "print('%d.%d' % sys.version_info[:2], y.shape, dispatch.declare_scope('tunekit')[0].name)"
        )
        assert place.code(code).stdout.strip() == f"{version} (2, 16) q8q8"
