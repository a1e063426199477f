# SPDX-License-Identifier: Apache-2.0
"""Progress: on a terminal of any width, in a log, for programs; with a pseudo-terminal where it matters."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest

from tunekit.console import PROGRESS, Console, Step, clip

STEP = Step("race", "tunekit.q8q8", "tile (1 of 3)", "screening", 2, 5, "rounds", "22 rows in turns")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (200, "race tunekit.q8q8, tile (1 of 3): screening 2/5 rounds, 22 rows in turns"),
        (60, "race tile: screening 2/5 rounds, 22 rows in turns"),
        (40, "race tile: screening 2/5 rounds"),
        (20, "race tile: 2/5"),
        (9, "race: 2/5"),
        (5, "race:"),
        (1, "r"),
    ],
)
def test_a_narrow_terminal_keeps_stage_and_count(columns: int, line: str) -> None:
    assert STEP.line(columns) == line


def test_every_width_fits() -> None:
    wide = Step("check", "漢字.核", "", "", 1, 22, "rows", "dot_漢\x1b[2J_nr5: tile")
    for step in (STEP, wide, Step("stamp", "tunekit")):
        for columns in range(1, 120):
            line = step.line(columns)
            assert line and clip(line, columns) == line and "\x1b" not in line
    assert clip("漢字", 3) == "漢" and clip("e\u0301e", 2) == "e\u0301e"


def test_a_log_has_a_line_a_stage_and_a_heartbeat() -> None:
    err, clock = io.StringIO(), Clock()
    console = Console(io.StringIO(), err, environ={}, clock=clock)
    for done in range(100):
        clock.now += 1
        console.step(Step("build", "tunekit", "", "", done, 100, "objects", f"row {done}"))
    console.step(STEP)
    console.step(Step("race", "tunekit.q8q8", "tile (1 of 3)", "final", 3, 15, "rounds"))
    console.step(Step("stamp", "tunekit"))
    assert err.getvalue().splitlines() == [
        "build tunekit: 100 objects",
        "build tunekit: 30/100 objects",
        "build tunekit: 60/100 objects",
        "build tunekit: 90/100 objects",
        "race tunekit.q8q8, tile (1 of 3): 5 rounds",
        "stamp tunekit",
    ]


def test_programs_get_json_lines_and_messages_among_them() -> None:
    err, clock = io.StringIO(), Clock()
    console = Console(io.StringIO(), err, environ={}, clock=clock, progress="json", quiet=True)
    for done in range(11):
        clock.now += 0.0625
        console.step(Step("check", "s.k", "", "", done, 10, "rows", "r\n\x1b"))
    console.complain("an odd\nthing")
    *lines, last = [json.loads(line) for line in err.getvalue().splitlines()]
    assert [line["done"] for line in lines] == [0, 4, 8, 10]  # a line each fifth of a second, and the last
    assert lines[0] == {
        "event": "progress", "stage": "check", "subject": "s.k", "done": 0, "total": 10, "unit": "rows", "item": "r\n\x1b",
    }  # fmt: skip
    assert last == {"event": "message", "text": "an odd\nthing"}


@pytest.mark.parametrize(
    ("terminal", "quiet", "environ", "progress", "kind"),
    [
        (True, False, {}, "auto", "live"),
        (True, False, {"NO_COLOR": "1"}, "auto", "live"),  # the line has no colour
        (True, False, {"TERM": "dumb"}, "auto", "lines"),
        (False, False, {}, "auto", "lines"),
        (True, False, {}, "plain", "lines"),
        (True, True, {}, "auto", ""),
        (True, True, {}, "plain", ""),
        (False, True, {}, "json", "json"),
        (True, False, {}, "json", "json"),
        (True, False, {}, "none", ""),
    ],
)
def test_who_gets_what(terminal: bool, quiet: bool, environ: dict[str, str], progress: str, kind: str) -> None:
    assert progress in PROGRESS
    err = Terminal() if terminal else io.StringIO()
    console = Console(io.StringIO(), err, quiet=quiet, environ=environ, progress=progress)
    console.step(STEP)
    text = err.getvalue()
    assert "\x1b[3" not in text  # no colour, anywhere
    found = "live" if "\x1b[2K" in text else "json" if text.startswith("{") else "lines" if text else ""
    assert found == kind


def test_a_closed_or_missing_stream_ends_progress_and_not_the_work() -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err, environ={})
    err.close()
    console.step(STEP)
    console.complain("x")
    silent = Console(io.StringIO(), None, environ={}, progress="json")
    silent._err = None
    silent.step(STEP)


# --- a real terminal -------------------------------------------------------------------------------------

SCRIPT = """
import sys
from tunekit.console import Console, Step
console = Console()
for done in range(3):
    console.step(Step("race", "tunekit.q8q8", "tile (1 of 3)", "screening", done, 3, "rounds", "22 rows in turns"))
console.say("the result")
console.note("a note")
"""


def on_terminal(command: list[str], columns: int, stdout: Any = None, **environ: str) -> str:
    """What a command writes to a terminal of so many columns; standard output too, unless it goes elsewhere."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environ}
    env.pop("COLUMNS", None)
    text = b""
    with subprocess.Popen(command, stdin=its, stdout=stdout or its, stderr=its, env=env) as process:
        os.close(its)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            ready, _, _ = select.select([own], [], [], 1)
            try:
                got = os.read(own, 65536) if ready else b"" if process.poll() is not None else None
            except OSError:  # the other side is closed
                break
            if got == b"":
                break
            text += got or b""
    os.close(own)
    assert process.returncode == 0, text
    return text.decode()


def screen(text: str) -> list[str]:
    """The lines that are left on the screen."""
    return [re.sub(r"^.*\r?\x1b\[2K", "", line.rstrip("\r")) for line in text.split("\n")]


@pytest.mark.parametrize("columns", [200, 40, 10])
def test_the_line_is_rewritten_never_wrapped_and_gone_in_the_end(columns: int) -> None:
    text = on_terminal([sys.executable, "-c", SCRIPT], columns)
    parts = [part for part in re.split(r"\r?\n|\r|\x1b\[2K", text) if part.startswith("race")]
    assert len(parts) == 3 and all(len(part) < columns for part in parts) and len(set(parts)) == 3
    assert screen(text) == ["the result", "a note", ""]


def test_the_width_is_that_of_the_terminal_that_is_written_to() -> None:
    """With standard output in a pipe, its width says nothing."""
    text = on_terminal([sys.executable, "-c", SCRIPT], 30, stdout=subprocess.DEVNULL)
    parts = [part for part in re.split(r"\r?\n|\r|\x1b\[2K", text) if part.startswith("race")]
    assert parts and all(len(part) < 30 for part in parts)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    text = on_terminal([sys.executable, "-c", SCRIPT], 80, TERM="dumb")
    assert text.split() == "race tunekit.q8q8, tile (1 of 3): 3 rounds the result a note".split()
    assert "\x1b" not in text
