# SPDX-License-Identifier: Apache-2.0
"""A simulated box for the tests of measuring: its time passes only in kernels, with noise and drift as asked."""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class SimulatedBox:
    """A clock and kernels that take time on it.

    Args:
        seed: of the noise.
        noise: relative standard deviation of one window.
        drift: factor on all times, as a function of the moment in seconds.
        bursts: how likely a window meets a neighbour's burst, which makes it 1.2 to 2 times as long.
    """

    def __init__(
        self,
        seed: int = 0,
        noise: float = 0.0,
        drift: Callable[[float], float] = lambda now: 1.0,
        bursts: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.noise, self.drift, self.bursts = noise, drift, bursts
        self.factor = 1.0
        self.order: list[str] = []

    def clock(self) -> float:
        """The moment; a window begins and ends with a look at the clock, so here the luck is drawn anew."""
        self.factor = math.exp(self.rng.gauss(0, self.noise)) if self.noise else 1.0
        if self.bursts and self.rng.random() < self.bursts:
            self.factor *= self.rng.uniform(1.2, 2.0)
        return self.now

    def kernel(self, seconds: float, name: str = "") -> Callable[[], None]:
        """A kernel that takes so many seconds a call."""

        def call() -> None:
            if name and (not self.order or self.order[-1] != name):
                self.order.append(name)
            self.now += seconds * self.factor * self.drift(self.now)

        return call
