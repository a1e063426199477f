# SPDX-License-Identifier: Apache-2.0
"""Rows that behave in their first calls, as long as a check lasts, and badly later. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measure_hostile import Row, forge, illegal, plant, plant_for_the_end, read_null, sleep_with_the_lock, step_on_it

from tunekit.measure.fixtures import GateCase, Regime

LATE = 3
"""Calls that a row does well; on the busiest box a race has more."""


def plant_once_for_the_end() -> None:
    if "a_time_bomb" not in sys.modules:
        plant_for_the_end()


def raise_without_words() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    raise Mute


def interrupt() -> None:
    raise KeyboardInterrupt


def alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    time.sleep(1)


def close_everything() -> None:
    os.closerange(0, 64)


def ignore_and_spin() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def say_where_and_sleep() -> None:
    with open(os.environ["HOSTILE_PID_FILE"], "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)


def start_another_session() -> None:
    if not Path(os.environ["HOSTILE_PID_FILE"]).exists():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        with open(os.environ["HOSTILE_PID_FILE"], "w", encoding="ascii") as file:
            file.write(str(child.pid))


forked: list[bool] = []


def fork() -> None:
    # Once; the copy is first, and what it would tell is another story.
    if forked:
        return
    forked.append(True)
    pid = os.fork()
    if not pid:
        raise RuntimeError("in the copy")
    os.waitpid(pid, 0)


ACTS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(0),
    "exits_in_c": lambda: ctypes.CDLL(None).exit(0),
    "exits_in_python": lambda: sys.exit(0),
    "segfaults": read_null,
    "illegal": illegal,
    "sleeps_with_the_lock": sleep_with_the_lock,
    "ignores_and_spins": ignore_and_spin,
    "raises_without_words": raise_without_words,
    "interrupts": interrupt,
    "alarms": alarm,
    "closes": close_everything,
    "forges": forge,
    "forks": fork,
    "starts_another_session": start_another_session,
    "plants": plant,
    "plants_for_the_end": plant_once_for_the_end,
    "victim": step_on_it,
    "says_where": say_where_and_sleep,
    "good": lambda: None,
    "good2": lambda: None,
}
ROWS: Mapping[str, Row] = {name: Row(name, act) for name, act in ACTS.items()}


class Family:
    def gates(self) -> list[GateCase]:
        return [GateCase("nothing", lambda row: None)]

    def regimes(self) -> list[Regime]:
        def prepare(row: Any) -> Callable[[], None]:
            calls = 0

            def call() -> None:
                nonlocal calls
                calls += 1
                if calls > LATE:
                    row.call("f")
                time.sleep(0.0002)

            return call

        return [Regime("tile", 1.0, decides="*", prepare=prepare), Regime("other", 1.0, prepare=prepare)]


def load(*args: str) -> tuple[Mapping[str, Any], Family]:
    return ROWS, Family()
