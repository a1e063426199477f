# SPDX-License-Identifier: Apache-2.0
"""Us and the peers on the same products, in turns in one run: rates, ratios with spreads, a chart, and the bars.

    bash benchmarks/peers.sh                              # build and install the peers, once
    python benchmarks/peers.py --quick                    # a look, about 90 seconds
    python benchmarks/peers.py --json all.json --chart all.svg --bars
    python benchmarks/peers.py --shapes "1B qo" 576x576 --tokens 1 4 --threads 1 --json part.json
    python benchmarks/peers.py --merge part1.json part2.json --bars

Activations are float32 and results are float32 on every side, so that quantising is inside, but where a label says
"kernel". Each peer's result is held against float32 before it is timed; one that computes something else, or that is
not installed, is named. Times are each peer's best of many short windows, taken in turns; "spread" is the middle half
of the single rounds' ratios. ``--json FILE`` adds each cell, when it is measured, to what the file
holds (one that is there already is replaced), so that the whole may be measured in slices; bars and chart are of the
whole file. ``--merge`` measures nothing. What runs here is what would run in an application of this user: status says
which row, and TUNEKIT_PIN names another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parent / ".peers"
TOKENS = (1, 2, 3, 4, 8, 16, 64, 512)
STREAMED_TOKENS = (1, 2, 3, 4, 8)  # beyond, the time is in the arithmetic; --tokens asks for others all the same
MXFP4_SHAPES = ("1B kv", "1B qo", "1B w13", "1B w2", "135M qo", "135M w13", "135M w2")
REGIMES = ("hot", "streamed", "chain")
QUICK: dict[str, Any] = {"shapes": ["1B qo", "135M w13"], "tokens": [1, 4, 64], "seconds": 0.8, "threads": ["1"]}


def cells_of(options: argparse.Namespace) -> list[Any]:
    from peerlib.measure import Cell
    from peerlib.work import SHAPES

    shapes = options.shapes or list(SHAPES)
    found = []
    for form in options.forms:
        for regime in [r for r in options.regimes if r != "chain"]:
            for shape in shapes:
                if form == "mxfp4" and not options.shapes and shape not in MXFP4_SHAPES:
                    continue
                if regime == "streamed" and form == "mxfp4" and not options.tokens:
                    continue
                tokens = options.tokens or (STREAMED_TOKENS if regime == "streamed" else TOKENS)
                if options.quick and regime == "streamed":
                    tokens = [1] if form == "q8_0" and shape == shapes[0] else []
                found += [Cell(shape, t, regime, form) for t in tokens]
    if "chain" in options.regimes and "q8_0" in options.forms:
        found += [Cell("SmolLM2-135M", t, "chain") for t in (1, 512) if not options.tokens or t in options.tokens]
    return found


def child(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measure on so many threads, in this process."""
    if count == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from peerlib import limits, peers
    from peerlib.measure import Loaded, measure, say

    found, missing = peers.start(count, options.libs)
    if options.peers:
        found = [p for p in found if any(word in p.label for word in ["tunekit", *options.peers])]
    for label, reason in missing.items():
        say(f"{count} threads: not measured: {label}: {reason}")
    loaded, measured = Loaded(), {}
    try:
        measured = limits.measure(count)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"this CPU's limits are not measured: {error}")
    whole: dict[str, Any] = {"box": box(), "missing": missing, "limits": {str(count): measured} if measured else {}}
    whole["cells"] = []
    for cell in cells_of(options):
        say(f"{count} threads: {cell.form} {cell.shape} T={cell.tokens} {cell.regime}")
        whole["cells"].append(measure(cell, found, count, options.seconds * (1 if count == 1 else 2), loaded))
        if options.json:
            add(options.json, {**whole, "cells": whole["cells"][-1:]})  # what is interrupted keeps what it has
    return whole


def add(path: Path, part: dict[str, Any]) -> None:
    """Put cells into a file beside those that are there, or in place of the same ones."""
    before = [json.loads(path.read_text())] if path.exists() else []
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(merged([*before, part]), indent=1) + "\n")
    os.replace(beside, path)


def in_child(count: int) -> dict[str, Any]:
    """The same command in a process that every library sees with so many threads from its start."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, str(count))}
        command = [sys.executable, __file__, *sys.argv[1:], "--child", str(count), "--result", result.name]
        subprocess.run(command, env=environment, check=True)
        return dict(json.loads(Path(result.name).read_text()))


def key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("form", "regime", "shape", "tokens", "threads"))


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Later parts replace the cells that earlier ones hold; of the limits the best is kept."""
    found: dict[str, Any] = {"box": {}, "missing": {}, "limits": {}, "cells": []}
    cells: dict[tuple[Any, ...], Any] = {}
    for part in parts:
        found["box"] |= part.get("box", {})
        found["missing"] |= part.get("missing", {})
        for threads, limits in part.get("limits", {}).items():
            own = found["limits"].setdefault(threads, {})
            for name, value in limits.items():
                own[name] = max(value, own.get(name, 0.0))
        cells |= {key(cell): cell for cell in part["cells"]}
    found["cells"] = list(cells.values())
    present = {label for cell in found["cells"] for label in cell["peers"]}
    found["missing"] = {label: why for label, why in found["missing"].items() if label not in present}
    return found


def box() -> dict[str, str]:
    from tunekit.cpu import this_box

    return {"box": this_box().key, "system": platform.platform(), "python": platform.python_version()}


def show(found: dict[str, Any]) -> list[str]:
    """The table: a line for a peer in a cell."""
    lines = []
    for cell in found["cells"]:
        size = f" ({cell['k']} x {cell['n']})" if "k" in cell else ""
        where = f"T={cell['tokens']}, {cell['regime']}, {cell['threads']} threads"
        lines.append(f"\n{cell['form']} {cell['shape']}{size}, {where}")
        lines.append(f"  {'':66} {'GMAC/s':>8} {'median':>7} {'ours is':>8}  {'spread':11} {'error':>8}")
        for label, p in sorted(cell["peers"].items(), key=lambda item: -item[1]["gmacs"]):
            median = p["gmacs"] * p["seconds"] / p["median"]
            ratio = f"{p['ratio']:7.2f}x  {p['low']:.2f}-{p['high']:.2f}" if "ratio" in p else ""
            lines.append(f"  {label:66} {p['gmacs']:8.1f} {median:7.1f} {ratio:21} {p['error']:8.1e}")
        lines += [f"  {label}: REFUSED: {why}" for label, why in cell["refused"].items()]
    versions = {label: p["version"] for cell in found["cells"] for label, p in cell["peers"].items()}
    lines += ["", *(f"{label}: {version}" for label, version in versions.items())]
    lines += [f"not measured: {label}: {why}" for label, why in found["missing"].items()]
    for threads, limits in found["limits"].items():
        shown = [f"{limits[name]:.1f} {unit}" for name, unit in UNITS.items() if name in limits]
        lines.append(f"this CPU, {threads} threads: " + ", ".join(shown))
    return lines


UNITS = {
    "port": "GMAC/s of the multipliers alone",
    "tile": "GMAC/s of our tile in first-level cache (both of one core)",
    "read": "GB/s of the best plain read of memory",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="two shapes, 1, 4 and 64 tokens, one core")
    parser.add_argument("--shapes", nargs="+", metavar="NAME|KxN", help="names of the table, or K and N")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T")
    parser.add_argument("--threads", nargs="+", metavar="N|all", help="default: 1 and all")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--forms", nargs="+", choices=("q8_0", "mxfp4"), default=["q8_0", "mxfp4"])
    parser.add_argument("--peers", nargs="+", metavar="WORD", help="only those whose label holds one of these words")
    seconds = "of turns for each cell (default 1.5; twice as long on several threads; at least four rounds)"
    parser.add_argument("--seconds", type=float, help=seconds)
    parser.add_argument("--libs", type=Path, default=DEFAULT_FOLDER, help="where peers.sh built (default .peers)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add to this file")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg")
    parser.add_argument("--bars", action="store_true", help="print how far each bar is met")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing: show these together")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, value in QUICK.items():
        if options.quick and not getattr(options, name):
            setattr(options, name, value)
    options.seconds = options.seconds or 1.5
    for shape in options.shapes or []:
        check_shape(parser, shape)
    if any(t < 1 for t in options.tokens or []):
        parser.error("--tokens: each must be at least 1")
    return options


def check_shape(parser: argparse.ArgumentParser, shape: str) -> None:
    from peerlib.work import BLOCK, SHAPES

    if shape in SHAPES:
        return
    k, _, n = shape.partition("x")
    if not (k.isdigit() and n.isdigit() and int(k) and int(k) % BLOCK == 0 and int(n)):
        parser.error(f"--shapes: {shape!r} is neither KxN with K a multiple of {BLOCK} nor one of {', '.join(SHAPES)}")


def main() -> int:
    options = parse()
    if options.child:
        options.result.write_text(json.dumps(child(options, options.child)))
        return 0
    if options.merge:
        found = merged([json.loads(path.read_text()) for path in options.merge])
    else:
        every = len(os.sched_getaffinity(0))
        counts = [every if t == "all" else int(t) for t in options.threads or ["1", "all"]]
        found = merged([in_child(count) for count in dict.fromkeys(counts)])
    print("\n".join(show(found)))
    if options.json and options.merge:
        add(options.json, found)
    if options.json:
        found = json.loads(options.json.read_text())
    if options.bars:
        from peerlib import bars

        print("\n" + "\n".join(bars.table(bars.judge(found["cells"], found["limits"]))))
    if options.chart:
        from peerlib import chart

        options.chart.write_text(chart.svg(found["cells"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
