# SPDX-License-Identifier: Apache-2.0
"""A tuner of one's own: build the rows, check each against the reference, time them in turns, keep the best.

The policy rail starts it as ``python -m walk_tuner`` with ``TUNEKIT_MODE=tune`` and ``TUNEKIT_MANIFEST``. (A family
that declares ``fixtures=`` needs no tuner: ``python -m tunekit.retune`` does all this, in processes of their own.)
"""

import statistics
import time

import numpy as np
import walk_kernels
from tunekit.build_tools import build_cached

SECONDS = 2.0


def main() -> None:
    """Tune, and record the winner."""
    kernel = walk_kernels.column_sums
    print("walk_tuner: building the rows", flush=True)
    build_cached([kernel.kernel], "grid")

    a = np.random.default_rng(0).standard_normal((2048, 1024), np.float32)
    sums, wanted = np.empty(1024, np.float32), np.empty(1024, np.float32)
    (_, reference), *rows = kernel.variants()
    reference(wanted, a, *a.shape)
    times: dict[str, list[float]] = {}
    for suffix, row in rows:
        row(sums, a, *a.shape)
        if row.bound is not None and np.array_equal(sums, wanted):
            times[suffix] = []
    print(f"walk_tuner: two seconds of {' against '.join(times)}", flush=True)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for suffix, row in rows:
            if suffix in times:
                start = time.perf_counter()
                row(sums, a, *a.shape)
                times[suffix].append(time.perf_counter() - start)
    best = min(times, key=lambda suffix: statistics.median(times[suffix]))
    print(f"walk_tuner: {best} wins", flush=True)
    kernel.manifest_set(best)


if __name__ == "__main__":
    main()
