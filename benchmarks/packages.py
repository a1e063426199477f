# SPDX-License-Identifier: Apache-2.0
"""The three packages of ``tests/packages`` beside what their users would otherwise call, in turns, as ratios.

Run with tunekit installed: ``python benchmarks/packages.py [--json]``. The packages are built into a cache of their own
and tuned there first (``--untuned``: the fallback runs). A ratio above 1 is in favour of the package. The second ratio
is that of the kernel without the checks of a call from Python: what a consumer through the table gets. Results are
compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT / "tests/packages" / name for name in ("vecs/src", "bitnear", "utf8check")]
SCOPES = ("vecs", "bitnear", "utf8check")
ROUNDS, WINDOW = 15, 0.01

Call = Callable[[], Any]


def cases() -> list[tuple[str, str, Call, Call, str, Call]]:
    """(package, what, ours, its kernel alone, what others call, theirs): both have given the same answer."""
    import bitnear
    import numpy as np
    import utf8check
    import vecs

    rng = np.random.default_rng(0)
    found: list[tuple[str, str, Call, Call, str, Call]] = []

    def bare(function: Any, *arguments: Any) -> Call:
        call: Call = function.bound().ready(function.__name__, *arguments)
        return call

    for n in (128, 4096, 65536, 4 << 20):
        x, y = rng.uniform(0.5, 1.5, (2, n)).astype(np.float32)
        assert np.isclose(vecs.dot(x, y, n), np.dot(x, y), rtol=1e-4)
        mine, other = (lambda x=x, y=y, n=n: vecs.dot(x, y, n)), (lambda x=x, y=y: np.dot(x, y))
        found.append(("vecs", f"dot, n={n}", mine, bare(vecs.dot, x, y, n), "numpy.dot", other))
    for n in (4096, 65536):
        x, y = rng.standard_normal((2, n), np.float32)

        def plain(x: Any = x, y: Any = y) -> None:
            np.add(y, np.float32(1e-9) * x, out=y)

        mine = lambda x=x, y=y, n=n: vecs.axpy(y, x, 1e-9, n)  # noqa: E731
        found.append(("vecs", f"axpy, n={n}", mine, bare(vecs.axpy, y, x, 1e-9, n), "y += a * x in numpy", plain))
    for n, width in ((1000, 96), (100_000, 96), (100_000, 128)):
        base, query = rng.integers(0, 256, (n, width), np.uint8), rng.integers(0, 256, width, np.uint8)
        out, words, word = np.empty(n, np.uint32), base.view(np.uint64), query.view(np.uint64)

        def ours(out: Any = out, query: Any = query, base: Any = base) -> Any:
            bitnear.distances(out, query, base, *base.shape)
            return out

        def theirs(words: Any = words, word: Any = word) -> Any:
            return np.bitwise_count(words ^ word).sum(1, dtype=np.uint32)

        assert np.array_equal(ours(), theirs())
        alone = bare(bitnear.distances, out, query, base, n, width)
        found.append(("bitnear", f"distances, {n} x {8 * width} bits", ours, alone, "numpy.bitwise_count", theirs))
    from utf8check.kernels import LOG, MIXED

    for name, text, ascii_ in (("ascii", LOG, True), ("mixed", MIXED, False), ("chinese", "天地玄黄宇宙洪荒", False)):
        for size in (1 << 10, 1 << 20):
            data = (text * (1 + size // len(text.encode()))).encode()

            def decode(data: bytes = data) -> bool:
                try:
                    data.decode("utf-8")
                except UnicodeDecodeError:
                    return False
                return True

            def check(data: bytes = data, ascii_: bool = ascii_) -> bool:
                return utf8check.is_utf8(data, mostly_ascii=ascii_)

            assert check() and decode() and not check(data + b"\xff")
            view = np.frombuffer(data, np.uint8)
            alone = bare(utf8check.valid_ascii if ascii_ else utf8check.valid, view, view.size)
            found.append(("utf8check", f"{name}, {len(data)} bytes", check, alone, "bytes.decode", decode))
    return found


def race(*calls_: Call) -> list[float]:
    """Median seconds a call of each, in windows that alternate."""
    def calls(call: Call) -> int:
        count, taken = 1, 0.0
        while taken < WINDOW / 4:
            count *= 2
            start = time.perf_counter()
            for _ in range(count):
                call()
            taken = time.perf_counter() - start
        return max(1, int(count * WINDOW / taken))

    contestants = [(call, calls(call), list[float]()) for call in calls_]
    for turn in range(ROUNDS):
        for call, count, samples in contestants[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples.append((time.perf_counter() - start) / count)
    return [statistics.median(samples) for _, _, samples in contestants]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--untuned", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = os.pathsep.join(map(str, FOLDERS))
        os.environ.update(TUNEKIT_CACHE=f"{scratch}/cache", TUNEKIT_HOME=f"{scratch}/home", PYTHONPATH=path)
        sys.path[:0] = map(str, FOLDERS)
        modules = [word for scope in SCOPES for word in ("--module", f"{scope}.kernels")]
        scopes = [word for scope in SCOPES for word in ("--scope", scope)]
        command = ["build"] if options.untuned else ["retune", *scopes, "--quiet"]
        subprocess.run([sys.executable, "-m", "tunekit", *command, *modules], check=True, stdout=subprocess.DEVNULL)
        found = []
        for package, what, ours, alone, other, theirs in cases():
            own, kernel, their = race(ours, alone, theirs)
            found.append({
                "package": package, "case": what, "ours_us": 1e6 * own, "other": other, "other_us": 1e6 * their,
                "ratio": their / own, "kernel_ratio": their / kernel,
            })  # fmt: skip
        import tunekit as tk

        rows = {f"{r.scope}.{r.kernel}": r.suffix for r in tk.status() if r.scope in SCOPES}
    if options.json:
        print(json.dumps({"rows": rows, "cases": found}, indent=1))
        return
    print("rows:", ", ".join(f"{k} <- {v}" for k, v in rows.items()))
    for f in found:
        mine, theirs = f"{f['ours_us']:10.1f} us", f"{f['other_us']:10.1f} us"
        ratios = f"{f['ratio']:6.2f}x {f['kernel_ratio']:6.2f}x"
        print(f"{f['package']:10} {f['case']:32} {mine}  {f['other']:20} {theirs}  {ratios}")


if __name__ == "__main__":
    main()
