# SPDX-License-Identifier: Apache-2.0
"""Products in a hostile process: flush-to-zero, other rounding, small stacks, many threads, a busy interpreter."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import run_python

from tunekit import q8
from tunekit.q8 import product

pytestmark = pytest.mark.build

# Sets flush-to-zero, denormals-are-zero and rounding towards zero, as fast-math start-up code and careless callers do.
BEND = """
#include <stdint.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
void bend(void) { _mm_setcsr(_mm_getcsr() | 0xE040); }
unsigned long control(void) { return _mm_getcsr() & 0xFFC0; }
#elif defined(__aarch64__)
void bend(void) { uint64_t v; __asm__ volatile("mrs %0, fpcr" : "=r"(v)); v |= 0x1C00000; __asm__ volatile("msr fpcr, %0" : : "r"(v)); }
unsigned long control(void) { uint64_t v; __asm__ volatile("mrs %0, fpcr" : "=r"(v)); return v; }
#endif
"""


@pytest.fixture(scope="module")
def bend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bend")
    (folder / "bend.c").write_text(BEND)
    command = ["cc", "-shared", "-fPIC", "-O2", str(folder / "bend.c"), "-o", str(folder / "bend.so")]
    subprocess.run(command, check=True)
    return folder / "bend.so"


@pytest.mark.parametrize("rows", ["chosen", "reference"])
def test_a_callers_flush_to_zero_changes_nothing(bend: Path, rows: str) -> None:
    code = (
        "import ctypes, numpy as np\n"
        "from tunekit import q8\n"
        "rng = np.random.default_rng(3)\n"
        "codes = rng.integers(-127, 128, (19, 96)).astype(np.int8)\n"
        "blocks = np.zeros((19, 3, 34), np.uint8)\n"
        "blocks[:, :, 2:] = codes.reshape(19, 3, 32).view(np.uint8)\n"
        "blocks[:, :, :2] = np.full((19, 3), 6e-8, np.float16).view(np.uint8).reshape(19, 3, 2)\n"  # subnormal float16
        "m = q8.from_q8_0(blocks.tobytes(), 19, 96)\n"
        "x = (rng.standard_normal((7, 96)) * 1e-33).astype(np.float32)\n"  # products and sums are subnormal
        "x[0] *= 1e-4\n"
        "want = q8.oracle.matmul(q8.quantize(x), m)\n"
        "assert np.any((want != 0) & (np.abs(want) < 2.0**-126))\n"
        "a = q8.quantize(x)\n"
        f"lib = ctypes.CDLL({str(bend)!r}); lib.bend(); before = lib.control()\n"
        "y = q8.matmul(x, m); v = q8.matmul(x[0], m); b = q8.quantize(x); z = q8.matmul(b, m)\n"
        "after = lib.control()\n"
        "same = y.tobytes() == want.tobytes() == z.tobytes() and v.tobytes() == want[0].tobytes()\n"
        "same = same and a.scales.tobytes() == b.scales.tobytes() and a.codes.tobytes() == b.codes.tobytes()\n"
        "print(same, before == after, product_native())\n"
    ).replace("product_native()", "__import__('tunekit.q8.product', fromlist=['x']).native() is not None")
    variables = {"TUNEKIT_POLICY": "reference"} if rows == "reference" else {}
    done = run_python(code, variables)
    assert done.stdout.split() == ["True", "True", "True"], done.stdout + done.stderr


def test_scales_that_a_callers_arithmetic_takes_for_zero_are_kept(bend: Path, tmp_path: Path) -> None:
    """Subnormal float32 scales equal 0 to whoever has set denormals-are-zero; none of them is a float16."""
    code = (
        "import ctypes, pickle, numpy as np\nfrom pathlib import Path\nfrom tunekit import q8\n"
        "rng = np.random.default_rng(4)\n"
        "codes = rng.integers(-127, 128, (16, 64)).astype(np.int8)\n"
        "scales = np.float32([1e-45, 1e-40, 2.0**-127, -1e-39] * 8).reshape(16, 2)\n"
        "x = np.full((3, 64), 1e20, np.float32)\n"
        "plain = q8.Matrix(codes, scales); data = pickle.dumps(plain)\n"
        f"file = Path({str(tmp_path)!r}) / 'm'; plain.save(file)\n"
        "want = q8.oracle.matmul(q8.quantize(x), plain)\n"
        "mx = q8.from_mxfp4(np.zeros(4 * 17, np.uint8), 4, 32)\n"
        f"lib = ctypes.CDLL({str(bend)!r}); lib.bend()\n"
        "found = [q8.Matrix(codes, scales), pickle.loads(data), q8.Matrix.load(file)]\n"
        "same = [q8.matmul(x, m).tobytes() == want.tobytes() for m in found]\n"
        "kept = [m.scales.tobytes() == scales.tobytes() and not m.scales_fit_float16 for m in found]\n"
        "try: mx.to_q8_0(); refused = False\n"
        "except ValueError: refused = True\n"
        "print(*same, *kept, refused)"
    )
    done = run_python(code)
    assert done.stdout.split() == ["True"] * 7, done.stdout + done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callers_flush_to_zero_changes_nothing_on_many_lanes(bend: Path, when: str) -> None:
    """A new thread inherits its maker's control word: workers that are made before and after the caller bends its own."""
    code = (
        "import ctypes, numpy as np\n"
        "from tunekit import q8, team\nfrom tunekit.core import core\n"
        "rng = np.random.default_rng(3)\n"
        "m = q8.Matrix(rng.integers(-127, 128, (300, 96)).astype(np.int8), np.full((300, 3), 6e-8, np.float32))\n"
        "x = (rng.standard_normal((40, 96)) * 1e-33).astype(np.float32)\n"
        "a = q8.quantize(x); want = q8.oracle.matmul(a, m)\n"
        "assert np.any((want != 0) & (np.abs(want) < 2.0**-126))\n"
        f"lib = ctypes.CDLL({str(bend)!r}); own = core(); own.set_knob('team_prof', 1)\n"
        "for name, value in (('target_chunk_work', 1), ('wake_work', 0), ('pretend_lanes', 4)): own.set_knob(name, value)\n"
        "START\n"
        "lib.bend(); before = lib.control()\n"
        "same = all(q8.matmul(x, m).tobytes() == want.tobytes() for _ in range(50))\n"
        "print(same, before == lib.control(), own.team_workers()[0], own.team_counts(False)['ops'] >= 50)\n"
    ).replace("START", "q8.matmul(x, m)" if when == "after" else "pass")
    done = run_python(code)
    if product.native() is None:
        pytest.skip("nothing native is built here")
    assert done.stdout.split() == ["True", "True", "3", "True"], done.stdout + done.stderr


def problem(seed: int, n: int = 70, k: int = 352, t: int = 13) -> tuple[q8.Matrix, np.ndarray, bytes]:
    rng = np.random.default_rng(seed)
    m = q8.pack(rng.standard_normal((n, k), dtype=np.float32))
    x = rng.standard_normal((t, k), dtype=np.float32)
    return m, x, q8.oracle.matmul(q8.quantize(x), m).tobytes()


def test_many_threads_on_one_matrix_and_on_their_own() -> None:
    shared = problem(0)
    faults: list[str] = []

    def work(number: int) -> None:
        own = problem(number, n=16 + number, k=32 * (1 + number), t=1 + number)
        for _ in range(50):
            for m, x, want in (shared, own):
                if q8.matmul(x, m).tobytes() != want:
                    faults.append(f"thread {number}")
                    return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []


def test_a_small_stack_is_enough() -> None:
    m, x, want = problem(1, n=512, k=2048, t=33)
    got: list[bytes] = []
    before = threading.stack_size(64 * 1024)
    try:
        thread = threading.Thread(target=lambda: got.append(q8.matmul(x, m).tobytes()))
        thread.start()
        thread.join(60)
    finally:
        threading.stack_size(before)
    assert got == [want]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nobody can tick beside a product")
def test_other_python_threads_go_on_during_a_product() -> None:
    if product.native() is None:
        pytest.skip("nothing native is built here")
    m, x, _ = problem(2, n=4096, k=4096, t=64)
    q8.matmul(x, m)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    inside = 0
    for _ in range(6):
        start = time.perf_counter()
        q8.matmul(x, m)
        end = time.perf_counter()
        inside += sum(start < t < end for t in list(ticks))
    stop.set()
    thread.join()
    # A product that held the GIL would let none through; how many depends on who else uses the box.
    assert inside >= 3
