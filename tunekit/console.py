# SPDX-License-Identifier: Apache-2.0
"""What a command says on a terminal, in a pipe and in a log.

Results go to stdout, progress and notes to stderr. On a terminal progress is one line that is rewritten in place;
elsewhere a :class:`Step` makes one plain line when its stage begins and one every half minute, so that a log shows
where it stands; programs can have JSON lines. Colour follows ``NO_COLOR`` and ``TERM=dumb``. A reader that goes away
(``| head -1``) ends the output, not the work; neither does a full disk, but there somebody meant to keep what was
written, so :attr:`Console.lost` says that it was not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import argparse

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_CLEAR = "\r\x1b[2K"

PROGRESS = ("auto", "plain", "json", "none")
"""How progress is told: as the stream asks for, or as plain lines, as JSON lines, or not at all."""

HEARTBEAT = 30.0
"""Seconds after which a stage is mentioned again in a log."""

_JSON_EVERY = 0.2  # seconds between JSON lines of one stage


def no_empty(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that were given an empty word, such as a shell variable that is not set: exit status 2."""
    for name, value in vars(options).items():
        if any(isinstance(word, str) and not word.strip() for word in (value if isinstance(value, list) else [value])):
            parser.error(f"{name.replace('_', '-')}: it is empty; name something, or leave it out")


_documents: list[TextIO | None] = []


def results() -> TextIO | None:
    """Where a command's result goes: standard output, or what :func:`apart` kept of it."""
    return _documents[-1] if _documents else sys.stdout


@contextlib.contextmanager
def apart(active: bool = True) -> Iterator[None]:
    """Keep standard output for the document: what others write there meanwhile, Python or C, goes to standard error.

    Somebody else's code runs in this process (declarations, samples, kernels), and may print.
    """
    out = sys.stdout
    if not active or out is None:
        yield
        return
    kept = -1
    try:
        out.flush()
        if out.fileno() == 1:
            kept = os.dup(1)
            try:
                os.dup2(2, 1)
            except OSError:  # standard error is closed
                _discard(out)
    except (OSError, ValueError, AttributeError):  # no file of the system, as in a test or a notebook
        pass
    document: TextIO = out
    if kept >= 0:
        document = open(kept, "w", encoding=out.encoding, errors=out.errors)  # noqa: SIM115 - closed below
    _documents.append(document)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = out
        _documents.pop()
        if kept >= 0:
            _flush_c()
            with contextlib.suppress(OSError, ValueError):
                document.flush()
            with contextlib.suppress(OSError, ValueError):
                os.dup2(kept, 1)
            with contextlib.suppress(OSError, ValueError):
                document.close()


def _flush_c() -> None:
    """Have C write out what a kernel or a library printed, while standard output still is where it belongs."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


def plain(text: str) -> str:
    """Text on one line and free of control characters: a compiler's or a kernel's words cannot steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """Lines of an aligned table.

    Args:
        headers: the columns' names.
        rows: cells as text; a row shorter than ``headers`` is filled with empty cells.
        align: one letter a column, ``l`` or ``r``; columns beyond its end are ``l``.
    """
    body = [[plain(cell) for cell in row] + [""] * (len(headers) - len(row)) for row in rows]
    grid = [[plain(cell) for cell in headers], *body]
    widths = [max(len(line[i]) for line in grid) for i in range(len(headers))]
    sides = align.ljust(len(headers), "l")

    def line(cells: Sequence[str]) -> str:
        parts = (c.rjust(w) if s == "r" else c.ljust(w) for c, w, s in zip(cells, widths, sides, strict=True))
        return "  ".join(parts).rstrip()

    return [line(grid[0]), line(["-" * w for w in widths]), *(line(cells) for cells in body)]


def seconds(value: float) -> str:
    """A duration as people write it: ``0.4 s``, ``12 s``, ``3 min 05 s``."""
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60:02d} s"


def clip(text: str, columns: int) -> str:
    """As much of a line as fits into so many columns; wide characters take two."""
    used = 0
    for at, char in enumerate(text):
        used += 2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char)
        if used > columns:
            return text[:at]
    return text


@dataclass(frozen=True)
class Step:
    """Where a long piece of work stands.

    Attributes:
        stage: what is being done: ``build``, ``check``, ``race``, ``stamp``, ``probe`` ...
        subject: the scope or kernel.
        part: of the subject, such as ``tile (1 of 3)``.
        phase: within the stage, such as ``screening``.
        done, total, unit: how many of how many of what; total 0: not countable.
        item: what is in hand now: a row, an object.
    """

    stage: str
    subject: str
    part: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    item: str = ""

    @property
    def head(self) -> str:
        """The stage and what it is about: what a log says when it begins."""
        return f"{self.stage} {self.subject}" + (f", {self.part}" if self.part else "")

    def count(self, unit: bool = True) -> str:
        """``12/60 rounds``."""
        return f"{self.done}/{self.total}" + (f" {self.unit}" if unit and self.unit else "") if self.total else ""

    def line(self, columns: int) -> str:
        """The most that fits into so many columns: what is left out first is said elsewhere or is seen to change."""

        def told(head: str, *more: str) -> str:
            rest = [word for word in more if word]
            return plain(head + (": " + ", ".join(rest) if rest else ""))

        short = f"{self.stage} {self.part.partition(' ')[0] or self.subject}"
        phase = f"{self.phase} {self.count()}".strip()
        candidates = (
            told(self.head, phase, self.item),
            told(short, phase, self.item),
            told(short, phase),
            told(short, self.count(False)),
            told(self.stage, self.count(False)),
        )
        return next((text for text in candidates if clip(text, columns) == text), clip(candidates[-1], columns))

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"event": "progress", **{name: value for name, value in vars(self).items() if value != ""}}


def _is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    try:
        return stream.isatty() and environ.get("TERM", "") != "dumb"
    except (AttributeError, ValueError):  # ValueError: already closed
        return False


class Console:
    """The two streams of a command and the rules for each.

    Args:
        out, err: the streams; by default the process's own at the time of construction.
        quiet: no progress (but JSON lines, where those are asked for) and no notes.
        progress: one of :data:`PROGRESS`.
        clock: seconds that only grow.
        environ: where ``NO_COLOR`` and ``TERM`` are looked up.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        quiet: bool = False,
        environ: Mapping[str, str] | None = None,
        progress: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        where = os.environ if environ is None else environ
        # pythonw and some services run with no streams at all; then there is nobody to talk to.
        self._out: TextIO | None = results() if out is None else out
        self._err: TextIO | None = sys.stderr if err is None else err
        self.quiet = quiet
        terminal = self._err is not None and _is_terminal(self._err, where)
        self._live = not quiet and progress == "auto" and terminal
        self._lines = not quiet and (progress == "plain" or (progress == "auto" and not terminal))
        self._json = progress == "json"
        self._clock = clock
        self._told: tuple[str, float] = ("", 0.0)
        self._colour = not where.get("NO_COLOR") and self._out is not None and _is_terminal(self._out, where)
        self._shown = False
        self.lost: str | None = None
        """Why a part of the results could not be written, or None. A reader that went away wanted no more."""

    def style(self, text: str, name: str) -> str:
        """Text in a style of ``bold dim red green yellow``, or as it is where colour is off."""
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if self._colour else text

    def say(self, text: str = "") -> None:
        """One line of result, on stdout."""
        self.clear()
        self._out, lost = self._write(self._out, text + "\n")
        self.lost = self.lost or lost

    def document(self, value: Any) -> None:
        """The result as one JSON document, on stdout."""
        self.say(json.dumps(value, indent=2, allow_nan=False))

    def note(self, text: str) -> None:
        """One line about the work, on stderr; dropped when quiet."""
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """One line that must be seen, on stderr, quiet or not."""
        self.clear()
        line = json.dumps({"event": "message", "text": text}) if self._json else text
        self._err, _ = self._write(self._err, line + "\n")

    def step(self, step: Step) -> None:
        """Say where the work stands, in the way that the reader can use."""
        now = self._clock()
        head, when = self._told
        begins = head != step.head
        if self._live:
            self._rewrite(step.line(self._columns()))
        elif self._json and (begins or now - when >= _JSON_EVERY or (step.total and step.done == step.total)):
            self._told = (step.head, now)
            self._err, _ = self._write(self._err, json.dumps(step.as_json()) + "\n")
        elif self._lines and (begins or now - when >= HEARTBEAT):
            self._told = (step.head, now)
            much = (f"{step.total} {step.unit}".strip() if begins else step.count()) if step.total else ""
            self._err, _ = self._write(self._err, plain(step.head + (f": {much}" if much else "")) + "\n")

    def progress(self, text: str) -> None:
        """Rewrite the progress line; nothing happens where stderr is not a terminal."""
        if self._live:
            self._rewrite(clip(plain(text), self._columns()))

    def _columns(self) -> int:
        """Columns of stderr's own terminal, less the last one, in which some terminals wrap."""
        try:
            columns = os.get_terminal_size(self._err.fileno()).columns if self._err is not None else 0
        except (OSError, ValueError, AttributeError):
            columns = 0
        return max(1, (columns or shutil.get_terminal_size().columns) - 1)

    def _rewrite(self, line: str) -> None:
        self._err, _ = self._write(self._err, _CLEAR + line)
        self._shown = True

    def clear(self) -> None:
        """Take the progress line away, so that the next line starts in the first column."""
        if self._shown:
            self._shown = False
            self._err, _ = self._write(self._err, _CLEAR)

    @staticmethod
    def _write(stream: TextIO | None, text: str) -> tuple[TextIO | None, str | None]:
        """Write and flush; the stream, or None once it is of no more use, and what went wrong (no reader is not)."""
        if stream is None:
            return None, None
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: somebody closed it
            _discard(stream)
            return None, None
        except OSError as error:
            _discard(stream)
            return None, error.strerror or str(error)
        return stream, None


def _discard(stream: TextIO) -> None:
    """Point a broken standard stream at nothing: the interpreter flushes it once more at exit and would complain."""
    try:
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):
        return
    os.dup2(nowhere, number)
    os.close(nowhere)
