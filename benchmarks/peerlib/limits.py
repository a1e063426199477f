# SPDX-License-Identifier: Apache-2.0
"""This CPU's own limits, measured in the same run: multipliers, reading of memory, our tile in the first cache."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit import q8
from tunekit.q8 import kernels
from tunekit.q8.chains import last_cache
from tunekit.q8.layout import layout_of

AHEAD = 1 << 16
"""Bytes behind memory that is read: requests go beyond its end."""

_loaded: list[Any] = []


def loops() -> Any:
    """``loops.c``, compiled by ``cc`` once a process.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be compiled.
    """
    if not _loaded:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "loops.so"
            source = Path(__file__).with_name("loops.c")
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
            _loaded.append(ctypes.CDLL(str(made)))
    return _loaded[0]


def best_of(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of each call's best, round-robin for so long."""
    found = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def _tile() -> tuple[Callable[[int], object], int] | None:
    """Our tile at its widest on one group of rows of K = 512, called so often; and its multiply-accumulates a call."""
    bound = kernels.q8q8.bound()
    if bound is None or bound.row is None:
        return None
    layout, nt, k = layout_of(bound.row), int(bound.call("q8q8_tokstep")), 512
    rng = np.random.default_rng(1)
    m = q8.pack(rng.standard_normal((layout.mr, k), dtype=np.float32))
    a = q8.quantize(rng.standard_normal((nt, k), dtype=np.float32))
    w, ws = m.planes(layout)
    tile = "q8q8_f16" if ws.dtype == np.float16 else "q8q8"
    room = np.empty(int(bound.call("q8q8_acts_bytes", nt, k // 32)) + 64, np.uint8)
    xa = room[-room.ctypes.data % 64 :]
    bound.call("q8q8_prepare", xa, a.codes, a.scales, nt, 0, nt, k // 32)
    y = np.empty((nt, layout.mr), np.float32)
    call = loops().loop_tile
    pointers = [ctypes.c_void_p(v) for v in (w.ctypes.data, ws.ctypes.data, xa.ctypes.data)]
    kept = (m, w, ws, room, xa, y)

    def run(times: int) -> object:
        return kept and call(
            ctypes.c_void_p(bound.address(tile)), ctypes.c_long(times), ctypes.c_void_p(y.ctypes.data),
            ctypes.c_int64(layout.mr), *pointers, ctypes.c_int64(nt), nt, k // 32,
        )  # fmt: skip

    return run, nt * layout.mr * k


def measure(threads: int, seconds: float = 2.0) -> dict[str, float]:
    """``port``: GMAC/s of the multipliers alone, one core; ``tile``: of our tile, one core; ``read``: GB/s of the best
    plain reading of memory, on all these threads. What this CPU or box cannot measure is left out."""
    found: dict[str, float] = {}
    library = loops()
    if not hasattr(library, "loop_read"):
        return found
    runs: dict[str, Callable[[], object]] = {"port": lambda: library.loop_multiplies(ctypes.c_long(200_000))}
    tile = _tile()
    if tile is not None:
        run, macs = tile
        runs["tile"] = lambda: run(1000)
    best = best_of(runs, seconds)
    found["port"] = 200_000 * 12 * 16 / best["port"] / 1e9
    if tile is not None:
        found["tile"] = 1000 * macs / best["tile"] / 1e9
    size = beyond_caches() // 8  # an eighth at a time, short enough to be left alone on a shared box
    starts = itertools.cycle(range(0, 8 * size, size))
    ways = readings(np.ones(8 * size + AHEAD, np.uint8), threads, lambda: (next(starts), size))
    found["read"] = size / min(best_of(ways, seconds).values()) / 1e9
    return found


def beyond_caches() -> int:
    """Bytes that no cache holds a good part of; a multiple of 8."""
    return max(4 * last_cache(), 128 << 20) & -8


def readings(
    room: NDArray[np.uint8], threads: int, part: Callable[[], tuple[int, int]], times: int = 1
) -> dict[str, Callable[[], object]]:
    """Ways of reading memory; none where ``loops.c`` has none for this CPU.

    Args:
        room: what is read, and :data:`AHEAD` bytes behind it.
        threads: by how many, each a share of its own.
        part: asked before each reading: where in the room it begins, and how many bytes it takes.
        times: how often it takes them.
    """
    library = loops()
    if not hasattr(library, "loop_read"):
        return {}

    def reading(streams: int, ahead: int) -> Callable[[], object]:
        def one(first: int, share: int) -> None:
            at = ctypes.c_void_p(room.ctypes.data + first)
            for _ in range(times):
                library.loop_read(at, ctypes.c_size_t(share), streams, ctypes.c_size_t(ahead))

        def run() -> None:
            first, size = part()
            share = size // threads
            others = [threading.Thread(target=one, args=(first + i * share, share)) for i in range(1, threads)]
            for thread in others:
                thread.start()
            one(first, share)
            for thread in others:
                thread.join()

        return run

    return {f"{s} {a}": reading(s, a) for s in (1, 2, 4) for a in (0, 1024, 2048, 4096)}
