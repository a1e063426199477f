# SPDX-License-Identifier: Apache-2.0
"""Fakes for the tests of measuring: a box whose time passes only in kernels, and a house made of plain data."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tunekit.errors import ManifestError
from tunekit.kernel import Kernel, Scope
from tunekit.measure.confirm import Arm, ArmFailed, Times
from tunekit.measure.family import row_digests
from tunekit.measure.fixtures import Chain, Fixtures, GateCase, Part, Regime
from tunekit.measure.gate import Job
from tunekit.measure.journal import Journal
from tunekit.measure.race import Deadline
from tunekit.rows import Row
from tunekit.tuner import Built, House, Options


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


# --- a house without builders, files and CPUs --------------------------------------------------------------

WORLDS: dict[str, tuple[Mapping[str, Any], Fixtures]] = {}
"""What :func:`load` hands out, by the name of the kernel."""


def load(name: str, *compilers: str) -> tuple[Mapping[str, Any], Fixtures]:
    return WORLDS[name]


class FakeRow:
    """A built row: its time in each regime, and what its gate says."""

    def __init__(self, suffix: str, times: Mapping[str, float], verdict: str | None = None) -> None:
        self.suffix, self.times, self.verdict = suffix, times, verdict
        self.alternative: tuple[str, ...] = ()
        self.compiler = "cc 1.0"

    def address(self, name: str) -> int:
        return 0

    def call(self, name: str, *args: Any) -> None:
        return None


class FakeFixtures:
    """Regimes on a simulated box; ``decides`` by regime name."""

    def __init__(self, box: SimulatedBox, decides: Mapping[str, str | tuple[str, ...]]) -> None:
        self.box, self.decides = box, decides

    def gates(self) -> list[GateCase]:
        return [GateCase("exact", lambda row: row.verdict)]

    def regimes(self) -> list[Regime]:
        def prepare(name: str) -> Callable[[Any], Callable[[], None]]:
            return lambda row: self.box.kernel(row.times[name])

        return [Regime(name, 1e6, decides=what, prepare=prepare(name)) for name, what in self.decides.items()]


class FakeHouse(House):
    """The rooms around the tuner, as plain data.

    Attributes:
        manifest: what stands in the manifest file; ``written`` counts the writes.
        events: what was asked for, in order.
        chain_times: seconds by row and part (``*``: of any); the row's time on the tile where it is not said.
        journals: a folder in which runs are remembered.
        arms: what was started to confirm winners, in order.
    """

    def __init__(self, scope: str = "toy") -> None:
        self.scope = Scope(scope)
        self.declared: list[Kernel] = []
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.reasons: dict[str, Mapping[str, str]] = {}
        self.fixture: dict[str, Fixtures] = {}
        self.manifest: dict[str, str] = {}
        self.last: Any = None
        self.events: list[str] = []
        self.refusal: str | None = None
        self.built = Built("cc 1.0", 3, 4)
        self.unwritable = ""
        self.turn = True
        self.missing: set[str] = set()
        self.seated: dict[str, Mapping[str, str]] = {}
        self.chained: list[Chain] = [Chain("app", (Part("all", 1e6),), lambda: lambda part: None)]
        self.chain_times: dict[tuple[str, str], float] = {}
        self.journals: Path | None = None
        self.arms: list[str] = []
        self.verdicts: dict[tuple[str, tuple[str, ...]], str | None] = {}

    def add(
        self,
        name: str,
        rows: Sequence[Row],
        fallback: str,
        bound: Sequence[FakeRow],
        fixtures: Fixtures,
        why: Mapping[str, str] | None = None,
    ) -> Kernel:
        chain = tuple(part for part in fallback.split(";") if part)
        kernel = Kernel(name, self.scope, cast(Any, None), "t", tuple(rows), chain, module=f"{self.scope.name}.k")
        self.declared.append(kernel)
        self.rows[name] = {row.suffix: row for row in bound}
        self.reasons[name] = dict(why or {})
        self.fixture[name] = fixtures
        WORLDS[name] = (self.rows[name], fixtures)
        return kernel

    def scopes(self) -> dict[str, str]:
        return {self.scope.name: f"{self.scope.name}.k"}

    def kernels(self, scope: str) -> Sequence[Kernel]:
        return self.declared

    def all_kernels(self) -> dict[str, Sequence[Kernel]]:
        return {self.scope.name: self.declared}

    def refuse_to_write(self) -> str | None:
        return self.refusal

    def can_write(self, scope: str) -> None:
        if self.unwritable:
            raise ManifestError(self.unwritable)

    @contextlib.contextmanager
    def alone(self, deadline: Deadline, tell: Callable[[str], None]) -> Iterator[bool]:
        yield self.turn

    def unbuilt(self, kernel: Kernel, suffix: str) -> bool:
        return suffix in self.missing

    def explained(self, kernel: Kernel, why: Mapping[str, str], problem: str) -> Mapping[str, str]:
        return {**why, **{suffix: f"not built: {problem}" for suffix in self.missing if problem}}

    def impossible(self, kernel: Kernel, suffix: str) -> str | None:
        why = self.reasons[kernel.name].get(suffix)
        return why if suffix in self.rows[kernel.name] or why else "the grid has no such row"

    def read_model(self, kernels: Sequence[Kernel], model: str) -> None:
        self.events.append(f"read {model}")

    def compilers(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names)

    def build(
        self, kernels: Sequence[Kernel], progress: Callable[[int, int, str], None], compiler: str = ""
    ) -> Built:
        self.events.append(f"build {compiler}".strip())
        progress(1, 2, "a row")
        return self.built

    def stamp(self, kernels: Sequence[Kernel]) -> None:
        self.events.append("stamp")

    def grid(self, kernel: Kernel, compilers: Sequence[str]) -> Mapping[str, Any]:
        return self.rows[kernel.name]

    def judged(self, kernel: Kernel, verdicts: Mapping[tuple[str, tuple[str, ...]], str | None]) -> None:
        self.verdicts.update(verdicts)

    def why_not(self, kernel: Kernel, compilers: Sequence[str]) -> Mapping[str, str]:
        return self.reasons[kernel.name]

    def fixtures(self, kernel: Kernel) -> Fixtures:
        return self.fixture[kernel.name]

    def job(self, kernel: Kernel) -> Job:
        return Job("measure_fakes:load", (kernel.name,))

    def incumbent(self, kernel: Kernel) -> str | None:
        return self.manifest.get(kernel.name)

    def box(self) -> tuple[dict[str, Any], str]:
        return {"arch": "pdp11"}, "PDP-11/70"

    def hashes(self, kernel: Kernel) -> dict[str, str]:
        return {"grid": "abc"}

    def record(self, scope: str) -> Any:
        return self.last

    def seats(self, kernel: Kernel) -> Mapping[str, str]:
        return self.seated.get(kernel.name, {})

    def chains(self, kernel: Kernel, fixtures: Fixtures, model: str | None) -> Sequence[Chain]:
        return self.chained

    def arm(self, kernel: Kernel, arm: Arm, chain: Chain, model: str | None, deadline: Deadline) -> Times:
        """The time of a row (or of the row in the seat, for parts that decide one) on the parts of a chain."""
        self.arms.append(arm.label)
        times = {}
        for part in chain.parts:
            row = next((arm.seats[seat] for seat in part.decides if seat in arm.seats), arm.row)
            usual = getattr(self.rows[kernel.name][row], "times", {}).get("tile", 1.0)
            seconds = self.chain_times.get((row, part.name), self.chain_times.get((row, "*"), usual))
            if seconds <= 0:
                raise ArmFailed("exit status 0 before the verdict")
            times[part.name] = [seconds, seconds * 1.01]
        return times

    def journal(self, kernel: Kernel, compiler: str, options: Options, compilers: Mapping[str, str]) -> Journal:
        path = self.journals / f"{kernel.key}.json" if self.journals else None
        key = {"compiler": compiler, "seed": options.seed}
        return Journal(path, key, row_digests(kernel, compilers), options.fresh)

    def write(
        self, winners: Mapping[Kernel, str], record: dict[str, Any], seats: Mapping[Kernel, Mapping[str, str]]
    ) -> str:
        self.seated = {kernel.name: dict(own) for kernel, own in seats.items()}
        self.events.append("write")
        self.manifest.update({kernel.name: suffix for kernel, suffix in winners.items()})
        self.last = json.loads(json.dumps(record, allow_nan=False))
        return "/state/toy.tune.json"
