# SPDX-License-Identifier: Apache-2.0
"""The CPU's marketing name, for records and reports. Tool time only, and never worth an error.

py-cpuinfo starts a child, takes a second, and on odd machines raises, exits or prints nothing. So it runs on a
daemon thread with a deadline, and whatever goes wrong the name is ``"unknown"``. Nothing decides by it.
"""

from __future__ import annotations

import sys
import threading

UNKNOWN = "unknown"
DEADLINE_S = 3.0
_MAX_LENGTH = 120


def brand(deadline: float = DEADLINE_S) -> str:
    """The CPU's brand (``"AMD EPYC 9R14"``), or ``"unknown"`` after ``deadline`` seconds or any failure."""
    # A frozen application's sys.executable is the application: py-cpuinfo's child would start it again.
    if getattr(sys, "frozen", False):
        return UNKNOWN
    answer: list[str] = []
    thread = threading.Thread(target=_ask, args=(answer,), name="tunekit-brand", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter is going down
        return UNKNOWN
    thread.join(deadline)
    return answer[0] if answer else UNKNOWN


def _ask(answer: list[str]) -> None:
    try:
        import cpuinfo

        info = cpuinfo.get_cpu_info()
        answer.append(_clean(info.get("brand_raw")))
    except BaseException:  # SystemExit included: it calls sys.exit on a CPU that it does not know
        return


def _clean(text: object) -> str:
    """One printable line of bounded length."""
    if not isinstance(text, str):
        return UNKNOWN
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:_MAX_LENGTH].rstrip() or UNKNOWN
