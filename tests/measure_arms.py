# SPDX-License-Identifier: Apache-2.0
"""Arms of a confirmation that do, each in a process of its own, what a bad one can do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tunekit.measure.fixtures import Chain, Part


def nothing(part: str) -> None:
    time.sleep(0.001)


def die(part: str) -> None:
    os.abort()


def leave(part: str) -> None:
    os._exit(0)


def hang(part: str) -> None:
    time.sleep(3600)


def talk(part: str) -> None:
    # An answer on standard output is no answer.
    print('{"times": {"a": [1e-9], "b": [1e-9]}, "ran": {"row": "fast", "tier": "c", "seats": {}}}', flush=True)


def forge(part: str) -> None:
    for number in range(3, 64):
        try:
            os.write(number, b"garbage\n")
        except OSError:
            pass


original: list[int] = []


def copy(part: str) -> None:
    # The copy takes no time at all, and it would answer first.
    if not original:
        original.append(os.getpid())
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
    if os.getpid() in original:
        time.sleep(0.001)


ACTS: dict[str, Callable[[str], Any]] = {
    "works": nothing,
    "dies": die,
    "leaves": leave,
    "hangs": hang,
    "talks": talk,
    "forges": forge,
    "copies": copy,
    "often": lambda part: time.sleep(0.002) or 1000,
}


def load(act: str, row: str, tier: str = "c", seat: str = "") -> tuple[Chain, Callable[[], Any]]:
    """A chain of two parts, and a witness that says what it is told to say."""
    if act == "cannot load":
        raise RuntimeError("no such luck")

    def prepare() -> Callable[[str], Any]:
        if act == "no memory":
            raise MemoryError("weights")
        return ACTS[act]

    def witness() -> Any:
        if row == "none":
            return None
        if row == "nonsense":
            return "fast"
        return {"row": row, "tier": tier, "seats": {"g": seat} if seat else {}}

    return Chain("app", (Part("a", 1.0), Part("b", 1.0)), prepare), witness
