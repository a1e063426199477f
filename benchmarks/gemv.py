# SPDX-License-Identifier: Apache-2.0
"""GEMVs by the memory that their weights come from, beside the best plain reading of the same memory.

    python benchmarks/gemv.py                                    # the AVX2 row of the chain beside others of its kind
    python benchmarks/gemv.py --mib 1 256 --row dot=madd16,width=256,mr=16,kstep=1,nr=5,gstreams=2,gahead=1088

A row need not be in the grid: it is rendered from its arguments and compiled by gcc, or by the compiler before a colon
(``clang-19:dot=...``). Weights have K = 2048, with scales of float32 and of float16; 256 MiB pass once through the
core in slices of 8, smaller ones again and again. Best of short windows, in turns; GB/s count codes and scales. Weights
stand on huge pages where the kernel gives them.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from peerlib.limits import AHEAD, best_of, readings
from tunekit.build_tools.plan import row_jobs
from tunekit.build_tools.render import render

import tunekit as tk
from tunekit.cpu import this_cpu, this_features
from tunekit.q8 import grid, kernels
from tunekit.q8.pages import weights
from tunekit.rows import Row

KERNEL = kernels.q8q8.kernel
BASE = "dot=madd16,width=256,mr=16,kstep=1,nr=5"
ROWS = (BASE, f"{BASE},gstreams=2,gahead=1344", f"{BASE},gstreams=3,gahead=1344", f"{BASE},gstreams=4,gahead=0")
K, NB = 2048, 2048 // 32
KINDS = {"float32": ("q8q8_gemv", 4), "float16": ("q8q8_gemv_f16", 2)}
"""The GEMV for each type of scales, and the bytes of one."""
SLICE = 8 << 20


def row_of(words: str) -> Row:
    """``name=value,...``; numbers are numbers."""
    pairs = (word.split("=", 1) for word in words.split(","))
    return tk.perm(**{name: int(value) if value.isdecimal() else value for name, value in pairs})


def compiled(row: Row, compiler: str, folder: Path) -> dict[str, Any]:
    """The row's GEMVs, as C functions, by the type of the scales."""
    jobs = row_jobs(KERNEL, row, this_cpu().arch)
    if isinstance(jobs, str):
        sys.exit(f"{row.suffix}: {jobs}")
    job = next((job for job in jobs if set(job.needs) <= this_features()), None)
    if job is None:
        sys.exit(f"{row.suffix}: this CPU lacks what it needs")
    unit = folder / "unit.c"
    unit.write_text(render(KERNEL, row, this_cpu().arch, job.alternative, job.features))
    target = folder / f"{len(list(folder.iterdir()))}.so"
    more = ["-fvisibility=default", str(unit), "-o", str(target)]
    subprocess.run([compiler, "-O2", "-fPIC", "-shared", *job.flags, *more], check=True)
    library = ctypes.CDLL(str(target))
    symbols = {kind: KERNEL.symbol(name, row.suffix, job.alternative) for kind, (name, _) in KINDS.items()}
    return {kind: getattr(library, symbol) for kind, symbol in symbols.items()}


def measure(
    gemvs: dict[tuple[str, str], tuple[Any, int]], mib: int, seconds: float
) -> tuple[float, float, dict[tuple[str, str], float]]:
    """GB/s of the best and of the simplest reading, and GMAC/s of each GEMV, with so many MiB of weights."""
    codes = mib << 20
    plane = weights(codes + AHEAD)
    plane[:] = np.resize(np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8), len(plane))
    scales = {kind: weights(codes // 32 * size + AHEAD) for kind, (_, size) in KINDS.items()}
    for kind, values in scales.items():
        values.view(kind)[:] = 0.001
    xa = np.zeros((NB * 72 + 4096), np.uint8)
    y = np.zeros(codes // K + 64, np.float32)
    cursor = itertools.count()
    here: dict[Any, int] = {}
    times = max(1, SLICE // codes)

    def part(group: int) -> tuple[int, int]:
        """Where to begin, and how many groups: all, or the next slice that is in no cache any more."""
        if codes <= 4 * SLICE:
            return 0, codes // group
        slices = codes // SLICE
        return next(cursor) % slices * SLICE // group, SLICE // group

    def gemv(name: tuple[str, str], function: Any, mr: int) -> Callable[[], object]:
        factors, size = scales[name[1]].ctypes.data, KINDS[name[1]][1]

        def run() -> None:
            first, groups = part(mr * K)
            here[name] = groups * mr * K * times
            at = first * mr
            for _ in range(times):
                function(
                    ctypes.c_void_p(y.ctypes.data), ctypes.c_void_p(plane.ctypes.data + at * K),
                    ctypes.c_void_p(factors + at * NB * size), ctypes.c_void_p(xa.ctypes.data),
                    ctypes.c_int64(1), ctypes.c_int64(0), NB, groups,
                )  # fmt: skip

        return run

    runs: dict[Any, Callable[[], object]] = {name: gemv(name, *found) for name, found in gemvs.items()}
    reads = readings(plane, 1, lambda: part(1), times)
    here |= dict.fromkeys(reads, part(1)[1] * times)
    best = best_of({**runs, **reads}, seconds)
    rates = {name: here[name] / took / 1e9 for name, took in best.items()}
    return max(rates[name] for name in reads), rates["1 0"], {name: rates[name] for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", metavar="[COMPILER:]ARGUMENTS", help="may be repeated")
    parser.add_argument("--mib", nargs="+", type=int, default=[1, 4, 16, 256])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each size (default 5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gemvs: dict[tuple[str, str], tuple[Any, int]] = {}
        for words in options.row or ROWS:
            compiler, _, arguments = words.rpartition(":")
            row = row_of(arguments)
            for kind, function in compiled(row, compiler or "gcc", Path(folder)).items():
                gemvs[words, kind] = function, grid.number(row, "mr")
        for mib in options.mib:
            best, simple, rates = measure(gemvs, mib, options.seconds)
            print(f"{mib} MiB: best reading {best:.1f} GB/s, in one stream without hints {simple:.1f}")
            for (words, kind), rate in rates.items():
                read = rate * (1 + KINDS[kind][1] / 32)
                print(f"  {rate:5.1f} GMAC/s  {read:5.1f} GB/s  {read / best:4.2f}  {kind}  {words}", flush=True)


if __name__ == "__main__":
    main()
