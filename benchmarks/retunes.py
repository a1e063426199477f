# SPDX-License-Identifier: Apache-2.0
"""Whether a retune says the same each time, and whether a busy neighbour makes it crown a slower row.

    python benchmarks/retunes.py [--runs 5] [--scope tunekit] [--time-limit S]
    python benchmarks/retunes.py --beside-busy [--runs 1]

The first form retunes so often from an empty state (``--fresh``, a state folder of its own, nothing sticky), prints
each manifest, and for each two runs that differ whether either's record explains it: the two rows' times, with their
errors, lie within the margin that counted. The second keeps a busy loop on every CPU that this process may use while it
retunes, ends it, and then races crown and fallback by turns. Exit status 1: a difference that nothing explains, or a
crown that is slower than the fallback by more than the margin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True:\n    pass"

_QUIETLY = """
import json, sys
from tunekit import dispatch, threads
from tunekit.measure import family, race, stats
from tunekit.measure.fixtures import EVERYTHING
scope, name, crown, fallback = sys.argv[1:]
kernel = next(k for k in dispatch.declare_scope(scope) if k.name == name)
rows = dispatch.grid_rows(kernel)
regime = next(r for r in family.fixtures_of(kernel).regimes() if r.decides == EVERYTHING)
entries = {s: regime.prepare(rows[s]) for s in {crown, fallback}}
with threads(1):
    raced = race.race(entries, regime.prepare(rows[fallback]), fallback, keep=set(entries))
seen = race.read(raced, race.Plan())
print(json.dumps({"ratio": seen.final[fallback].centre / seen.final[crown].centre, "margin": seen.margin}))
"""


@contextmanager
def busy() -> Iterator[None]:
    """A loop that never sleeps, pinned to each CPU of ours."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY, str(cpu)]) for cpu in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def retune(scope: str, limit: float | None) -> dict[str, Any]:
    """One retune from nothing; its record."""
    with tempfile.TemporaryDirectory() as home:
        words = ["--scope", scope, "--fresh", "--no-probe", "--json"]
        words += ["--time-limit", str(limit)] if limit else []
        environment = {**os.environ, "TUNEKIT_HOME": home}
        command = [sys.executable, "-m", "tunekit.retune", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"retune ended with status {done.returncode}: {done.stderr[-500:]}")
    (found,) = json.loads(done.stdout)["scopes"]
    record: dict[str, Any] = found["record"]
    return record


def chosen(record: dict[str, Any]) -> dict[str, str]:
    """What the manifest of a run holds."""
    found = {name: kernel["winner"] for name, kernel in record["kernels"].items()}
    for kernel in record["kernels"].values():
        found |= kernel["seats"]
    return found


def explained(record: dict[str, Any], name: str, a: str, b: str) -> bool:
    """Whether a run's record shows two rows within the margin of each other, where it chose between them."""
    for own, kernel in record["kernels"].items():
        if name not in (own, *(regime["seat"] for regime in kernel["regimes"].values())):
            continue
        if any({entry["challenger"], entry["base"]} & {a, b} for entry in kernel["confirm"]):
            return True  # one was sent away in a confirmation: its ratio is in the record
        for regime in kernel["regimes"].values():
            centres, errors = regime["centres"], regime["errors"]
            if regime["margin"] is None or not (regime["decides"] or regime["seat"]) or not {a, b} <= set(centres):
                continue
            apart = abs(centres[a] - centres[b]) / min(centres[a], centres[b])
            if apart <= max(regime["margin"], 2 * math.hypot(errors[a], errors[b])):
                return True
    return False


def show(number: int, record: dict[str, Any]) -> None:
    stages: dict[str, float] = {}
    for stage, seconds in record["stages"].items():
        stages[stage.split()[0]] = stages.get(stage.split()[0], 0.0) + seconds
    print(f"run {number}: {json.dumps(chosen(record))}")
    for kernel in record["kernels"].values():
        deciding = {n: r for n, r in kernel["regimes"].items() if r["margin"] and (r["decides"] or r["seat"])}
        margins = [f"{n} {100 * r['margin']:.1f} %" for n, r in deciding.items()]
        print(f"  margins: {', '.join(margins)}; {kernel['reason']}")
        for entry in kernel["confirm"]:
            print(f"  confirm on {entry['chain']}: {entry['challenger']} {entry['verdict']}: {entry['reason']}")
    print("  " + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items()), flush=True)


def main() -> int:
    """Run, print and compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scope", default="tunekit")
    parser.add_argument("--time-limit", type=float, metavar="S", help="of each run, in seconds")
    parser.add_argument("--beside-busy", action="store_true", help="beside busy loops on our CPUs; then check quietly")
    options = parser.parse_args()
    records = []
    bad = False
    for number in range(1, options.runs + 1):
        if not options.beside_busy:
            records.append(retune(options.scope, options.time_limit))
            show(number, records[-1])
            continue
        with busy():
            record = retune(options.scope, options.time_limit)
        show(number, record)
        for name, kernel in record["kernels"].items():
            words = [options.scope, name, kernel["winner"], kernel["fallback"]]
            done = subprocess.run([sys.executable, "-c", _QUIETLY, *words], capture_output=True, text=True, check=True)
            seen = json.loads(done.stdout)
            slower = seen["ratio"] < 1 - seen["margin"]
            bad = bad or slower
            print(
                f"  quietly: {name} on {kernel['winner']} is {seen['ratio']:.3f} times as fast as the fallback "
                f"(margin {100 * seen['margin']:.1f} %): {'SLOWER' if slower else 'not slower'}"
            )
    for (i, one), (j, other) in itertools.combinations(enumerate(records, 1), 2):
        first, second = chosen(one), chosen(other)
        for name in sorted(set(first) | set(second)):
            # A seat without an entry follows its kernel.
            a, b = (run.get(name) or next(iter(run.values())) for run in (first, second))
            if a != b:
                fine = explained(one, name, a, b) or explained(other, name, a, b)
                bad = bad or not fine
                why = "within the margin" if fine else "NOT explained"
                print(f"runs {i} and {j} differ in {name}: {a} / {b}: {why}")
    if records and len({json.dumps(chosen(r), sort_keys=True) for r in records}) == 1:
        print(f"{len(records)} runs, one manifest")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
