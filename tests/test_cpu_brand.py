# SPDX-License-Identifier: Apache-2.0
"""brand(): the kernel's word, or py-cpuinfo's, which may raise, exit, hang, lie or be absent: then it is 'unknown'."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tunekit.cpu import brand as brand_module
from tunekit.cpu.brand import ask, brand


def install(monkeypatch: pytest.MonkeyPatch, get_cpu_info: Callable[[], object]) -> None:
    fake = types.ModuleType("cpuinfo")
    fake.get_cpu_info = get_cpu_info  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cpuinfo", fake)


@pytest.mark.parametrize(
    "error",
    [
        json.JSONDecodeError("nothing printed", "", 0),
        OSError("no exec memory"),
        TimeoutError(),
        SystemExit(1),
        KeyboardInterrupt(),
        RuntimeError(),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_failure_is_unknown(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail() -> object:
        raise error

    install(monkeypatch, fail)
    assert ask() == "unknown"


@pytest.mark.parametrize(
    "answer", [{}, None, [], {"arch": "ARM_8"}, {"brand_raw": None}, {"brand_raw": ""}, {"brand_raw": 7}]
)
def test_missing_keys_are_unknown(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    install(monkeypatch, lambda: answer)
    assert ask() == "unknown"


def test_absent_package_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cpuinfo", None)
    assert ask() == "unknown"


def test_a_name_is_one_clean_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda: {"brand_raw": "  AMD\x00 EPYC\n\t9R14 \x1b[31m " + "x" * 500})
    name = ask()
    assert name.startswith("AMD EPYC 9R14")
    assert name.isprintable() and len(name) <= 120


@pytest.fixture
def a_slow_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A py-cpuinfo that starts a child, notes its number and hangs; the kernel says nothing."""
    note = tmp_path / "pid"
    (tmp_path / "cpuinfo.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(brand_module, "_PROC", tmp_path / "none")
    return note


def test_a_hang_ends_at_the_deadline_with_all_that_it_started(a_slow_package: Path) -> None:
    seconds = 1.0
    while not a_slow_package.exists():  # a busy box may be slow to start it
        assert brand(deadline=seconds) == "unknown"
        seconds *= 2
    end = time.monotonic() + 20
    line = Path(f"/proc/{int(a_slow_package.read_text())}/cmdline")
    while line.exists() and line.read_bytes():  # a zombie has none
        assert time.monotonic() < end, "the child of py-cpuinfo outlived the deadline"
        time.sleep(0.05)


def test_py_cpuinfo_is_asked_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo.py").write_text("def get_cpu_info():\n    return {'brand_raw': 'PDP-11/70'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(brand_module, "_PROC", tmp_path / "none")
    assert brand(deadline=120) == "PDP-11/70" and "cpuinfo" not in sys.modules


def test_what_the_kernel_says_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = tmp_path / "cpuinfo"
    proc.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n")
    monkeypatch.setattr(brand_module, "_PROC", proc)
    monkeypatch.setattr(brand_module.subprocess, "Popen", None)
    assert brand() == "AMD EPYC 9R14"


def test_no_process_to_be_had_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **named: object) -> None:
        raise OSError("can't start new process")

    monkeypatch.setattr(brand_module, "_PROC", tmp_path / "none")
    monkeypatch.setattr(brand_module.subprocess, "Popen", refuse)
    assert brand() == "unknown"


def test_a_frozen_application_is_never_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brand_module, "_PROC", tmp_path / "none")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(brand_module.subprocess, "Popen", None)
    assert brand() == "unknown"
