# SPDX-License-Identifier: Apache-2.0
"""Measuring a cell: one work, one number of threads, all peers in turns on the same data.

A round calls every peer, each after a call that is not timed where calls are short, and after a rest until the
threads of the one before have stopped. A peer's time is its best window; a ratio is best against best, and its
spread the middle half of the rounds' own ratios. Before a peer is timed, its results must be right.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from .peers import MissingPeer, Model, Peer
from .work import SHAPES, Work, chain, error_of, last_cache, product

WINDOW = 0.002
"""Seconds that a timed window lasts at least; short, so that on a shared box some of them are left alone."""


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


def window(run: Any, calls: int, pause: float, warm: bool) -> float:
    """Seconds a call."""
    if pause:
        time.sleep(pause)
    if warm:
        run()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def measure(cell: Cell, peers: list[Peer], count: int, seconds: float, loaded: Loaded) -> dict[str, Any]:
    """The cell's record."""
    record: dict[str, Any] = {
        "shape": cell.shape, "tokens": cell.tokens, "regime": cell.regime, "form": cell.form, "threads": count,
        "peers": {}, "refused": {},
    }  # fmt: skip
    if cell.regime != "chain":
        record["k"], record["n"] = dimensions(cell.shape)
    runs: dict[str, tuple[Peer, Any, Any, int]] = {}
    samples: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for peer in peers:
        if peer.form != cell.form or (cell.regime == "chain" and peer.kernel):
            continue
        try:
            work = cell.work(peer)
            run, result = loaded.of(cell, peer).plan(work)
            once = window(run, 1, 0, False)
        except (MissingPeer, MemoryError, RuntimeError, OSError, ValueError, AttributeError) as error:
            record["refused"][peer.label] = str(error).partition("\n")[0][:200]
            continue
        error = error_of(work, result)
        if error > peer.tolerance:
            record["refused"][peer.label] = (
                f"computes something else: relative error {error:.2g}, {peer.tolerance:g} allowed"
            )
            continue
        if once < 0.2:
            once = min(window(run, 1, 0, False) for _ in range(2))
        runs[peer.label] = (peer, run, result, work.macs)
        samples[peer.label], calls[peer.label] = [], max(1, round(WINDOW / once))
        record["peers"][peer.label] = {
            "version": peer.version, "exact": peer.exact, "kernel": peer.kernel, "error": error,
            "bytes": sum(peer.bytes(w.k, w.n) for w in work.weights),
        }  # fmt: skip
    end, rounds, before = time.perf_counter() + seconds, 0, 0.0
    while rounds < 4 or (time.perf_counter() < end and rounds < 200):
        for label, (peer, run, _, _) in runs.items():
            short = not samples[label] or samples[label][-1] < 0.02
            samples[label].append(window(run, calls[label], before if count > 1 else 0, short))
            before = peer.settle
        rounds += 1
    for label, (_, _, result, macs) in runs.items():
        best, times = min(samples[label]), samples[label]
        record["peers"][label] |= {
            "seconds": best, "median": statistics.median(times), "gmacs": macs / best / 1e9, "rounds": rounds,
        }  # fmt: skip
        close = getattr(result, "close", None)
        if close:
            close()
    compare(record, samples, {label: macs for label, (_, _, _, macs) in runs.items()})
    return record


def compare(record: dict[str, Any], samples: dict[str, list[float]], macs: dict[str, int]) -> None:
    """Add ours against each peer: ``ratio`` best against best, ``low`` and ``high`` of the rounds' middle half."""
    ours = next((label for label in samples if label.startswith("tunekit") and "kernel" not in label), None)
    for label, times in samples.items():
        if ours is None or label == ours:
            continue
        scale = macs[ours] / macs[label]
        each = sorted(t / o * scale for t, o in zip(times, samples[ours], strict=True))
        found = record["peers"][label]
        found["ratio"] = min(times) / min(samples[ours]) * scale
        found["low"], found["high"] = each[len(each) // 4], each[(3 * len(each)) // 4]
