# SPDX-License-Identifier: Apache-2.0
"""Other people's packages, built with pip in fresh environments: every form of install, and every mistake of an author.

``tests/packages`` holds four: vecs (pyproject.toml alone, a src folder), bitnear (setup.py), utf8check (found by
setuptools itself, two kernels) and boxed (test_frozen.py). Nothing here reaches an index: tunekit's own wheel lies in
the wheelhouse, under our distribution's name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, lacking
from installing import Place, Wheelhouse, copy_tree, fill_wheelhouse, make_place, pip, run

pytestmark = [pytest.mark.build, pytest.mark.install, pytest.mark.slow]

PACKAGES = ROOT / "tests" / "packages"
KERNELS_OF = ("vecs.dot", "bitnear.distances", "utf8check.valid")  # two of them have a sibling in their file
LINES = 30


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    return fill_wheelhouse(tmp_path_factory.getbasetemp() / "wheelhouse")


@pytest.fixture(scope="session")
def author(room: Path, house: Wheelhouse) -> Place:
    """Where authors build without isolation: tunekit from its wheel, and what building needs."""
    place = make_place(room / "author", house.build)
    place.pip("install", "-q", "--no-compile", "--no-deps", own_wheel(room, house), variables=house.variables)
    return place


def own_wheel(room: Path, house: Wheelhouse) -> Path:
    """tunekit's wheel, in a folder that pip searches beside the wheelhouse."""
    folder = room / "links"
    if not folder.exists():
        builder = make_place(room / "builder", house.build)
        words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, copy_tree(room / "tree"))
        builder.pip(*words, variables={**house.variables, "TUNEKIT_BUILD": "reference-only"})
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def index(room: Path, house: Wheelhouse, author: Place) -> dict[str, str]:
    """Environment in which pip takes everything from the two folders."""
    return {**house.variables, "PIP_FIND_LINKS": f"{house.folder} {room / 'links'}"}


def copy_package(name: str, target: Path) -> Path:
    return Path(shutil.copytree(PACKAGES / name, target, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")))


def meta(place: Place, source: Path, call: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call the build backend as a front end does."""
    code = f"import setuptools.build_meta as b; b.{call}"
    return run([place.python, "-c", code], variables, cwd=source, check=check)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


# --- the three packages ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheels(room: Path, author: Place, index: dict[str, str]) -> dict[str, Path]:
    """vecs in isolation, bitnear from the tree without, utf8check from its sdist on a box that says it has no AVX2."""
    found = {}
    run([author.python, pip(), "wheel", "-q", "--no-deps", "-w", room / "vecs wheel", copy_package("vecs", room / "vecs")], index)
    found["vecs"] = only(room / "vecs wheel", "*.whl")
    meta(author, copy_package("bitnear", room / "bitnear"), f"build_wheel({str(room / 'bitnear wheel')!r})")
    found["bitnear"] = only(room / "bitnear wheel", "*.whl")
    meta(author, copy_package("utf8check", room / "utf8check"), f"build_sdist({str(room / 'utf8check sdist')!r})")
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", room / "utf8check wheel", only(room / "utf8check sdist", "*.tar.gz"))
    author.pip(*words, variables={**index, "TUNEKIT_DISABLE_FEATURES": "avx2,fma,popcnt"})
    found["utf8check"] = only(room / "utf8check wheel", "*.whl")
    return found


@pytest.fixture(scope="session")
def together(room: Path, house: Wheelhouse, wheels: dict[str, Path], index: dict[str, str]) -> Place:
    """All three in one environment, resolved by pip from their own requirements."""
    place = make_place(room / "together")
    place.pip("install", "-q", "--no-compile", *wheels.values(), variables=index)
    return place


def test_a_wheel_holds_module_templates_headers_and_stub(wheels: dict[str, Path]) -> None:
    wanted = {
        "vecs": {"vecs/isa.h", "vecs/vecs.c.j2", "vecs/tk_include/vecs_kernels.h", "vecs/tk_include/vecs_kernels.pxd", "vecs/tk_include/vecs_kernels.pc", "vecs/kernels.pyi", "vecs/kernels.py"},
        "bitnear": {"bitnear/bitnear.c.j2", "bitnear/tk_include/bitnear_kernels.h", "bitnear/kernels.pyi"},
        "utf8check": {"utf8check/utf8.c.j2", "utf8check/tk_include/utf8check_kernels.h", "utf8check/kernels.pyi"},
    }
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            held = set(archive.namelist())
            modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
        assert wanted[name] <= held
        assert {n.split("/")[0] for n in held if ".dist-info" not in n} == {name}
        (module,) = (n for n in held if n.endswith(".so"))
        assert re.fullmatch(rf"{name}/_tk_{name}_[0-9a-f]{{12}}\.\S+\.so", module)
        assert all(mode & 0o444 == 0o444 for mode in modes.values())


def test_an_sdist_holds_the_templates(room: Path, wheels: dict[str, Path]) -> None:
    with tarfile.open(only(room / "utf8check sdist", "*.tar.gz")) as archive:
        held = {n.partition("/")[2] for n in archive.getnames()}
    assert {"utf8check/utf8.c.j2", "utf8check/kernels.py", "pyproject.toml"} <= held
    assert not [n for n in held if n.endswith((".so", ".pyi", ".h"))]


def test_nothing_fetches_the_distribution_of_that_name(together: Place) -> None:
    code = (
        "import importlib.metadata as m, re\n"
        "print(sorted(d.metadata['Name'] for d in m.distributions() if 'tunekit' in d.metadata['Name']))\n"
        "print([r for d in m.distributions() for r in d.requires or () if re.match(r'tunekit\\b(?!-)', r)])"
    )
    assert together.code(code).stdout.splitlines() == ["['tunekit-native']", "[]"]
    texts = [p.read_text() for p in [*PACKAGES.rglob("pyproject.toml"), *PACKAGES.rglob("setup.py"), ROOT / "templates/new/pyproject.toml.txt"]]
    assert not [t for t in texts if re.search(r"[\"']tunekit[\"'~=<>\[]", t)]


WORK = """
import json, numpy as np
import bitnear, utf8check, vecs
import tunekit as tk
rng = np.random.default_rng(1)
x, y = rng.uniform(0.5, 1.5, (2, 1003)).astype(np.float32)
want = y + np.float32(0.5) * x
assert np.isclose(vecs.dot(x, y, x.size), x.astype(float) @ y, rtol=1e-5)
vecs.axpy(y, x, 0.5, x.size)
assert np.allclose(y, want, rtol=1e-6)
base = rng.integers(0, 256, (100, 96), np.uint8)
query = base[41] ^ np.uint8(1)
want = np.bitwise_count(base ^ query).sum(1)
index, distances = bitnear.search(query, base, 5)
assert index[0] == 41 == bitnear.nearest(query, base, *base.shape)
assert distances.tolist() == sorted(want)[:5]
for text, good in ((b"", 1), ("Grüße, 世界 🙂".encode() * 9, 1), ("世界".encode()[:-1], 0), (b"\\xed\\xa0\\x80", 0)):
    assert utf8check.is_utf8(text) == good == utf8check.is_utf8(text, mostly_ascii=True)
print(json.dumps({r.kernel: [r.scope, r.suffix, r.source, r.tier] for r in tk.status() if r.scope != "tunekit"}))
"""


def test_three_packages_work_together_and_each_has_its_status(together: Place, tmp_path: Path) -> None:
    own = {"TUNEKIT_HOME": str(tmp_path / "h"), "TUNEKIT_CACHE": str(tmp_path / "c")}
    found = json.loads(together.code(WORK, own).stdout)
    assert {k: v[0] for k, v in found.items()} == {"dot": "vecs", "axpy": "vecs", "distances": "bitnear", "valid": "utf8check", "valid_ascii": "utf8check"}
    assert all(v[2:] == ["fallback", "c"] for v in found.values()), found
    # A wheel that moves to a smaller CPU runs what that one has; what it holds never depended on the box that built it.
    small = json.loads(together.code(WORK, {**own, "TUNEKIT_DISABLE_FEATURES": "avx2,popcnt"}).stdout)
    assert all(v[3] == "c" for v in small.values())
    assert not [v for v in small.values() if re.search("avx2|width256|popcnt|shuffle", v[1])]
    listed = json.loads(run([together.python, "-m", "tunekit", "list", "--json"], own).stdout)
    assert {f["scope"]: f["module"] for f in listed} == {"bitnear": "bitnear.kernels", "tunekit": "tunekit.q8.kernels", "utf8check": "utf8check.kernels", "vecs": "vecs.kernels"}


def test_every_row_of_the_three_passes_its_gates_or_is_unproven_here(together: Place, tmp_path: Path) -> None:
    own = {"TUNEKIT_HOME": str(tmp_path / "h"), "TUNEKIT_CACHE": str(tmp_path / "c")}
    words = [word for kernel in KERNELS_OF for word in ("--kernel", kernel)]
    done = run([together.python, "-m", "tunekit", "verify", "--execution", "--json", *words], own, timeout=400)
    objects = json.loads(done.stdout)["execution"]["objects"]
    assert {o["kernel"] for o in objects} == set(KERNELS_OF)
    assert not [o for o in objects if o["state"] == "failed"], objects
    passed = [o["row"] for o in objects if o["state"] == "passed"]
    assert passed.count("reference") == len(KERNELS_OF)


def test_a_module_of_another_format_is_refused_clearly(together: Place, tmp_path: Path) -> None:
    own = {"TUNEKIT_HOME": str(tmp_path / "h"), "TUNEKIT_CACHE": str(tmp_path / "c")}
    code = "import warnings; warnings.simplefilter('always')\nfrom tunekit import module; module.FORMAT = 99\nimport vecs, numpy as np\nprint(vecs.dot(np.ones(4, np.float32), np.ones(4, np.float32), 4))"
    done = run([together.python, "-c", code], own, cwd=tmp_path)
    assert done.stdout == "4.0\n"  # on the Python reference
    assert re.search(r"_tk_vecs_\w+\S+: format is 2, this tunekit wants 99; the module was made by another tunekit, rebuild it with: python -m tunekit build", done.stderr)


def test_the_headers_of_an_installed_package_compile(together: Place, tmp_path: Path) -> None:
    folder = together.code("import tunekit; print(tunekit.get_include('vecs'))").stdout.strip()
    assert Path(folder).is_relative_to(together.site)
    assert run([together.python, "-m", "tunekit", "header", "vecs", "--where"]).stdout.strip() == folder
    (tmp_path / "a.c").write_text("#include <vecs_kernels.h>\nfloat f(const vecs_kernels_api *a, float *x) { return a->dot(x, x, 3); }\n")
    run(["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-c", "-I", folder, "a.c"], cwd=tmp_path)


# --- the skeleton ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def skeleton(room: Path, author: Place) -> Path:
    """What ``python -m tunekit new`` writes."""
    done = run([author.python, "-m", "tunekit", "new", "mylib", "--to", room])
    assert done.stdout.splitlines() == [str(room / "mylib" / p) for p in ("pyproject.toml", "mylib/__init__.py", "mylib/kernels.py", "mylib/axpy.c.j2", "tests/test_mylib.py")]
    assert "python -m tunekit.retune --scope mylib" in done.stderr
    return room / "mylib"


def test_a_new_package_is_thirty_lines_beside_one_template_and_one_test(skeleton: Path) -> None:
    python = sorted((skeleton / "mylib").glob("*.py"))
    assert sum(len(p.read_text().splitlines()) for p in python) <= LINES
    assert [p.name for p in python] == ["__init__.py", "kernels.py"]


def test_a_new_package_is_not_written_over_anything(skeleton: Path, author: Place, tmp_path: Path) -> None:
    def new(*words: str | Path) -> str:
        done = run([author.python, "-m", "tunekit", "new", *words], check=False)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    assert f"{skeleton} is there already" in new("mylib", "--to", skeleton.parent)
    for name in ("My", "1a", "a-b", "class", "double", "json", "tunekit", "a__b", "ü"):
        assert f"{name!r} " in new(name, "--to", tmp_path)
    assert "cannot write" in new("fine", "--to", tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_new_package_installs_tunes_and_passes_and_one_command_tunes_every_family(
    skeleton: Path, room: Path, house: Wheelhouse, wheels: dict[str, Path], index: dict[str, str], tmp_path: Path
) -> None:
    place = make_place(room / "new", house.build)
    place.pip("install", "-q", "--no-compile", "--no-deps", own_wheel(room, house), wheels["bitnear"], variables=index)
    place.pip("install", "-q", "--no-deps", copy_clean(skeleton, room / "new source"), variables=index)  # in isolation
    own = {"TUNEKIT_HOME": str(tmp_path / "h"), "TUNEKIT_CACHE": str(tmp_path / "c")}
    done = run([place.python, "-m", "tunekit.retune", "--all", "--json"], own, cwd=tmp_path, timeout=300)
    scopes = {s["scope"]: s for s in json.loads(done.stdout)["scopes"]}
    # (tunekit itself is a reference-only build here: it says so, and is left alone.)
    assert set(scopes) == {"bitnear", "mylib"}
    for name, scope in scopes.items():
        assert Path(scope["manifest"]).name == f"{name}.tune.json"
        assert set(json.loads(Path(scope["manifest"]).read_text())) == set(scope["record"]["kernels"])
    rows = scopes["mylib"]["record"]["kernels"]["axpy"]["rows"]
    assert set(rows) == {"reference", "unroll1", "unroll8", "avx2_unroll8"}
    assert not [r for r in rows.values() if r["verdict"] == "rejected"], rows
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_mylib as t; t.test_axpy_is_what_numpy_says(); print(t.axpy.choice().source)"
    assert run([place.python, "-W", "error", "-c", code, skeleton / "tests"], own, cwd=tmp_path).stdout == "manifest\n"
    both = run([place.python, "-m", "tunekit.retune", "--all", "--scope", "mylib"], own, check=False)
    assert (both.returncode, "--all tunes every family" in both.stderr) == (2, True)


def copy_clean(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info", "tk_include", "*.pyi", "__pycache__")))


def test_editable_builds_again_what_changed_and_nothing_else(skeleton: Path, room: Path, house: Wheelhouse, index: dict[str, str], author: Place) -> None:
    place = make_place(room / "editable", house.build)
    place.pip("install", "-q", "--no-compile", "--no-deps", own_wheel(room, house), variables=index)
    source = copy_clean(skeleton, room / "editable ü source")
    code = "import numpy as np, mylib.kernels as k\ny = np.ones(9, np.float32); k.axpy(y, y.copy(), 1, 9); print(y[0], k.axpy.choice().tier)"

    def install() -> tuple[str, Path, int]:
        done = place.pip("install", "-v", "--no-deps", "--no-build-isolation", "-e", source, variables=index)
        module = only(source / "mylib", "_tk_mylib_*.so")
        assert run([place.python, "-W", "error", "-c", code]).stdout.split()[1] == "c"
        (line,) = re.findall(r"mylib.axpy: built .*\((\d+ compiled, \d+ as they were)", done.stdout + done.stderr)
        return line, module, module.stat().st_mtime_ns

    first = install()
    assert first[0] == "3 compiled, 0 as they were"
    assert install() == ("0 compiled, 3 as they were", *first[1:])
    template = source / "mylib" / "axpy.c.j2"
    text = template.read_text()
    template.write_text(text.replace("y[i + j] += a * x[i + j];", "y[i + j] = y[i + j] + (a + 0) * x[i + j];"))
    changed = install()
    assert changed[0] == "2 compiled, 1 as they were"  # the reference has no unrolled part
    assert changed[1] != first[1]
    template.write_text(text)
    assert install()[:2] == ("0 compiled, 3 as they were", first[1])
    kernels = source / "mylib" / "kernels.py"
    kernels.write_text(kernels.read_text().replace('fallback="avx2', 'cflags=["-fno-tree-vectorize"], fallback="avx2'))
    assert install()[0] == "3 compiled, 0 as they were"
    # Generated files lie beside the sources and are nobody's to commit; the author's own stub stays.
    (source / "mylib" / "kernels.pyi").write_text("axpy: int\n")
    install()
    assert (source / "mylib" / "kernels.pyi").read_text() == "axpy: int\n"


# --- mistakes --------------------------------------------------------------------------------------------


def broken(skeleton: Path, target: Path, changes: dict[str, tuple[str, str]]) -> Path:
    copy_clean(skeleton, target)
    for name, (old, new) in changes.items():
        path = target / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    return target


TEMPLATE, KERNELS, PROJECT = "mylib/axpy.c.j2", "mylib/kernels.py", "pyproject.toml"
STOPS: dict[str, tuple[dict[str, tuple[str, str]], str]] = {
    "an undefined variable": ({TEMPLATE: ("unroll > 1", "unrol > 1")}, r"mylib/kernels.py: kernel mylib.axpy, row reference, template mylib/axpy.c.j2: 'unrol' is undefined"),
    "a syntax error": ({TEMPLATE: ("//% endif", "//% endfi")}, r"mylib/kernels.py: kernel mylib.axpy, row reference, template mylib/axpy.c.j2: mylib/axpy.c.j2:\d+"),
    "a bad declaration": ({KERNELS: ('fallback="avx2', 'fallback="sse9_x;avx2')}, r"mylib/kernels.py: kernel 'axpy': fallback entry 'sse9_x' is not in the grid"),
    "an import that the build lacks": ({KERNELS: ("import numpy as np", "import numpy as np, nowhere_to_be_found")}, r"mylib/kernels.py: No module named 'nowhere_to_be_found'; this file is executed alone, so what it imports belongs to the build requirements"),
    "an exception": ({KERNELS: ("SCOPE = ", "1 / 0\nSCOPE = ")}, r"mylib/kernels.py: it cannot be executed: ZeroDivisionError"),
    "no kernel in it": ({PROJECT: ('"mylib/kernels.py"', '"mylib/other.py"'), }, r"\[tool.tunekit\] modules names 'mylib/other.py', which is no Python file of "),
    "an unknown key": ({PROJECT: ("[tool.tunekit]", "[tool.tunekit]\nmodule = 1")}, r"\[tool.tunekit\] has 'module'; it may hold: modules"),
    "not a list": ({PROJECT: ('["mylib/kernels.py"]', '"mylib/kernels.py"')}, r"\[tool.tunekit\] modules must be a list of files"),
    "no package": ({PROJECT: ('packages = ["mylib"]', 'packages = []')}, r"'mylib/kernels.py', which lies in none of this project's packages"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", STOPS)
def test_a_mistake_stops_the_build_and_says_where(mistake: str, skeleton: Path, author: Place, tmp_path: Path) -> None:
    changes, words = STOPS[mistake]
    source = broken(skeleton, tmp_path / "mylib", changes)
    done = meta(author, source, f"build_wheel({str(tmp_path / 'out')!r})", check=False)
    assert done.returncode != 0
    assert re.search(words, done.stderr.splitlines()[-1]), done.stderr[-2000:]
    assert not list(tmp_path.glob("out/*.whl"))


DROPS: dict[str, tuple[dict[str, tuple[str, str]], str]] = {
    "an error in one row": ({TEMPLATE: ("    int32_t i = 0;", "    int32_t i = ${ 'oops' if unroll > 1 else 0 };")}, r"row unroll8: .*line \d+: error: .*oops"),
    "an intrinsic without its feature": (
        {TEMPLATE: ("    int32_t i = 0;", "    int32_t i = 0;\n//% if unroll > 1\n    (void)_mm256_add_epi32(_mm256_set1_epi32(n), _mm256_set1_epi32(n));\n//% endif"), },
        r"row unroll8: .*error: .*\(with baseline flags\); an intrinsic needs a feature that the row does not have: add it to requires=",
    ),
    "another prototype": ({TEMPLATE: ('${ proto("axpy") }', 'void ${ symbol("axpy") }(float *y, const float *x, ${ "double" if unroll > 1 else "float" } a, int32_t n)'), }, r"row unroll8: .*conflicting types for .*; the template's prototype is not that of the annotations: begin the function with \$\{ proto\(...\) \}"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", DROPS)
def test_a_row_that_does_not_compile_is_dropped_by_name_and_strictly_an_error(mistake: str, skeleton: Path, author: Place, tmp_path: Path) -> None:
    changes, words = DROPS[mistake]
    source = broken(skeleton, tmp_path / "mylib", changes)
    if "intrinsic" in mistake:
        path = source / TEMPLATE
        path.write_text(path.read_text().replace("#include <stdint.h>", "#include <immintrin.h>\n#include <stdint.h>"))
    call = f"build_wheel({str(tmp_path / 'out')!r})"
    done = meta(author, source, call)
    line = next(x for x in done.stderr.splitlines() if "row unroll8" in x)
    assert line.startswith("tunekit: dropped, it does not compile: mylib/kernels.py: kernel mylib.axpy, row unroll8")
    assert re.search(words, line), line
    with zipfile.ZipFile(only(tmp_path / "out", "*.whl")) as archive:
        assert [n for n in archive.namelist() if n.endswith(".so")]
    strict = meta(author, source, call, check=False, TUNEKIT_STRICT="compiler")
    assert strict.returncode != 0
    assert re.search(words, strict.stderr)
    assert "TUNEKIT_STRICT has compiler, and these rows do not compile" in strict.stderr


def test_two_packages_of_one_scope(skeleton: Path, author: Place, index: dict[str, str], tmp_path: Path) -> None:
    other = copy_clean(skeleton, tmp_path / "source")
    (other / "mylib").rename(other / "other")
    for path in (other / "pyproject.toml", other / "other" / "kernels.py", other / "other" / "__init__.py"):
        text = path.read_text().replace("mylib", "other")
        path.write_text(text.replace('Scope("other")', 'Scope("mylib")').replace('other = "other.kernels"', 'mylib = "other.kernels"'))
    site = tmp_path / "site"
    words = ("install", "-q", "--no-compile", "--no-deps", "--no-build-isolation", "--target", site)
    author.pip(*words, copy_clean(skeleton, tmp_path / "first"), other, variables={**index, "TUNEKIT_BUILD": "none"})
    own = {"PYTHONPATH": str(site)}
    done = run([author.python, "-m", "tunekit", "list"], own, check=False)
    assert done.returncode == 1 and re.search(r"^mylib +cannot be used", done.stdout, re.M), done.stdout
    assert re.search(r"two installed packages declare the scope 'mylib': (mylib|other) \(\w+.kernels\) and (mylib|other) \(\w+.kernels\); they would share one manifest", done.stderr)
    both = run([author.python, "-c", "import mylib, other"], own, check=False)
    assert re.search(r"DeclarationError: scope 'mylib' is declared twice in this process: at \S+mylib/kernels.py:\d+ and at \S+other/kernels.py:\d+; rename one", both.stderr)


def test_several_declaring_files_in_one_folder(skeleton: Path, author: Place, tmp_path: Path) -> None:
    """Each has a module of its own, and neither build removes the other's."""
    source = copy_clean(skeleton, tmp_path / "mylib")
    text = (source / KERNELS).read_text()
    second = text.replace("def axpy", "def twice").replace("mylib.kernels:", "mylib.more:").replace("mylib/axpy", "mylib/twice").replace('SCOPE = tk.Scope("mylib")', "from mylib.kernels import SCOPE")
    (source / "mylib" / "more.py").write_text(second.replace("from mylib.kernels import SCOPE", 'SCOPE = tk.Scope("mylibmore")'))
    (source / "mylib" / "twice.c.j2").write_text((source / TEMPLATE).read_text().replace('proto("axpy")', 'proto("twice")'))
    path = source / PROJECT
    path.write_text(path.read_text().replace('["mylib/kernels.py"]', '["mylib/kernels.py", "mylib/more.py"]'))
    meta(author, source, f"build_wheel({str(tmp_path / 'out')!r})")
    with zipfile.ZipFile(only(tmp_path / "out", "*.whl")) as archive:
        held = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert sorted(re.sub("_[0-9a-f]{12}", "", n.split("/")[-1].partition(".")[0]) for n in held if n.endswith(".so")) == ["_tk_mylib", "_tk_mylibmore"]
    assert {"mylib/kernels.pyi", "mylib/more.pyi", "mylib/tk_include/mylib_more.h"} <= set(held)
    code = "import mylib.kernels as k, mylib.more as m; print(k.axpy.choice().tier, m.twice.choice().tier)"
    assert run([author.python, "-W", "error", "-c", code], {"PYTHONPATH": str(tmp_path / "site")}).stdout == "c c\n"


def test_the_hook_is_inert_in_other_projects(author: Place, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "plain"\nversion = "1"\n[tool.setuptools]\npackages = ["plain"]\n')
    code = (
        "import sys, setuptools.build_meta as b; name = b.build_wheel('out')\n"
        "print(name, [m for m in sys.modules if m.split('.')[0] in ('jinja2', 'cffi', 'numpy') or m.startswith('tunekit.build_tools')])"
    )
    assert run([author.python, "-c", code], cwd=tmp_path).stdout.splitlines()[-1] == "plain-1-py3-none-any.whl []"


def test_a_build_ext_of_the_projects_own_is_refused_unless_it_is_one_of_ours(author: Place, tmp_path: Path) -> None:
    source = copy_package("bitnear", tmp_path / "bitnear")
    setup = (source / "setup.py").read_text()
    own = "from {0} import build_ext\nclass mine(build_ext): pass\nfrom setuptools import setup"
    for base, good in (("setuptools.command.build_ext", False), ("tunekit.build_tools.hook", True)):
        text = setup.replace("from setuptools import setup", own.format(base)).replace("tunekit_modules=", 'cmdclass={"build_ext": mine}, tunekit_modules=')
        (source / "setup.py").write_text(text)
        done = meta(author, source, f"build_wheel({str(tmp_path / base)!r})", check=False)
        assert (done.returncode == 0) is good, done.stderr
        assert good or "derive it from tunekit.build_tools.hook.build_ext" in done.stderr




# --- the guides ------------------------------------------------------------------------------------------


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """(language, file or nothing, text) of every fenced block of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", text, re.M | re.S)


def run_page(page: str, place: Place, folder: Path, variables: dict[str, str]) -> str:
    """Write a page's files and run its commands in order; what they printed."""
    shim = place.folder / "bin" / "pip"
    shim.write_text(f'#!/bin/sh\nexec "{place.python}" "{pip()}" "$@"\n')
    shim.chmod(0o755)
    own = {"PATH": f"{place.folder / 'bin'}:{os.environ['PATH']}", "TUNEKIT_HOME": str(folder / "h"), "TUNEKIT_CACHE": str(folder / "c")}
    said = []
    for language, name, text in blocks_of(page):
        if name:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            assert language == "sh", f"a block of {language} is neither a file nor a command"
            said.append(run(["sh", "-e", "-c", text], {**variables, **own}, cwd=folder, timeout=300).stdout)
    return "\n".join(said)


def test_every_snippet_of_the_authors_guide_runs(room: Path, house: Wheelhouse, author: Place, index: dict[str, str], tmp_path: Path) -> None:
    place = make_place(room / "guide", house.build)
    place.pip("install", "-q", "--no-compile", "--no-deps", own_wheel(room, house), variables=index)
    said = run_page("authors.md", place, tmp_path, {**index, "PIP_NO_DEPS": "1"})
    assert re.search(r"^mylib.axpy +\S+ +manifest +c ", said, re.M)
    assert re.search(r"^peaks +peak +2 +peaks.kernels$", said, re.M)
    assert re.search(r"^peaks.peak: ", said, re.M)
    assert "static float largest(const float *x, int32_t n)" in said


def test_every_snippet_of_the_linking_guide_runs(room: Path, house: Wheelhouse, skeleton: Path, author: Place, index: dict[str, str], tmp_path: Path) -> None:
    missing = [name for name in ("Cython", "numba", "pkgconf") if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"{', '.join(missing)} (pip install -e '.[test]')")
    place = make_place(room / "linking guide".replace(" ", "-"), Path(sysconfig.get_path("purelib")))
    words = ("install", "-q", "--no-compile", "--no-deps", "--no-build-isolation")
    place.pip(*words, own_wheel(room, house), variables=index)
    place.pip(*words, copy_clean(skeleton, tmp_path / "source"), variables=index)
    said = run_page("linking.md", place, tmp_path, index)
    assert re.search(r"^-I\S+/mylib/tk_include", said, re.M)
    assert said.splitlines()[-1] in ("avx2_unroll8", "unroll8", "unroll1", "reference")
