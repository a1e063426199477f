# SPDX-License-Identifier: Apache-2.0
"""What packing a matrix costs beside a plain copy of as many bytes, by one lane and by all.

    python benchmarks/packing.py [--rows 8192] [--columns 2048] [--repeats 15]

``from_q8_0`` takes ggml's blocks apart into codes and scales; ``pack`` lays codes out for a row's plane. All are
measured in turns in one process; a ratio is best against best: 1.00 is a copy's speed, 2.00 takes twice its time.
Outputs are fresh memory each time, as they are in use, and the copy's are too.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

import tunekit
from tunekit import q8
from tunekit.q8.layout import Layout, pack_plane


def copied(source: np.ndarray, lanes: int) -> np.ndarray:
    """A copy of flat bytes by so many threads."""
    out = np.empty_like(source)
    cuts = [len(source) * i // lanes for i in range(lanes + 1)]
    parts = [(out[a:b], source[a:b]) for a, b in pairwise(cuts)]
    others = [threading.Thread(target=np.copyto, args=part) for part in parts[1:]]
    for other in others:
        other.start()
    np.copyto(*parts[0])
    for other in others:
        other.join()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    n, k = options.rows, options.columns
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, n * (k // 32) * 34, dtype=np.uint8)
    blocks.reshape(-1, 34)[:, 1] &= 0x3F  # scales that are numbers
    matrix = q8.from_q8_0(blocks, n, k)
    codes, scales = matrix.codes, matrix.scales
    layouts = [Layout(8, 4), Layout(16, 2), Layout(16, 4, 128), Layout(32, 2), Layout(4, 4), Layout(8, 8)]
    for lanes in dict.fromkeys((1, tunekit.lanes())):
        work: dict[str, tuple[int, Callable[[], object]]] = {
            "copy of the blocks": (blocks.nbytes, lambda lanes=lanes: copied(blocks, lanes)),
            "from_q8_0": (blocks.nbytes, lambda: q8.from_q8_0(blocks, n, k)),
            "copy of codes and scales": (
                codes.nbytes + scales.nbytes,
                lambda lanes=lanes: (copied(codes.reshape(-1), lanes), copied(scales.reshape(-1), lanes)),
            ),
        }
        for layout in layouts:
            bytes_ = codes.nbytes + scales.nbytes
            work[f"pack {layout.plane}"] = (bytes_, lambda layout=layout: pack_plane(codes, scales, layout))
        times: dict[str, list[float]] = {name: [] for name in work}
        with tunekit.threads(lanes):
            for again in range(options.repeats + 1):
                for name, (_, run) in work.items():
                    start = time.perf_counter()
                    run()
                    if again:
                        times[name].append(time.perf_counter() - start)
        base = 1.0
        for name, taken in times.items():
            best = min(taken)
            base = best if name.startswith("copy") else base
            print(
                f"{lanes} lanes  {name:28} {work[name][0] / best / 1e9:6.2f} GB/s  "
                f"median {work[name][0] / statistics.median(taken) / 1e9:6.2f}  time of a copy: {best / base:5.2f}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
