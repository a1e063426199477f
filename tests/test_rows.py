# SPDX-License-Identifier: Apache-2.0
"""Names of rows: derivation, parsing back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunekit as tk
from tunekit.rows import check_grid, derive_suffix, parse_suffix, vocabulary_of


@pytest.mark.parametrize(
    ("args", "suffix"),
    [
        ({"kstep": 2}, "kstep2"),
        ({"dot": "maddubs"}, "dot_maddubs"),
        ({"pipe": True}, "pipe"),
        ({"pipe": False}, "nopipe"),
        ({"k": 0.5}, "k0d5"),
        ({"dot": "amx_int8", "width": 512, "mr": 16}, "dot_amx_int8_width512_mr16"),
        ({"kstep": 2, "nrsplit": 2, "mr": 8}, "kstep2_nrsplit2_mr8"),
    ],
)
def test_a_suffix_is_derived_from_the_arguments_in_order(args: dict[str, object], suffix: str) -> None:
    row = tk.perm(**args)  # type: ignore[arg-type]
    assert row.suffix == suffix
    assert parse_suffix(suffix, vocabulary_of([row])) == row.args


def test_suffix_and_requires_are_not_arguments() -> None:
    row = tk.perm(suffix="mr8_budget", requires="avx2", mr=8)
    assert (row.suffix, row.requires, row.args) == ("mr8_budget", "avx2", (("mr", 8),))


names = st.sampled_from(["kstep", "mr", "dot", "pipe", "gkstep", "bias", "x"])
values = st.one_of(
    st.booleans(),
    st.integers(0, 4096),
    st.sampled_from(["maddubs", "amx_int8", "sdot"]),
    st.sampled_from([0.5, 1.25, 12.0]),
)


@given(st.lists(st.dictionaries(names, values, min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_grid_that_is_accepted_reads_back(grid: list[dict[str, object]]) -> None:
    rows = [tk.perm(**args) for args in grid]  # type: ignore[arg-type]
    try:
        check_grid("kernel 'g'", rows)
    except tk.DeclarationError:
        return
    vocabulary = vocabulary_of(rows)
    for row in rows:
        assert parse_suffix(row.suffix, vocabulary) == row.args


def test_names_that_share_a_prefix_stay_apart() -> None:
    rows = [tk.perm(kstep=2, gkstep=2), tk.perm(kstep=2, gkstep=2, bias=128), tk.perm(kstep=2, bias=128)]
    vocabulary = vocabulary_of(rows)
    assert dict(parse_suffix("kstep2_gkstep2_bias128", vocabulary)) == {"kstep": 2, "gkstep": 2, "bias": 128}
    # The tile of rows 2 and 3 is one and the same once gkstep is set aside; row 1 has another plane.
    assert rows[1].without("gkstep") == rows[2].without("gkstep") != rows[0].without("gkstep")


@pytest.mark.parametrize("text", ["", "kstep", "kstepx", "2kstep", "kstep2_", "mr8", "kstep2__kstep2", "kstep2_kstep2"])
def test_what_is_no_name_of_the_grid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_suffix(text, vocabulary_of([tk.perm(kstep=2)]))


def test_an_ambiguous_name_is_refused_at_declaration() -> None:
    with pytest.raises(tk.DeclarationError, match=r"'m21'.*does not read back.*give it a suffix"):
        check_grid("kernel 'g'", [tk.perm(m=21), tk.perm(m2=3)])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "neither arguments nor a suffix"),
        ({"suffix": "reference", "k": 1}, "reserved"),
        ({"k": None}, "rows take bool, int, float and str"),
        ({"k": -1}, "cannot be part of a C name"),
        ({"k": 1e-9}, "cannot be part of a C name"),
        ({"k": "a b"}, "cannot be part of a C name"),
        ({"k": "a__b"}, "cannot be part of a C name"),
        ({"k": 1, "requires": 3}, "requires must be text"),
    ],
)
def test_bad_rows_are_refused_with_the_mend(args: dict[str, object], message: str) -> None:
    with pytest.raises(tk.DeclarationError, match=message):
        tk.perm(**args)  # type: ignore[arg-type]


def test_derive_suffix_is_what_perm_uses() -> None:
    assert derive_suffix([("a", 1), ("b", True)]) == tk.perm(a=1, b=True).suffix
