# SPDX-License-Identifier: Apache-2.0
"""From facts to findings, each with its mend in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunekit.ceilings import LEGS
from tunekit.doctor.facts import Facts

KERNELS, TIMING, NOTE = "kernels", "timing", "note"
"""Kinds: kernels are unavailable, or not the ones that were tuned; timing is unreliable; good to know."""

BUSY = 0.15
"""Of the CPUs that this process may use, how much others may use before it is a finding."""

SIBLING_BUSY = 0.25
STEAL = 0.01
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
LEAST_MEMORY = 1 << 30
PRESSURE = 5.0

_OWN_GOVERNOR = ("intel_pstate", "amd-pstate", "amd-pstate-epp", "intel_cpufreq")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or good to know.

    Attributes:
        name: stable, for programs.
        kind: :data:`KERNELS`, :data:`TIMING` or :data:`NOTE`.
        what: a sentence.
        mend: a sentence: what to do about it.
    """

    name: str
    kind: str
    what: str
    mend: str


Check = Callable[[Facts], Iterator[Finding]]


def _some(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def system(facts: Facts) -> Iterator[Finding]:
    """Platforms that have no native rows."""
    if facts.system != "Linux":
        yield Finding(
            "system", KERNELS, f"this is {facts.system}, where native rows are unproven",
            "run on Linux (x86-64 or AArch64) to have tuned kernels; here everything runs on the reference",
        )  # fmt: skip


def load(facts: Facts) -> Iterator[Finding]:
    """Others who use the CPUs."""
    used = [facts.busy.get(cpu, 0.0) for cpu in facts.allowed]
    if used and sum(used) / len(used) > BUSY:
        seen = [p for p in facts.processes if p.cpus >= 0.05]
        who = _some([f"{p.name} ({p.pid}) {p.cpus:.1f}" for p in seen]) or "nobody that this process can see"
        yield Finding(
            "load", TIMING,
            f"others use {100 * sum(used) / len(used):.0f} % of the {len(used)} CPUs that this process may use: {who}",
            "retune when they have finished, or on CPUs that they leave alone (taskset -c N python -m tunekit.retune)",
        )  # fmt: skip
    elif facts.load > 0.5 * len(facts.allowed) + 0.5:
        yield Finding(
            "load-average", NOTE,
            f"the load of the last minute is {facts.load:.1f} on {len(facts.allowed)} CPUs, though it is quiet now",
            "run doctor again before a retune, or retune at a quieter time",
        )  # fmt: skip


def quota(facts: Facts) -> Iterator[Finding]:
    """Control groups that stop this process for a part of each period."""
    if facts.quota is not None and facts.quota < len(facts.allowed):
        yield Finding(
            "quota", TIMING,
            f"a control group leaves {facts.quota:g} CPUs' worth of time on {len(facts.allowed)} CPUs, and stops the "
            "process for the rest of each period",
            "give the container whole CPUs (docker --cpuset-cpus, a static CPU policy in Kubernetes) for the retune",
        )  # fmt: skip


def affinity(facts: Facts) -> Iterator[Finding]:
    """Fewer CPUs than there are."""
    if len(facts.allowed) < len(facts.online):
        yield Finding(
            "affinity", NOTE,
            f"this process may use {len(facts.allowed)} of {len(facts.online)} CPUs (an affinity mask or a cpuset)",
            "start it without taskset, or widen the cpuset, if products should use the others too",
        )  # fmt: skip


def siblings(facts: Facts) -> Iterator[Finding]:
    """The other thread of a core, at work."""
    at_work = [
        f"CPU {other} beside {cpu} ({100 * facts.busy[other]:.0f} %)"
        for cpu, others in facts.siblings.items()
        for other in others
        if facts.busy.get(other, 0.0) > SIBLING_BUSY and (other not in facts.allowed or cpu < other)
    ]
    if at_work:
        yield Finding(
            "sibling", TIMING, f"another thread of a core that would be timed is busy: {_some(at_work)}",
            "stop that work, or retune on CPUs of idle cores (taskset -c N python -m tunekit.retune)",
        )  # fmt: skip


def hypervisor(facts: Facts) -> Iterator[Finding]:
    """Virtual machines, and time that was taken from this one."""
    taken = [facts.steal.get(cpu, 0.0) for cpu in facts.allowed]
    share = sum(taken) / len(taken) if taken else 0.0
    if share > STEAL:
        yield Finding(
            "steal", TIMING, f"the hypervisor took {100 * share:.0f} % of this machine's CPU time while it was watched",
            "retune at another hour, or on an instance with CPUs of its own (dedicated or bare metal)",
        )  # fmt: skip
    elif facts.hypervisor:
        yield Finding(
            "hypervisor", NOTE, "this is a virtual machine: neighbours can take time from it unseen",
            "look at the noise floor that retune prints; where it is above 3 %, retune at another hour",
        )  # fmt: skip


def governor(facts: Facts) -> Iterator[Finding]:
    """Cores that change their clock while they are timed."""
    slow = {cpu: name for cpu, name in facts.governors.items() if name != "performance"}
    if not slow:
        return
    names = _some(sorted(set(slow.values())))
    own = facts.driver in _OWN_GOVERNOR and set(slow.values()) <= {"powersave", "schedutil"}
    mild = own or set(slow.values()) <= {"schedutil"}
    yield Finding(
        "governor", NOTE if mild else TIMING,
        f"the frequency governor of {len(slow)} CPUs is {names} ({facts.driver or 'unknown driver'}), not performance",
        "for the retune: cpupower frequency-set -g performance (as root)",
    )  # fmt: skip


def clock(facts: Facts) -> Iterator[Finding]:
    """A clock that is slow to read or coarse."""
    if facts.clock in SLOW_CLOCKS:
        yield Finding(
            "clock", TIMING, f"the kernel's clock source is {facts.clock}, which costs microseconds to read",
            "if the CPU's counter is sound, boot with tsc=reliable, or see dmesg for why the kernel gave it up",
        )  # fmt: skip
    elif facts.tick > 1e-6:
        yield Finding(
            "clock", TIMING, f"Python's clock has a resolution of {1e6 * facts.tick:.0f} microseconds",
            "enable high-resolution timers in the kernel (do not boot with highres=off)",
        )  # fmt: skip


def memory(facts: Facts) -> Iterator[Finding]:
    """Too little memory, or pages on their way."""
    if facts.swapped:
        yield Finding(
            "swap", TIMING, f"{facts.swapped} pages went to or from swap while it was watched",
            "end what uses the memory, or add some; a retune needs about a gibibyte",
        )  # fmt: skip
    elif facts.memory and facts.available < min(LEAST_MEMORY, facts.memory // 4):
        yield Finding(
            "memory", TIMING, f"{facts.available >> 20} MiB of {facts.memory >> 20} MiB of memory are available",
            "end what uses the memory, or add some; a retune needs about a gibibyte",
        )  # fmt: skip
    elif facts.pressure > PRESSURE:
        yield Finding(
            "pressure", TIMING, f"processes waited for memory {facts.pressure:.0f} % of the last ten seconds",
            "end what uses the memory, or raise the control group's limit",
        )  # fmt: skip


def withheld(facts: Facts) -> Iterator[Finding]:
    """Instructions that the CPU has and the system does not allow."""
    for name, reason in facts.blocked.items():
        tiles = name.startswith("amx")
        mend = (
            "run Linux 5.16 or later, outside sandboxes that filter arch_prctl, without a small alternate signal stack"
            if tiles
            else "let the hypervisor or emulator show XSAVE and this state, and boot without clearcpuid= or noxsave"
        )
        yield Finding("amx" if tiles else "withheld", KERNELS, f"the CPU has {name}, and {reason}", mend)


def toolchain(facts: Facts) -> Iterator[Finding]:
    """No compiler, an old one, or one that is told odd things."""
    own = facts.compiler
    if own.problem:
        yield Finding(
            "compiler", KERNELS, f"rows cannot be built: {own.problem}",
            "install a C compiler (Debian and Ubuntu: apt-get install gcc libc6-dev), then: python -m tunekit.retune",
        )  # fmt: skip
        return
    needs = {leg.name: set(leg.features) for leg in LEGS}
    useful = [name for name in own.unable if needs[name] <= facts.features]
    idle = [name for name in own.unable if name not in useful]
    if useful:
        why = own.unable[useful[0]]
        yield Finding(
            "old-compiler", KERNELS, f"{own.label} cannot build what this CPU has: {_some(useful)} ({why})",
            "install a newer gcc or clang with its assembler, name it in CC, then: python -m tunekit.retune",
        )  # fmt: skip
    if idle:
        yield Finding(
            "compiler-lacks", NOTE, f"{own.label} cannot build {_some(idle)}, which this CPU lacks, too",
            "nothing to do here; modules built for other machines want a newer compiler",
        )  # fmt: skip
    if own.dropped:
        yield Finding(
            "cc", NOTE, f"of CC={own.named!r}, tunekit leaves out {_some(own.dropped)}: rows have flags of their own",
            "take these flags out of CC, or leave them: other builds may want them",
        )  # fmt: skip


def folders(facts: Facts) -> Iterator[Finding]:
    """Where modules and manifests are kept."""
    if facts.cache.problem:
        yield Finding(
            "cache", KERNELS, f"built rows cannot be kept: {facts.cache.problem}",
            "set TUNEKIT_CACHE to a folder of your own that can be written to",
        )  # fmt: skip
    elif facts.cache.load or facts.cache.noexec:
        why = facts.cache.load or f"{facts.cache.noexec} is mounted noexec"
        yield Finding(
            "noexec", KERNELS, f"code in the cache {facts.cache.path} cannot be loaded: {why}",
            "set TUNEKIT_CACHE to a folder on a file system that is not mounted noexec",
        )  # fmt: skip
    if facts.state.problem:
        yield Finding(
            "state", KERNELS, f"winners cannot be kept: {facts.state.problem}",
            "set TUNEKIT_HOME to a folder that can be written to",
        )  # fmt: skip


def choices(facts: Facts) -> Iterator[Finding]:
    """What runs, against what was tuned."""
    untuned = []
    for kernel in facts.kernels:
        if kernel.frozen:
            continue
        if kernel.tier == "python":
            yield Finding(
                "nothing-built", KERNELS, f"{kernel.key} runs in Python: {kernel.reason}",
                "run: python -m tunekit build",
            )  # fmt: skip
        elif kernel.named and kernel.source == "fallback":
            yield Finding(
                "ignored", KERNELS, f"{kernel.key}: the manifest names {kernel.named}, and it does not run: "
                f"{kernel.reason}",
                f"see python -m tunekit status --why-not {kernel.key} {kernel.named}, then: python -m tunekit.retune",
            )  # fmt: skip
        elif kernel.source == "fallback":
            untuned.append(kernel.key)
        if kernel.stale:
            yield Finding(
                "stale", KERNELS, f"the winner of {kernel.key} was found under other conditions: {_some(kernel.stale)}",
                "run: python -m tunekit.retune",
            )  # fmt: skip
        if kernel.lacking:
            most = sorted(kernel.lacking.items(), key=lambda item: (-item[1], item[0]))
            yield Finding(
                "lacking", NOTE,
                f"rows of {kernel.key} need what this CPU lacks: {_some([f'{n} ({c} rows)' for n, c in most])}",
                "nothing to do: the other rows run; another machine may have these",
            )  # fmt: skip
    if untuned:
        yield Finding(
            "untuned", NOTE, f"never tuned on this box, so the fallback runs: {_some(untuned)}",
            "run: python -m tunekit.retune",
        )  # fmt: skip


def profile(facts: Facts) -> Iterator[Finding]:
    """A box profile that does not apply."""
    for problem in facts.profile:
        yield Finding("profile", KERNELS, f"the box profile: {problem}", "run: python -m tunekit probe")


def variables(facts: Facts) -> Iterator[Finding]:
    """Variables that bend what runs."""
    if facts.bent:
        yield Finding(
            "environment", NOTE, f"{_some(facts.bent)} change what runs in this shell",
            "unset them to see the box as it is",
        )  # fmt: skip


CHECKS: tuple[Check, ...] = (
    system, withheld, toolchain, folders, choices, profile,
    load, siblings, hypervisor, quota, governor, clock, memory, affinity, variables,
)  # fmt: skip


def examine(facts: Facts) -> list[Finding]:
    """All findings: kernels first, then timing, then notes."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: (KERNELS, TIMING, NOTE).index(finding.kind))


def status(found: Sequence[Finding]) -> int:
    """The exit status: 1 where kernels are affected, 4 where timing alone is, else 0 (notes do not count)."""
    kinds = {finding.kind for finding in found}
    return 1 if KERNELS in kinds else 4 if TIMING in kinds else 0
