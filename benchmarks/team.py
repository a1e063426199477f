# SPDX-License-Identifier: Apache-2.0
"""The thread team: what an op costs, beside OpenMP (libgomp) and a pool on condition variables; and how products scale.

    python benchmarks/team.py overhead [--lanes N] [--json]
    python benchmarks/team.py scaling [--pin] [--seconds S] [--json]
    python benchmarks/team.py threshold [--pin] [--json]

``overhead`` builds ``team_overhead.c`` with the core's own sources and runs it twice, with OpenMP's waiting active
and at its default. ``scaling`` multiplies real models' shapes on 1 lane and on all of them, in turns: parallel
efficiency is the ratio of the best windows over the lanes. ``box`` is what the machine gives: so many one-lane
products at once, on threads that share nothing, over one alone; ``of box`` is the speedup over that. ``threshold``
compares products around
``target_chunk_work``: as dispatched, and held to one lane, back to back and with pauses in which workers park.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tunekit
from tunekit import q8
from tunekit.core import SOURCES, core

HERE = Path(__file__).resolve().parent


def overhead(lanes: int) -> dict[str, list[dict[str, object]]]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "team_overhead"
        sources = [str(HERE / "team_overhead.c"), str(SOURCES / "team.c"), str(SOURCES / "shape.c")]
        command = ["cc", "-std=c11", "-O2", "-fopenmp", "-pthread", "-I", str(SOURCES), *sources, "-o", str(program)]
        subprocess.run(command, check=True)
        found = {}
        for policy in ("active", "default"):
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
            if policy == "active":
                environment["OMP_WAIT_POLICY"] = "active"
            run = [str(program), str(lanes)]
            done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
            found[f"OMP_WAIT_POLICY {policy}"] = json.loads(done.stdout)
        return found


def window(run: Callable[[], object]) -> Callable[[int], float]:
    """Seconds of so many calls, after one that wakes the workers."""

    def seconds(calls: int) -> float:
        run()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    return seconds


def together(runs: list[Callable[[], object]], cpus: list[int]) -> Callable[[int], float]:
    """Seconds until each of these has been called so often, all at once, each on a thread and a CPU of its own."""

    def seconds(calls: int) -> float:
        meet = threading.Barrier(len(runs))
        ends = [0.0] * len(runs)
        starts = [0.0] * len(runs)

        def one(i: int) -> None:
            os.sched_setaffinity(0, {cpus[i % len(cpus)]})
            runs[i]()
            meet.wait()
            starts[i] = time.perf_counter()
            for _ in range(calls):
                runs[i]()
            ends[i] = time.perf_counter()

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(ends) - min(starts)

    return seconds


def best(candidates: dict[str, Callable[[int], float]], calls: int, seconds: float = 1.2) -> dict[str, float]:
    """Seconds a call in each candidate's best window; they take turns for so long, and for five rounds at least.

    Windows are short, so that on a shared box some of them are left alone.
    """
    found = dict.fromkeys(candidates, float("inf"))
    end, number = time.perf_counter() + seconds, 0
    while number < 6 or time.perf_counter() < end:
        for name, run in candidates.items():
            found[name] = min(found[name], run(calls) / calls)
        number += 1
    return found


def pin(lanes: int) -> None:
    """A CPU for each lane. On a box where others run, the kernel may put two lanes on one CPU and leave them there."""
    own, cpus = core(), sorted(os.sched_getaffinity(0))
    own.set_knob("pretend_lanes", lanes)
    own.team_empty(lanes, lanes, 1, 1)
    os.sched_setaffinity(0, cpus[:1])
    time.sleep(0.02)
    own.team_empty(lanes, lanes, 1, 1)  # the team moves its workers to the caller's CPU; now each goes to its own
    tasks = [int(folder.name) for folder in Path("/proc/self/task").iterdir()]
    ours = [t for t in tasks if Path(f"/proc/self/task/{t}/comm").read_text().strip() == "tunekit"]
    for task, cpu in zip(sorted(ours), cpus[1:], strict=False):
        os.sched_setaffinity(task, {cpu})


class Product:
    def __init__(self, t: int, k: int, n: int) -> None:
        rng = np.random.default_rng(1)
        scales = rng.random((n, k // 32), dtype=np.float32).astype(np.float16)  # as those of Q8_0
        self.m = q8.Matrix(rng.integers(-127, 128, (n, k), dtype=np.int8), scales.astype(np.float32))
        self.x, self.y = rng.standard_normal((t, k), dtype=np.float32), np.empty((t, n), np.float32)
        self.macs = t * k * n

    def on(self, ceiling: int) -> Callable[[], object]:
        own = core()

        def run() -> object:
            own.set_knob("ceiling", ceiling)
            return q8.matmul(self.x, self.m, out=self.y)

        run()
        return run


# (model, K, N): the matrices of a layer
SHAPES = (("135M qo", 576, 576), ("135M w13", 576, 1536), ("135M w2", 1536, 576), ("1B kv", 2048, 512),
          ("1B qo", 2048, 2048), ("1B w13", 2048, 8192), ("1B w2", 8192, 2048))  # fmt: skip


def scaling(lanes: int, seconds: float, cpus: list[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, k, n in SHAPES:
        for t in (1, 4, 16, 64, 512):
            product = Product(t, k, n)
            alone = [Product(t, k, n).on(1) for _ in range(lanes)]
            runs = {"one": window(product.on(1)), "all": window(product.on(0)), "box": together(alone, cpus)}
            times = best(runs, max(1, int(3e7 / product.macs)), seconds)
            speedup, box = times["one"] / times["all"], lanes * times["one"] / times["box"]
            rows.append({"shape": name, "k": k, "n": n, "t": t, "mmacs": product.macs / 1e6, "lanes": lanes,
                         "one_gmacs": product.macs / times["one"] / 1e9, "all_gmacs": product.macs / times["all"] / 1e9,
                         "speedup": speedup, "efficiency": speedup / lanes,
                         "box": box, "of box": speedup / box})  # fmt: skip
    large = [row for row in rows if float(str(row["mmacs"])) > 4]
    for column in ("speedup", "box", "of box"):
        mean = float(np.exp(np.mean([np.log(float(str(row[column]))) for row in large])))
        print(
            f"geometric mean of {column} where a product has more than 4 M multiply-accumulates: {mean:.2f}",
            file=sys.stderr,
        )
    core().set_knob("ceiling", 0)
    return rows


def threshold() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    target = core().knobs()["target_chunk_work"]
    for part in (0.25, 0.5, 0.9, 1.1, 1.5, 2, 4):
        n = max(16, int(part * 2 * target / 512 / 4))
        product = Product(4, 512, n)
        runs = {"one": product.on(1), "dispatched": product.on(0)}
        times = best({name: window(run) for name, run in runs.items()}, max(1, int(1e7 / product.macs)), 0.6)
        paused: dict[str, list[float]] = {"one": [], "dispatched": []}
        for _ in range(30):
            for name, run in runs.items():
                time.sleep(0.004)
                start = time.perf_counter()
                run()
                paused[name].append(time.perf_counter() - start)
        rows.append({"of the threshold": part, "mmacs": product.macs / 1e6,
                     "back to back": times["one"] / times["dispatched"],
                     "after a pause": float(np.median(paused["one"]) / np.median(paused["dispatched"]))})  # fmt: skip
    core().set_knob("ceiling", 0)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(*[list(rows[0]), *cells], strict=True)]
    for line in [list(rows[0]), *cells]:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("what", choices=("overhead", "scaling", "threshold"))
    parser.add_argument("--lanes", type=int, default=max(2, tunekit.lanes()))
    parser.add_argument("--pin", action="store_true", help="a CPU for each lane (scaling and threshold)")
    parser.add_argument("--seconds", type=float, default=1.2, help="for each product of scaling")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    q8.quantize(np.ones((1, 32), np.float32))
    cpus = sorted(os.sched_getaffinity(0))
    if options.pin:
        pin(options.lanes)
    runs: dict[str, Callable[[], Any]] = {
        "overhead": lambda: overhead(options.lanes),
        "scaling": lambda: scaling(options.lanes, options.seconds, cpus),
        "threshold": threshold,
    }
    result = runs[options.what]()
    if options.json:
        print(json.dumps(result, indent=1))
    elif isinstance(result, dict):
        for name, rows in result.items():
            print(f"{name}, {options.lanes} lanes, ns an op")
            show(rows)
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
