# SPDX-License-Identifier: Apache-2.0
"""What a family of kernels brings to be measured: checks (gates) and timed workloads (regimes).

The harness knows no family. It hands a :class:`BoundRow` to the family's own functions and reads an answer.
This module imports nothing of tunekit, so that families may import it from any floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

EVERYTHING = "*"
SPILLS = "spills"
"""In place of instructions in a :class:`Count`: vector loads and stores on the stack inside innermost loops."""


class BoundRow(Protocol):
    """A built row that this CPU can run, as gates and regimes see it."""

    @property
    def suffix(self) -> str:
        """The row's name."""

    @property
    def alternative(self) -> Any:
        """The features that this object was compiled for."""

    @property
    def compiler(self) -> str:
        """The first line of its compiler's ``--version``."""

    def address(self, name: str) -> int:
        """The C address of the kernel or companion ``name``."""

    def call(self, name: str, *args: Any) -> Any:
        """Call the kernel or companion ``name``."""


# Gates and regimes are typed to take Any rather than BoundRow: families annotate their functions with the
# concrete class, and a function of a subclass is no Callable of the protocol.
Run = Callable[[Any], "str | None"]
Prepare = Callable[[Any], Callable[[], None]]


@dataclass(frozen=True)
class GateCase:
    """One check that a row must pass before it may be timed.

    Attributes:
        name: short, shown in the reason of a rejection.
        run: gets the row; returns None when it passes, else the reason of the rejection. An exception rejects
            too, with its text as the reason. It runs in a child process that a bad row may take down with it.
    """

    name: str
    run: Run

    def __post_init__(self) -> None:
        _check_title("gate", self.name)


def _check_title(what: str, name: object) -> None:
    """A name stands in a line of a table, in a record and on a terminal."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"{what} {name!r}: its name must be text on one line, without control characters")


def _no_prepare(row: Any) -> Callable[[], None]:
    raise TypeError("a Regime needs prepare=")


@dataclass(frozen=True)
class Regime:
    """One workload that rows are timed on.

    Attributes:
        name: the column's title, such as ``tile``.
        work: what one call of the prepared function does, in multiply-accumulates (or the unit's own count).
        unit: what ``work / seconds / 1e9`` is called.
        decides: ``"*"`` for the primary regime, which chooses among all rows; names of row arguments for a
            secondary one, which chooses among the rows that equal the primary's winner in all other arguments;
            empty for a regime that is only reported.
        seat: a companion with a seat (see :func:`tunekit.companion`) whose own row this regime chooses, among the rows
            of the winner's layout; empty for none. It may choose arguments by ``decides``, too, and does so first.
        prepare: gets the row, builds the row's own operands and returns the function to time. That function
            should do at least 20 microseconds of work a call: it is called from Python.
        traffic: bytes that one call must read and write at least, each counted once; 0 where nobody says. The
            report's roofline needs it.
    """

    name: str
    work: float
    unit: str = "GMAC/s"
    decides: str | tuple[str, ...] = ()
    prepare: Prepare = _no_prepare
    traffic: float = 0.0
    seat: str = ""

    def __post_init__(self) -> None:
        _check_title("regime", self.name)
        if self.traffic < 0:
            raise ValueError(f"regime {self.name}: traffic must not be negative, not {self.traffic!r}")
        if not self.work > 0:
            raise ValueError(f"regime {self.name}: work must be positive, not {self.work!r}")
        if self.prepare is _no_prepare:
            raise TypeError(f"regime {self.name}: it needs prepare=, a function of a row")
        if isinstance(self.decides, str) and self.decides != EVERYTHING:
            raise ValueError(f"regime {self.name}: decides is '*' or a tuple of row arguments, not {self.decides!r}")

    @property
    def chooses(self) -> bool:
        """Whether anything follows from this regime, or it is only reported."""
        return bool(self.decides or self.seat)

    def rate(self, seconds: float) -> float:
        """What one call in ``seconds`` means in ``unit``."""
        return self.work / seconds / 1e9


@dataclass(frozen=True)
class Part:
    """A stretch of a :class:`Chain` that is timed by itself.

    Attributes:
        name: short, such as ``prefill``.
        work: what it does, in the unit's own count.
        decides: about what its time counts: ``"*"`` for the kernel's row, names of seats for theirs.
    """

    name: str
    work: float
    decides: tuple[str, ...] = (EVERYTHING,)


@dataclass(frozen=True)
class Chain:
    """What an application does with a kernel, from end to end: the last word on a row that won the races.

    It runs in fresh processes in which nothing but a row's name differs, through the calls that users make, on all
    lanes. A row's score is the time of the parts that decide ``"*"``, added up; a seat's that of those which name it.

    Attributes:
        name: shown in the record, such as ``SmolLM2-135M``.
        parts: what is timed, in order.
        prepare: called once in each process; returns a function that runs the part of the name it is given, and may
            return how often it did so (None: once). It says in an exception why it cannot (no memory, no file), and
            such a chain decides nothing.
        unit: what ``work / seconds / 1e9`` is called.
    """

    name: str
    parts: tuple[Part, ...]
    prepare: Callable[[], Callable[[str], int | None]]
    unit: str = "GMAC/s"


@dataclass(frozen=True)
class Count:
    """How often an instruction may stand in one function of a row's object: a gate on what the compiler emitted.

    Attributes:
        function: the C symbol, or ``"*"`` for the whole object.
        instructions: mnemonics, blanks between, ``*`` and ``?`` as in a shell (``"vpdpbusd"``, ``"tile* ldtilecfg"``),
            or :data:`SPILLS`. Prefixes like ``{vex}`` and suffixes like ``.4s`` are no part of a mnemonic. A word that
            stands twice, or two that match the same instruction, count it twice (``"ld2 ld2 uzp1 uzp2"``).
        least, most: the bounds, both included; ``most`` None is no bound.
        having: a regular expression that the instruction's text must match too (``"zmm"``, ``r"\\{1to16\\}"``).
        what: what is counted, in words, where the mnemonics do not say it.
        step: beyond ``least`` in whole multiples of this only: a compiler may copy a block, and not half of one.
        looped: count in one innermost loop, the one that has most of them.
    """

    function: str
    instructions: str
    least: int
    most: int | None
    having: str = ""
    what: str = ""
    step: int = 1
    looped: bool = False

    @classmethod
    def exactly(
        cls, function: str, instructions: str, number: int, having: str = "", what: str = "", looped: bool = False
    ) -> Count:
        """``number`` of them; 0: they must be absent."""
        return cls(function, instructions, number, number, having, what, looped=looped)

    @property
    def expected(self) -> str:
        """The bounds in short: ``96``, ``>=1``, ``<=8``, ``24 or 32``."""
        if self.most == self.least:
            return str(self.least)
        if self.most is None:
            return f">={self.least}" + (f" by {self.step}" if self.step > 1 else "")
        if self.step > 1:
            return " or ".join(str(number) for number in range(self.least, self.most + 1, self.step))
        return f"{self.least}..{self.most}" if self.least else f"<={self.most}"

    def allows(self, found: int) -> bool:
        """Whether so many are right."""
        beyond = found - self.least
        return beyond >= 0 and (self.most is None or found <= self.most) and beyond % self.step == 0


@dataclass(frozen=True)
class Unit:
    """One object of a row, as a family's ``emission`` sees it before it says what must be in it.

    Attributes:
        row: the row (a :class:`tunekit.rows.Row`).
        arch: the architecture that it is compiled for.
        features: the features that it is compiled for.
        symbols: the C symbol of the kernel and of each companion, by name.
    """

    row: Any
    arch: str
    features: tuple[str, ...]
    symbols: Mapping[str, str]


@runtime_checkable
class ConfirmFixtures(Protocol):
    """Fixtures that also say what an application does. Without it, the chain is one pass of the deciding regimes.

    Where it raises, or returns something else, no winner is confirmed, and what ran before stays.
    """

    def confirm(self, model: str | None) -> Sequence[Chain]:
        """The chains, in the order in which a challenger must win them.

        Args:
            model: the file of ``retune --model``, or None.

        Raises:
            ValueError: the file is none that the family reads; the message says why.
        """


@runtime_checkable
class EmissionFixtures(Protocol):
    """Fixtures that also say what a compiler must make of a row; ``python -m tunekit verify --emission`` asks."""

    def emission(self, unit: Unit) -> Sequence[Count]:
        """What must stand in the row's object, computed from the row's arguments."""


@dataclass(frozen=True)
class Sample:
    """Arguments of one call: all that a family must bring to be checked and timed.

    ``fixtures="module:function"`` may name a function that returns a list of these. Each becomes a gate: the row runs
    on copies whose ends, and then whose beginnings, lie against pages that nobody may touch, with outputs poisoned
    beforehand, and must give what the decorated Python body gives; inputs must be what they were. Those with ``work``
    are timed, too, in the order given, and the first of them decides.

    Attributes:
        name: short; the title of the gate and of the column.
        arguments: of the function, in order: arrays for pointers, numbers for scalars. Nothing writes into them.
        work: what one call does, in operations of any kind; 0: checked and not timed.
        unit: what ``work / seconds / 1e9`` is called.
        function: the kernel itself, or the name of a companion.
        rtol, atol: how far a float may be off, as :func:`numpy.isclose` counts; 0 and 0: equal bits (NaN: equal
            positions). Integers are always compared exactly.
        decides: as in :class:`Regime`; None: the first sample that is timed decides, the others are reported.
    """

    name: str
    arguments: tuple[Any, ...]
    work: float = 0.0
    unit: str = "G/s"
    function: str | None = None
    rtol: float = 0.0
    atol: float = 0.0
    decides: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_title("sample", self.name)
        if not isinstance(self.arguments, tuple):
            raise TypeError(f"sample {self.name}: arguments must be a tuple, not {type(self.arguments).__name__}")
        if not (0 <= self.work < float("inf") and self.rtol >= 0 and self.atol >= 0):
            raise ValueError(f"sample {self.name}: work, rtol and atol must not be negative, and work is a number")


@runtime_checkable
class Fixtures(Protocol):
    """What ``fixtures="module:attribute"`` of a declaration names: an object, or a class to be called.

    A function that returns a list of :class:`Sample` will do as well; gates and regimes are then made from them.
    """

    def gates(self) -> Sequence[GateCase]:
        """The checks, cheap ones first; the first that fails ends the row."""

    def regimes(self) -> Sequence[Regime]:
        """The workloads; exactly one decides ``"*"``."""


def check_regimes(regimes: Sequence[Regime]) -> list[Regime]:
    """The regimes with the primary first.

    Raises:
        ValueError: no or several primaries, or a name that appears twice.
    """
    primary = [r for r in regimes if r.decides == EVERYTHING]
    if len(primary) != 1:
        raise ValueError(f"exactly one regime must have decides='*'; here {len(primary)} of {len(regimes)} have")
    names = [r.name for r in regimes]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"two regimes are called {twice[0]!r}")
    return primary + [r for r in regimes if r.decides != EVERYTHING]
