# SPDX-License-Identifier: Apache-2.0
"""What the doctor looks at, as plain data, and the thin layer that asks the machine for it.

Files of the kernel are read below a root that tests replace. What cannot be read is left at its default, which is
healthy: a doctor that guesses is worse than one that is silent.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import _manifest, _status, ceilings, dispatch, paths, team
from tunekit.cpu import this_cpu, this_features
from tunekit.cpu.features import TABLES, why_not
from tunekit.cpu.quota import cgroup_quota
from tunekit.cpu.record import CpuRecord
from tunekit.environment import settings
from tunekit.errors import TunekitError

SAMPLE = 0.5
"""Seconds during which the machine is watched."""

_HYPERVISOR = 1 << 31  # CPUID leaf 1, ECX


@dataclass(frozen=True)
class Process:
    """Another process and the CPUs' worth of time that it used while it was watched."""

    pid: int
    name: str
    cpus: float


@dataclass(frozen=True)
class Compiler:
    """The C compiler.

    Attributes:
        label: the first line of its version; empty where there is none.
        problem: why there is none.
        named: what ``CC`` holds.
        dropped: words of ``CC`` that tunekit leaves out.
        unable: a reason for each dot instruction that it cannot build, by name.
    """

    label: str = ""
    problem: str = ""
    named: str = ""
    dropped: tuple[str, ...] = ()
    unable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Folder:
    """A folder of ours.

    Attributes:
        path: where it is.
        problem: why it cannot be written to or is not trusted.
        noexec: the mount point, where nothing below may be executed.
        load: why a shared object in it cannot be loaded; it was tried.
    """

    path: str = ""
    problem: str = ""
    noexec: str = ""
    load: str = ""


@dataclass(frozen=True)
class KernelFacts:
    """One kernel: what runs, from where, why; what is stale; and rows that lack features, by feature."""

    key: str
    suffix: str
    source: str
    tier: str
    reason: str
    stale: tuple[str, ...] = ()
    lacking: Mapping[str, int] = field(default_factory=dict)
    named: str = ""
    frozen: bool = False


@dataclass(frozen=True)
class Facts:
    """A box at one moment. The defaults are those of a healthy one.

    Attributes:
        system: ``Linux`` and so on.
        online, allowed: logical CPUs that there are, and those that this process may use.
        load: runnable processes, the average of a minute.
        busy, steal: by logical CPU, the fractions of the sample that were used, and taken by the hypervisor.
        processes: others that used time, the busiest first.
        siblings: other threads of an allowed CPU's core.
        quota: CPUs that control groups leave, or None.
        hypervisor: whether this is a virtual machine.
        governors: by allowed CPU, where visible; ``driver`` of frequencies.
        clock: the kernel's clock source, and ``tick`` the resolution of Python's in seconds.
        memory, available: bytes, or 0 where not known.
        swapped: pages in and out while it was watched; ``pressure``: per cent of ten seconds that waited for memory.
        blocked: features that the CPU has and the system withholds, with the reason.
        features: usable ones.
        compiler, cache, state: see there.
        kernels: of installed families.
        profile: what is wrong with the box profile.
        bent: TUNEKIT_ variables that change what runs.
    """

    system: str = "Linux"
    online: tuple[int, ...] = (0,)
    allowed: tuple[int, ...] = (0,)
    load: float = 0.0
    busy: Mapping[int, float] = field(default_factory=dict)
    steal: Mapping[int, float] = field(default_factory=dict)
    processes: tuple[Process, ...] = ()
    siblings: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    quota: float | None = None
    hypervisor: bool = False
    governors: Mapping[int, str] = field(default_factory=dict)
    driver: str = ""
    clock: str = ""
    tick: float = 1e-9
    memory: int = 0
    available: int = 0
    swapped: int = 0
    pressure: float = 0.0
    blocked: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    compiler: Compiler = field(default_factory=Compiler)
    cache: Folder = field(default_factory=Folder)
    state: Folder = field(default_factory=Folder)
    kernels: tuple[KernelFacts, ...] = ()
    profile: tuple[str, ...] = ()
    bent: tuple[str, ...] = ()


# --- files of the kernel, below a root -------------------------------------------------------------------


def text(root: Path, name: str) -> str:
    """A small file's text; empty where it cannot be read."""
    try:
        return (root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_list(words: str) -> tuple[int, ...]:
    """``0-3,8`` as numbers; what is malformed is left out."""
    found: list[int] = []
    for part in words.strip().split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def ticks(stat: str) -> dict[int, tuple[int, int, int]]:
    """Of ``/proc/stat``: (used, stolen, all) ticks by logical CPU."""
    found = {}
    for line in stat.splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and len(words) >= 8 and all(w.isdecimal() for w in words):
            user, nice, system, idle, waiting, irq, soft, steal = map(int, words[:8])
            used = user + nice + system + irq + soft
            found[int(name[3:])] = (used, steal, used + steal + idle + waiting)
    return found


def process_ticks(root: Path) -> dict[int, tuple[str, int]]:
    """(name, ticks used) of every process that can be seen."""
    found = {}
    try:
        names = [entry.name for entry in (root / "proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return {}
    for name in names:
        head, paren, tail = text(root, f"proc/{name}/stat").rpartition(")")  # a name may hold blanks and parentheses
        words = tail.split()
        if paren and len(words) > 12 and words[11].isdecimal() and words[12].isdecimal():
            found[int(name)] = (head.partition("(")[2], int(words[11]) + int(words[12]))
    return found


def fields(table: str) -> dict[str, int]:
    """Lines such as ``MemTotal:  123 kB`` or ``pswpin 5``, as numbers by name."""
    found = {}
    for line in table.splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def mount_of(mountinfo: str, path: str) -> tuple[str, str]:
    """(mount point, options) of the mount that a path lies on; empty where there is none."""
    best = ("", "")
    for line in mountinfo.splitlines():
        words = line.split()
        if len(words) < 6:
            continue
        where = words[4].replace("\\040", " ")
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best[0]):  # the later of two at one place hides the other
            best = (where, words[5])
    return best


def pressure(words: str) -> float:
    """``some avg10=`` of ``/proc/pressure/memory``."""
    for line in words.splitlines():
        if line.startswith("some "):
            for word in line.split():
                name, _, value = word.partition("=")
                if name == "avg10":
                    try:
                        return float(value)
                    except ValueError:
                        return 0.0
    return 0.0


def machine(root: Path, allowed: Sequence[int], own: int, wait: Callable[[], float]) -> dict[str, Any]:
    """What the kernel's files say.

    Args:
        root: where ``proc`` and ``sys`` are.
        allowed: CPUs that this process may use.
        own: this process's number, which is left out.
        wait: waits for the sample and returns the seconds that passed.
    """
    cpu = "sys/devices/system/cpu"
    before, others, pages = ticks(text(root, "proc/stat")), process_ticks(root), fields(text(root, "proc/vmstat"))
    passed = wait()
    after, later, paged = ticks(text(root, "proc/stat")), process_ticks(root), fields(text(root, "proc/vmstat"))
    busy, steal = {}, {}
    for number, (used, stolen, whole) in after.items():
        then = before.get(number, (used, stolen, whole))
        span = whole - then[2]
        if span > 0:
            busy[number] = (used - then[0]) / span
            steal[number] = (stolen - then[1]) / span
    rate = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    seen = [
        Process(pid, name, (now - others[pid][1]) / rate / passed)
        for pid, (name, now) in later.items()
        if pid != own and pid in others and now > others[pid][1] and passed > 0
    ]
    siblings = {}
    for number in allowed:
        shared = cpu_list(text(root, f"{cpu}/cpu{number}/topology/thread_siblings_list"))
        if len(shared) > 1:
            siblings[number] = tuple(other for other in shared if other != number)
    governors = {n: text(root, f"{cpu}/cpu{n}/cpufreq/scaling_governor").strip() for n in allowed}
    memory = fields(text(root, "proc/meminfo"))
    load = text(root, "proc/loadavg").split()
    first = min(allowed, default=0)
    return {
        "online": cpu_list(text(root, f"{cpu}/online")) or tuple(allowed),
        "allowed": tuple(allowed),
        "load": float(load[0]) if load and load[0].replace(".", "", 1).isdecimal() else 0.0,
        "busy": busy,
        "steal": steal,
        "processes": tuple(sorted(seen, key=lambda p: (-p.cpus, p.pid))[:10]),
        "siblings": siblings,
        "quota": cgroup_quota(root),
        "governors": {n: g for n, g in governors.items() if g},
        "driver": text(root, f"{cpu}/cpu{first}/cpufreq/scaling_driver").strip(),
        "clock": text(root, "sys/devices/system/clocksource/clocksource0/current_clocksource").strip(),
        "memory": 1024 * memory.get("MemTotal", 0),
        "available": 1024 * memory.get("MemAvailable", 0),
        "swapped": sum(max(0, paged.get(n, 0) - pages.get(n, 0)) for n in ("pswpin", "pswpout")),
        "pressure": pressure(text(root, "proc/pressure/memory")),
    }


# --- our own side ----------------------------------------------------------------------------------------


def blocked(record: CpuRecord) -> dict[str, str]:
    """Features that the CPU reports and the operating system withholds, one for each kind of state."""
    table = TABLES.get(record.arch, {})
    found = {}
    for name in ("avx", "avx512f", "amx-tile"):
        reason = why_not(record, name) if name in table and table[name].present(record) else None
        if reason is not None and "the CPU lacks" not in reason:  # what it builds on may be missing, too
            found[name] = reason
    return found


def compiler(environ: Mapping[str, str]) -> Compiler:
    """The compiler, and what it cannot build. It is run once for each dot instruction of its architecture."""
    from tunekit.build_tools import Runner, find_toolchain
    from tunekit.build_tools.objects import first_error
    from tunekit.build_tools.toolchain import keep_program, row_flags, split

    named = environ.get("CC", "")
    runner = Runner()
    try:
        words = split(named)
        toolchain = find_toolchain(runner, environ)
    except TunekitError as error:
        return Compiler(problem=str(error.args[0]), named=named)
    kept = list(keep_program(words))
    dropped = tuple(word for word in words if word not in kept)
    unable = {}
    with tempfile.TemporaryDirectory(prefix="tk-doctor-") as folder:
        for leg in ceilings.LEGS:
            if leg.arch != toolchain.arch:
                continue
            flags = [*row_flags(leg.arch, leg.features), f"-DTK_LEG={leg.number}"]
            command = [*toolchain.command, *toolchain.places, *flags, "-c", str(ceilings.SOURCE), "-o"]
            try:
                status, _, errors = runner.run([*command, str(Path(folder) / "leg.o")])
            except TunekitError as error:
                status, errors = 1, str(error.args[0])
            if status != 0:
                unable[leg.name] = first_error(errors)
    return Compiler(toolchain.label, "", named, dropped, unable)


def cache_folder(root: Path = Path("/")) -> Folder:
    """The cache: whether it can be written to, and whether code in it can be loaded; it is tried."""
    try:
        path = paths.cache_root()
        paths.private_folder(path)
    except TunekitError as error:
        return Folder(problem=str(error.args[0]))
    where, options = mount_of(text(root, "proc/self/mountinfo"), str(path.resolve()))
    noexec = where if "noexec" in options.split(",") else ""
    try:
        with tempfile.TemporaryDirectory(prefix=".tk-doctor-", dir=path) as folder:
            return Folder(str(path), noexec=noexec, load=_load(Path(folder)))
    except OSError as error:
        return Folder(str(path), f"{path} cannot be written to: {error.strerror or error}", noexec)


def _load(folder: Path) -> str:
    """Why a shared object cannot be loaded from a folder; empty where it can, or where there is none to try."""
    try:
        import _ctypes

        file = getattr(_ctypes, "__file__", None)
        if not file:
            return ""
        copy = folder / "try.so"
        shutil.copyfile(file, copy)
        ctypes.CDLL(str(copy))
    except (OSError, ImportError) as error:
        return str(error)
    return ""


def state_folder() -> Folder:
    """The folder of the manifests: whether it can be written to."""
    try:
        path = _manifest.write_path("tunekit")
        _manifest.check_writable(path)
    except TunekitError as error:
        return Folder(problem=str(error.args[0]))
    return Folder(str(path.parent))


def kernels() -> tuple[KernelFacts, ...]:
    """The kernels of every installed family."""
    found = []
    for group in dispatch.declare_installed().values():
        for kernel in group:
            row = _status.status_of(kernel)
            lacking: dict[str, int] = {}
            for one in kernel.rows:
                targets = [set(target) for target in kernel.targets(one) or ((),)]
                known = TABLES.get(this_cpu().arch, {})
                if any(target <= set(known) for target in targets):  # else it belongs to another architecture
                    least = min((target - this_features() for target in targets), key=lambda t: (len(t), sorted(t)))
                    for name in least:
                        lacking[name] = lacking.get(name, 0) + 1
            named = _manifest.manifest_get(kernel) or ""
            found.append(
                KernelFacts(
                    kernel.key,
                    row.suffix,
                    row.source,
                    row.tier,
                    row.reason,
                    row.stale,
                    lacking,
                    named,
                    bool(row.frozen),
                )
            )
    return tuple(found)


def bent() -> tuple[str, ...]:
    """TUNEKIT_ variables that change what runs here."""
    now = settings()
    values = {
        "TUNEKIT_PIN": now.pin,
        "TUNEKIT_DISABLE_FEATURES": now.disable_features,
        "TUNEKIT_FORCE_FEATURES": now.force_features,
        "TUNEKIT_THREADS": now.threads,
    }
    return tuple(name for name, value in values.items() if value)


def _wait() -> float:
    start = time.monotonic()
    time.sleep(SAMPLE)
    return time.monotonic() - start


def here(root: Path = Path("/"), wait: Callable[[], float] = _wait) -> Facts:
    """This box now. Takes a second or two: it is watched, and the compiler is tried."""
    record = this_cpu()
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    # Watched first: what we do ourselves must not be taken for somebody else's load.
    watched = machine(root, allowed, os.getpid(), wait) if platform.system() == "Linux" else {}
    try:
        made = compiler(os.environ)
    except ImportError as error:
        made = Compiler(problem=f"the build tools cannot be imported ({error}); install tunekit with pip")
    return Facts(
        system=platform.system(),
        hypervisor=bool(record.registers(1)[2] & _HYPERVISOR) if record.arch == "x86_64" else False,
        tick=time.get_clock_info("perf_counter").resolution,
        blocked=blocked(record),
        features=this_features(),
        compiler=made,
        cache=cache_folder(root),
        state=state_folder(),
        kernels=kernels(),
        profile=team.profile().problems,
        bent=bent(),
        **watched,
    )
