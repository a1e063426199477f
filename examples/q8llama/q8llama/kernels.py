# SPDX-License-Identifier: Apache-2.0
"""The model's own tuned family: attention, and the operations between the matrix products.

Every row gives the same bits. Sums over the dimension of a head and over keys run in ascending order with fused
multiply-adds, vectors lying across keys and across the dimension; sums over a token's values have 16 lanes, folded in
one order, however wide a vector is; the exponential is one polynomial. The bodies are :mod:`q8llama.spec`'s.

Keys of a key-value head lie in tiles of 16 positions, ``[position / 16][dimension][position % 16]``, values as
``[position][dimension]``.
"""

from __future__ import annotations

from typing import Annotated

import tunekit as tk

SCOPE = tk.Scope("q8llama")

ISA = {"avx2": ("x86_64", "avx2,fma"), "avx512": ("x86_64", "avx512f"), "neon": ("aarch64", "neon")}

# fmt: off
ATTEND = [
    # queries that meet the keys at once; queries that meet the values at once
    tk.perm(isa="avx2",   block=3,  deep=3, requires="avx2,fma"),
    tk.perm(isa="avx2",   block=4,  deep=2, requires="avx2,fma"),
    tk.perm(isa="avx2",   block=6,  deep=2, requires="avx2,fma"),
    tk.perm(isa="avx2",   block=6,  deep=3, requires="avx2,fma"),
    tk.perm(isa="avx512", block=6,  deep=3, requires="avx512f"),
    tk.perm(isa="avx512", block=12, deep=4, requires="avx512f"),
    tk.perm(isa="avx512", block=12, deep=6, requires="avx512f"),
    tk.perm(isa="neon",   block=3,  deep=3, requires="neon"),
    tk.perm(isa="neon",   block=4,  deep=4, requires="neon"),
    tk.perm(isa="neon",   block=6,  deep=3, requires="neon"),
]
GATES = [
    tk.perm(isa="avx2",   deep=1, requires="avx2,fma"),
    tk.perm(isa="avx2",   deep=2, requires="avx2,fma"),
    tk.perm(isa="avx512", deep=1, requires="avx512f"),
    tk.perm(isa="avx512", deep=4, requires="avx512f"),
    tk.perm(isa="neon",   deep=1, requires="neon"),
    tk.perm(isa="neon",   deep=2, requires="neon"),
]
# fmt: on


def declines(row: tk.Row, target: tk.Target) -> str | None:
    """Which rows cannot be emitted: vectors of another architecture."""
    arch, _ = ISA[str(row["isa"])]
    return None if target.arch == arch else f"{row['isa']} is no instruction set of {target.arch}"


@tk.companion
def merge(
    acc: Annotated[tk.InOut[tk.f32], "rows * hd"],
    ml: Annotated[tk.InOut[tk.f32], "rows * 2"],
    part: Annotated[tk.In[tk.f32], "rows * hd"],
    pml: Annotated[tk.In[tk.f32], "rows * 2"],
    rows: tk.i32,
    hd: tk.i32,
) -> None:
    """Take a later slice's part into what the slices before it gave. A part without keys has the sum 0."""
    from q8llama import spec

    spec.merge(acc, ml, part, pml, rows, hd)


@tk.companion
def finish(
    out: Annotated[tk.InOut[tk.f32], "((rows + group - 1) // group - 1) * ldo + group * hd"],
    acc: Annotated[tk.In[tk.f32], "rows * hd"],
    ml: Annotated[tk.In[tk.f32], "rows * 2"],
    ldo: tk.i64,
    group: tk.i32,
    rows: tk.i32,
    hd: tk.i32,
) -> None:
    """Divide by the sum; row i is head ``i % group`` of token ``i // group``, whose values lie ``ldo`` apart."""
    from q8llama import spec

    spec.finish(out, acc, ml, ldo, group, rows, hd)


@tk.tune(
    scope=SCOPE,
    template="q8llama/attend.c.j2",
    reference="q8llama/attend.c.j2",
    rows=ATTEND,
    defaults={"isa": "none", "block": 2, "deep": 1},
    declines=declines,
    fallback="isa_avx512_block12_deep4;isa_avx2_block6_deep3;isa_neon_block6_deep3",
    companions=[merge, finish],
    fixtures="q8llama.spec:attend_samples",
)
def attend(
    acc: Annotated[tk.Out[tk.f32], "rows * hd"],
    ml: Annotated[tk.Out[tk.f32], "rows * 2"],
    q: Annotated[tk.In[tk.f32], "((rows + group - 1) // group - 1) * ldq + group * hd"],
    k: Annotated[tk.In[tk.f32], "(j1 + 15) // 16 * 16 * hd"],
    v: Annotated[tk.In[tk.f32], "j1 * hd"],
    ldq: tk.i64,
    group: tk.i32,
    rows: tk.i32,
    first: tk.i64,
    j0: tk.i64,
    j1: tk.i64,
    hd: tk.i32,
    scale: tk.f32,
) -> None:
    """Unfinished attention of some queries to the keys ``[j0, j1)``, at most 256, j0 a multiple of 16.

    Query i is head ``i % group`` of the token at position ``first + i // group``, and sees no key beyond it. For each
    its largest score and the sum of exponentials go to ``ml``, the sum of values, each times its exponential, to
    ``acc``: (-inf, 0) and zeros where it sees no key. hd is a multiple of 16.
    """
    from q8llama import spec

    spec.attend(acc, ml, q, k, v, ldq, group, rows, first, j0, j1, hd, scale)


@tk.companion
def rmsnorm(
    y: Annotated[tk.Out[tk.f32], "n"],
    x: Annotated[tk.In[tk.f32], "n"],
    w: Annotated[tk.In[tk.f32], "n"],
    n: tk.i32,
    eps: tk.f32,
) -> None:
    """Divide a token by the root of its mean square (and eps), and multiply it by the weights."""
    from q8llama import spec

    y[:] = spec.rmsnorm(x, w, eps)


@tk.companion
def rope(
    x: Annotated[tk.InOut[tk.f32], "heads * hd"],
    cosines: Annotated[tk.In[tk.f32], "hd // 2"],
    sines: Annotated[tk.In[tk.f32], "hd // 2"],
    heads: tk.i32,
    hd: tk.i32,
) -> None:
    """Turn the pairs (i, i + hd / 2) of each head by a position's angles."""
    from q8llama import spec

    spec.rope(x, cosines, sines, heads, hd)


@tk.companion
def accumulate(x: Annotated[tk.InOut[tk.f32], "n"], more: Annotated[tk.In[tk.f32], "n"], n: tk.i32) -> None:
    """``x += more``."""
    del n
    x += more


@tk.tune(
    scope=SCOPE,
    template="q8llama/gates.c.j2",
    reference="q8llama/gates.c.j2",
    rows=GATES,
    defaults={"isa": "none", "deep": 1},
    declines=declines,
    fallback="isa_avx512_deep1;isa_avx2_deep1;isa_neon_deep1",
    companions=[rmsnorm, rope, accumulate],
    fixtures="q8llama.spec:gates_samples",
)
def swiglu(
    y: Annotated[tk.Out[tk.f32], "n"], g: Annotated[tk.In[tk.f32], "n"], u: Annotated[tk.In[tk.f32], "n"], n: tk.i32
) -> None:
    """``y = g / (1 + exp(-g)) * u``."""
    from q8llama import spec

    del n
    y[:] = spec.swiglu(g, u)
