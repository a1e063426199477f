# SPDX-License-Identifier: Apache-2.0
"""The doctor: every finding both ways on made-up boxes, the reading of the kernel's files, and the command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tunekit import _manifest, _profile, ceilings, cpu, dispatch, team
from tunekit.__main__ import main
from tunekit.cpu.record import CpuRecord
from tunekit.doctor import facts, findings
from tunekit.doctor.facts import Compiler, Facts, Folder, KernelFacts, Process
from tunekit.doctor.findings import KERNELS, NOTE, TIMING

K = KernelFacts("s.k", "fast", "manifest", "c", "the manifest names it")
TWO: dict[str, Any] = {"online": (0, 1), "allowed": (0, 1)}

# (name, kind, an ill box, a healthy box that differs from it in what matters, words of the finding)
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("system", KERNELS, {"system": "Darwin"}, {"system": "Linux"}, "this is Darwin"),
    ("amx", KERNELS, {"blocked": {"amx-tile": "the kernel refused the AMX tile permission"}}, {}, "Linux 5.16"),
    ("withheld", KERNELS, {"blocked": {"avx512f": "the operating system has not enabled the zmm state"}}, {}, "XSAVE"),
    ("compiler", KERNELS, {"compiler": Compiler(problem="no C compiler found")}, {}, "apt-get install gcc"),
    (
        "old-compiler", KERNELS,
        {"compiler": Compiler("gcc 8", unable={"avxvnni": "unknown option"}), "features": frozenset({"avx2", "avxvnni"})},
        {"compiler": Compiler("gcc 14"), "features": frozenset({"avx2", "avxvnni"})},
        "gcc 8 cannot build what this CPU has: avxvnni (unknown option)",
    ),
    (
        "compiler-lacks", NOTE, {"compiler": Compiler("gcc 8", unable={"avxvnni": "unknown option"})},
        {"compiler": Compiler("gcc 14")}, "this CPU lacks, too",
    ),
    (
        "cc", NOTE, {"compiler": Compiler("gcc", named="gcc -O0 -march=native", dropped=("-O0", "-march=native"))},
        {"compiler": Compiler("gcc", named="gcc")}, "leaves out -O0, -march=native",
    ),
    ("cache", KERNELS, {"cache": Folder(problem="/x belongs to another user")}, {"cache": Folder("/x")}, "TUNEKIT_CACHE"),
    ("noexec", KERNELS, {"cache": Folder("/x", noexec="/tmp")}, {"cache": Folder("/x")}, "/tmp is mounted noexec"),
    ("noexec", KERNELS, {"cache": Folder("/x", load="failed to map segment")}, {"cache": Folder("/x")}, "failed to map"),
    ("state", KERNELS, {"state": Folder(problem="read-only file system")}, {"state": Folder("/s")}, "TUNEKIT_HOME"),
    (
        "nothing-built", KERNELS, {"kernels": (replace(K, tier="python", source="reference"),)}, {"kernels": (K,)},
        "python -m tunekit build",
    ),
    (
        "ignored", KERNELS, {"kernels": (replace(K, source="fallback", named="gone", reason="it is not built"),)},
        {"kernels": (replace(K, named="fast"),)}, "status --why-not s.k gone",
    ),
    ("stale", KERNELS, {"kernels": (replace(K, stale=("box.model: 1 there, 2 here",)),)}, {"kernels": (K,)}, "box.model"),
    ("lacking", NOTE, {"kernels": (replace(K, lacking={"avx2": 1, "amx-int8": 9}),)}, {"kernels": (K,)}, "amx-int8 (9 rows)"),
    ("untuned", NOTE, {"kernels": (replace(K, source="fallback"),)}, {"kernels": (K,)}, "s.k"),
    ("profile", KERNELS, {"profile": ("it is the profile of another box",)}, {}, "python -m tunekit probe"),
    (
        "load", TIMING, {**TWO, "busy": {0: 0.9, 1: 0.0, 2: 0.0}, "processes": (Process(7, "make", 0.9), Process(8, "sh", 0.0))},
        {**TWO, "busy": {0: 0.05, 1: 0.0, 2: 1.0}}, "45 % of the 2 CPUs that this process may use: make (7) 0.9",
    ),
    ("load", TIMING, {**TWO, "busy": {0: 0.9, 1: 0.0}}, {**TWO, "busy": {0: 0.1, 1: 0.1}}, "nobody that this process can see"),
    ("load-average", NOTE, {"load": 1.5}, {"load": 0.9}, "the load of the last minute is 1.5"),
    (
        "sibling", TIMING, {"siblings": {0: (4,)}, "busy": {4: 0.8, 0: 0.0}}, {"siblings": {0: (4,)}, "busy": {4: 0.1, 0: 0.0}},
        "CPU 4 beside 0 (80 %)",
    ),
    ("steal", TIMING, {"steal": {0: 0.07}}, {"steal": {0: 0.004}}, "took 7 %"),
    ("hypervisor", NOTE, {"hypervisor": True}, {"hypervisor": False}, "virtual machine"),
    ("quota", TIMING, {**TWO, "quota": 1.5}, {**TWO, "quota": 2.0}, "1.5 CPUs' worth of time on 2 CPUs"),
    ("governor", TIMING, {"governors": {0: "ondemand"}}, {"governors": {0: "performance"}}, "ondemand"),
    ("governor", NOTE, {"governors": {0: "powersave"}, "driver": "intel_pstate"}, {}, "intel_pstate"),
    ("clock", TIMING, {"clock": "hpet"}, {"clock": "tsc"}, "hpet"),
    ("clock", TIMING, {"tick": 1e-3}, {"tick": 1e-9}, "1000 microseconds"),
    ("swap", TIMING, {"swapped": 9}, {"swapped": 0}, "9 pages"),
    ("memory", TIMING, {"memory": 8 << 30, "available": 1 << 29}, {"memory": 8 << 30, "available": 1 << 31}, "512 MiB of 8192"),
    ("pressure", TIMING, {"pressure": 12.0}, {"pressure": 1.0}, "12 % of the last ten"),
    ("affinity", NOTE, {"online": (0, 1, 2), "allowed": (0, 1)}, TWO, "2 of 3 CPUs"),
    ("environment", NOTE, {"bent": ("TUNEKIT_PIN",)}, {}, "TUNEKIT_PIN"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "ill", "healthy", "words"), CASES, ids=[c[0] for c in CASES])
def test_each_finding_both_ways(name: str, kind: str, ill: dict[str, Any], healthy: dict[str, Any], words: str) -> None:
    found = [one for one in findings.examine(Facts(**ill)) if one.name == name]
    assert [one.kind for one in found] == [kind]
    assert words in f"{found[0].what} {found[0].mend}"
    for sentence in (found[0].what, found[0].mend):
        assert sentence and "\n" not in sentence and not sentence.endswith(".")
    assert [one.name for one in findings.examine(Facts(**healthy)) if one.name == name] == []


def test_every_check_has_a_case() -> None:
    for check in findings.CHECKS:
        assert any(list(check(Facts(**ill))) for _, _, ill, _, _ in CASES), check.__name__
    assert findings.examine(Facts()) == []


def test_the_status_is_that_of_the_worst() -> None:
    def of(*kinds: str) -> int:
        return findings.status([findings.Finding("n", kind, "w", "m") for kind in kinds])

    assert [of(), of(NOTE), of(TIMING, NOTE), of(NOTE, TIMING, KERNELS)] == [0, 0, 4, 1]
    found = findings.examine(Facts(hypervisor=True, clock="hpet", profile=("x",)))
    assert [one.kind for one in found] == [KERNELS, TIMING, NOTE]


def test_both_threads_of_a_core_are_one_finding() -> None:
    (one,) = findings.siblings(Facts(allowed=(0, 1), siblings={0: (1,), 1: (0,)}, busy={0: 0.9, 1: 0.9}))
    assert one.what.count("beside") == 1


# --- the kernel's files ----------------------------------------------------------------------------------


class Root:
    """A made-up ``/proc`` and ``/sys``, and what changes while it is watched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.later: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def wait(self) -> float:
        for name, text in self.later.items():
            self.put(name, text)
        return 0.5


def stat(name: str, ticks: int) -> str:
    return f"9 ({name}) S " + " ".join(["1"] * 10) + f" {ticks} 0 0 0\n"


def test_what_the_kernels_files_say(tmp_path: Path) -> None:
    root = Root(tmp_path)
    root.put("proc/stat", "cpu  9 9 9 9\ncpu0 10 0 0 90 0 0 0 0 0 0\ncpu1 0 0 0 100 0 0 0 0 0 0\nintr 5\n")
    root.put("proc/loadavg", "2.50 1.0 0.5 1/100 99\n")
    root.put("proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable: 1048576 kB\n")
    root.put("proc/vmstat", "pswpin 5\npswpout 7\n")
    root.put("proc/pressure/memory", "some avg10=7.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=1.0\n")
    root.put("proc/9/stat", stat("a (b) c", 100))
    root.put("proc/10/stat", stat("me", 100))
    root.put("proc/11/stat", "torn")
    cpus = "sys/devices/system/cpu"
    root.put(f"{cpus}/online", "0-1,4\n")
    root.put(f"{cpus}/cpu0/topology/thread_siblings_list", "0,4\n")
    root.put(f"{cpus}/cpu1/topology/thread_siblings_list", "1\n")
    root.put(f"{cpus}/cpu0/cpufreq/scaling_governor", "powersave\n")
    root.put(f"{cpus}/cpu0/cpufreq/scaling_driver", "acpi-cpufreq\n")
    root.put("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    root.later = {
        "proc/stat": "cpu0 30 0 5 110 0 0 0 15 0 0\ncpu1 0 0 0 150 0 0 0 0 0 0\n",
        "proc/vmstat": "pswpin 8\npswpout 7\n",
        "proc/9/stat": stat("a (b) c", 125),
        "proc/10/stat": stat("me", 150),
        "proc/12/stat": stat("new", 50),
    }
    seen = Facts(**facts.machine(tmp_path, (0, 1), 10, root.wait))
    assert seen.online == (0, 1, 4) and seen.allowed == (0, 1) and seen.load == 2.5
    assert seen.busy == {0: 25 / 60, 1: 0.0} and seen.steal == {0: 0.25, 1: 0.0}
    (other,) = seen.processes
    assert (other.pid, other.name) == (9, "a (b) c") and other.cpus == pytest.approx(25 / os.sysconf("SC_CLK_TCK") / 0.5)
    assert seen.siblings == {0: (4,)} and seen.governors == {0: "powersave"} and seen.driver == "acpi-cpufreq"
    assert (seen.clock, seen.memory, seen.available, seen.swapped) == ("hpet", 8 << 30, 1 << 30, 3)
    assert seen.pressure == 7.5 and seen.quota is None


def test_files_that_are_missing_or_torn_are_no_illness(tmp_path: Path) -> None:
    root = Root(tmp_path)
    assert findings.examine(Facts(**facts.machine(tmp_path, (0,), 1, root.wait))) == []
    for name in ("stat", "meminfo", "vmstat", "loadavg", "pressure/memory", "self/mountinfo", "5/stat"):
        root.put(f"proc/{name}", "cpu0 x\nsome avg10=x\n: ) (\n\0\xff")
    assert findings.examine(Facts(**facts.machine(tmp_path, (0,), 1, root.wait))) == []


def test_lists_of_cpus_and_mounts() -> None:
    assert facts.cpu_list("0-3,8,x,9-\n") == (0, 1, 2, 3, 8) and facts.cpu_list("") == ()
    mounts = (
        "1 0 8:1 / / rw,relatime - ext4 /dev/a rw\n"
        "2 1 0:5 / /home/a\\040b rw,noexec - tmpfs t rw\n"
        "3 1 0:6 / /home rw - tmpfs t rw\n"
    )
    assert facts.mount_of(mounts, "/home/a b/cache") == ("/home/a b", "rw,noexec")
    assert facts.mount_of(mounts, "/home/a bc") == ("/home", "rw")
    assert facts.mount_of(mounts, "/var") == ("/", "rw,relatime") and facts.mount_of("", "/var") == ("", "")


def test_a_cache_on_a_noexec_mount_is_seen_by_its_flags(tmp_path: Path, private_folders: Path) -> None:
    root = Root(tmp_path / "root")
    cache = os.path.realpath(os.environ["TUNEKIT_CACHE"])
    root.put("proc/self/mountinfo", f"1 0 8:1 / {cache} rw,nosuid,noexec - tmpfs t rw\n")
    seen = facts.cache_folder(root.folder)
    assert seen.noexec == cache and seen.problem == "" and seen.load == ""
    assert facts.cache_folder().noexec == "" and list(Path(cache).iterdir()) == []  # nothing is left behind


def test_loading_from_the_cache_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import _ctypes

    torn = tmp_path / "torn.so"
    torn.write_bytes(b"\x7fELF")
    monkeypatch.setattr(_ctypes, "__file__", str(torn), raising=False)
    assert facts.cache_folder().load


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX")
def test_folders_that_cannot_be_used(environ: Any, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    environ(CACHE=str(open_to_all), HOME=str(tmp_path / "file"))
    assert "can be written to by others" in facts.cache_folder().problem
    assert "is not a folder" in facts.state_folder().problem


# --- CPU and compiler ------------------------------------------------------------------------------------


def test_what_the_system_withholds_is_blocked() -> None:
    leaves = {(0, 0): (0x1E, 0, 0, 0), (1, 0): (0, 0, 1 << 27 | 1 << 28, 0), (7, 0): (2, 1 << 16, 0, 1 << 24)}
    record = CpuRecord("x86_64", leaves, xcr0=0x60007, tiles=False)
    found = facts.blocked(record)
    assert set(found) == {"avx512f", "amx-tile"}
    assert "refused the AMX tile permission" in found["amx-tile"] and "zmm" in found["avx512f"]
    assert "amx-tile" not in facts.blocked(replace(record, tiles=True))
    assert facts.blocked(CpuRecord("aarch64")) == {}


@pytest.mark.build
def test_a_compiler_that_cannot_build_a_leg_is_asked_and_named(tmp_path: Path) -> None:
    script = tmp_path / "oldcc"
    script.write_text(
        "#!/bin/sh\ncase \"$*\" in *-mavx2*|*dotprod*) echo \"cc: error: unrecognized option '-mnew'\" >&2; exit 1;; esac\n"
        'exec cc "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    found = facts.compiler({**os.environ, "CC": f"{script} -O0 -march=native"})
    legs = {leg.name for leg in ceilings.LEGS if set(leg.features) & {"avx2", "dotprod"} and leg.arch == cpu.this_cpu().arch}
    assert legs and legs <= set(found.unable) and "unrecognized option" in found.unable[min(legs)]
    assert found.dropped == ("-O0", "-march=native")
    assert "does not work" in facts.compiler({"CC": "/no/such/cc"}).problem
    assert "mend the quotes" in facts.compiler({"CC": "gcc '"}).problem


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def quiet_box(monkeypatch: pytest.MonkeyPatch, toy: Any) -> Any:
    """The toy family alone, on a box whose files say nothing and whose compiler can do all."""
    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels"})
    monkeypatch.setattr(facts, "machine", lambda root, allowed, own, wait: {})
    monkeypatch.setattr(facts, "compiler", lambda environ: Compiler("cc 1"))
    return toy


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["doctor", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def names(answer: Any) -> set[str]:
    return {finding["name"] for finding in answer["findings"]}


def test_a_tuned_box_is_well_and_an_untuned_one_is_told(quiet_box: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = run(capsys)
    assert status == answer["status"] == 0 and "untuned" in names(answer)
    quiet_box.toy.manifest_set("k2")
    status, answer = run(capsys)
    assert status == 0 and not names(answer) & {"untuned", "ignored", "stale", "nothing-built"}
    assert {field.name for field in fields(Facts)} == set(answer["facts"])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "nothing is wrong here" in out and out.startswith(f"box: {cpu.this_box().key}")


def test_a_stale_manifest_an_ignored_entry_and_a_foreign_profile(
    quiet_box: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"box": {**cpu.this_box().to_json(), "model": 99}}
    _manifest.manifest_set_many(quiet_box.SCOPE, {quiet_box.toy.kernel: "k3"}, record)  # k3 needs an unknown feature
    _profile.save(team.profile_path(), replace(cpu.this_box(), model=99), {}, {})
    status, answer = run(capsys)
    assert status == 1 and {"stale", "ignored", "profile"} <= names(answer)
    main(["doctor"])
    out = capsys.readouterr().out
    assert "Kernels are unavailable" in out and out.count("\n  mend: ") == len(answer["findings"])


def test_pins_and_disabled_features_are_told(quiet_box: Any, environ: Any, capsys: pytest.CaptureFixture[str]) -> None:
    environ(PIN="toy=k1", CACHE=os.environ["TUNEKIT_CACHE"])
    status, answer = run(capsys)
    assert status == 0 and "environment" in names(answer)


def test_this_box_itself(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says of this box, it says it without an error, and leaves nothing behind."""
    monkeypatch.setattr(dispatch, "installed_scopes", lambda: {"toyscope": "toy.kernels"})
    seen = facts.here(wait=lambda: 0.05)
    assert seen.kernels and seen.tick > 0
    if sys.platform == "linux":
        assert seen.online and seen.allowed and seen.memory
    findings.examine(seen)
