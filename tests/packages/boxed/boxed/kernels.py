# SPDX-License-Identifier: Apache-2.0
"""a + b + k on row k: the result is the fingerprint of the row."""

import tunekit as tk

SCOPE = tk.Scope("boxed", tuner="boxed.nobody")


@tk.companion
def shift() -> tk.i32:
    """The row's k."""
    return 0


@tk.tune(
    scope=SCOPE,
    template="boxed/plus.c.j2",
    reference="boxed/plus.c.j2",
    defaults={"k": 0},
    targets=lambda row: ((),),
    rows=[tk.perm(k=1), tk.perm(k=2), tk.perm(k=3, requires="avx2,sve")],
    fallback="k1",
    companions=[shift],
)
def plus(a: tk.i32, b: tk.i32) -> tk.i32:
    """a + b (+ k on row k)."""
    return a + b
