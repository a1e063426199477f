# SPDX-License-Identifier: Apache-2.0
"""A family whose rows depend on who compiles them: k2 by clang is the fastest, k3 only gcc takes, k4 by clang is wrong.

``twins_by`` says who built the row that runs: 1 gcc, 2 clang, 0 nobody.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

import tunekit as tk
from tunekit.measure.fixtures import Sample

SCOPE = tk.Scope("twins")


@tk.companion
def twins_by() -> tk.i32:
    """Who built the row."""
    return 0


def samples() -> list[Sample]:
    """One small call, and one that is timed."""
    small, large = np.arange(7, dtype=np.float32), np.ones(4096, np.float32)
    return [
        Sample("small", (np.empty_like(small), small, small.size)),
        Sample("timed", (np.empty_like(large), large, large.size), work=4096.0),
    ]


@tk.tune(
    scope=SCOPE,
    template="twins/twins.c.j2",
    rows=[tk.perm(k=1), tk.perm(k=2), tk.perm(k=3), tk.perm(k=4)],
    targets=lambda row: ((),),
    fallback="k1",
    companions=[twins_by],
    fixtures="twins.kernels:samples",
)
def twins(y: Annotated[tk.Out[tk.f32], "n"], x: Annotated[tk.In[tk.f32], "n"], n: tk.i32) -> None:
    """y = x + x."""
    del n
    np.add(x, x, out=y)
