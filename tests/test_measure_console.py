# SPDX-License-Identifier: Apache-2.0
"""What is printed where: terminals, pipes, closed pipes, ASCII locales, hostile text."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from tunekit import console as module
from tunekit.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_table_is_aligned_and_cells_cannot_steer_the_terminal() -> None:
    lines = module.table(["row", "GMAC/s", "reason"], [["a", "1.5"], ["longer", "12.0", "bad\x1b[2J\nword"]], "lr")
    assert lines == [
        "row     GMAC/s  reason",
        "------  ------  ------------",
        "a          1.5",
        "longer    12.0  bad [2J word",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0 s"), (0.44, "0.4 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119.4, "119 s"), (125, "2 min 05 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert module.seconds(value) == text


def test_progress_only_on_a_terminal_and_gone_before_the_next_line() -> None:
    out, err = io.StringIO(), Terminal()
    console = Console(out, err, environ={})
    console.progress("one\ntwo" + "x" * 500)
    assert err.getvalue().startswith("\r\x1b[2Kone two") and "\n" not in err.getvalue() and len(err.getvalue()) < 200
    console.note("a note")
    assert err.getvalue().endswith("\r\x1b[2Ka note\n")
    console.clear()
    assert err.getvalue().endswith("a note\n")
    assert out.getvalue() == ""


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}])
def test_no_progress_elsewhere(environ: dict[str, str]) -> None:
    for err, quiet, where in ((io.StringIO(), False, {}), (Terminal(), True, {}), (Terminal(), False, environ)):
        console = Console(io.StringIO(), err, quiet=quiet, environ=where)
        console.progress("working")
        assert err.getvalue() == ""


def test_quiet_drops_notes_and_keeps_complaints() -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err, quiet=True, environ={})
    console.note("dropped")
    console.complain("kept")
    assert err.getvalue() == "kept\n"


def test_colour_follows_terminal_and_no_color() -> None:
    assert Console(Terminal(), Terminal(), environ={}).style("x", "green") == "\x1b[32mx\x1b[0m"
    assert Console(Terminal(), Terminal(), environ={"NO_COLOR": "1"}).style("x", "green") == "x"
    assert Console(Terminal(), Terminal(), environ={"NO_COLOR": ""}).style("x", "red") == "\x1b[31mx\x1b[0m"
    assert Console(io.StringIO(), Terminal(), environ={}).style("x", "green") == "x"


def test_no_streams_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    console = Console(environ={})
    console.say("x")
    console.complain("y")
    console.progress("z")


def test_an_ascii_stream_gets_escapes() -> None:
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"), io.StringIO(), environ={})
    console.say("Zürich")
    assert raw.getvalue() == b"Z\\xfcrich\n"


def test_a_document_is_strict_json() -> None:
    with pytest.raises(ValueError):
        Console(io.StringIO(), io.StringIO(), environ={}).document({"x": float("nan")})


def test_a_reader_that_goes_away_ends_the_output_without_a_traceback() -> None:
    script = (
        "from tunekit.console import Console\nc = Console()\n"
        "for i in range(20000): c.say('line')\nc.complain('worked on')"
    )
    read, write = os.pipe()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, env=env) as process:
        os.close(write)
        os.read(read, 5)
        os.close(read)
        assert process.stderr is not None
        assert process.stderr.read() == b"worked on\n"
        assert process.wait(10) == 0
