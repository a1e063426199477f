# SPDX-License-Identifier: Apache-2.0
"""Reading objects back: which instructions a compiler put into each function.

GNU objdump of the object's architecture is asked first, then llvm-objdump; one that meets an instruction that it
does not know is no witness, and the next is asked. (capstone is none at all: it stops silently at AVX-VNNI and AMX.)
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from tunekit.errors import ToolchainError

from .cross import TRIPLES, versioned
from .toolchain import Runner

_SYMBOL = re.compile(r"[0-9a-f]+ <(.+)>:$")
_LINE = re.compile(r"\s*([0-9a-f]+):\s+(.*)$")
_TARGET = re.compile(r"(?:0x)?([0-9a-f]+)(?: <|$)")
_UNKNOWN = re.compile(r"\(bad\)|<unknown>|\bundefined\b|^\.(byte|inst|word|long)\b")
# What a compiler appends to the name of a function that it split or specialised.
_PARTS = re.compile(r"\.(cold|part|isra|constprop|llvm)(\.\d+)*(\.|$).*")
_VECTOR = {"x86_64": re.compile(r"%[xyz]mm"), "aarch64": re.compile(r"(^|[ {,])[qdvz]\d")}
_COMMENT = {"x86_64": r"\s+#", "aarch64": r"\s+(?://|;)"}
_STACK = {"x86_64": r"\(%rsp", "aarch64": r"\[sp\b"}
_FRAME = {"x86_64": r"\(%rsp|\(%rbp", "aarch64": r"\[(sp|x29)\b"}
_SETS_FRAME = {"x86_64": re.compile(r"movq? +%rsp, ?%rbp"), "aarch64": re.compile(r"(mov|add) +x29, sp")}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: inside its section.
        name: the mnemonic, without a prefix like ``{vex}`` and without a suffix like ``.4s``.
        text: all that the disassembler printed, prefix and operands included, blanks made single.
    """

    address: int
    name: str
    text: str


@dataclass(frozen=True)
class Function:
    """A function of an object, its instructions in order."""

    name: str
    arch: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def names(self) -> Counter[str]:
        """How often each mnemonic stands in it."""
        return Counter(i.name for i in self.instructions)

    @cached_property
    def text(self) -> str:
        """All instructions, a line each."""
        return "\n".join(i.text for i in self.instructions)

    def count(self, names: str = "*", having: str = "") -> int:
        """Instructions with these names (shell patterns, blanks between) whose text matches ``having``.

        A name that is given twice counts twice, for invariants such as ``ld2 ld2 uzp1 uzp2``.
        """
        patterns = names.split()
        weights = {name: n for name in self.names if (n := sum(fnmatchcase(name, p) for p in patterns))}
        if not weights or not having:
            return sum(self.names[name] * weight for name, weight in weights.items())
        wanted = re.compile(having, re.MULTILINE)
        if not wanted.search(self.text):  # the usual answer, and the quick one
            return 0
        return sum(weights[i.name] for i in self.instructions if i.name in weights and wanted.search(i.text))

    @cached_property
    def hot(self) -> tuple[Function, ...]:
        """Its innermost loops."""
        return tuple(
            Function(self.name, self.arch, tuple(i for i in self.instructions if i.address in loop))
            for loop in self.loops()
        )

    def loops(self) -> list[frozenset[int]]:
        """The innermost loops, each the addresses of its instructions.

        By flow and not by place: compilers lay what runs once between what runs often.
        """
        return _innermost_loops(_blocks(self.instructions, self.arch))

    def spills(self) -> int:
        """Vector loads and stores on the stack inside innermost loops: registers that the compiler ran out of.

        A frame pointer counts as the stack where the function makes it one; elsewhere it is a register like others.
        """
        framed = any(_SETS_FRAME[self.arch].match(i.text) for i in self.instructions)
        stack = re.compile((_FRAME if framed else _STACK)[self.arch])
        vector = _VECTOR[self.arch]
        return sum(
            1
            for loop in self.hot
            for i in loop.instructions
            if stack.search(i.text) and vector.search(i.text.partition(" ")[2])
        )


def _branch(instruction: Instruction, arch: str) -> tuple[int | None, bool] | None:
    """Where a branch goes (None: not known) and whether it may fall through; None for any other instruction."""
    name = instruction.name
    if re.fullmatch(r"ret[a-z]*|ud2|hlt|br|udf", name):
        return None, False
    if not (name.startswith("j") if arch == "x86_64" else re.fullmatch(r"b(\..*)?|cbn?z|tbn?z", name)):
        return None
    found = _TARGET.match(instruction.text.partition(" ")[2].rpartition(",")[2].strip())
    return int(found[1], 16) if found else None, name not in ("jmp", "jmpq", "b")


@dataclass(frozen=True)
class _Block:
    """Instructions that run one after the other: their addresses, and the blocks that may follow."""

    addresses: tuple[int, ...]
    following: tuple[int, ...]


def _blocks(instructions: Sequence[Instruction], arch: str) -> dict[int, _Block]:
    """A function's basic blocks, by the address of their first instruction."""
    own = {i.address for i in instructions}
    branches = {i.address: found for i in instructions if (found := _branch(i, arch)) is not None}
    starts = {target for target, _ in branches.values() if target in own}
    starts |= {b.address for a, b in pairwise(instructions) if a.address in branches}
    starts |= {i.address for i in instructions[:1]}
    parts: list[list[int]] = []
    for instruction in instructions:
        if instruction.address in starts:
            parts.append([])
        parts[-1].append(instruction.address)
    blocks = {}
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        target, falls = branches.get(part[-1], (None, True))
        following = ([target] if target in own else []) + ([after[0]] if falls and after else [])
        blocks[part[0]] = _Block(tuple(part), tuple(f for f in following if f is not None))
    return blocks


def _innermost_loops(blocks: dict[int, _Block]) -> list[frozenset[int]]:
    """Natural loops that hold no other one: a block that leads back to one that every way to it passes, and what
    lies between them."""
    before: dict[int, set[int]] = {start: set() for start in blocks}
    for start, block in blocks.items():
        for following in block.following:
            before[following].add(start)
    everything = set(blocks)
    entries = {start for start in blocks if not before[start]} | set(list(blocks)[:1])
    dominators = {start: {start} if start in entries else everything for start in blocks}
    changed = True
    while changed:
        changed = False
        for start in blocks:
            if start not in entries:
                new = {start} | set.intersection(*(dominators[b] for b in before[start]))
                changed, dominators[start] = changed or new != dominators[start], new
    loops: dict[int, set[int]] = {}
    for start, block in blocks.items():
        for head in block.following:
            if head in dominators[start]:
                body, waiting = loops.setdefault(head, {head}), [start]
                while waiting:
                    at = waiting.pop()
                    if at not in body:
                        body.add(at)
                        waiting += before[at]
    inner = [body for head, body in loops.items() if not any(h != head and h in body for h in loops)]
    return [frozenset(a for start in body for a in blocks[start].addresses) for body in inner]


def parse(text: str, arch: str) -> dict[str, Function]:
    """What a disassembler printed, by function; parts that a compiler split off count with their function.

    Raises:
        ToolchainError: it met an instruction that it does not know.
    """
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        label = _SYMBOL.match(line)
        if label:
            current = found.setdefault(_PARTS.sub("", label[1]), [])
            continue
        match = _LINE.match(line)
        if match is None or current is None:
            continue
        shown = re.sub(r"\s+", " ", re.split(_COMMENT[arch], match[2])[0]).strip()
        if _UNKNOWN.search(shown):
            raise ToolchainError(f"the disassembler does not know an instruction: {shown!r}")
        name = re.sub(r"\{\w+\} ?", "", shown).partition(" ")[0]
        if name:
            name = re.sub(r"\.\d*[bhsdq]\d*$", "", name) if arch == "aarch64" else name
            current.append(Instruction(int(match[1], 16), name, shown))
    return {name: Function(name, arch, tuple(instructions)) for name, instructions in found.items()}


@dataclass(frozen=True)
class Disassembler:
    """A disassembler that answered; ``label`` is the first line of its ``--version``."""

    command: tuple[str, ...]
    label: str


def find_disassemblers(runner: Runner, arch: str, host: str) -> list[Disassembler]:
    """Those of this machine that read objects of ``arch``, best first.

    Raises:
        ToolchainError: there is none.
    """
    names = [f"{TRIPLES.get(arch, arch)}-objdump", *(["objdump"] if arch == host else []), *versioned("llvm-objdump")]
    found = []
    for name in names:
        if shutil.which(name):
            status, output, _ = runner.run([name, "--version"])
            shown = output.decode(errors="replace").splitlines()
            lines = [line.strip() for line in shown if "version" in line or "GNU" in line]
            if status == 0 and lines:
                found.append(Disassembler((name,), lines[0]))
    if not found:
        raise ToolchainError(
            f"no disassembler for {arch} (looked for {', '.join(dict.fromkeys(names)) or 'llvm-objdump'}); "
            f"install binutils (another architecture's: binutils-{TRIPLES.get(arch, arch)}) or llvm"
        )
    return found


def disassemble(
    runner: Runner, path: Path, arch: str, programs: Sequence[Disassembler]
) -> tuple[dict[str, Function], str]:
    """The functions of an object, and the label of the disassembler that read it.

    Raises:
        ToolchainError: none of them can read it.
    """
    fault = None
    for program in programs:
        command = [*program.command, "-d", "-w", "--no-show-raw-insn", str(path)]
        if "llvm" in program.command[0]:
            command.remove("-w")
        status, output, errors = runner.run(command)
        try:
            if status != 0:
                raise ToolchainError(errors.strip().partition("\n")[0] or "it failed", command, status, errors)
            return parse(output.decode(errors="replace"), arch), program.label
        except ToolchainError as error:
            fault = fault or error
    raise fault or ToolchainError(f"no disassembler for {arch}")
