# SPDX-License-Identifier: Apache-2.0
"""What one product of a prepared matrix costs besides the product: nothing is allocated, imported, opened or asked of
the environment, and on one lane no lock of ours is taken. Counted in the process, by functions put before libc's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import lacking

pytestmark = pytest.mark.build

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
int counting;
long allocations, questions, locks;
static int ours(void *from) {
    Dl_info info;
    if (!dladdr(from, &info) || !info.dli_fname) return 0;
    const char *slash = strrchr(info.dli_fname, '/'), *name = slash ? slash + 1 : info.dli_fname;
    return strncmp(name, "_core.", 6) == 0 || strncmp(name, "_tk_", 4) == 0; /* the file: any folder may be a tunekit */
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
extern void *__libc_malloc(size_t); extern void *__libc_calloc(size_t, size_t); extern void *__libc_realloc(void *, size_t);
void *malloc(size_t n) { allocations += counting; return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { allocations += counting; return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { allocations += counting; return __libc_realloc(p, n); }
int posix_memalign(void **p, size_t a, size_t n) { REAL(posix_memalign); allocations += counting; return real(p, a, n); }
char *getenv(const char *name) { REAL(getenv); questions += counting; return real(name); }
int pthread_mutex_lock(pthread_mutex_t *m) {
    REAL(pthread_mutex_lock);
    if (counting && ours(__builtin_return_address(0))) locks++; /* CPython's own are of the interpreter's lock */
    return real(m);
}
"""

SCRIPT = """
import ctypes, json, sys
import numpy as np
from tunekit import q8
counter = ctypes.CDLL(sys.argv[1])
number = lambda name: ctypes.c_long.in_dll(counter, name).value
counting = ctypes.c_int.in_dll(counter, "counting")
rng = np.random.default_rng(1)
m = q8.pack(rng.standard_normal((512, 2048), dtype=np.float32))
x, y = rng.standard_normal((1, 2048), dtype=np.float32), np.empty((1, 512), np.float32)
found = {}
def measure(name, call):
    for _ in range(50):
        call()
    events = []
    on = [False]
    sys.addaudithook(lambda event, args: events.append(event) if on[0] else None)
    before = [number(n) for n in ("allocations", "questions", "locks")]
    counting.value, on[0] = 1, True
    for _ in range(1000):
        call()
    counting.value, on[0] = 0, False
    found[name] = [number(n) - b for n, b in zip(("allocations", "questions", "locks"), before)] + [len(events)]
measure("nothing", lambda: None)
measure("product", lambda: q8.matmul(x, m, out=y))
measure("allocating", lambda: bytearray(5000))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not sys.platform.startswith("linux"):
        pytest.skip("functions are put before those of glibc")
    if shutil.which("gcc") is None:
        lacking("gcc")
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.c").write_text(COUNTER)
    command = ["gcc", "-O1", "-w", "-fPIC", "-shared", "counter.c", "-o", "counter.so", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return folder / "counter.so"


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_product_costs_nothing_but_itself(counter: Path, threads: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(counter)],
        env={**os.environ, "LD_PRELOAD": str(counter), "TUNEKIT_THREADS": threads, "TUNEKIT_MODE": ""},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["allocating"][0] >= 1000, "the counter counts nothing"
    extra = [own - base for own, base in zip(found["product"], found["nothing"], strict=True)]
    # A worker that was asleep is woken under a lock: now and then, and never on one lane.
    assert extra[2] <= (0 if threads == "1" else 50), f"locks of ours in 1000 products: {found}"
    extra[2] = 0
    assert extra == [0, 0, 0, 0], f"of 1000 products: allocations, getenv, locks, audit events: {found}"
