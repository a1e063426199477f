# SPDX-License-Identifier: Apache-2.0
"""What the canonical fold costs: the same rows with cheaper folds, which do not give the same bits.

    python benchmarks/fold.py [--json] [ROW ...]

``canonical``: ``f = fma(float(sum), ws * xs, f)``, blocks ascending, as it ships. ``any order``: the compiler may
reassociate (``-ffast-math``, no pinned results). ``one scale a token``: no product of scales, as if activations were
quantised once a token. ``no fold``: the integer sums are kept as they are, which is the bound of every fold.
Each is the row's own C with that one change, by the flags that ship; all are raced interleaved in one process.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tunekit.build_tools.plan import row_jobs
from tunekit.build_tools.render import render

from tunekit import dispatch
from tunekit.cpu import this_cpu, this_features
from tunekit.q8 import kernels, product
from tunekit.q8.layout import layout_of, pack_plane

KERNEL = kernels.q8q8.kernel
REPEATS = 31
ROWS = [row for row in KERNEL.fallback if "_width" in row and "amx" not in row]  # x86-64, sums in row vectors
SHAPES = {"tile": (120, 512, 2048), "GEMV, in cache": (1, 512, 512)}  # tokens, k, n

FOLD = re.compile(r"f = _mm\d+_fmadd_ps\(_mm(256|512)_cvtepi32_ps\(acc\), _mm\d+_mul_ps\(ws, xs\), f\);")
PIN = re.compile(r"^#define TK_PIN\(.*$(\n.*\\$)*", re.M)
CHANGES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "canonical": (None, ()),
    "any order": (None, ("-ffast-math",)),
    "one scale a token": (r"(void)xs; f = _mm\1_fmadd_ps(_mm\1_cvtepi32_ps(acc), ws, f);", ()),
    "no fold": (
        r"(void)ws; (void)xs; f = _mm\1_castsi\1_ps(_mm\1_add_epi32(acc, _mm\1_castps_si\1(f)));", ()
    ),
}  # fmt: skip


def variants(bound: Any, folder: Path) -> dict[str, Any]:
    """The row with each fold, callable through the traversal of the core."""
    jobs = row_jobs(KERNEL, bound.row, this_cpu().arch)
    assert not isinstance(jobs, str)
    job = next(job for job in jobs if set(job.needs) <= this_features())
    source = render(KERNEL, bound.row, this_cpu().arch, job.alternative, job.features)
    symbols = [KERNEL.symbol(name, bound.suffix, job.alternative) for name, _ in KERNEL.functions]
    found = {}
    for name, (fold, flags) in CHANGES.items():
        text, changed = FOLD.subn(fold, source) if fold else (source, 1)
        assert changed, f"{bound.suffix}: the fold is not written as it was"
        if "-ffast-math" in flags:
            text, changed = PIN.subn("#define TK_PIN(x) ((void)0)", text)
            assert changed, f"{bound.suffix}: no pins"
        unit, target = folder / "unit.c", folder / f"{name.replace(' ', '_')}.so"
        unit.write_text(text)
        more = ["-fvisibility=default", *flags, str(unit), "-o", str(target)]
        subprocess.run(["gcc", "-O2", "-fPIC", "-shared", *job.flags, *more], check=True)
        library = ctypes.CDLL(str(target))
        addresses = tuple(int(ctypes.cast(getattr(library, s), ctypes.c_void_p).value or 0) for s in symbols)
        changed_row = dataclasses.replace(bound, built=dataclasses.replace(bound.built, addresses=addresses))
        found[name] = (product.bind(changed_row), library)
    return found


def race(found: dict[str, Any], layout: Any, t: int, k: int, n: int) -> dict[str, dict[str, float]]:
    """GMAC/s and speed against the canonical fold, of each one's fastest tenth: others may share the machine."""
    rng = np.random.default_rng(1)
    w, ws = rng.integers(-127, 128, (n, k), dtype=np.int8), rng.random((n, k // 32), dtype=np.float32)
    planes, x = pack_plane(w, ws, layout), rng.standard_normal((t, k), dtype=np.float32)
    y = np.empty((t, n), np.float32)
    calls = max(1, int(2e8 / (t * k * n)))
    seconds: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for turn in range(REPEATS + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            native = found[name][0]
            start = time.perf_counter()
            for _ in range(calls):
                native.core.q8_matmul(native.row, y, x, *planes, t, n, k)
            if turn:
                seconds[name].append((time.perf_counter() - start) / calls)
    best = {name: statistics.quantiles(values, n=10)[0] for name, values in seconds.items()}
    return {
        name: {"GMAC/s": t * k * n / own / 1e9, "speed ratio": best["canonical"] / own} for name, own in best.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", default=ROWS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    here = dispatch.grid_rows(KERNEL)
    answer: dict[str, Any] = {}
    for suffix in options.rows:
        if suffix not in here:
            if not options.json:
                print(f"{suffix}: not built, or not for this CPU; python -m tunekit.retune builds the grid")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = variants(here[suffix], Path(folder))
            for shape, sizes in SHAPES.items():
                result = answer.setdefault(suffix, {})[shape] = race(found, layout_of(here[suffix].row), *sizes)
                if not options.json:
                    print(f"{suffix}, {shape}:")
                    for name, r in result.items():
                        speed = f"{r['GMAC/s']:7.1f} GMAC/s, {r['speed ratio']:.3f} of the canonical fold's speed"
                        print(f"  {name:18} {speed}")
    if options.json:
        print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
