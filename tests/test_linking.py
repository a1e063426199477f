# SPDX-License-Identifier: Apache-2.0
"""Consumers of the toy family in C99, C++17, Cython, numba, cffi and SciPy: compiled for real, and strictly.

The toy family tells by its results which row ran: ``toy(2, 3)`` is 5 + k on row k.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import TOY_ENVIRONMENT, lacking, run_python
from tunekit.build_tools.interface import interface, write_interface

import tunekit as tk
from tunekit import dispatch, linking

pytestmark = pytest.mark.build

STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")

METHODS = """
static PyObject *call(PyObject *self, PyObject *args)
{
    const toy_kernels_api *api = toy_kernels_import();
    (void)self;
    (void)args;
    if (api == NULL)
        return NULL;
    float x[3] = {1.0f, 2.0f, 3.0f}, y[3];
    api->toy_sum(y, x, 3);
    return Py_BuildValue("iidss", (int)api->toy(2, 3), (int)api->toy_k(), (double)y[2], api->tk_row_toy,
        api->tk_source_toy);
}

static PyMethodDef methods[] = {
    {"call", call, METH_NOARGS, "toy(2, 3), toy_k(), a sum, row and source"},
    {NULL, NULL, 0, NULL}
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "consumer", NULL, -1, methods, NULL, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit_consumer(void)
{
    return PyModule_Create(&definition);
}
"""
SOURCE = "#include <Python.h>\n#include <toy_kernels.h>\n" + METHODS
CYTHON = """# cython: language_level=3
from libc.stdint cimport int32_t
from toy_kernels cimport toy_kernels_api, toy_kernels_import

cdef const toy_kernels_api *api = NULL

def call():
    global api
    if api == NULL:
        api = toy_kernels_import()
    cdef float x[3]
    cdef float y[3]
    cdef int32_t found
    x[0], x[1], x[2] = 1, 2, 3
    with nogil:
        api.toy_sum(y, x, 3)
        found = api.toy(2, 3)
    return found, api.toy_k(), y[2], api.tk_row_toy.decode(), api.tk_source_toy.decode()
"""


def cpp() -> list[str]:
    """A C++ compiler; clang's needs no libstdc++, of which nothing is used."""
    found = [words for words in (["g++"], ["clang++"], ["clang-19", "-x", "c++"]) if shutil.which(words[0])]
    return found[0] if found else lacking("a C++ compiler (Debian and Ubuntu: apt-get install g++)")


def compile_extension(folder: Path, source: Path, include: Path, *words: str) -> Path:
    """A consumer's extension module, compiled without a warning."""
    target = folder / f"consumer{sysconfig.get_config_var('EXT_SUFFIX')}"
    python = sysconfig.get_path("include")
    command = [*words, "-shared", "-fPIC", "-isystem", python, "-I", include, source, "-o", target]
    done = subprocess.run([str(w) for w in command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return target


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the toy family's headers, as an install leaves it."""
    import toy.kernels  # noqa: F401

    folder = tmp_path_factory.mktemp("toy")
    write_interface(linking.unit_of("toy.kernels"), folder, "1.2")
    assert sorted(p.name for p in (folder / linking.FOLDER).iterdir()) == ["toy_kernels.h", "toy_kernels.pc", "toy_kernels.pxd"]
    return folder / linking.FOLDER


@pytest.fixture(scope="module", params=["c99", "c++17", "cython"])
def consumer(request: pytest.FixtureRequest, include: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a consumer that was compiled against the toy's header."""
    folder = tmp_path_factory.mktemp("consumer")
    if request.param == "c99":
        (folder / "consumer.c").write_text(SOURCE)
        compile_extension(folder, folder / "consumer.c", include, "gcc", "-std=c99", *STRICT)
    elif request.param == "c++17":
        (folder / "consumer.cpp").write_text(SOURCE)
        compile_extension(folder, folder / "consumer.cpp", include, *cpp(), "-std=c++17", *STRICT)
    else:
        if importlib.util.find_spec("Cython") is None:
            lacking("Cython (pip install -e '.[test]')")
        (folder / "consumer.pyx").write_text(CYTHON)
        words = [sys.executable, "-m", "cython", "-Werror", "-I", str(include), "consumer.pyx"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        # Not -pedantic: Cython's own run time keeps function pointers in void *.
        compile_extension(folder, folder / "consumer.c", include, "gcc", "-std=c11", *STRICT[:3], "-Wno-unused-function")
    return folder


def ask(code: str, cache: Path, folder: Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([TOY_ENVIRONMENT["PYTHONPATH"], str(folder)])
    done = run_python(code, {"TUNEKIT_CACHE": str(cache), "PYTHONPATH": path, **variables})
    assert not check or done.returncode == 0, done.stderr
    return done


ORDERS = {
    "before tunekit": "import consumer, sys; assert 'tunekit' not in sys.modules; import tunekit; print(consumer.call())",
    "after tunekit": "import tunekit, toy.kernels, consumer; print(consumer.call())",
    "alone": "import consumer; print(consumer.call())",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_consumer_follows_the_choice_of_the_box(consumer: Path, toy_cache: Path, order: str, tmp_path: Path) -> None:
    code = ORDERS[order]
    assert ask(code, toy_cache, consumer).stdout == "(6, 1, 4.0, 'k1', 'fallback')\n"
    assert ask(code, toy_cache, consumer, TUNEKIT_PIN="toy=k2").stdout == "(7, 2, 5.0, 'k2', 'pin')\n"
    (tmp_path / "m.json").write_text('{"toy": "k4"}')
    assert ask(code, toy_cache, consumer, TUNEKIT_MANIFEST=str(tmp_path / "m.json")).stdout == "(9, 4, 7.0, 'k4', 'manifest')\n"
    assert ask(code, toy_cache, consumer, TUNEKIT_POLICY="reference").stdout == "(5, 0, 3.0, 'reference', 'reference')\n"


def test_fetching_the_table_fixes_the_choice_and_importing_does_not(consumer: Path, toy_cache: Path) -> None:
    code = (
        "import consumer, toy.kernels as t, tunekit as tk\nfrom tunekit import dispatch\n"
        "print(dispatch.used(), 'ctypes' in __import__('sys').modules)\nconsumer.call()\nprint(dispatch.used())\n"
        "try: dispatch.reference_everywhere()\nexcept tk.ChoiceError as e: print('too late')"
    )
    assert ask(code, toy_cache, consumer).stdout.splitlines()[-2:] == ["('toyscope.toy',)", "too late"]
    assert ask(code, toy_cache, consumer).stdout.startswith("()")


def test_without_native_code_the_consumers_import_fails_with_the_mend(consumer: Path, tmp_path: Path) -> None:
    done = ask("import consumer\ntry: consumer.call()\nexcept ImportError as e: print(e)", tmp_path / "none", consumer)
    assert "toy.kernels._C_API: toyscope.toy has no native code here: no module was built for it" in done.stdout
    assert "python -m tunekit build --scope toyscope" in done.stdout


CHANGES: dict[str, Callable[[str], str]] = {
    "one entry older": lambda text: text.replace("  void (*toy_sum)(float *y, const float *x, int32_t n);\n", ""),
    "one entry newer": lambda text: text.replace("} toy_kernels_api;", "  void (*later)(void);\n} toy_kernels_api;"),
    "another prototype": lambda text: re.sub(r"(PROTOTYPES UINT64_C\(0x)(.)", lambda m: m[1] + "01"[m[2] == "0"], text),
    "another abi": lambda text: text.replace("_ABI 1u", "_ABI 2u"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_consumer_of_another_version_gets_an_error_and_no_pointer(
    change: str, include: Path, toy_cache: Path, tmp_path: Path
) -> None:
    own = tmp_path / "include"
    own.mkdir()
    text = (include / "toy_kernels.h").read_text()
    changed = CHANGES[change](text)
    assert changed != text
    (own / "toy_kernels.h").write_text(changed)
    body = SOURCE if change != "one entry older" else SOURCE.replace("api->toy_sum(y, x, 3);", "y[2] = x[2];")
    (tmp_path / "consumer.c").write_text(body)
    compile_extension(tmp_path, tmp_path / "consumer.c", own, "gcc", "-std=c99", *STRICT)
    done = ask("import consumer\ntry: consumer.call()\nexcept ImportError as e: print(e)", toy_cache, tmp_path)
    if change == "another abi":
        assert "toy.kernels._C_API has tunekit abi 1, this extension was compiled for abi 2" in done.stdout
    else:
        assert re.search(r"toy.kernels._C_API has a table of \d+ bytes with prototypes [0-9a-f]{16}, made by toy.kernels in \S+kernels.py, tunekit 0", done.stdout)
        assert re.search(r"was compiled for \d+ bytes with prototypes", done.stdout)
    assert "python -m tunekit header toyscope --where" in done.stdout


def test_cffi_includes_the_types_and_casts_the_address(toy: Any, include: Path) -> None:
    import cffi

    ffi = cffi.FFI()
    ffi.include(linking.ffi("toy.kernels"))
    ffi.cdef("typedef struct { toy_kernels_api *api; int own; } holder;")
    api = ffi.cast("toy_kernels_api *", linking.table_address("toy.kernels"))
    held = ffi.new("holder *", {"api": api, "own": 1})
    assert held.api.toy(2, 3) == 6
    assert ffi.string(held.api.tk_row_toy) == b"k1"
    assert held.api.tk_size == ffi.sizeof("toy_kernels_api")


def test_a_ctypes_function_is_the_chosen_row(toy: Any) -> None:
    import numpy as np

    assert toy.toy.c_function()(2, 3) == 6
    x, y = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    toy.toy_sum.c_function()(y.ctypes.data, x.ctypes.data, 4)
    assert y.tolist() == [1, 2, 3, 4]


NUMBA = """
import numba, numpy as np, toy.kernels
toy, total = toy.kernels.toy.c_function(), toy.kernels.toy_sum.c_function()

@numba.njit
def go(x):
    y = np.empty_like(x)
    total(y.ctypes, x.ctypes, x.size)
    return toy(2, 3), y.sum()

print(go(np.arange(4, dtype=np.float32)))
"""
WAVE = {
    "wave.py": """
import tunekit as tk

@tk.tune(scope=tk.Scope("wave"), template="wave.c.j2", rows=[tk.perm(k=3)], fallback="k3", targets=lambda row: ((),))
def wave(x: tk.f64) -> tk.f64:
    return 0.0
""",
    "wave.c.j2": """
${ proto("wave") } { return ${ k } * x * x; }
""",
    "integrate.py": """
import wave as w
from scipy import LowLevelCallable, integrate
from tunekit import dispatch
from tunekit.build_tools import build_cached

build_cached(dispatch.kernels("wave"), "fat")
print(round(integrate.quad(LowLevelCallable(w.wave.c_function()), 0, 2)[0], 6))
""",
}


def test_scipy_takes_the_chosen_row_as_a_low_level_callable(tmp_path: Path) -> None:
    if importlib.util.find_spec("scipy") is None:
        lacking("scipy (pip install -e '.[test]')")
    for name, text in WAVE.items():
        (tmp_path / name.replace("wave.py", "ripple.py")).write_text(text.replace("import wave as w", "import ripple as w"))
    done = run_python((tmp_path / "integrate.py").read_text(), {"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "8.0\n", done.stderr


def test_numba_calls_the_chosen_row(toy_cache: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("numba") is None:
        lacking("numba (pip install -e '.[test]')")
    for pin, want in (("toy=k1", "(6, 10.0)"), ("toy=k2", "(7, 14.0)")):
        assert ask(NUMBA, toy_cache, tmp_path, TUNEKIT_PIN=pin).stdout.strip() == want


# --- the files themselves --------------------------------------------------------------------------------


def test_the_exported_symbols_of_a_module_are_its_init_function(toy: Any) -> None:
    (loaded,) = {m.path for m in dispatch.loaded_modules(toy.toy.kernel)}
    done = subprocess.run(["nm", "-D", "--defined-only", loaded], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [f"PyInit_{loaded.name.partition('.')[0]}"]


def test_the_header_alone_is_strict_c_and_cpp_without_python(include: Path, tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("#include <toy_kernels.h>\nint main(void) { return TOY_KERNELS_ABI == 0; }\n")
    for words in (["gcc", "-std=c99"], ["g++", "-x", "c++", "-std=c++17"], ["clang-19", "-std=c17"]):
        if shutil.which(words[0]) is None:
            continue
        done = subprocess.run([*words, *STRICT, "-I", include, tmp_path / "a.c", "-o", tmp_path / "a"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_pkg_config_finds_the_header(include: Path) -> None:
    if importlib.util.find_spec("pkgconf") is None:
        lacking("pkgconf (pip install -e '.[test]')")
    environment = {**os.environ, "PKG_CONFIG_PATH": str(include)}

    def said(word: str) -> str:
        return subprocess.run([sys.executable, "-m", "pkgconf", word, "toy_kernels"], env=environment, capture_output=True, text=True, check=True).stdout

    assert f"-I{include}" in said("--cflags").replace('"', "").replace("\\", "")
    assert said("--modversion") == "1.2\n"


def test_the_stub_has_the_real_signatures(include: Path, tmp_path: Path) -> None:
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        lacking("mypy")
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(include.parent / "kernels.pyi", package / "kernels.pyi")
    (tmp_path / "user.py").write_text(
        "import numpy as np\nfrom toy.kernels import toy, toy_sum, anything_else\n"
        "x = np.zeros(3, np.float32)\nn: int = toy(2, 3)\ntoy_sum(x, x, 3)\ntoy.address()\n"
        "toy('a', 3)\ntoy_sum(x, 3)\ntoy(1, 2).nothing\n"
    )
    words = [mypy, "--strict", "--no-incremental", "--cache-dir", os.devnull, "user.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    found = re.findall(r"^user.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    assert {line for line, _ in found} == {"7", "8", "9"}, done.stdout


def test_an_authors_own_stub_is_left_alone(include: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels.pyi").write_text("mine: int\n")
    made = write_interface(linking.unit_of("toy.kernels"), tmp_path)
    assert tmp_path / "kernels.pyi" not in made
    assert (tmp_path / "kernels.pyi").read_text() == "mine: int\n"


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    unit = linking.unit_of("toy.kernels")
    first = {path: path.stat().st_mtime_ns for path in write_interface(unit, tmp_path)}
    assert {path: path.stat().st_mtime_ns for path in write_interface(unit, tmp_path)} == first
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in first)
    assert set(interface(unit)) == {"toy_kernels.h", "toy_kernels.pxd", "toy_kernels.pc", "kernels.pyi"}


def test_get_include_of_an_unknown_scope_and_of_one_without_headers(toy: Any) -> None:
    with pytest.raises(tk.TunekitError, match="no scope 'nothing' is installed"):
        tk.get_include("nothing")
    with pytest.raises(tk.TunekitError, match="write them with: python -m tunekit header toyscope --to FOLDER"):
        tk.get_include("toyscope")


def run(*words: str | Path) -> Sequence[str]:
    environment = {**os.environ, **TOY_ENVIRONMENT}
    done = subprocess.run([sys.executable, "-m", "tunekit", *words], env=environment, capture_output=True, text=True, timeout=120, check=False)
    return [str(done.returncode), *done.stdout.splitlines(), *done.stderr.splitlines()]


def test_the_header_command(tmp_path: Path) -> None:
    found = run("header", "toyscope", "--module", "toy.kernels", "--to", tmp_path)
    assert found[0] == "0"
    assert found[1] == str(tmp_path / "tk_include" / "toy_kernels.h")
    assert run("header", "toyscope", "--module", "toy.kernels", "--where")[0] == "2"
