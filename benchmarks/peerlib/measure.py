# SPDX-License-Identifier: Apache-2.0
"""Measuring a cell: one work, one number of threads, all peers in turns on the same data.

A round calls every peer, each after calls that are not timed where calls are short, and on several threads after a
rest until those of the one before have stopped. A peer's time is its best window; a ratio is best against best, and its
spread the middle half of the rounds' own ratios. Before a peer is timed, its results must be right.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunekit.q8.chains import last_cache

from . import limits
from .peers import MissingPeer, Model, Peer, Tunekit
from .work import LAYER, SHAPES, Work, chain, error_of, product

WINDOW = 0.002
"""Seconds that a timed window lasts at least; short, so that on a shared box some of them are left alone."""

SETTLING = 0.03
"""Seconds that a peer of several threads runs before it is timed: threads just woken may share a CPU for so long."""


@dataclass(frozen=True)
class Cell:
    """What is multiplied: a shape or ``SmolLM2-135M``, tokens, ``hot``, ``streamed`` or ``chain``, whose values."""

    shape: str
    tokens: int
    regime: str
    form: str = "q8_0"

    def work(self, peer: Peer) -> Work:
        """For one peer: how many matrices are streamed depends on the bytes that it holds them in."""
        if self.regime == "chain":
            return chain(self.tokens)
        k, n = dimensions(self.shape)
        copies = max(1, math.ceil(4 * last_cache() / peer.bytes(k, n))) if self.regime == "streamed" else 1
        return product(k, n, self.tokens, self.form, copies)

    @property
    def held(self) -> tuple[str, str, str]:
        """Cells with the same one share loaded weights."""
        return self.shape, self.regime, self.form


def dimensions(shape: str) -> tuple[int, int]:
    """K and N of a shape's name, or of ``KxN``."""
    if shape in SHAPES:
        return SHAPES[shape]
    k, _, n = shape.partition("x")
    return int(k), int(n)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Loaded:
    """The weights of the current cell in each peer's memory; another cell's replace them."""

    def __init__(self) -> None:
        self.key: tuple[str, str, str] | None = None
        self.models: dict[str, Model] = {}

    def of(self, cell: Cell, peer: Peer) -> Model:
        if self.key != cell.held:
            self.close()
            self.key = cell.held
        if peer.label not in self.models:
            self.models[peer.label] = peer.load(cell.work(peer))
        return self.models[peer.label]

    def close(self) -> None:
        for model in self.models.values():
            model.close()
        self.models.clear()


def parts_of(cell: Cell, work: Work) -> list[Work]:
    """What is timed by itself: a chain's layers and its head one by one, anything else as a whole.

    A chain takes longer than a shared box leaves a core alone; its time is the sum of its parts' best.
    """
    if cell.regime != "chain":
        return [work]
    cuts = range(0, len(work.steps), len(LAYER))
    return [Work(work.weights, work.acts, work.steps[at : at + len(LAYER)]) for at in cuts]


def window(runs: list[Any], calls: int, pause: float = 0.0, warm: float | None = None) -> list[float]:
    """Seconds a call of each part, in order, after so many seconds of calls that are not timed (at least one)."""
    if pause:
        time.sleep(pause)
    end = None if warm is None else time.perf_counter() + warm
    while end is not None:
        for run in runs:
            run()
        end = end if time.perf_counter() < end else None
    found = []
    for run in runs:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls)
    return found


@dataclass
class Contender:
    """A peer that is timed in a cell. ``samples``: of each round, seconds of each part."""

    peer: Peer
    runs: list[Any]
    results: list[Any]
    macs: int
    calls: int
    samples: list[list[float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        return sum(map(min, zip(*self.samples, strict=True)))

    @property
    def rounds(self) -> list[float]:
        return [sum(parts) for parts in self.samples]


def enter(cell: Cell, peer: Peer, loaded: Loaded, record: dict[str, Any]) -> Contender | None:
    """Load, plan, run and check; None where the peer is refused, with the reason in the record."""
    try:
        work = cell.work(peer)
        parts = parts_of(cell, work)
        plans = [loaded.of(cell, peer).plan(part) for part in parts]
        runs = [run for run, _ in plans]
        once = sum(window(runs, 1))
    except (MissingPeer, MemoryError, RuntimeError, OSError, ValueError, AttributeError) as error:
        record["refused"][peer.label] = str(error).partition("\n")[0][:200]
        return None
    error = max(error_of(parts[i], plans[i][1]) for i in (0, -1))
    if error > peer.tolerance:
        record["refused"][peer.label] = (
            f"computes something else: relative error {error:.2g}, {peer.tolerance:g} allowed"
        )
        return None
    if once < 0.2:
        once = min(sum(window(runs, 1)) for _ in range(2))
    record["peers"][peer.label] = {
        "version": peer.version, "exact": peer.exact, "kernel": peer.kernel, "error": error,
        "bytes": sum(peer.bytes(w.k, w.n) for w in work.weights),
    }  # fmt: skip
    calls = 1 if len(parts) > 1 else max(1, round(WINDOW / once))
    return Contender(peer, runs, [result for _, result in plans], work.macs, calls)


def measure(cell: Cell, peers: list[Peer], count: int, seconds: float, loaded: Loaded) -> dict[str, Any]:
    """The cell's record."""
    record: dict[str, Any] = {
        "shape": cell.shape, "tokens": cell.tokens, "regime": cell.regime, "form": cell.form, "threads": count,
        "peers": {}, "refused": {},
    }  # fmt: skip
    if cell.regime != "chain":
        record["k"], record["n"] = dimensions(cell.shape)
    wanted = [p for p in peers if p.form == cell.form and not (cell.regime == "chain" and p.kernel)]
    found = [c for p in wanted if (c := enter(cell, p, loaded, record)) is not None]
    # A vector from memory is held against plain reading, in the same rounds and as long a stretch of it.
    plain = cell.regime == "streamed" and cell.tokens == 1 and bool(found)
    size = limits.beyond_caches()
    room = np.ones(size + limits.AHEAD if plain else 0, np.uint8)
    ways = limits.readings(room, count, lambda: (0, size)) if plain else {}
    reads = dict.fromkeys(ways, math.inf)
    end, rounds, before = time.perf_counter() + seconds, 0, 0.0
    while found and (rounds < 4 or (time.perf_counter() < end and rounds < 200)):
        for c in found:
            short = not c.samples or sum(c.samples[-1]) < 0.02
            pause, warm = (before, SETTLING) if count > 1 else (0.0, 0.0)
            c.samples.append(window(c.runs, c.calls, pause, warm if short else None))
            before = c.peer.settle
        for way, read in ways.items():
            reads[way] = min(reads[way], *window([read], 1))
        rounds += 1
    if reads:
        record["read"] = size / min(reads.values()) / 1e9
    for c in found:
        record["peers"][c.peer.label] |= {
            "seconds": c.best, "median": statistics.median(c.rounds), "gmacs": c.macs / c.best / 1e9, "rounds": rounds,
        }  # fmt: skip
        for result in c.results:
            close = getattr(result, "close", None)
            if close:
                close()
    compare(record, found)
    return record


def compare(record: dict[str, Any], found: list[Contender]) -> None:
    """Add ours against each peer: ``ratio`` best against best, ``low`` and ``high`` of the rounds' middle half."""
    ours = next((c for c in found if isinstance(c.peer, Tunekit) and not c.peer.kernel), None)
    for c in found:
        if ours is None or c is ours:
            continue
        scale = ours.macs / c.macs
        each = sorted(t / o * scale for t, o in zip(c.rounds, ours.rounds, strict=True))
        record["peers"][c.peer.label] |= {
            "ratio": c.best / ours.best * scale, "low": each[len(each) // 4], "high": each[(3 * len(each)) // 4],
        }  # fmt: skip
