# SPDX-License-Identifier: Apache-2.0
"""How many instructions the fallback rows take: the guard against getting slower, which needs no quiet machine.

    python benchmarks/instructions.py                     # what is found, beside what is recorded
    python benchmarks/instructions.py --record "REASON"   # make what is found here the record, for these compilers

Two counts for each compiler. ``loops``: instructions for 1000 multiply-accumulates in the innermost loops of each
function, from the disassembly. ``calls``: instructions that callgrind counts for fixed
products (:data:`MAIN`), of the rows that need AVX2 and nothing that callgrind does not know. The test fails where a
count is more than 2 % above the record, ``instructions.json``; a change of the record says why, in the same commit.
Compilers are told apart by their major version, and one that is not recorded is no failure: it says what to run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tunekit import verify
from tunekit.errors import ToolchainError
from tunekit.q8 import grid, kernels

RECORD = Path(__file__).with_name("instructions.json")
ALLOWED = 1.02
KERNEL = kernels.q8q8.kernel
ROWS = [suffix for suffix in KERNEL.fallback if suffix != "reference"]

# Multiply-accumulates of an instruction for a vector of 128 bits.
BYTES = {"vpmaddubsw": 16, "vpdpbusd": 16, "vpdpbssd": 16, "sdot": 16, "smmla": 32}
WORDS = {"vpmaddwd": 8, "smlal": 4, "smlal2": 4}

MAIN = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
enum { K = 512, NB = K / 32, N = 64, T = 16, MR = @mr@, NG = N / MR, STEP = @tokstep@ };
extern int64_t @acts_bytes@(int64_t, int32_t);
extern void @quantize@(int8_t *, float *, const float *, int64_t, int64_t, int32_t);
extern void @prepare@(uint8_t *, const int8_t *, const float *, int64_t, int64_t, int64_t, int32_t);
extern void @tile@(float *, int64_t, const int8_t *, const float *, const uint8_t *, int64_t, int64_t, int32_t, int32_t,
                   int32_t);
extern void @gemv@(float *, const int8_t *, const float *, const uint8_t *, int64_t, int64_t, int32_t, int32_t);
extern void @f16@(float *, int64_t, const int8_t *, const uint16_t *, const uint8_t *, int64_t, int64_t, int32_t,
                  int32_t, int32_t);
extern void @gemv_f16@(float *, const int8_t *, const uint16_t *, const uint8_t *, int64_t, int64_t, int32_t, int32_t);
extern void @mx4_gemv@(float *, const uint8_t *, const uint8_t *, const uint8_t *, int64_t, int64_t, int32_t, int32_t);
extern int64_t @mx4_room@(int32_t);
extern void @mx4_expand@(uint8_t *, const uint8_t *, const uint8_t *, int32_t, int32_t);
extern void @mx4_tile@(float *, int64_t, const uint8_t *, const uint8_t *, const uint8_t *, const uint8_t *, int64_t,
                       int64_t, int32_t, int32_t, int32_t);
static float x[T * K], s[T * NB], ws[N * NB], y[T * N];
static uint16_t halves[N * NB];
static int8_t q[T * K] __attribute__((aligned(64))), w[N * K + 4096] __attribute__((aligned(64)));
static uint8_t nib[N * K + 4096] __attribute__((aligned(64))), e[N * NB + 4096], *xa, *room;
#define MEASURED __attribute__((noinline, used)) void
MEASURED measured_quantize(void) { @quantize@(q, s, x, 0, T, NB); }
MEASURED measured_prepare(void) { @prepare@(xa, q, s, T, 0, T, NB); }
MEASURED measured_tile(void) {
    for (int t = 0; t < T; t += STEP) @tile@(y + t * N, N, w, ws, xa, T, t, T - t < STEP ? T - t : STEP, NB, NG);
}
MEASURED measured_gemv(void) { @gemv@(y, w, ws, xa, T, 0, NB, NG); }
MEASURED measured_tile_f16(void) {
    for (int t = 0; t < T; t += STEP) @f16@(y + t * N, N, w, halves, xa, T, t, T - t < STEP ? T - t : STEP, NB, NG);
}
MEASURED measured_gemv_f16(void) { @gemv_f16@(y, w, halves, xa, T, 0, NB, NG); }
MEASURED measured_mx4_gemv(void) { @mx4_gemv@(y, nib, e, xa, T, 0, NB, NG); }
MEASURED measured_mx4_tile(void) {
    @mx4_expand@(room, nib, e, NB, NG);
    for (int t = 0; t < T; t += STEP)
        @mx4_tile@(y + t * N, N, nib, e, room, xa, T, t, T - t < STEP ? T - t : STEP, NB, NG);
}
int main(void) {
    uint32_t r = 1;
    for (int i = 0; i < T * K; i++) x[i] = (float)(int32_t)(r = r * 1664525u + 1013904223u) / 1e9f;
    for (int i = 0; i < N * K; i++) w[i] = (int8_t)((r = r * 1664525u + 1013904223u) >> 24);
    for (int i = 0; i < N * NB; i++) ws[i] = 0.01f, halves[i] = 0x2100, e[i] = 120;
    for (int i = 0; i < N * K / 2; i++) nib[i] = (uint8_t)((r = r * 1664525u + 1013904223u) >> 24);
    xa = aligned_alloc(64, (size_t)(@acts_bytes@(T, NB) + 63) / 64 * 64);
    memset(xa, 0, (size_t)@acts_bytes@(T, NB));
    room = aligned_alloc(64, (size_t)@mx4_room@(NB) * NG + 64 & -64);
    measured_quantize();
    measured_prepare();
    measured_tile();
    measured_gemv();
    measured_tile_f16();
    measured_gemv_f16();
    measured_mx4_gemv();
    measured_mx4_tile();
    return 0;
}
"""
"""Fixed work for callgrind: 16 tokens of K = 512 by 64 rows, and one token; the vectors' values decide nothing."""


def compiler(label: str, arch: str) -> str:
    """``gcc 12 x86_64``: what a record belongs to."""
    name, _, version = verify.short_label(label).partition(" ")
    return f"{name} {version.partition('.')[0]} {arch}"


def macs(instructions: Any) -> int:
    """Multiply-accumulates of a loop's instructions. Pair sums that go on to be added up count once."""

    def of(table: dict[str, int]) -> int:
        found = 0
        for i in instructions:
            width = 4 if "%zmm" in i.text else 2 if "%ymm" in i.text else 1
            found += table.get(i.name, 0) * width
        return found

    return of(BYTES) or of(WORDS)


def loops(proof: Any) -> dict[str, float]:
    """Of each function: instructions for 1000 multiply-accumulates, in all its innermost loops that multiply."""
    found = {}
    for name, function in proof.functions.items():
        own = [(len(loop.instructions), n) for loop in function.hot if (n := macs(loop.instructions))]
        if own:
            found[name.removeprefix("tk_tunekit_")] = round(1000 * sum(i for i, _ in own) / sum(n for _, n in own), 2)
    return found


def all_loops(folder: Path | None = None) -> dict[str, dict[str, float]]:
    """By compiler, then by function of a row. Raises ToolchainError where nothing can be compiled or read back."""
    found: dict[str, dict[str, float]] = {}
    for proof in verify.emission([KERNEL], ROWS, folder=folder).proofs:
        if proof.problem:
            raise ToolchainError(f"{proof.compiler}: row {proof.row}: {proof.problem}")
        found.setdefault(compiler(proof.compiler, proof.arch), {}).update(loops(proof))
    return found


def _jobs(toolchain: Any) -> list[Any]:
    """The fallback rows' objects that callgrind can run: those of AVX2."""
    from tunekit.build_tools.plan import plan

    from tunekit.cpu.features import implied

    known = implied(("avx2", "fma", "f16c"))
    return [job for job in plan(KERNEL, toolchain.arch, ROWS, reference=False)[0] if job.needs <= known]


def missing_callgrind() -> str | None:
    """What callgrind lacks here, or None."""
    from tunekit.cpu import this_features

    if shutil.which("valgrind") is None:
        return "valgrind"
    return None if {"avx2", "fma", "f16c"} <= this_features() else "a CPU with AVX2, for callgrind"


def _counted(toolchain: Any, compiled: Any, folder: Path) -> dict[str, int]:
    """Callgrind's totals of a row's object, by what was called."""
    from tunekit.q8.layout import layout_of

    job = compiled.job
    row = KERNEL.row(job.suffix)
    text = MAIN.replace("@mr@", str(layout_of(row).mr)).replace("@tokstep@", str(grid.tokstep(row)))
    for word, name in (("tile", "q8q8"), *((n.removeprefix("q8q8_"), n) for n, _ in KERNEL.functions if n != "q8q8")):
        text = text.replace(f"@{word}@", KERNEL.symbol(name, job.suffix, job.alternative))
    source, program = folder / "main.c", folder / "main"
    source.write_text(text)
    command = [*toolchain.command, "-O1", "-w", str(source), str(compiled.path), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"row {job.suffix}: the counted program does not compile", command, 1, done.stderr)
    out = folder / "counts"
    plain = ("--compress-pos=no", "--compress-strings=no", f"--callgrind-out-file={out}")
    what = ("--collect-atstart=no", "--toggle-collect=measured_*")
    command = ["valgrind", "--tool=callgrind", *what, *plain, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise ToolchainError(f"row {job.suffix}: callgrind failed", command, done.returncode, done.stderr)
    # A function's own cost, and that of each call in it with all that it led to, is the last number of a line.
    found: dict[str, int] = {}
    name = ""
    for line in out.read_text().splitlines():
        if line.startswith("fn="):
            measured = re.fullmatch(r"fn=measured_(\w+)", line)
            name = measured[1] if measured else ""
        elif name and re.fullmatch(r"\w+ \d+", line):
            found[name] = found.get(name, 0) + int(line.split()[1])
    if not found:
        raise ToolchainError(f"row {job.suffix}: callgrind wrote no counts", command, 0, done.stderr)
    return found


def all_calls(folder: Path | None = None) -> dict[str, dict[str, int]]:
    """By compiler, then by row and call. Raises ToolchainError."""
    from tunekit.build_tools.cross import find_toolchains, host
    from tunekit.build_tools.objects import compile_jobs
    from tunekit.build_tools.toolchain import Runner

    from tunekit import paths

    runner = Runner()
    where = paths.private_folder(paths.objects_folder()) if folder is None else folder
    found: dict[str, dict[str, int]] = {}
    for toolchain in find_toolchains(runner)[0]:
        if toolchain.arch != host():
            continue
        own = found.setdefault(compiler(toolchain.label, toolchain.arch), {})
        for compiled in compile_jobs(runner, toolchain, _jobs(toolchain), where):
            if compiled.path is None:
                raise ToolchainError(compiled.problem or f"row {compiled.job.suffix} was not compiled")
            with tempfile.TemporaryDirectory() as scratch:
                counts = _counted(toolchain, compiled, Path(scratch))
            own |= {f"{compiled.job.suffix} {name}": count for name, count in counts.items()}
    return found


def slower(recorded: dict[str, float], found: dict[str, float]) -> list[str]:
    """What fails: counts that have grown beyond what is allowed, and those on one side alone."""
    faults = [f"{name}: not recorded" for name in sorted(found.keys() - recorded.keys())]
    faults += [f"{name}: recorded, and no longer there" for name in sorted(recorded.keys() - found.keys())]
    for name in sorted(found.keys() & recorded.keys()):
        before, now = recorded[name], found[name]
        if now > before * ALLOWED:
            faults.append(f"{name}: {now:g} instructions, {before:g} recorded ({100 * (now / before - 1):+.1f} %)")
    return faults


def load() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {"reasons": [], "loops": {}, "calls": {}}


def save(record: dict[str, Any]) -> None:
    """One line a function, so that a change of the record shows what changed."""
    parts = [f' "reasons": {json.dumps(record["reasons"], indent=2)}']
    for kind in ("loops", "calls"):
        compilers = []
        for name, counts in sorted(record[kind].items()):
            lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(counts[key])}" for key in sorted(counts))
            compilers.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
        parts.append(f' "{kind}": {{\n' + ",\n".join(compilers) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def how_to_record(name: str) -> str:
    return f'{name} is not recorded; to record it: python benchmarks/instructions.py --record "{name}: first counts"'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--record", metavar="REASON", help="make what is found the record of these compilers")
    options = parser.parse_args()
    record = load()
    found: dict[str, Any] = {"loops": all_loops()}
    lacks = missing_callgrind()
    found["calls"] = {} if lacks else all_calls()
    if lacks:
        print(f"calls are not counted: this needs {lacks}", file=sys.stderr)
    faults = []
    for kind, compilers in found.items():
        for name, counts in compilers.items():
            before = record[kind].get(name)
            faults += [f"{name}: {fault}" for fault in slower(before, counts)] if before else [how_to_record(name)]
            for key, value in counts.items():
                recorded = "" if before is None or before.get(key) == value else f"  recorded: {before.get(key)}"
                print(f"{kind} {name}  {key}  {value}{recorded}")
    print("\n".join(faults), file=sys.stderr)
    if options.record:
        for kind, compilers in found.items():
            record[kind] |= compilers
        record["reasons"].append(options.record)
        save(record)
    return 1 if faults and not options.record else 0


if __name__ == "__main__":
    sys.exit(main())
