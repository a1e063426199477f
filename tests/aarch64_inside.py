# SPDX-License-Identifier: Apache-2.0
"""What test_aarch64.py runs inside an AArch64 CPython under qemu: ``aarch64_inside.py COMMAND ARGUMENT...``.

Prints one JSON object on the last line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def choice() -> dict[str, Any]:
    """What this CPU is said to have, what runs on it, and that a product through the public calls is exact."""
    import numpy as np

    import tunekit
    from tunekit import dispatch, q8
    from tunekit.cpu import this_cpu, this_features
    from tunekit.q8 import kernels

    rng = np.random.default_rng(5)
    exact = True
    for n, k, t in ((40, 96, 5), (33, 64, 1), (7, 32, 3)):
        x = rng.standard_normal((t, k), dtype=np.float32)
        m = q8.pack(rng.standard_normal((n, k), dtype=np.float32))
        a = q8.quantize(x)
        want = q8.oracle.matmul(a, m)
        exact &= np.array_equal(q8.matmul(x, m).view(np.uint32), want.view(np.uint32))
        exact &= np.array_equal(q8.matmul(a, m).view(np.uint32), want.view(np.uint32))
    (status,) = tunekit.status()
    return {
        "arch": this_cpu().arch,
        "features": sorted(this_features()),
        "chosen": status.suffix,
        "tier": status.tier,
        "reason": status.reason,
        "module": str(status.module),
        "exact": bool(exact),
        "runnable": list(dispatch.grid_rows(kernels.q8q8.kernel)),
        "why_not": dispatch.why_not(kernels.q8q8.kernel),
    }


def gates(*only: str) -> dict[str, Any]:
    """The family's own gates of every row that can run here (or of those named): row to reasons.

    All of them for what runs untuned; of the rest the costly ones are thinned, as in every emulator.
    """
    from q8_cases import thinned_gates

    from tunekit import dispatch
    from tunekit.q8 import fixtures, kernels

    kernel = kernels.q8q8.kernel
    few, whole = thinned_gates(), fixtures.FIXTURES.gates()
    found: dict[str, list[str]] = {}
    for suffix, bound in dispatch.grid_rows(kernel).items():
        if not only or suffix in only:
            mine = whole if suffix in kernel.fallback else few
            found[suffix] = [f"{g.name}: {reason}" for g in mine if (reason := g.run(bound))]
            print(f"{suffix}: {len(mine)} gates, {time.process_time():.0f} s", file=sys.stderr, flush=True)
    return found


def by_address(suffix: str) -> dict[str, Any]:
    """Run a row's tile by its address, whatever the CPU lacks: below the dispatcher, which would refuse."""
    import numpy as np

    from tunekit import dispatch
    from tunekit.q8 import kernels, layout

    kernel = kernels.q8q8.kernel
    loaded, built = dispatch.world_of(kernel, grid=True)[1][suffix][0]
    bound = dispatch.BoundRow(kernel, suffix, kernel.row(suffix), "test", loaded, built)
    mr = bound.call("q8q8_layout")
    xa = layout.aligned(bound.call("q8q8_acts_bytes", 2, 1), np.uint8)
    bound.call("q8q8_prepare", xa, np.ones(64, np.int8), np.ones(2, np.float32), 2, 0, 2, 1)
    y = np.zeros(2 * mr, np.float32)
    print("prepared", flush=True)
    bound.call("q8q8", y, mr, np.ones(mr * 32, np.int8), np.ones(mr, np.float32), xa, 2, 0, 2, 1, 1)
    return {"y": y.tolist()}


def model(path: str) -> dict[str, Any]:
    """The cut-down model of examples/q8llama, written there, on every row that runs here."""
    from pathlib import Path

    import q8llama_rows
    import small

    return {"rows": q8llama_rows.native(small.write(Path(path))), "digest": small.DIGEST}


def tests(*arguments: str) -> dict[str, Any]:
    """Run pytest. Its tests start children through a script of the host, as the host cannot run this interpreter."""
    import pytest

    sys.executable = os.environ["AARCH64_PYTHON"]
    return {"status": int(pytest.main(list(arguments)))}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "choice": choice, "gates": gates, "by-address": by_address, "model": model, "tests": tests,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
