# SPDX-License-Identifier: Apache-2.0
"""What a call costs: through the table from C, beside a plain function pointer, and by cffi, ctypes, numba and Python.

Run from anywhere with tunekit installed: ``python benchmarks/linking.py``. Everything takes turns in one process, and
the medians of the turns are printed. The kernel is ``a + b + k``, so a call is nothing but its cost.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 15

SOURCE = r"""
#include <Python.h>
#include <time.h>
#include <toy_kernels.h>

static const toy_kernels_api *api;
static int32_t (*volatile pointer)(int32_t, int32_t);
static int32_t body(int32_t a, int32_t b);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Nanoseconds a call; each result is the next argument, so that calls do not overlap. */
#define TIMED(name, call)                                     \
    static PyObject *name(PyObject *self, PyObject *count)    \
    {                                                         \
        const long n = PyLong_AsLong(count);                  \
        int32_t x = 0;                                        \
        (void)self;                                           \
        const double start = now();                           \
        for (long i = 0; i < n; i++)                          \
            x = call;                                         \
        const double taken = now() - start;                   \
        return Py_BuildValue("di", 1e9 * taken / (double)n, (int)x); \
    }

TIMED(through_table, api->toy(x, 1))
TIMED(through_pointer, pointer(x, 1))
TIMED(direct, body(x, 1))

static __attribute__((noinline)) int32_t body(int32_t a, int32_t b)
{
    return a + b + 1;
}

static PyMethodDef methods[] = {
    {"through_table", through_table, METH_O, ""},
    {"through_pointer", through_pointer, METH_O, ""},
    {"direct", direct, METH_O, ""},
    {NULL, NULL, 0, NULL}
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "costs", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_costs(void)
{
    api = toy_kernels_import();
    pointer = body;
    return api == NULL ? NULL : PyModule_Create(&definition);
}
"""


def timed(call: Callable[[], object], count: int) -> float:
    """Nanoseconds a call, the loop's own time left in (about 10 ns)."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return 1e9 * (time.perf_counter() - start) / count


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ.update(TUNEKIT_CACHE=str(folder / "cache"), TUNEKIT_HOME=str(folder / "home"))
        sys.path[:0] = [str(ROOT / "tests"), scratch]
        import numpy as np
        import toy.kernels
        from tunekit.build_tools import build_cached
        from tunekit.build_tools.interface import write_interface

        from tunekit import dispatch, linking

        build_cached(dispatch.kernels("toyscope"), "fat")
        write_interface(linking.unit_of("toy.kernels"), folder)
        (folder / "costs.c").write_text(SOURCE)
        include = ["-I", folder / linking.FOLDER, "-I", sysconfig.get_path("include")]
        target = folder / f"costs{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", *include, folder / "costs.c", "-o", target], check=True)
        import costs

        toy_, total = toy.kernels.toy, toy.kernels.toy_sum
        ffi = linking.ffi("toy.kernels")
        by_cffi = ffi.cast("toy_kernels_api *", linking.table_address("toy.kernels")).toy
        by_ctypes = toy_.c_function()
        x, y = np.ones(16, np.float32), np.ones(16, np.float32)
        ways: dict[str, Callable[[], float]] = {
            "C, a direct call": lambda: costs.direct(1_000_000)[0],
            "C, a function pointer": lambda: costs.through_pointer(1_000_000)[0],
            "C, through the table": lambda: costs.through_table(1_000_000)[0],
            "Python, cffi by address": lambda: timed(lambda: by_cffi(2, 3), 20_000),
            "Python, ctypes": lambda: timed(lambda: by_ctypes(2, 3), 20_000),
            "Python, the kernel, two numbers": lambda: timed(lambda: toy_(2, 3), 5_000),
            "Python, the kernel, two arrays": lambda: timed(lambda: total(y, x, 16), 5_000),
        }
        try:
            import numba
        except ImportError:
            pass
        else:
            loop = _numba(numba, by_ctypes)
            loop(1)
            ways["numba, through ctypes"] = lambda: 1e9 * _seconds(lambda: loop(1_000_000)) / 1_000_000
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                samples[name].append(way())
        pointer = statistics.median(samples["C, a function pointer"])
        print(f"{'way':34}{'ns a call':>10}{'of a pointer':>14}")
        for name, found in samples.items():
            print(f"{name:34}{statistics.median(found):>10.2f}{statistics.median(found) / pointer:>13.2f}x")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _numba(numba: object, function: ctypes._CFuncPtr) -> Callable[[int], int]:
    @numba.njit  # type: ignore[attr-defined]
    def loop(n: int) -> int:
        x = 0
        for _ in range(n):
            x = function(x, 1)
        return x

    return loop


if __name__ == "__main__":
    main()
