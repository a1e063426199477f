# SPDX-License-Identifier: Apache-2.0
"""Hostile surroundings of a build: no compiler, odd compilers, flags and places. None may choose what a row is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, run_python
from installing import Place, Wheelhouse, copy_tree, fill_wheelhouse, make_place, pip, run
from tunekit.build_tools import Runner, find_toolchain

pytestmark = [pytest.mark.build, pytest.mark.slow]

X86 = find_toolchain(Runner()).arch == "x86_64"
GCC = shutil.which("gcc") or shutil.which("cc") or "gcc"
x86_only = pytest.mark.skipif(not X86, reason="x86 instructions")

BUILD = """
import dataclasses, json, sys
from pathlib import Path
from tunekit import core, dispatch, module
from tunekit.build_tools import build as b
out, objects, kind, extra = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
if extra:
    find = b.find_toolchain
    b.find_toolchain = lambda runner: dataclasses.replace(t := find(runner), command=(*t.command, *extra))
kernels = dispatch.declare_scope('tunekit')
report = b.build_into(kernels, out, objects, kind)
made = b.build_core_into(out, objects, core.SOURCES)
stamp = module.load(report.path, kernels).stamp
print(json.dumps({'module': str(report.path), 'core': str(made), 'stamp': stamp, 'compiled': report.compiled}))
"""


@dataclass(frozen=True)
class Build:
    """What a build in a process of its own made."""

    module: Path
    core: Path
    objects: Path
    stamp: dict[str, Any]
    compiled: int

    @property
    def rows(self) -> dict[str, str]:
        """Row to the key of its object; the reference is one of them."""
        return {f"{r['suffix']} {r['alternative']}": r["object"] for r in self.stamp["kernels"]["tunekit.q8q8"]["rows"]}

    @property
    def dropped(self) -> dict[str, str]:
        return dict(self.stamp["kernels"]["tunekit.q8q8"]["dropped"])


def build(
    folder: Path, variables: Mapping[str, str | None] | None = None, *extra: str, kind: str = "fat", objects: Path | None = None
) -> Build:
    """Build core and Q8 module with an environment of its own; ``extra`` words go behind the compiler."""
    objects = objects or folder / "objects"
    done = run([sys.executable, "-c", BUILD, folder / "out", objects, kind, *extra], variables, cwd=ROOT / "tests")
    found = json.loads(done.stdout.splitlines()[-1])
    return Build(Path(found["module"]), Path(found["core"]), objects, found["stamp"], found["compiled"])


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The build that all others must equal."""
    return build(tmp_path_factory.mktemp("plain"), {"CC": GCC})


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Core, glue, reference and every row of the grid, each warning an error."""
    return build(tmp_path_factory.mktemp("grid"), {"CC": GCC}, "-Wall", "-Wextra", "-Werror", kind="grid")


# --- what is in an object --------------------------------------------------------------------------------

_AFTER_BASELINE = re.compile(
    r"^(v(?!err|erw|mcall|mmcall)\w+|k(mov|and|or|xor|not|test|unpck|shift|add)\w*|andn|bextr|bls\w+|[rs]orx|s[ah][lr]x|mulx|pdep|pext"
    r"|crc32\w*|popcnt|lzcnt|pshufb|pmadd?ubsw|pabs[bwd]|psign[bwd]|palignr|pmulhrsw|ph(add|sub)\w+|h(add|sub)p[sd]|ptest|round[sp][sd]"
    r"|pinsr[bdq]|pextr[bdq]|p(min|max)(sb|sd|uw|ud)|pmulld|pmuldq|pblend\w+|blend\w+|pmov[sz]x\w+|movntdqa|dpp[sd]|pcmpeqq|pcmpgtq|ldtilecfg|tdp\w+)$"
)


def instructions(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Function to its (mnemonic, operands)."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        header = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if header:
            name = header[1]
        elif line.startswith(" ") and "\t" in line:
            mnemonic, _, operands = line.split("\t", 1)[1].strip().partition(" ")
            if mnemonic.rstrip() in ("rep", "repz", "repnz", "lock", "bnd", "notrack", "data16", "cs"):
                mnemonic, _, operands = operands.strip().partition(" ")
            found.setdefault(name, []).append((mnemonic, operands.strip()))
    return found


def beyond_the_baseline(path: Path) -> list[str]:
    """The instructions of an object that not every x86-64 has."""
    return [
        f"{function}: {mnemonic} {operands}"
        for function, code in instructions(path).items()
        for mnemonic, operands in code
        if _AFTER_BASELINE.match(mnemonic) or re.search(r"%[yz]mm|%xmm(1[6-9]|2\d|3[01])|%k[1-7]|%tmm", operands)
    ]


def symbols(path: Path) -> dict[str, str]:
    """Symbol that an object defines to its letter; helpers that are static are lower case."""
    text = subprocess.run(["nm", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[2]: line.split()[1] for line in text.splitlines()}


def baseline_objects(made: Build) -> list[Path]:
    """Core, glue and reference."""
    reference = made.rows["reference 0"]
    rows = set(made.rows.values()) - {reference}
    found = [p for p in made.objects.glob("*.o") if p.stem not in rows]
    assert made.objects / f"{reference}.o" in found
    assert len(found) == 2 + len(list((ROOT / "tunekit" / "csrc").glob("*.c")))
    return found


def test_every_row_glue_and_core_compile_without_a_warning(grid: Build) -> None:
    assert grid.dropped == {}
    if X86:
        assert len(grid.rows) > 3


def test_what_a_module_exports_is_its_init_function(grid: Build) -> None:
    for path, name in ((grid.module, grid.module.name.partition(".")[0]), (grid.core, "_core")):
        out = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
        assert [line.split()[-1] for line in out.splitlines()] == [f"PyInit_{name}"]


def test_a_row_defines_its_own_symbols_and_shares_none(grid: Build) -> None:
    from tunekit import dispatch

    (kernel,) = dispatch.declare_scope("tunekit")
    owner: dict[str, str] = {}
    for row, key in grid.rows.items():
        suffix, alternative = row.rsplit(" ", 1)
        found = symbols(grid.objects / f"{key}.o")
        shared = {name for name, letter in found.items() if letter.isupper() or letter in "uvw"}
        assert shared == {kernel.symbol(function, suffix, int(alternative)) for function, _ in kernel.functions}
        assert {found[name] for name in shared} == {"T"}, "weak, common or data symbols can be merged by a linker"
        for name in shared:
            assert owner.setdefault(name, row) == row
    for path in baseline_objects(grid):
        for name, letter in symbols(path).items():
            if letter.isupper() and path.stem != grid.rows["reference 0"]:
                assert owner.setdefault(name, path.stem) == path.stem


@x86_only
def test_baseline_objects_hold_baseline_instructions(grid: Build) -> None:
    for path in baseline_objects(grid):
        assert beyond_the_baseline(path) == []


@x86_only
def test_the_reader_of_instructions_knows_one_when_it_sees_it(grid: Build) -> None:
    rows = [key for row, key in grid.rows.items() if row != "reference 0"]
    assert all(beyond_the_baseline(grid.objects / f"{key}.o") for key in rows)


@x86_only
def test_in_the_linked_module_wide_code_stands_in_rows_alone(plain: Build) -> None:
    from tunekit import dispatch

    (kernel,) = dispatch.declare_scope("tunekit")
    own = {n for r, key in plain.rows.items() if r != "reference 0" for n in symbols(plain.objects / f"{key}.o")}
    wide = {line.partition(":")[0] for line in beyond_the_baseline(plain.module)}
    assert wide
    assert {re.sub(r"\.(cold|part|constprop|isra)(\.\d+)*", "", name) for name in wide} <= own
    assert beyond_the_baseline(plain.core) == []
    assert kernel.symbol(kernel.name, "reference", 0) not in wide


def test_two_builds_make_one_module_to_the_byte(plain: Build, tmp_path: Path) -> None:
    again = build(tmp_path / "elsewhere", {"CC": GCC, "SOURCE_DATE_EPOCH": "1"})
    assert again.module.name == plain.module.name
    assert again.compiled > 0
    assert again.module.read_bytes() == plain.module.read_bytes()
    assert again.core.read_bytes() == plain.core.read_bytes()


# --- compilers and flags of the environment --------------------------------------------------------------


def test_flags_in_cc_reach_no_object(plain: Build, tmp_path: Path) -> None:
    made = build(tmp_path, {"CC": f"{GCC} -march=native -O0 -flto -Werror -mavx2 -ffast-math"}, objects=plain.objects)
    assert (made.rows, made.compiled) == (plain.rows, 0)
    assert made.module.name == plain.module.name


def test_flags_in_cflags_reach_no_object(plain: Build, tmp_path: Path) -> None:
    flags = "-O0 -march=native -mavx2 -flto -Werror -Wconversion -ffast-math -fPIE -std=c89 -g3"
    made = build(tmp_path, {"CC": GCC, "CFLAGS": flags, "CPPFLAGS": "-march=native", "LDFLAGS": "-flto -Wl,--no-such-option"})
    assert made.compiled > 0
    assert (made.rows, made.module.name, made.dropped) == (plain.rows, plain.module.name, {})
    if X86:
        for path in baseline_objects(made):
            assert beyond_the_baseline(path) == []


def test_fast_math_in_any_spelling_reaches_no_object(plain: Build, tmp_path: Path) -> None:
    words = (
        "-fassociative-math -fno-signed-zeros -fno-trapping-math -freciprocal-math -ffp-contract=fast -fshort-enums"
        " -fsingle-precision-constant -x c -ansi -pedantic-errors -Xassembler -mfence-as-lock-add=no"
    )
    made = build(tmp_path, {"CC": f"{GCC} {words}"}, objects=plain.objects)
    assert (made.rows, made.compiled) == (plain.rows, 0)


def test_a_compiler_behind_another_program(plain: Build, tmp_path: Path) -> None:
    made = build(tmp_path, {"CC": "env FOO=1 gcc"})
    assert (list(made.rows), made.dropped) == (list(plain.rows), {})
    assert made.stamp["compiler_command"] == ["env", "FOO=1", "gcc"]


def test_a_compiler_in_a_folder_with_spaces(plain: Build, tmp_path: Path) -> None:
    program = tmp_path / "a dir ü" / "my gcc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {GCC} "$@"\n')
    program.chmod(0o755)
    made = build(tmp_path / "b", {"CC": f"'{program}' -pipe"})
    assert (list(made.rows), made.dropped) == (list(plain.rows), {})
    assert made.stamp["compiler_command"] == [str(program), "-pipe"]


def test_an_empty_cc_is_none(plain: Build, tmp_path: Path) -> None:
    made = build(tmp_path, {"CC": ""})
    assert (list(made.rows), made.dropped) == (list(plain.rows), {})


@x86_only
def test_an_assembler_that_lacks_an_instruction_costs_those_rows_alone(plain: Build, tmp_path: Path) -> None:
    assembler = tmp_path / "bin" / "as"
    assembler.parent.mkdir()
    assembler.write_text(
        '#!/bin/sh\nfor word; do case "$word" in *.s) if grep -Eq "^[[:space:]]*([{]vex[}][[:space:]]*)?vpdpbusd[[:space:]]" "$word"; then\n'
        'echo "$word:7: Error: no such instruction: \\`vpdpbusd\'" >&2; exit 1; fi;; esac; done\n'
        f'exec {shutil.which("as")} "$@"\n'
    )
    assembler.chmod(0o755)
    made = build(tmp_path, {"CC": f"{GCC} -B {assembler.parent}"})
    lost = {row.rsplit(" ", 1)[0] for row in plain.rows if "vpdpbusd" in row}
    assert lost
    assert set(made.dropped) == lost
    assert {row.rsplit(" ", 1)[0] for row in made.rows} == {r.rsplit(" ", 1)[0] for r in plain.rows} - lost
    for reason in made.dropped.values():
        assert "no such instruction: `vpdpbusd'" in reason
        assert "-mavx" in reason


# --- places ----------------------------------------------------------------------------------------------


def test_cache_and_temporary_folder_with_spaces_colons_and_umlauts(tmp_path: Path) -> None:
    odd = tmp_path / "a b:c" / "ü"
    (odd / "tmp").mkdir(parents=True)
    code = (
        "from tunekit import dispatch; import toy.kernels as t; from tunekit.build_tools import build_cached\n"
        "build_cached(dispatch.kernels('toyscope'), 'fat'); dispatch.forget_modules(); print(t.toy(2, 3), t.toy.choice().tier)"
    )
    for locale in ("C.UTF-8", "C"):
        done = run_python(code, {"TUNEKIT_CACHE": str(odd / locale), "TMPDIR": str(odd / "tmp"), "LC_ALL": locale})
        assert done.stdout.split() == ["6", "c"], done.stderr


def _noexec(folder: Path) -> list[str]:
    """The command that runs the rest with a noexec file system on the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o noexec none '{folder}' && exec \"$@\"", "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, check=False) if shutil.which("unshare") else None
    if probe is None or probe.returncode != 0:
        pytest.skip(f"no mount of one's own is permitted here: {probe.stderr.strip() if probe else 'unshare is missing'}")
    return command


def test_a_cache_that_forbids_execution_falls_back_with_a_reason(tmp_path: Path) -> None:
    code = (
        "from tunekit import dispatch; import toy.kernels as t; from tunekit.build_tools import build_cached\n"
        "r = build_cached(dispatch.kernels('toyscope'), 'fat'); dispatch.forget_modules()\n"
        "print(r.path.is_file(), t.toy(2, 3), t.toy.choice().tier)"
    )
    wrap = _noexec(tmp_path / "noexec")
    variables = {
        "TUNEKIT_CACHE": str(tmp_path / "noexec/cache"), "PYTHONPATH": f"{ROOT / 'tests'}", "TUNEKIT_HOME": str(tmp_path / "h"),
    }  # fmt: skip
    done = run([*wrap, sys.executable, "-c", code], variables, cwd=ROOT / "tests")
    assert done.stdout.split() == ["True", "5", "python"]
    assert "runs on its Python reference, which is correct and slow" in done.stderr
    assert "cannot be loaded" in done.stderr


# --- installs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Wheelhouse:
    return fill_wheelhouse(tmp_path_factory.getbasetemp() / "wheelhouse")


def install(
    folder: Path, house: Wheelhouse, variables: Mapping[str, str | None] | None = None, *, tree: Path | None = None,
    wrap: tuple[str, ...] = (), check: bool = True, isolated: bool = False,
) -> tuple[Place, subprocess.CompletedProcess[str]]:
    """Install a copy of the tree into a fresh environment."""
    place = make_place(folder / "venv", house.build)
    words = [*wrap, place.python, pip(), "install", "-v", "--no-deps"]
    words += [] if isolated else ["--no-build-isolation"]
    tree = copy_tree(tree or folder / "tree")
    return place, run([*words, tree], {**house.variables, **(variables or {})}, check=check)


PRODUCT = (
    "import json, numpy as np, tunekit.core\nfrom tunekit import dispatch, q8\n"
    "x = np.cos(np.arange(7 * 96, dtype=np.float32)).reshape(7, 96)\n"
    "m = q8.pack(np.sin(np.arange(48 * 96, dtype=np.float32)).reshape(48, 96))\n"
    "y = q8.matmul(x, m)\nassert np.array_equal(y, q8.oracle.matmul(q8.quantize(x), m))\n"
    "(k,) = dispatch.declare_scope('tunekit')\n"
    "print(json.dumps({'tier': dispatch.peek(k).choice.tier,"
    " 'core': getattr(tunekit.core.core(), '__file__', None),"
    " 'modules': [str(m.path) for m in dispatch.loaded_modules(k)]}))"
)


def _status_says(place: Place, reason: str, variables: Mapping[str, str | None]) -> None:
    status = run([place.python, "-m", "tunekit", "status"], variables, cwd=place.folder)
    assert re.search(r"tunekit.q8q8 +reference +reference +python", status.stdout)
    assert "python -m tunekit build" in status.stdout
    assert reason in status.stdout


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, house: Wheelhouse) -> tuple[Place, str]:
    """An install where no compiler is, and what pip showed."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "bin").mkdir()
    place, done = install(folder, house, {"PATH": str(folder / "bin")})
    return place, done.stdout + done.stderr


@pytest.mark.install
def test_without_a_compiler_the_install_goes_on_and_is_loud(bare: tuple[Place, str], tmp_path: Path) -> None:
    place, shown = bare
    assert "was NOT built: no C compiler found" in shown
    assert "apt-get install gcc libc6-dev" in shown
    variables = {"TUNEKIT_CACHE": str(tmp_path / "c"), "TUNEKIT_HOME": str(tmp_path / "h")}
    done = run([place.python, "-c", PRODUCT], variables, cwd=place.folder)
    found = json.loads(done.stdout)
    assert (found["tier"], found["core"], found["modules"]) == ("python", None, [])
    reason = "the install could not build it (no C compiler found"
    assert reason in done.stderr
    assert "to build: python -m tunekit build" in done.stderr
    _status_says(place, reason, variables)


@pytest.mark.install
def test_afterwards_build_makes_core_and_module_in_the_cache(bare: tuple[Place, str], plain: Build, tmp_path: Path) -> None:
    place, _ = bare
    cache = tmp_path / "cache"
    variables = {"TUNEKIT_CACHE": str(cache), "TUNEKIT_HOME": str(tmp_path / "h"), "CC": GCC}
    none = run([place.python, "-m", "tunekit", "build"], {**variables, "CC": "/nonexistent/cc"}, cwd=place.folder, check=False)
    assert none.returncode == 3
    assert "/nonexistent/cc does not work" in none.stderr
    assert "Traceback" not in none.stderr
    run([place.python, "-m", "tunekit", "build"], variables, cwd=place.folder)
    found = json.loads(run([place.python, "-W", "error", "-c", PRODUCT], variables, cwd=place.folder).stdout)
    assert Path(found["core"]).is_relative_to(cache)
    (module,) = found["modules"]
    assert Path(module).is_relative_to(cache)
    assert place.stamps(variables)["modules"][plain.module.name.partition(".")[0]] == plain.stamp
    assert not list(place.site.glob("tunekit/**/*.so"))


@pytest.mark.install
def test_strict_makes_a_missing_compiler_an_error(house: Wheelhouse, tmp_path: Path) -> None:
    _, done = install(tmp_path, house, {"CC": "/nonexistent", "TUNEKIT_STRICT": "compiler"}, check=False)
    assert done.returncode != 0
    assert "the C compiler /nonexistent does not work: cannot run '/nonexistent': No such file or directory" in done.stdout + done.stderr


@pytest.mark.install
def test_missing_python_headers_name_their_package(house: Wheelhouse, tmp_path: Path) -> None:
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(
        "import sysconfig\nfound = sysconfig.get_path\n"
        "def get_path(name, *a, **k): return '/nowhere/include' if 'include' in name else found(name, *a, **k)\n"
        "sysconfig.get_path = get_path\n"
    )
    place, done = install(tmp_path, house, {"PYTHONPATH": str(tmp_path / "patch")})
    assert "Python.h is not in /nowhere/include" in done.stdout + done.stderr
    variables = {"TUNEKIT_HOME": str(tmp_path / "h"), "TUNEKIT_CACHE": str(tmp_path / "c")}
    done = run([place.python, "-c", PRODUCT], variables, cwd=place.folder)
    assert re.search(r"Python.h is not in /nowhere/include.*apt-get install python3-dev", done.stderr)
    _status_says(place, "Python.h is not in /nowhere/include", variables)


@pytest.mark.install
def test_tree_and_environment_in_a_folder_with_spaces_and_umlauts(house: Wheelhouse, plain: Build, tmp_path: Path) -> None:
    odd = tmp_path / "a b" / "ü"
    (odd / "tmp").mkdir(parents=True)
    place, _ = install(odd, house, {"TMPDIR": str(odd / "tmp"), "CC": GCC}, isolated=True)
    assert list(place.stamps()["modules"].values()) == [plain.stamp]


@pytest.mark.install
def test_tree_and_temporary_folder_with_a_colon(house: Wheelhouse, plain: Build, tmp_path: Path) -> None:
    # An environment in such a folder is refused by venv itself, build isolation by pip's own PYTHONPATH.
    odd = tmp_path / "a b:c" / "ü"
    (odd / "tmp").mkdir(parents=True)
    place, _ = install(tmp_path, house, {"TMPDIR": str(odd / "tmp"), "CC": GCC}, tree=odd / "tree")
    assert list(place.stamps()["modules"].values()) == [plain.stamp]


@pytest.mark.install
def test_without_a_home_and_with_a_temporary_folder_that_forbids_execution(
    house: Wheelhouse, plain: Build, tmp_path: Path
) -> None:
    wrap = _noexec(tmp_path / "noexec")
    home = tmp_path / "nonexistent"
    variables = {
        "HOME": str(home), "TMPDIR": str(tmp_path / "noexec"), "CC": GCC, "XDG_CACHE_HOME": None, "XDG_STATE_HOME": None,
        "PIP_NO_CACHE_DIR": "1", "TUNEKIT_HOME": None, "TUNEKIT_CACHE": None,
    }  # fmt: skip
    place, _ = install(tmp_path, house, variables, wrap=tuple(wrap))
    found = json.loads(run([place.python, "-W", "error", "-c", PRODUCT], variables, cwd=place.folder).stdout)
    assert Path(found["core"]).is_relative_to(place.site)
    assert list(place.stamps(variables)["modules"].values()) == [plain.stamp]
    run([place.python, "-m", "tunekit", "status"], variables, cwd=place.folder)
    # (pip asks rustc for its version, and a rustup that stands in for it makes its own folder.)
    left = [p.name for p in home.iterdir()] if home.exists() else []
    assert set(left) <= {".rustup"}, "installing, importing and computing must not write to the home"
