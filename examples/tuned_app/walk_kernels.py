# SPDX-License-Identifier: Apache-2.0
"""A kernel with two rows: the sums of a matrix's columns, walked down the columns or along the rows.

Both add the same numbers in the same order, so the results are the same bits; which is faster is the machine's matter.
"""

from typing import Annotated

import numpy as np

import tunekit as tk

SCOPE = tk.Scope("walk", tuner="walk_tuner")


@tk.tune(
    scope=SCOPE,
    template="walk.c.j2",
    reference="walk.c.j2",
    defaults={"walk": "columns"},
    rows=[tk.perm(walk="columns"), tk.perm(walk="rows")],
    fallback="walk_columns",
)
def column_sums(
    sums: Annotated[tk.Out[tk.f32], "columns"],
    a: Annotated[tk.In[tk.f32], "rows", "columns"],
    rows: tk.i32,
    columns: tk.i32,
) -> None:
    """The sum of each column, row after row."""
    del columns
    sums[:] = 0
    for row in range(rows):
        np.add(sums, a[row], out=sums)
