# SPDX-License-Identifier: Apache-2.0
"""The ``requires`` grammar: AND over groups, OR inside one, and errors that say how to write it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit.cpu.features import KNOWN_FEATURES
from tunekit.cpu.requires import MAX_ALTERNATIVES, Requires, parse
from tunekit.errors import DeclarationError

NAMES = st.sampled_from(sorted(KNOWN_FEATURES))
GROUPS = st.lists(st.lists(NAMES, min_size=1, max_size=3, unique=True).map(tuple), max_size=3, unique=True).map(tuple)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("", ()),
        ("   ", ()),
        (",,|,", ()),
        ("avx2", (("avx2",),)),
        ("avx2,fma", (("avx2",), ("fma",))),
        (" avx2 , fma ", (("avx2",), ("fma",))),
        ("avx2,,fma", (("avx2",), ("fma",))),
        ("avx2,|,fma|", (("avx2",), ("fma",))),
        ("avx2,avxvnni|avx512vnni", (("avx2",), ("avxvnni", "avx512vnni"))),
        ("avx2|avx2,avx2", (("avx2",),)),
        ("amx-int8,sse4.2,avx512_vnni", (("amx-int8",), ("sse4.2",), ("avx512_vnni",))),
    ],
)
def test_parse(text: str, groups: tuple[tuple[str, ...], ...]) -> None:
    assert parse(text).groups == groups


@pytest.mark.parametrize(
    ("text", "quoted", "mend"),
    [
        ("(avx2,fma)|neon", "'(avx2'", "no parentheses"),
        ("avx2,!fma", "'!fma'", "no negation"),
        ("not avx2", "'not avx2'", "no negation"),
        ("-avx2", "'-avx2'", "no negation"),
        ("+avx2", "'+avx2'", "no negation"),
        ("avx2 fma", "'avx2 fma'", "put ',' (AND) or '|' (OR)"),
        ("avx2\tfma", "avx2", "put ',' (AND)"),
        ("avx2&fma", "'avx2&fma'", "write ',' for AND"),
        ("avx2;fma", "'avx2;fma'", "write ',' for AND"),
        ("AVX2", "'AVX2'", "write 'avx2'"),
        ("AVX512_VNNI", "'AVX512_VNNI'", "write 'avx512vnni'"),
        ("Mystery", "'Mystery'", "write 'mystery'"),
        ("avx2=1", "'avx2=1'", "lower-case letters, digits"),
        ("ävx", "'ävx'", "lower-case letters, digits"),
        (".avx", "'.avx'", "lower-case letters, digits"),
    ],
)
def test_malformed_text_names_the_part_and_the_mend(text: str, quoted: str, mend: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        parse(text)
    message = str(caught.value)
    assert quoted in message
    assert mend in message


@pytest.mark.parametrize("value", [None, 3, ["avx2"], b"avx2"])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(DeclarationError, match="write a string"):
        parse(value)  # type: ignore[arg-type]


def test_holds_and_missing() -> None:
    needs = parse("avx2,avxvnni|avx512vnni,fma")
    assert needs.holds({"avx2", "avx512vnni", "fma"})
    assert not needs.holds({"avx2", "fma"})
    assert needs.missing({"avx2", "fma"}) == ("avxvnni|avx512vnni",)
    assert needs.missing(frozenset()) == ("avx2", "avxvnni|avx512vnni", "fma")
    assert needs.missing({"avx2", "avxvnni", "fma"}) == ()


def test_empty_text_always_holds() -> None:
    assert parse("").holds(frozenset())
    assert parse("").alternatives() == ((),)
    assert str(parse(" , ")) == ""
    assert parse("") == Requires()


def test_unknown_names_are_false_and_listed() -> None:
    needs = parse("avx2,warp|turbo,warp")
    assert needs.unknown() == ("warp", "turbo")
    assert not needs.holds(KNOWN_FEATURES)
    assert needs.missing(KNOWN_FEATURES) == ("warp|turbo", "warp")
    assert parse("avx2|neon").unknown() == ()


def test_alternatives_keep_the_order_written() -> None:
    assert parse("avx2,avxvnni|avx512vnni").alternatives() == (("avx2", "avxvnni"), ("avx2", "avx512vnni"))
    assert parse("avx2|fma,fma|avx2").alternatives() == (("avx2", "fma"), ("avx2",), ("fma",), ("fma", "avx2"))
    assert parse("avx2").alternatives() == (("avx2",),)


def test_too_many_alternatives_are_a_slip_of_the_pen() -> None:
    group = "|".join(f"n{i}" for i in range(9))
    assert len(parse(group).alternatives()) == 9
    with pytest.raises(DeclarationError, match=str(MAX_ALTERNATIVES)):
        parse(f"{group},{group}|x")


@given(GROUPS)
def test_text_round_trip(groups: tuple[tuple[str, ...], ...]) -> None:
    needs = Requires(groups)
    assert parse(str(needs)) == needs


@given(GROUPS, st.frozensets(NAMES))
def test_the_three_readings_agree(groups: tuple[tuple[str, ...], ...], have: frozenset[str]) -> None:
    needs = Requires(groups)
    assert needs.holds(have) == (not needs.missing(have))
    assert needs.holds(have) == any(set(way) <= have for way in needs.alternatives())
