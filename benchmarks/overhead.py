# SPDX-License-Identifier: Apache-2.0
"""What tunekit costs around the kernels: import, one call, and the portable reference where nothing else runs.

    python benchmarks/overhead.py [--json]
    python benchmarks/overhead.py --quantiser      # its share of 16 tokens by 2048 x 2048, in every row that runs here

Every pair is measured interleaved in one process (imports: interleaved fresh processes); medians and ranges, no
absolute promise. ``reference without FMA`` runs the C reference in a child under
``GLIBC_TUNABLES=glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2``, so that a libm that looks for the instruction finds none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import tunekit
from tunekit import dispatch, q8

REPEATS = 15


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def interleaved(candidates: dict[str, Callable[[], object]], calls: int) -> dict[str, dict[str, float]]:
    """Seconds a call of each candidate, round-robin."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(REPEATS + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if round_number:  # the first round warms up
                samples[name].append((time.perf_counter() - start) / calls)
    return {name: spread(values) for name, values in samples.items()}


def imports() -> dict[str, dict[str, float]]:
    codes = {"python alone": "pass", "import numpy": "import numpy", "import tunekit": "import tunekit",
             "import tunekit.q8": "import tunekit.q8"}  # fmt: skip
    samples: dict[str, list[float]] = {name: [] for name in codes}
    for round_number in range(REPEATS + 1):
        for name, code in codes.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            if round_number:
                samples[name].append(time.perf_counter() - start)
    return {name: spread(values) for name, values in samples.items()}


def calls() -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(1)
    m = q8.pack(rng.standard_normal((32, 32), dtype=np.float32))
    x = rng.standard_normal((1, 32), dtype=np.float32)
    vector, out = x[0].copy(), np.empty((1, 32), np.float32)
    q8.matmul(x, m)
    w = rng.standard_normal((32, 32), dtype=np.float32)
    found = {"empty": lambda: None, "numpy x @ w": lambda: x @ w}
    found["matmul(x, m)"] = lambda: q8.matmul(x, m)
    found["matmul(x, m, out=out)"] = lambda: q8.matmul(x, m, out=out)
    found["matmul(vector, m)"] = lambda: q8.matmul(vector, m)
    # What Python adds to a token of 2048: the whole call, and the C function that it ends in.
    token, few = rng.standard_normal((1, 2048), dtype=np.float32), np.empty((1, 16), np.float32)
    wide = q8.pack(rng.standard_normal((16, 2048), dtype=np.float32))
    q8.matmul(token, wide)
    found["matmul(token, 16 rows, out=)"] = lambda: q8.matmul(token, wide, out=few)
    if wide._call is not None:
        _, product, prepared = wide._call
        found["  its C function alone"] = lambda: product(prepared, token, few)
    return interleaved(found, 2000)


def reference_rate() -> float:
    """GMAC/s of the C reference on 2048 x 512, 16 tokens, in this process."""
    os.environ["TUNEKIT_POLICY"] = "reference"
    rng = np.random.default_rng(1)
    m = q8.pack(rng.standard_normal((512, 2048), dtype=np.float32))
    x = rng.standard_normal((16, 2048), dtype=np.float32)
    out = np.empty((16, 512), np.float32)
    found = interleaved({"reference": lambda: q8.matmul(x, m, out=out)}, 4)
    return 16 * 512 * 2048 / found["reference"]["median"] / 1e9


def references() -> dict[str, float]:
    rates = {}
    for name, tunables in (("reference", ""), ("reference without FMA", "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2")):
        environment = {**os.environ, "TUNEKIT_POLICY": "reference", "GLIBC_TUNABLES": tunables}
        done = subprocess.run(
            [sys.executable, __file__, "--reference"], env=environment, capture_output=True, text=True, check=True
        )
        rates[name] = float(done.stdout)
    return rates


def quantiser() -> dict[str, dict[str, float]]:
    """By row that runs here: seconds of quantising and of the whole product from float32, and the former's share.

    16 tokens by 2048 x 2048 on one lane; best of many, in turns. The C reference's product is cut to 64 rows of weights
    and multiplied up.
    """
    from tunekit.q8 import kernels, product
    from tunekit.q8.layout import pack_plane

    t, n, k = 16, 2048, 2048
    rng = np.random.default_rng(1)
    x = rng.standard_normal((t, k), dtype=np.float32)
    codes, scales = rng.integers(-127, 128, (n, k), dtype=np.int8), rng.random((n, k // 32), dtype=np.float32)
    q, s = np.empty((t, k), np.int8), np.empty((t, k // 32), np.float32)
    planes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    work: dict[str, tuple[int, Callable[[], object], Callable[[], object]]] = {}
    for suffix, bound in dispatch.grid_rows(kernels.q8q8.kernel).items():
        row = product.bind(bound)
        rows = 64 if suffix == "reference" else n
        if row.layout.plane not in planes:
            planes[row.layout.plane] = pack_plane(codes[:rows], scales[:rows], row.layout)
        w, ws = planes[row.layout.plane]
        y = np.empty((t, rows), np.float32)
        work[suffix] = (
            n // rows,
            lambda row=row: row.core.q8_quantize(row.row, q, s, x, t, k),
            lambda row=row, y=y, w=w, ws=ws, rows=rows: row.core.q8_matmul(row.row, y, x, w, ws, t, rows, k),
        )
    best: dict[str, list[float]] = {suffix: [1e9, 1e9] for suffix in work}
    with tunekit.threads(1):
        for _ in range(REPEATS + 1):
            for suffix, (_, quantise, multiply) in work.items():
                for at, call in enumerate((quantise, multiply)):
                    for _ in range(3):
                        start = time.perf_counter()
                        call()
                        best[suffix][at] = min(best[suffix][at], time.perf_counter() - start)
    found = {}
    for suffix, (often, _, _) in work.items():
        quantised, whole = best[suffix]
        product_only = (whole - quantised) * often
        found[suffix] = {"quantise": quantised, "whole": product_only + quantised,
                         "share": quantised / (product_only + quantised)}  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quantiser", action="store_true", help="the quantiser's share of a product, by row, alone")
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        print(reference_rate())
        return 0
    if options.quantiser:
        shares = quantiser()
        if options.json:
            print(json.dumps(shares, indent=1))
            return 0
        for suffix, one in sorted(shares.items(), key=lambda item: -item[1]["share"]):
            took = f"{one['quantise'] * 1e6:7.1f} of {one['whole'] * 1e6:8.1f} us"
            print(f"{suffix:52} {took}  {100 * one['share']:.1f} %")
        return 0
    results = {"import, seconds": imports(), "call, seconds": calls(), "C reference, GMAC/s": references()}
    if options.json:
        print(json.dumps(results, indent=1))
        return 0
    for name, value in results["import, seconds"].items():
        print(f"{name:28} {value['median'] * 1e3:8.1f} ms  ({value['low'] * 1e3:.1f} to {value['high'] * 1e3:.1f})")
    for name, value in results["call, seconds"].items():
        print(f"{name:28} {value['median'] * 1e6:8.2f} us  ({value['low'] * 1e6:.2f} to {value['high'] * 1e6:.2f})")
    for name, rate in results["C reference, GMAC/s"].items():
        print(f"{name:28} {rate:8.2f} GMAC/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
