# SPDX-License-Identifier: Apache-2.0
"""Asking this machine: which sources are read, when the tile permission is asked for, what a missing core means."""

from __future__ import annotations

import builtins
import importlib.util
import os
import platform
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shelf_loader import load_shelf

from tunekit import cpu
from tunekit.cpu.features import usable
from tunekit.cpu.record import CpuRecord
from tunekit.environment import Settings

SHELF = load_shelf()
HAS_CORE = importlib.util.find_spec("tunekit._core") is not None
needs_core = pytest.mark.skipif(not HAS_CORE, reason="tunekit._core is not built")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what the process knows, before and after; no test reads the caller's environment."""
    monkeypatch.setattr(cpu, "settings", lambda: Settings())
    cpu.forget()
    yield
    cpu.forget()


class FakeCore(types.ModuleType):
    """A core that replays a recorded CPU and counts the permission requests."""

    def __init__(self, record: CpuRecord, grants: bool) -> None:
        super().__init__("tunekit._core")
        self.record, self.grants, self.asked = record, grants, 0

    def probe(self) -> dict[str, Any]:
        return {name: getattr(self.record, name) for name in CpuRecord.__dataclass_fields__} | {"tiles": None}

    def request_tiles(self) -> bool:
        self.asked += 1
        return self.grants


def install(monkeypatch: pytest.MonkeyPatch, name: str, grants: bool = True) -> FakeCore:
    core = FakeCore(SHELF[name].record, grants)
    monkeypatch.setattr(cpu, "core", lambda: core)
    return core


@pytest.mark.parametrize("name", SHELF)
def test_a_replayed_cpu_is_seen_as_recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    record = SHELF[name].record
    core = install(monkeypatch, name, grants=bool(record.tiles))
    asked = usable(replace(record, tiles=True)) != usable(replace(record, tiles=False))
    assert cpu.this_features() == usable(record)
    assert cpu.this_box().features == tuple(sorted(usable(record)))
    assert cpu.this_cpu() is cpu.this_cpu()
    assert core.asked == asked


def test_a_refused_permission_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    core = install(monkeypatch, "sapphire-rapids-not-asked", grants=False)
    assert cpu.this_cpu().tiles is False
    assert not any(name.startswith("amx") for name in cpu.this_features())
    assert core.asked == 1


@pytest.mark.parametrize("name", ["arrow-lake", "arrow-lake-e-core"])
def test_a_hybrid_box_has_one_name_on_every_core(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, name)
    assert cpu.this_box().core == "hybrid"


@pytest.mark.parametrize(
    ("machine", "arch"),
    [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64"), ("s390x", "s390x"),
     ("ppc64le", "ppc64le"), ("", "unknown")],
)  # fmt: skip
def test_without_a_core_there_are_no_features(monkeypatch: pytest.MonkeyPatch, machine: str, arch: str) -> None:
    monkeypatch.setattr(cpu, "core", lambda: None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert cpu.this_cpu() == CpuRecord(arch)
    assert cpu.this_features() == frozenset()
    assert cpu.this_box().vendor == "unknown"


def test_disabled_features_and_their_dependants_go(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "zen5")
    monkeypatch.setattr(cpu, "settings", lambda: Settings(disable_features=frozenset({"avx512f", "typo"})))
    assert cpu.this_features() == {n for n in SHELF["zen5"].features if not n.startswith("avx512")}
    assert "avx512f" in cpu.this_box().features


def test_forced_features_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "haswell")
    monkeypatch.setattr(cpu, "settings", lambda: Settings(force_features=frozenset({"avx512f", "amx-int8"})))
    assert cpu.this_features() == SHELF["haswell"].features


@needs_core
def test_no_flag_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under qemu-user /proc/cpuinfo is the host's: no decision may come from it, nor from a child."""

    def refuse(*args: object, **kwargs: object) -> object:
        raise AssertionError(f"opened {args[:1]}")

    importlib.import_module("tunekit._core")
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(platform, "machine", refuse)
    assert cpu.this_features() <= frozenset(cpu.this_box().features)


def test_the_sources_name_no_flag_text() -> None:
    room = Path(cpu.__file__).parent
    for path in room.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "brand.py":  # the processor's name, for people to read
            assert "flags" not in text and text.count('"/proc/cpuinfo"') == 1
        else:
            assert "/proc/" not in text, path.name


@needs_core
def test_the_probe_is_plain_data() -> None:
    core = importlib.import_module("tunekit._core")
    raw = core.probe()
    assert set(raw) == {"arch", "leaves", "xcr0", "tiles", "hwcap", "hwcap2", "midr"}
    record = CpuRecord.from_probe(raw)
    assert CpuRecord.from_json(record.to_json()) == record
    assert record.tiles is None
    highest = record.leaves.get((0, 0), (0, 0, 0, 0))[0]
    assert all(leaf <= highest or leaf >= 0x80000000 for leaf, _ in record.leaves)


@needs_core
def test_the_permission_is_idempotent_and_never_raises() -> None:
    core = importlib.import_module("tunekit._core")
    first = core.request_tiles()
    assert first is core.request_tiles()
    if "amx-tile" not in usable(replace(CpuRecord.from_probe(core.probe()), tiles=True)):
        assert first is False


@needs_core
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="flag text of x86-64 Linux")
def test_the_probe_agrees_with_the_kernel_here() -> None:
    """Not a source of decisions, but a witness: a feature of ours that the kernel also names must not be denied."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    text = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    box = cpu.this_box()
    if (text.get("vendor_id"), text.get("cpu family"), text.get("model")) != (
        box.vendor,
        str(box.family),
        str(box.model),
    ):
        pytest.skip("the flag text is another machine's (an emulator passes the host's through)")
    flags = set(text.get("flags", "").split())
    for ours, theirs in [("avx2", "avx2"), ("fma", "fma"), ("avx512f", "avx512f"), ("avx512vnni", "avx512_vnni")]:
        assert (ours in cpu.this_features()) >= (theirs in flags)


def test_importing_the_room_is_light() -> None:
    code = "import sys, tunekit.cpu.box, tunekit.cpu.requires; print('cpuinfo' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[0] == "False"
