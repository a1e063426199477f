# SPDX-License-Identifier: Apache-2.0
"""A family without any instruction set in it: the result of a call is the fingerprint of the row that ran.

``toy(2, 3)`` is 5 on the reference and 5 + k on row k; the companion ``toy_k`` returns k; the row ``k9`` declines;
``toy_sum`` takes arrays. ``toy_k`` has a seat, and rows of one layout are k1, k2 and k3; k4 has another. Rows ``k3`` and ``k4`` require what no CPU has and what only some have.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

import tunekit as tk

SCOPE = tk.Scope("toyscope")


def declines(row: tk.Row, target: tk.Target) -> str | None:
    """The one predicate of the family."""
    del target
    return "k 9 is declined on purpose" if row["k"] == 9 else None


def targets(row: tk.Row) -> tuple[tuple[str, ...], ...]:
    """No row needs an instruction set; what ``requires`` says only narrows."""
    del row
    return ((),)


def layout(row: tk.Row | None) -> str:
    """Which rows a seat may mix."""
    return "none" if row is None else "wide" if row["k"] == 4 else "narrow"


@tk.companion(seat=True)
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
    targets=targets,
    layout=layout,
    rows=[
        tk.perm(k=1),
        tk.perm(k=2),
        tk.perm(k=3, requires="amx-tf32,sme2p1"),
        tk.perm(k=4, requires="sse2|neon"),
        tk.perm(k=9),
    ],
    fallback="k1",
    companions=[toy_k, toy_sum],
    fixtures="toy.fixtures:FIXTURES",
)
def toy(a: tk.i32, b: tk.i32) -> tk.i32:
    """a + b (+ k on row k)."""
    return a + b
