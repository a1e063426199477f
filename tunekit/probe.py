# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit probe``: measure what dispatch costs on this box, and write the box profile.

Seconds, not minutes. Candidates take turns, and a number leaves its default only where that is worth more than the
margin. ``retune`` runs it in a fresh process, so that products run on the rows that were just chosen.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunekit import _manifest, _profile, ceilings, paths, team
from tunekit.console import table
from tunekit.core import core
from tunekit.cpu import this_box
from tunekit.environment import settings
from tunekit.errors import TunekitError
from tunekit.q8 import product
from tunekit.q8.matrix import Matrix

MARGIN = 0.03
"""A candidate replaces the default where it is faster by more than this part."""

NOISY = 0.10
"""Where the default differs from itself by more than this, nothing is concluded."""

KNEE = 0.10
"""Another doubling of the lanes is worth it where it brings this part more bytes a second."""

_FREE = 0.75
"""Where all lanes are worth less than this part of themselves on a product in the cache, others hold the CPUs."""

_DISPATCHES = 2000
_ROUNDS = 15
_WINDOW = 0.006  # seconds
_STREAM_BYTES = 150e6


@dataclass
class Minted:
    """What a probe found.

    Attributes:
        knobs: what the profile says.
        measured: the figures behind it, for the file.
        lines: the same, to read.
    """

    knobs: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def knee(rates: Sequence[tuple[int, float]]) -> int:
    """The last number of lanes that brought more than :data:`KNEE` over the best rate before it."""
    best_lanes, best = rates[0]
    for lanes, rate in rates[1:]:
        if rate > best * (1 + KNEE):
            best_lanes, best = lanes, rate
    return best_lanes


def pick(default: int, seconds: dict[int, float], floor: float) -> int:
    """The candidate with the least time; the default where that is not beaten by more than the margin and the noise."""
    best = min(seconds, key=lambda value: seconds[value])
    won = floor <= NOISY and seconds[best] < seconds[default] * (1 - max(MARGIN, floor))
    return best if won else default


def ladder(live: int) -> list[int]:
    """1, 2, 4 ... and all lanes."""
    found = []
    lanes = 1
    while lanes < live:
        found.append(lanes)
        lanes *= 2
    return [*found, live]


def target_of(per_chunk_ns: float, rate: float) -> int:
    """Multiply-accumulates worth a lane: eight times what a chunk costs, at this box's rate (in MACs a nanosecond)."""
    return max(65536, round(per_chunk_ns * 8 * rate))


def wake_of(wake_ns: float, rate: float) -> int:
    """Multiply-accumulates that take eight times as long as the caller's part of a wake."""
    return max(65536, round(wake_ns * 8 * rate))


def _matrix(rng: np.random.Generator, n: int, k: int) -> Matrix:
    codes = rng.integers(-127, 128, (n, k), dtype=np.int8)
    scales = rng.uniform(0.5, 1.5, (n, k // 32)).astype(np.float16)  # as those of Q8_0
    return Matrix(codes, scales.astype(np.float32))


class _Bench:
    """One product, run again and again through the core."""

    def __init__(self, rng: np.random.Generator, t: int, k: int, n: int) -> None:
        row = product.native()
        if row is None:
            raise TunekitError("nothing native is built, and the reference has one lane: python -m tunekit build")
        self.row, self.work = row, t * k * n
        self.m, self.x = _matrix(rng, n, k), rng.standard_normal((t, k), dtype=np.float32)
        self.y = np.empty((t, n), np.float32)
        self.planes = self.m.planes(row.layout)
        self.t, self.n, self.k = t, n, k

    def run(self) -> None:
        self.row.core.q8_matmul(self.row.row, self.y, self.x, *self.planes, self.t, self.n, self.k)

    def calls(self, seconds: float) -> int:
        """How many calls take about so long."""
        self.run()
        start = time.perf_counter()
        self.run()
        return max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))


def interleaved(values: Sequence[int], run: Callable[[int], None], calls: int) -> list[float]:
    """Seconds a call for each value, in turns: of the best window of many.

    What others take of a shared box comes and goes, and a window that they left alone is what the box can do.
    """
    best = [float("inf")] * len(values)
    for round_number in range(_ROUNDS + 1):
        for i, value in enumerate(values):
            start = time.perf_counter()
            for _ in range(calls):
                run(value)
            if round_number:
                best[i] = min(best[i], (time.perf_counter() - start) / calls)
    return best


def _compare(own: Any, name: str, values: Sequence[int], bench: _Bench, minted: Minted, label: str) -> int:
    def run(value: int) -> None:
        own.set_knob(name, value)
        bench.run()

    default = _profile.BY_NAME[name].default
    # The default runs twice: what lies between it and itself is noise.
    *times, again = interleaved([*values, default], run, bench.calls(_WINDOW))
    seconds = dict(zip(values, times, strict=True))
    floor = abs(again / seconds[default] - 1)
    chosen = pick(default, seconds, floor)
    if chosen != default:  # once more, by itself: the winner of many had more chances to be lucky
        first, other, second = interleaved([default, chosen, default], run, bench.calls(_WINDOW))
        chosen = pick(default, {default: first, chosen: other}, abs(second / first - 1))
    own.set_knob(name, chosen)
    rates = {value: bench.work / time_ / 1e9 for value, time_ in seconds.items()}
    minted.measured[name] = {
        "gmacs": {str(value): round(rate, 2) for value, rate in rates.items()},
        "noise_floor": round(floor, 3),
    }
    told = ", ".join(f"{value}: {rate:.1f}" for value, rate in rates.items())
    minted.lines.append(f"{label}: {told} GMAC/s, noise {100 * floor:.1f} % -> {name} {chosen}")
    return chosen


def _dispatch(own: Any, live: int, rate: float, minted: Minted) -> None:
    """The empty-dispatch ladder: what an op costs, what a chunk more costs, and what a wake costs."""
    chunks = [live, 2 * live, 4 * live, 8 * live]
    best = dict.fromkeys(chunks, float("inf"))
    own.team_empty(live, live, 1, _DISPATCHES)
    for _ in range(5):
        for n in chunks:
            best[n] = min(best[n], own.team_empty(live, n, 1, _DISPATCHES) / _DISPATCHES)
    slope = max(0.0, (best[8 * live] - best[live]) / (7 * live))
    # Workers that have gone to sleep: what the caller pays to wake one before its first chunk.
    own.set_knob("team_prof", 1)
    own.set_knob("team_spin_us", 0)
    wakes = []
    for _ in range(25):
        time.sleep(0.002)
        own.team_counts(True)
        own.team_empty(live, live, 1, 1)
        wakes.append(own.team_counts(True)["publish_ns"])
    own.set_knob("team_spin_us", _profile.BY_NAME["team_spin_us"].default)
    own.set_knob("team_prof", 0)
    wake = statistics.quantiles(wakes, n=10)[0]
    minted.measured["dispatch"] = {
        "lanes": live,
        "op_ns": {str(n): round(ns, 1) for n, ns in best.items()},
        "per_chunk_ns": round(slope, 2),
        "wake_ns": round(wake),
        "macs_per_ns": round(rate, 2),
    }
    minted.knobs["target_chunk_work"] = target_of(slope, rate)
    minted.knobs["wake_work"] = wake_of(wake, rate)
    told = ", ".join(f"{n}: {ns:.0f}" for n, ns in best.items())
    minted.lines.append(
        f"empty op of so many chunks, {live} lanes: {told} ns; {slope:.1f} ns a chunk, {wake / 1000:.1f} us a wake; "
        f"one lane makes {rate:.1f} GMAC/s -> target_chunk_work {minted.knobs['target_chunk_work']}, "
        f"wake_work {minted.knobs['wake_work']}"
    )


def _free(own: Any, hot: _Bench, live: int) -> float:
    """How much of the CPUs is there for the taking: the speedup by all lanes of a product in the cache, over the lanes.

    Where others hold the CPUs, one lane seems to be enough for anything.
    """

    def run(ceiling: int) -> None:
        own.set_knob("ceiling", ceiling)
        hot.run()

    before = own.knobs()["ceiling"]
    one, all_ = interleaved([1, before], run, hot.calls(_WINDOW))
    own.set_knob("ceiling", before)
    return one / all_ / live


def _stream(own: Any, rng: np.random.Generator, live: int, free: float, minted: Minted) -> None:
    """One token against matrices that are too many for any cache: how many lanes fill the memory's bandwidth."""
    bench = _Bench(rng, 1, 4096, 4096)
    size = sum(plane.nbytes for plane in bench.planes)
    w, ws = bench.planes
    copies = [bench.planes, *((w.copy(), ws.copy()) for _ in range(int(_STREAM_BYTES // size)))]
    steps = ladder(live)
    turn = iter(range(1 << 60))

    def run(lanes: int) -> None:
        own.set_knob("gemv_lane_cap", lanes)
        bench.planes = copies[next(turn) % len(copies)]
        bench.run()

    *times, again = interleaved([*steps, steps[-1]], run, bench.calls(2 * _WINDOW))
    floor = abs(again / times[-1] - 1)
    rates = [(lanes, size / seconds / 1e9) for lanes, seconds in zip(steps, times, strict=True)]
    best = knee(rates) if floor <= NOISY and free >= _FREE else live
    minted.knobs["gemv_lane_cap"] = 0 if best == live else best
    own.set_knob("gemv_lane_cap", minted.knobs["gemv_lane_cap"])
    minted.measured["stream_gbs"] = {str(lanes): round(rate, 2) for lanes, rate in rates}
    minted.measured["cpus_free"] = round(free, 2)
    minted.measured["stream_noise_floor"] = round(floor, 3)
    told = ", ".join(f"{lanes}: {rate:.1f}" for lanes, rate in rates)
    minted.lines.append(
        f"one token, weights from memory, lanes: {told} GB/s, noise {100 * floor:.1f} %, "
        f"{100 * free:.0f} % of the CPUs free -> gemv_lane_cap {minted.knobs['gemv_lane_cap']}"
    )


def probe() -> Minted:
    """Measure, in the process's present limits; leaves the core's numbers at what was found.

    Raises:
        TunekitError: nothing native is built.
    """
    rng = np.random.default_rng(0)
    hot = _Bench(rng, 32, 1024, 512)
    own = core()
    minted = Minted()
    team.forget()
    team.start()
    for knob in _profile.KNOBS:  # an older profile must not colour this one
        if knob.name not in ("threads", "dispatch_worker_limit", "team_spin_us"):
            own.set_knob(knob.name, knob.default)
    live = team.lanes()
    ceiling = own.knobs()["ceiling"]
    own.set_knob("ceiling", 1)
    seconds = interleaved([0], lambda _: hot.run(), hot.calls(_WINDOW))
    own.set_knob("ceiling", ceiling)
    minted.measured["live"] = live
    blocks, budgets = (32, 64, 128, 256), (1 << 20, 2 << 20, 4 << 20, 8 << 20)
    if live > 1:
        _dispatch(own, live, hot.work / seconds[0] / 1e9, minted)
        _stream(own, rng, live, _free(own, _Bench(rng, 128, 1024, 512 * live), live), minted)
        small = _Bench(rng, 4, 576, 192)  # few chunks: what a gate keeps the others out of
        gate = _compare(own, "team_rank_gate", (1, 0), small, minted, "rank gate on, off")
        minted.knobs["team_rank_gate"] = gate
        starved = _Bench(rng, 512, 1024, 32 * live - 16)
        own.set_knob("matmul_min_chunk_rows", 64)
        grid = _compare(own, "batch_grid_2d", (0, 1, 2), starved, minted, "grid of rows that starve the lanes")
        own.set_knob("matmul_min_chunk_rows", _profile.BY_NAME["matmul_min_chunk_rows"].default)
        minted.knobs["batch_grid_2d"] = grid
    block = _compare(own, "q8_token_block", blocks, _Bench(rng, 512, 2048, 512), minted, "tokens a block")
    minted.knobs["q8_token_block"] = block
    budget = _compare(own, "q8_l2_budget", budgets, _Bench(rng, 256, 8192, 128), minted, "bytes a block")
    minted.knobs["q8_l2_budget"] = budget
    minted.measured["ceilings"] = ceilings.here()
    minted.lines += ceilings.lines(minted.measured["ceilings"])
    for name in ("target_chunk_work", "wake_work"):
        own.set_knob(name, minted.knobs.get(name, _profile.BY_NAME[name].default))
    return minted


def check_writable() -> None:
    """Refuse before anything is measured what :func:`write` would refuse.

    Raises:
        TunekitError: ``TUNEKIT_BOX_PROFILE`` names another box's profile, which that box may be reading.
    """
    path = team.profile_path()
    if settings().box_profile and _profile.load(path, this_box()).refused == "another box":
        raise TunekitError(
            f"TUNEKIT_BOX_PROFILE names {path}, the profile of another box, and it is kept: "
            f"name another file for this one, or remove it"
        )


def write(minted: Minted) -> Path:
    """Write the profile where :func:`tunekit.team.profile_path` says.

    Numbers that were not minted now are kept: those that nobody mints, and those that a run on fewer CPUs cannot
    measure. A file that cannot be read is put aside.

    Raises:
        TunekitError: the file cannot be written, or :func:`check_writable` refuses.
    """
    check_writable()
    path = team.profile_path()
    before = _profile.load(path, this_box())
    try:
        if path.parent == paths.state_folder(this_box().key):
            path.parent.mkdir(parents=True, exist_ok=True)
        if before.refused and path.is_file():
            old = _manifest.aside(path, ".bad" if before.refused == "damaged" else ".old")
            os.replace(path, old)
            minted.lines.append(f"{before.problems[0]}; it is kept as {old}")
        _profile.save(path, this_box(), {**before.knobs, **minted.knobs}, {**before.measured, **minted.measured})
    except OSError as error:
        raise TunekitError(f"the box profile {path} cannot be written: {error.strerror or error}") from error
    return path


def report(minted: Minted) -> list[str]:
    """What was measured and what follows, as lines."""
    cells = [
        [name, str(value), str(_profile.BY_NAME[name].default), _profile.BY_NAME[name].meaning]
        for name, value in minted.knobs.items()
    ]
    return [*minted.lines, "", *table(["knob", "here", "default", "meaning"], cells, "lrrl")]
