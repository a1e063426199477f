# SPDX-License-Identifier: Apache-2.0
"""A library with the toy's kernel in a scope of its own; its tuner is what ``ALPHA_TUNER`` says."""

from __future__ import annotations

import os
from typing import Annotated

import numpy as np

import tunekit as tk

SCOPE = tk.Scope("alpha", tuner=os.environ.get("ALPHA_TUNER", "faketuner") or None)


def declines(row: tk.Row, target: tk.Target) -> str | None:
    del target
    return "k 9 is declined on purpose" if row["k"] == 9 else None


@tk.companion
def toy_k() -> tk.i32:
    """The row's k."""
    return 0


@tk.companion
def toy_sum(y: Annotated[tk.Out[tk.f32], "n"], x: Annotated[tk.In[tk.f32], "n"], n: tk.i32) -> None:
    """y = x + k."""
    del n
    np.copyto(y, x)


@tk.tune(
    scope=SCOPE,
    template="toy/toy.c.j2",
    reference="toy/toy.c.j2",
    defaults={"k": 0},
    declines=declines,
    targets=lambda row: ((),),
    rows=[tk.perm(k=1), tk.perm(k=2), tk.perm(k=9)],
    fallback="k1",
    companions=[toy_k, toy_sum],
    fixtures=os.environ.get("ALPHA_FIXTURES") or None,
)
def toy(a: tk.i32, b: tk.i32) -> tk.i32:
    """a + b (+ k on row k)."""
    return a + b
