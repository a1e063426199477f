# SPDX-License-Identifier: Apache-2.0
"""brand(): py-cpuinfo may raise, exit, hang, lie or be absent, and the name is then 'unknown'."""

from __future__ import annotations

import json
import sys
import threading
import time
import types
from collections.abc import Callable

import pytest

from tunekit.cpu import brand as brand_module
from tunekit.cpu.brand import brand


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
    assert brand() == "unknown"


@pytest.mark.parametrize(
    "answer", [{}, None, [], {"arch": "ARM_8"}, {"brand_raw": None}, {"brand_raw": ""}, {"brand_raw": 7}]
)
def test_missing_keys_are_unknown(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    install(monkeypatch, lambda: answer)
    assert brand() == "unknown"


def test_absent_package_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cpuinfo", None)
    assert brand() == "unknown"


def test_a_name_is_one_clean_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda: {"brand_raw": "  AMD\x00 EPYC\n\t9R14 \x1b[31m " + "x" * 500})
    name = brand()
    assert name.startswith("AMD EPYC 9R14")
    assert name.isprintable() and len(name) <= 120


def test_a_hang_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    install(monkeypatch, lambda: release.wait(30))
    start = time.monotonic()
    try:
        assert brand(deadline=0.05) == "unknown"
    finally:
        release.set()
    assert time.monotonic() - start < 2
    assert brand_module.DEADLINE_S == 3.0


def test_no_thread_to_be_had_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert brand() == "unknown"


def test_a_frozen_application_is_never_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    install(monkeypatch, lambda: calls.append(1))
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert brand() == "unknown"
    assert calls == []
