# SPDX-License-Identifier: Apache-2.0
"""The CPU's marketing name, for records and reports. Tool time only, and never worth an error.

On x86 the Linux kernel has the name in /proc/cpuinfo. Elsewhere py-cpuinfo is asked, which starts children, takes a
second, and on odd machines raises, exits or prints nothing: so it runs in a process of its own (``python -m
tunekit.cpu.brand``) with a deadline, and whatever it started ends with it. Where nobody knows, the name is
``"unknown"``, and whoever shows it later asks again. Nothing decides by it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tunekit.environment import for_child

UNKNOWN = "unknown"
DEADLINE_S = 10.0
_MAX_LENGTH = 120
_PROC = Path("/proc/cpuinfo")


def brand(deadline: float = DEADLINE_S) -> str:
    """The CPU's brand (``"AMD EPYC 9R14"``), or ``"unknown"`` after ``deadline`` seconds or any failure."""
    name = _kernel_says()
    # A frozen application's sys.executable is the application: it would be started again.
    if name != UNKNOWN or getattr(sys, "frozen", False) or not sys.executable:
        return name
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tunekit.cpu.brand"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=for_child(),
            process_group=0 if os.name == "posix" else None,
        )
    except (OSError, ValueError):
        return UNKNOWN
    try:
        out, _ = process.communicate(timeout=deadline)
        return _clean(out.decode("utf-8", "replace"))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return UNKNOWN
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started, and reap it."""
    with contextlib.suppress(OSError):
        if process.returncode is None and os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    process.wait()


def _kernel_says() -> str:
    """What Linux says of an x86 processor; of others it has numbers only."""
    try:
        with open(_PROC, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return _clean(value)
    except OSError:
        pass
    return UNKNOWN


def ask() -> str:
    """What py-cpuinfo says, in this process."""
    try:
        import cpuinfo

        return _clean(cpuinfo.get_cpu_info().get("brand_raw"))
    except BaseException:  # SystemExit included: it calls sys.exit on a CPU that it does not know
        return UNKNOWN


def _clean(text: object) -> str:
    """One printable line of bounded length."""
    if not isinstance(text, str):
        return UNKNOWN
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:_MAX_LENGTH].rstrip() or UNKNOWN


if __name__ == "__main__":
    print(ask())
