# SPDX-License-Identifier: Apache-2.0
"""A family of rows that do, in a child process, everything that a bad kernel can do. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tunekit.measure.fixtures import GateCase, Regime

damage: dict[str, bool] = {}


class Row:
    """A row that answers 42 and may do something first."""

    def __init__(self, suffix: str, act: Callable[[], object] = lambda: None, answer: int = 42) -> None:
        self.suffix, self.act, self.answer = suffix, act, answer
        self.alternative: tuple[str, ...] = ()

    def address(self, name: str) -> int:
        return 0

    def call(self, name: str, *args: Any) -> int:
        self.act()
        return self.answer


def abort() -> None:
    ctypes.CDLL(None).abort()


def print_and_abort() -> None:
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def c_exit() -> None:
    ctypes.CDLL(None).exit(0)


def read_null() -> None:
    ctypes.string_at(0)


def illegal() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def divide() -> None:
    os.kill(os.getpid(), signal.SIGFPE)


def sleep() -> None:
    time.sleep(3600)


def sleep_with_the_lock() -> None:
    ctypes.PyDLL(None).sleep(3600)  # a PyDLL call keeps the GIL: no thread of the child can help


def ignore_and_sleep() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def eat_memory() -> None:
    bytearray(64 << 30)


def talk() -> None:
    os.write(1, b'{"row": "talks", "verdict": null}\n' * 3000)
    print("and more")
    os.write(2, b"\xff\x00 noise\n")


def forge() -> None:
    # Every descriptor that is open; a kernel that runs wild knows no manners.
    for number in range(3, 64):
        try:
            os.write(number, b"garbage\n")
        except OSError:
            pass


def fork_and_die() -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
    with open(os.environ["HOSTILE_PID_FILE"], "w", encoding="ascii") as file:
        file.write(str(pid))
    os._exit(3)


def fork_and_go_on() -> None:
    pid = os.fork()
    if pid == 0:
        ROWS["copies_itself"].answer = 41  # what the copy says is wrong, and it would say it first
    else:
        os.waitpid(pid, 0)


def plant() -> None:
    damage["planted"] = True


def step_on_it() -> None:
    if damage.get("planted"):
        os.abort()


class DiesAtTheEnd:
    def __del__(self) -> None:
        os.abort()


def plant_for_the_end() -> None:
    plant()
    sys.modules["a_time_bomb"] = DiesAtTheEnd()  # type: ignore[assignment]


def say_where() -> None:
    with open(os.environ["HOSTILE_PID_FILE"], "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)


ROWS = {
    row.suffix: row
    for row in (
        Row("good"),
        Row("good2"),
        Row("aborts", abort),
        Row("prints_and_aborts", print_and_abort),
        Row("exits", lambda: os._exit(0)),
        Row("exits_in_c", c_exit),
        Row("exits_in_python", lambda: sys.exit(0)),
        Row("segfaults", read_null),
        Row("illegal", illegal),
        Row("divides", divide),
        Row("sleeps", sleep),
        Row("sleeps_with_the_lock", sleep_with_the_lock),
        Row("ignores_and_sleeps", ignore_and_sleep),
        Row("eats_memory", eat_memory),
        Row("wrong", answer=41),
        Row("talks", talk),
        Row("forges", forge),
        Row("forks", fork_and_die),
        Row("copies_itself", fork_and_go_on),
        Row("plants", plant),
        Row("plants_for_the_end", plant_for_the_end),
        Row("victim", step_on_it),
        Row("says_where", say_where),
        Row("bad_at_the_regime"),
    )
}


def check(row: Any) -> str | None:
    found = row.call("f")
    return None if found == 42 else f"returned {found}, not 42"


class Family:
    def gates(self) -> list[GateCase]:
        return [GateCase("first", lambda row: None), GateCase("answer", check)]

    def regimes(self) -> list[Regime]:
        def prepare(row: Any) -> Callable[[], None]:
            if row.suffix == "bad_at_the_regime":
                raise ValueError("no operands")
            return lambda: None

        return [Regime("tile", 1.0, decides="*", prepare=prepare)]


class OddFamily(Family):
    def gates(self) -> list[GateCase]:
        return [GateCase("odd", lambda row: 7)]  # type: ignore[arg-type, return-value]


def load(*args: str) -> tuple[Mapping[str, Any], Family]:
    return ROWS, Family()


def load_odd(*args: str) -> tuple[Mapping[str, Any], Family]:
    return ROWS, OddFamily()


def load_not(*args: str) -> tuple[Mapping[str, Any], Family]:
    raise RuntimeError("no such luck")


def load_and_die(*args: str) -> tuple[Mapping[str, Any], Family]:
    os._exit(7)
