# SPDX-License-Identifier: Apache-2.0
"""What llvm-mca predicts of rows on CPUs that are not here: multiply-accumulates a cycle of each hot loop.

    python benchmarks/predict.py                     # rows of the fallback chain, what gcc makes of them
    python benchmarks/predict.py --all --compilers gcc,clang
    python benchmarks/predict.py --row dot_vpdpbusd_width512_mr32_kstep1_nr6_gstreams2_gahead0_bias128

A prediction, and no measurement: the model knows ports and latencies of a core and takes every load for a hit in the
first cache. Where a CPU was here it can be held against it: LLVM 19 says 17 for the int16 tile on Zen 3 and 22 for
VNNI's on Zen 4, where 22 and 47 were measured. So it ranks loops on one core, and not cores. The widest tile and the
GEMV's function of most streams stand for a row. LLVM 19's llvm-mca is asked (Debian: ``apt install llvm-19``), since
older ones lack some of these CPUs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import instructions as counted

from tunekit import verify
from tunekit.errors import ToolchainError
from tunekit.q8 import grid

CPUS = {"x86_64": ("znver3", "znver4", "sapphirerapids"), "aarch64": ("neoverse-v2", "apple-m1")}
CYCLES = 100
"""Turns of a loop that are simulated; what comes before the first is then a percent or so."""


def program() -> str | None:
    """llvm-mca of LLVM 19, or of whatever else there is under its plain name."""
    for name in ("llvm-mca-19", "/usr/lib/llvm-19/bin/llvm-mca", "llvm-mca"):
        if found := shutil.which(name):
            return found
    return None


def assembly(loop: Any) -> str:
    """A loop's instructions as an assembler reads them: no addresses, no comments, branches to nowhere."""
    lines = []
    for i in loop.instructions:
        text = re.split(r"\s+#" if loop.arch == "x86_64" else r"\s+(?://|;)", i.text)[0]
        text = re.sub(r"^(b\.\w+|cbn?z\s+\w+,|tbn?z\s+[^<]*,|b)\s+[0-9a-f]+\b.*$", r"\1 0", text)  # aarch64
        text = re.sub(r"^(j\w+)\s.*$", r"\1 0", text)  # x86-64
        lines.append(re.sub(r"\s*<[^>]*>", "", text))
    return "\n".join(lines) + "\n"


def cycles(mca: str, arch: str, cpu: str, loop: Any) -> float:
    """Cycles of one turn. Raises ToolchainError where llvm-mca does not take it."""
    features = ("-mattr=+fp16fml,+dotprod,+i8mm",) if arch == "aarch64" else ()
    command = [mca, f"-mtriple={arch}", f"-mcpu={cpu}", *features, f"-iterations={CYCLES}", "--instruction-info=0"]
    command += ["--resource-pressure=0"]
    done = subprocess.run(command, input=assembly(loop), capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode or not found:
        raise ToolchainError(f"{cpu}: llvm-mca does not take the loop", command, done.returncode, done.stderr)
    return int(found[1]) / CYCLES


def stand_in(proof: Any, word: str) -> tuple[Any, int] | None:
    """The loop with most multiply-accumulates among the functions whose name holds the word, and how many."""
    own = [
        (counted.macs(loop.instructions), loop)
        for name, function in proof.functions.items()
        if word in name
        for loop in function.hot
    ]
    best = max(own, key=lambda found: found[0], default=(0, None))
    return (best[1], best[0]) if best[0] else None


FUNCTIONS = {"tile": "_q8q8__", "gemv": "_q8q8_gemv__", "mxfp4 tile": "_q8q8_mx4_tile__", "mxfp4": "_q8q8_mx4_gemv__"}
"""What is predicted, and what the names of its functions hold."""


def predictions(mca: str, rows: list[str], compilers: list[str]) -> list[dict[str, Any]]:
    """Of each object of each row: multiply-accumulates a cycle of tile and GEMV, by CPU; None where it cannot say."""
    found = []
    for proof in verify.emission([counted.KERNEL], rows, compilers).proofs:
        if proof.problem:
            continue
        entry: dict[str, Any] = {"row": proof.row, "features": list(proof.features), "compiler": proof.compiler}
        for what, word in FUNCTIONS.items():
            loop = stand_in(proof, word)
            for cpu in CPUS[proof.arch]:
                rate = None
                if loop is not None and runs_on(proof.features, cpu):
                    try:
                        rate = round(loop[1] / cycles(mca, proof.arch, cpu, loop[0]), 1)
                    except ToolchainError as error:
                        entry.setdefault("problems", []).append(f"{what}: {error.args[0]}")
                entry.setdefault(cpu, {})[what] = rate
        found.append(entry)
    return found


LACKS = {
    "znver3": ("avx512", "avxvnni", "amx"),
    "znver4": ("avxvnni", "amx"),
    "sapphirerapids": ("avxvnniint8",),
    "apple-m1": ("i8mm",),
}
"""What a CPU does not have, by the beginning of the feature's name."""


def runs_on(features: Any, cpu: str) -> bool:
    """Whether the CPU has what an object is compiled for."""
    return not any(feature.startswith(word) for feature in features for word in LACKS.get(cpu, ()))


def table(found: list[dict[str, Any]]) -> str:
    """Markdown; tile, GEMV, MXFP4 tile (where it is one of its own) and MXFP4 GEMV in each cell."""
    cpus = [cpu for cpus in CPUS.values() for cpu in cpus]
    lines = ["| row | compiled for | " + " | ".join(cpus) + " |", "|---|---|" + "---|" * len(cpus)]
    for entry in found:
        cells = []
        for cpu in cpus:
            rates = entry.get(cpu, {})
            shown = " / ".join("-" if rates.get(what) is None else f"{rates[what]:g}" for what in FUNCTIONS)
            cells.append("" if all(rates.get(what) is None for what in FUNCTIONS) else shown)
        lines.append(f"| `{entry['row']}` | {','.join(entry['features']) or 'baseline'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help="may be repeated; default: the fallback chain")
    parser.add_argument("--all", action="store_true", help="every row of the grid")
    parser.add_argument("--compilers", default="gcc")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mca = program()
    if mca is None:
        print("this needs llvm-mca; on Debian: apt install llvm-19", file=sys.stderr)
        return 1
    rows = options.row or ([row.suffix for row in grid.ROWS] if options.all else counted.ROWS)
    try:
        found = predictions(mca, rows, options.compilers.split(","))
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if options.json else table(found))
    for entry in found:
        for problem in entry.get("problems", ()):
            print(f"{entry['row']}: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
