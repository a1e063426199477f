# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit verify``: proof of every row, on machines that lack its instructions too.

*Emission*: every row is compiled for its architecture with the flags that ship, read back with a disassembler, and
its instructions are counted function by function against what the family's fixtures expect of the row's arguments.
*Execution*: every row that this machine can run, by itself or by an emulator that is installed, runs its gates.
A row that nothing here can run is called unproven, never passed over in silence.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import dispatch, paths
from tunekit._proofs import NATIVE
from tunekit.console import table
from tunekit.cpu import this_cpu, this_features
from tunekit.cpu.features import implied
from tunekit.errors import ToolchainError, TunekitError
from tunekit.kernel import Kernel
from tunekit.measure import gate
from tunekit.measure.family import fixtures_of
from tunekit.measure.fixtures import SPILLS, BoundRow, Count, EmissionFixtures, Fixtures, GateCase, Regime, Unit
from tunekit.rows import REFERENCE
from tunekit.tuner import House

Progress = Callable[[int, int, str], None]


# --- emission --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """One count and what was found."""

    function: str
    what: str
    expected: str
    found: int
    passed: bool


@dataclass
class Proof:
    """One object of a row, of one compiler.

    Attributes:
        kernel, row: which.
        arch, features: what it was compiled for.
        compiler, disassembler: the first lines of their ``--version``.
        problem: why there is no object, or none that could be read; then there are no gates.
        gates: the counts.
        spills: vector loads and stores on the stack inside innermost loops, of the whole object.
        totals: instructions by function: recorded, never judged.
        functions: the functions as they were read back.
    """

    kernel: str
    row: str
    arch: str
    features: tuple[str, ...]
    compiler: str
    disassembler: str = ""
    problem: str = ""
    gates: list[Gate] = field(default_factory=list)
    spills: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> list[Gate]:
        return [gate for gate in self.gates if not gate.passed]

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "row": self.row,
            "arch": self.arch,
            "features": list(self.features),
            "compiler": self.compiler,
            "disassembler": self.disassembler,
            "problem": self.problem,
            "gates": [vars(gate) for gate in self.gates],
            "spills": self.spills,
            "instructions": self.totals,
        }


@dataclass
class Emission:
    """What the emission proofs found.

    Attributes:
        proofs: one for each row, alternative and compiler.
        declined: ``kernel row`` to reason, for rows that no architecture has.
        missing: compilers that were looked for and are not here.
    """

    proofs: list[Proof] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def gates(self) -> int:
        return sum(len(proof.gates) for proof in self.proofs)

    @property
    def failed(self) -> int:
        return sum(len(proof.failed) for proof in self.proofs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "gates": self.gates,
            "failed": self.failed,
            "objects": [proof.as_dict() for proof in self.proofs],
            "declined": self.declined,
            "unproven": self.unproven(),
            "missing": self.missing,
        }

    def unproven(self) -> dict[str, str]:
        """Objects that no compiler here could make, with the first compiler's reason."""
        made = {(p.kernel, p.row, p.features) for p in self.proofs if not p.problem}
        found: dict[str, str] = {}
        for proof in self.proofs:
            if (proof.kernel, proof.row, proof.features) not in made:
                found.setdefault(f"{proof.kernel} {proof.row} [{','.join(proof.features)}]", proof.problem)
        return found


def foreign(arch: str, features: frozenset[str]) -> list[Count]:
    """The gates of any object: nothing that the CPU need not have by what the object was compiled for."""
    from tunekit.build_tools.foreign import rules

    return [
        Count.exactly("*", names, 0, having, f"{'/'.join(needs)} instructions")
        for names, having, needs in rules(arch, features)
    ]


def judge(counts: Sequence[Count], functions: dict[str, Any]) -> list[Gate]:
    """Compare counts with the functions of an object; a function that is not there has failed."""
    gates = []
    for count in counts:
        what = (count.what or count.instructions) + (", in the loop" if count.looped else "")
        if count.function != "*" and count.function not in functions:
            gates.append(Gate(count.function, f"{what}: no such function", count.expected, -1, False))
            continue
        chosen = functions.values() if count.function == "*" else [functions[count.function]]
        found = 0
        for function in chosen:
            if count.instructions == SPILLS:
                found += function.spills()
            elif count.looped:
                found += max((loop.count(count.instructions, count.having) for loop in function.hot), default=0)
            else:
                found += function.count(count.instructions, count.having)
        gates.append(Gate(count.function, what, count.expected, found, count.allows(found)))
    return gates


def emission(
    kernels: Sequence[Kernel],
    rows: Sequence[str] = (),
    compilers: Sequence[str] = ("gcc", "clang"),
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Emission:
    """Compile rows, read them back and count.

    Args:
        kernels: whose rows.
        rows: suffixes, or none for all.
        compilers: names of programs; for another architecture than this machine's the cross compiler of that kind.
        folder: where objects are kept by content; None: the user's cache.
        progress: told what was compiled.

    Raises:
        ToolchainError: there is no compiler or no disassembler at all.
    """
    from tunekit.build_tools.cross import find_toolchains, host
    from tunekit.build_tools.disassembly import disassemble, find_disassemblers
    from tunekit.build_tools.objects import compile_jobs
    from tunekit.build_tools.plan import plan
    from tunekit.build_tools.toolchain import Runner

    runner = Runner()
    found = Emission()
    toolchains, found.missing = find_toolchains(runner, compilers)
    if not toolchains:
        raise ToolchainError(f"nothing can be compiled here: {'; '.join(found.missing)}")
    where = paths.private_folder(paths.objects_folder()) if folder is None else folder
    emitted: set[tuple[str, str]] = set()
    declined: dict[tuple[str, str], list[str]] = {}
    for toolchain in toolchains:
        programs = find_disassemblers(runner, toolchain.arch, host())
        for kernel in kernels:
            # The portable reference belongs to every architecture; it is judged for what must not be in it.
            jobs, refused = plan(kernel, toolchain.arch, list(rows) or None, reference=not rows or REFERENCE in rows)
            for suffix, reason in refused.items():
                declined.setdefault((kernel.key, suffix), []).append(reason)
            for compiled in compile_jobs(runner, toolchain, jobs, where, progress):
                job = compiled.job
                emitted.add((kernel.key, job.suffix))
                proof = Proof(kernel.key, job.suffix, toolchain.arch, job.features, toolchain.label)
                found.proofs.append(proof)
                if compiled.path is None:
                    proof.problem = compiled.problem or "it was not compiled"
                    continue
                try:
                    functions, proof.disassembler = disassemble(runner, compiled.path, toolchain.arch, programs)
                except ToolchainError as error:
                    proof.problem = str(error.args[0])
                    continue
                counts = [*expected_of(kernel, job, toolchain.arch), *foreign(toolchain.arch, job.needs)]
                proof.gates = judge(counts, functions)
                proof.spills = sum(f.spills() for f in functions.values())
                proof.functions = functions
                proof.totals = {name: len(f.instructions) for name, f in functions.items()}
    found.declined = {
        f"{key} {suffix}": "; ".join(dict.fromkeys(reasons))
        for (key, suffix), reasons in declined.items()
        if (key, suffix) not in emitted
    }
    return found


def expected_of(kernel: Kernel, job: Any, arch: str) -> list[Count]:
    """What the family's fixtures expect of an object: nothing of the reference, or of a family that says nothing."""
    if job.row is None or not kernel.fixtures:
        return []
    fixtures = fixtures_of(kernel)
    if not isinstance(fixtures, EmissionFixtures):
        return []
    symbols = {name: kernel.symbol(name, job.suffix, job.alternative) for name, _ in kernel.functions}
    return list(fixtures.emission(Unit(job.row, arch, job.features, symbols)))


def emission_table(found: Emission) -> list[str]:
    """The proofs, one line for each object; then what failed, what no compiler could make, and what declined."""
    cells = []
    for proof in found.proofs:
        verdict = f"{len(proof.failed)} FAILED" if proof.failed else "not compiled" if proof.problem else "ok"
        cells.append(
            [
                proof.row,
                ",".join(proof.features) or "baseline",
                proof.arch,
                short_label(proof.compiler),
                str(len(proof.gates) - len(proof.failed)) if proof.gates else "-",
                verdict,
                "-" if proof.problem else str(proof.spills),
            ]
        )
    lines = table(["row", "compiled for", "arch", "compiler", "gates", "verdict", "spills in loops"], cells, "llllrlr")
    for proof in found.proofs:
        where = f"{proof.row} [{','.join(proof.features)}] by {short_label(proof.compiler)}"
        lines += [
            f"FAILED: {where}: {gate.function}: {gate.what}: expected {gate.expected}, "
            f"found {'no such function' if gate.found < 0 else gate.found}"
            for gate in proof.failed
        ]
        if proof.problem:
            lines.append(f"not compiled: {where}: {proof.problem}")
    lines += [f"declined: {name}: {reason}" for name, reason in found.declined.items()]
    lines += [f"unproven: {name}: {reason}" for name, reason in found.unproven().items()]
    lines += [f"not here: {what}" for what in found.missing]
    proofs = [p for p in found.proofs if not p.problem]
    for label in dict.fromkeys((p.compiler, p.disassembler) for p in proofs):
        lines.append(f"compiler: {label[0]}, read with {label[1]}")
    rows = len({(p.kernel, p.row) for p in proofs if p.row != REFERENCE})
    lines.append(f"{found.gates} gates on {len(proofs)} objects of {rows} rows: {found.failed} failed")
    return lines


def short_label(label: str) -> str:
    """``gcc 12.2.0`` of a compiler's first line."""
    words = label.split()
    version = next((w for w in reversed(words) if w[:1].isdigit()), "")
    name = next((name for name in ("clang", "gcc") if name in label.lower()), words[0] if words else "?")
    return f"{name} {version}"


# --- execution -------------------------------------------------------------------------------------------

TRAPPED = "trap and emulate"
MACHINE = "Bochs"
TRAPPED_AND_MACHINE = "trap and emulate, Bochs"  # matrix tiles, and the companions that are no tiles
_open_for_good = contextlib.ExitStack()  # of a child that emulates until its end


@dataclass
class Executed:
    """One object of a row, and whether it was run.

    Attributes:
        kernel, row: which.
        arch, features: what it is compiled for.
        how: what executed it; empty where nothing did.
        state: ``passed``, ``failed`` or ``unproven``.
        reason: of the failure, or why nothing here can execute it.
        seconds: what its gates took.
    """

    kernel: str
    row: str
    arch: str
    features: tuple[str, ...]
    how: str = ""
    state: str = "unproven"
    reason: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, tuple[str, ...]]:
        return self.kernel, self.row, self.arch, self.features


class _GatesOnly:
    """A family's gates without its timed workloads, which are too long for an emulator.

    With a machine of software a fault that C could not be told of is a gate's reason.
    """

    def __init__(self, fixtures: Fixtures, machine: Any = None) -> None:
        self._fixtures, self._machine = fixtures, machine

    def gates(self) -> Sequence[GateCase]:
        gates = self._fixtures.gates()
        if self._machine is None:
            return gates
        return [GateCase(gate.name, functools.partial(self._machine.guarded, gate.run)) for gate in gates]

    def regimes(self) -> Sequence[Regime]:
        return ()


def _name(suffix: str, features: Sequence[str]) -> str:
    return f"{suffix} [{','.join(features)}]"


def find_emulator() -> Path | None:
    """The emulators of tunekit's own tests, which a checkout has and an installed package has not."""
    folder = Path(__file__).resolve().parent.parent / "tests" / "emulate"
    return folder if (folder / "__init__.py").is_file() else None


def _load_emulator(folder: str) -> Any:
    """The package in that folder: ``EMULATED``, ``own()``, ``why_not()``, ``trapping()`` and ``machine``."""
    if "emulate" in sys.modules:
        return sys.modules["emulate"]
    spec = importlib.util.spec_from_file_location("emulate", Path(folder) / "__init__.py")
    if spec is None or spec.loader is None:
        raise TunekitError(f"{folder} holds no emulator")
    module = importlib.util.module_from_spec(spec)
    sys.modules["emulate"] = module
    spec.loader.exec_module(module)
    return module


def _own() -> frozenset[str]:
    """What this CPU has: in a checkout the tests' word for it, who may ask for more emulation than there need be."""
    folder = find_emulator()
    return frozenset(this_features()) if folder is None else _load_emulator(str(folder)).own()


def load_objects(
    module: str, scope: str, name: str, emulator: str = "", how: str = TRAPPED
) -> tuple[Mapping[str, BoundRow], Fixtures]:
    """Every object of the grid that can run here, each alternative by itself: what a child process loads.

    With an emulator: those that this CPU cannot run and the emulator can; the trap is switched on for good. ``how`` is
    the way in which they are run, one of the constants above.
    """
    importlib.import_module(module)
    have = _own()
    less: frozenset[str] = frozenset()  # what has less in it goes another way
    machine = None
    if emulator:
        tool = _load_emulator(emulator)
        less = have
        have = have | tool.EMULATED
        _open_for_good.enter_context(tool.trapping())
        if how != TRAPPED:
            machine = importlib.import_module("emulate.machine")
            less = have
            have = have | machine.FEATURES
    kernel = next((k for k in dispatch.kernels(scope) if k.name == name), None)
    if kernel is None:
        raise TunekitError(f"module {module} declares no kernel {name!r} in scope {scope!r}")
    rows: dict[str, BoundRow] = {}
    for loaded in dispatch.loaded_modules(kernel, grid=True):
        for suffix, objects in loaded.objects(kernel).items():
            for built in objects:
                if built.needs <= have and not (emulator and built.needs <= less):
                    bound = dispatch.BoundRow(kernel, suffix, kernel.row(suffix), "grid", loaded, built)
                    rows.setdefault(_name(suffix, bound.alternative), machine.within(bound) if machine else bound)
    return rows, _GatesOnly(House().fixtures(kernel), machine)


def _objects(kernel: Kernel, rows: Sequence[str]) -> list[Executed]:
    """What there is to prove: every alternative of every row for the architecture that has it, and the reference."""
    found = []
    if kernel.reference is not None and (not rows or REFERENCE in rows):
        found.append(Executed(kernel.key, REFERENCE, this_cpu().arch, ()))
    for row in kernel.rows:
        if rows and row.suffix not in rows:
            continue
        for arch in ("x86_64", "aarch64"):
            if kernel.refuses(row, arch) is None:
                found += [Executed(kernel.key, row.suffix, arch, tuple(f)) for f in kernel.targets(row) or ((),)]
    return found


def execution(
    kernels: Sequence[Kernel],
    rows: Sequence[str] = (),
    also: Sequence[str] = (),
    in_process: bool = False,
    progress: Progress | None = None,
) -> list[Executed]:
    """Build the grid, and run the gates of every object that can run here.

    Args:
        kernels: of which families.
        rows: suffixes, or none for all.
        also: commands of other Pythons with this package (one for another architecture under an emulator); each
            proves what it can, and its answers are added.
        in_process: run gates in this process, where no child can be started. A bad row ends it.
        progress: told what is compiled and what is checked.

    Raises:
        ToolchainError: the grid cannot be built.
    """
    say = progress or (lambda done, total, what: None)
    found: list[Executed] = []
    house = House()
    for scope, module in dict.fromkeys((kernel.scope.name, kernel.module) for kernel in kernels):
        # All kernels of a file share a module, so all are built even where one is asked for.
        unit = [kernel for kernel in dispatch.kernels(scope) if kernel.module == module]
        built = house.build(unit, say)
        # An install may have brought the grid with it, to a machine that has no compiler.
        if built.problem and not any(dispatch.loaded_modules(kernel, grid=True) for kernel in unit):
            raise ToolchainError(f"the grid cannot be built: {built.problem}")
    for kernel in kernels:
        objects = _objects(kernel, rows)
        found += objects
        if not kernel.fixtures:
            for item in objects:
                item.reason = "the family declares no fixtures=, so there are no gates to run"
            continue
        arguments = (kernel.module, kernel.scope.name, kernel.name)
        names = {_name(item.row, item.features): item for item in objects if item.arch == this_cpu().arch}
        known = load_objects(*arguments)[0]
        _run_gates(arguments, [name for name in names if name in known], NATIVE, names, in_process, say)
        lacking: dict[str, str] = {}  # objects that could be emulated, and why they were not
        for how, features, problem in [] if in_process else _emulators():
            wanted = [n for n, x in names.items() if not x.how and x.features and implied(x.features) <= features]
            for way in dict.fromkeys(_way(how, names[name]) for name in wanted):
                chosen = [name for name in wanted if _way(how, names[name]) == way]
                if problem is None:
                    _run_gates((*arguments, str(find_emulator()), way), chosen, way, names, False, say)
                else:
                    lacking.update(dict.fromkeys(chosen, f"{way} cannot run it here: {problem}"))
        for name, item in names.items():
            if not item.how:
                item.reason = lacking.get(name, "")
        for item in objects:
            if not item.how and not item.reason:
                item.reason = _why_unproven(kernel, item)
    for command in also:
        _ask_another(command, kernels, rows, found)
    return found


def _emulators() -> list[tuple[str, frozenset[str], str | None]]:
    """The emulators of a checkout, simplest first: name, the features that rows have with it, why it is not here."""
    folder = find_emulator()
    if folder is None or this_cpu().arch != "x86_64":
        return []
    tool = _load_emulator(str(folder))
    machine = importlib.import_module("emulate.machine")
    trapped = _own() | implied(tool.EMULATED)
    no_trap = tool.why_not()
    no_machine = machine.why_not() or no_trap
    return [(TRAPPED, trapped, no_trap), (MACHINE, trapped | machine.FEATURES, no_machine)]


def _way(how: str, item: Executed) -> str:
    """The machine has no matrix tiles, and runs what stands beside them."""
    return TRAPPED_AND_MACHINE if how == MACHINE and any(f.startswith("amx") for f in item.features) else how


def _run_gates(
    arguments: tuple[str, ...],
    wanted: Sequence[str],
    how: str,
    names: Mapping[str, Executed],
    in_process: bool,
    say: Progress,
) -> None:
    """Run the gates of objects and write the verdicts down."""
    if not wanted:
        return
    job = gate.Job("tunekit.verify:load_objects", arguments)
    ask = gate.gate_rows_here if in_process else gate.gate_rows
    verdicts = ask(job, wanted, progress=lambda name, case, done, total: say(done, total, f"{name}: {case}"))
    for name, verdict in verdicts.items():
        item = names[name]
        item.how, item.seconds, item.reason = how, round(verdict.seconds, 3), verdict.reason
        item.state = "passed" if verdict.state == gate.PASSED else "failed"


def _why_unproven(kernel: Kernel, item: Executed) -> str:
    cpu = this_cpu()
    if item.arch != cpu.arch:
        return f"code of {item.arch}, and this is {cpu.arch}"
    missing = [f for f in item.features if f not in _own()]
    if missing:
        return f"this CPU lacks {', '.join(missing)}"
    return dispatch.why_not(kernel).get(item.row) or "it was not built"


def _ask_another(command: str, kernels: Sequence[Kernel], rows: Sequence[str], found: list[Executed]) -> None:
    """Let another Python prove what it can; its verdicts replace ours where it could run what we could not."""
    words = [*shlex.split(command), "-m", "tunekit", "verify", "--execution", "--in-process", "--json"]
    words += [word for kernel in kernels for word in ("--kernel", kernel.key)]
    words += [word for row in rows for word in ("--row", row)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise TunekitError(f"{command!r} cannot be run: {error.strerror or error}") from error
    try:
        answers = json.loads(done.stdout)["execution"]["objects"]
    except (ValueError, KeyError, TypeError) as error:
        said = done.stderr.strip()[-300:] or f"it ended with {gate.describe_end(done.returncode)}"
        raise TunekitError(f"{command!r} gave no verdicts: {said}") from error
    known = {item.key: item for item in found}
    for answer in answers:
        theirs = Executed(**{**answer, "features": tuple(answer["features"])})
        ours = known.get(theirs.key)
        if theirs.how:
            theirs.how = command
            if ours is None:
                found.append(theirs)
            elif ours.state == "unproven" or theirs.state == "failed":
                vars(ours).update(vars(theirs))


def execution_table(found: Sequence[Executed]) -> list[str]:
    """The rows and what ran them."""
    cells = []
    for x in found:
        seconds = f"{x.seconds:.1f}" if x.how else "-"
        cells.append([x.row, ",".join(x.features) or "baseline", x.arch, x.how or "-", x.state, seconds, x.reason])
    lines = table(["row", "compiled for", "arch", "executed by", "verdict", "s", "why"], cells, "lllllr")
    count = {state: sum(x.state == state for x in found) for state in ("passed", "failed", "unproven")}
    lines.append(", ".join(f"{number} {state}" for state, number in count.items()))
    return lines
