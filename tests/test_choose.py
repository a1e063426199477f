# SPDX-License-Identifier: Apache-2.0
"""Choosing as a pure function: every manifest text, every box of the shelf, on this one machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import toy.kernels
from shelf_loader import load_shelf

import tunekit as tk
from tunekit.choose import Choice, World, choose
from tunekit.environment import Settings, read_settings
from tunekit.kernel import Kernel

TOY: Kernel = toy.kernels.toy.kernel
NO_NEEDS = (frozenset[str](),)
BUILT = {"reference": NO_NEEDS, "k1": NO_NEEDS, "k2": NO_NEEDS, "k3": NO_NEEDS, "k4": NO_NEEDS}
WORLD = World("x86_64", frozenset({"sse2"}), BUILT)
NORMAL = Settings()


def pick(manifest: Any = None, world: World = WORLD, settings: Settings = NORMAL) -> Choice:
    return choose(TOY, manifest, world, settings)


def test_no_manifest_is_the_fallback_without_a_word() -> None:
    choice = pick()
    assert (choice.suffix, choice.source, choice.tier, choice.warnings) == ("k1", "fallback", "c", ())
    assert choice.reason.startswith("no manifest")


def test_a_runnable_entry_wins() -> None:
    choice = pick('{"toy": "k2"}')
    assert (choice.suffix, choice.source) == ("k2", "manifest")
    assert choice.log_line() == "tunekit: toyscope.toy <- k2 (manifest, c): the manifest names it"


def test_an_explicit_reference_is_the_reference() -> None:
    assert (pick('{"toy": "reference"}').suffix, pick('{"toy": "reference"}').source) == ("reference", "manifest")


def test_a_manifest_older_than_the_kernel_keeps_the_fallback() -> None:
    choice = pick('{"another": "k2"}')
    assert (choice.suffix, choice.source, choice.warnings) == ("k1", "fallback", ())
    assert "has no entry for it" in choice.reason


# fmt: off
@pytest.mark.parametrize(("text", "words"), [
    ("",                                  "it is empty"),
    ("   \n",                             "it is empty"),
    ("{",                                 "it is not JSON"),
    ('{"toy": "k2"',                      "it is not JSON"),
    (b"\x00\x00\x00",                     "it is not JSON"),
    (b"\xff\xfe",                         "it is not UTF-8"),
    ("[]",                                "JSON an array"),
    ("null",                              "JSON null"),
    ('"x"',                               "JSON text"),
    ("7",                                 "JSON a number"),
    ("[" * 100_000,                       "nested too deeply"),
    ('{"toy": ' + "[" * 100_000,          "nested too deeply"),
    ('{"toy": null}',                     "its value is null"),
    ('{"toy": 3}',                        "its value is 3"),
    ('{"toy": NaN}',                      "its value is NaN"),
    ('{"toy": ["k2"]}',                   "its value is"),
    ('{"toy": "k77"}',                    "has no row 'k77'"),
    ('{"toy": ""}',                       "has no row ''"),
    ('{"toy": "k9"}',                     "declined: k 9 is declined on purpose"),
    ('{"toy": "k3"}',                     "its requires 'amx-tf32,sme2p1' do not hold here"),
])
def test_whatever_a_manifest_holds_the_fallback_runs_and_the_reason_is_said(text: str | bytes, words: str) -> None:
    choice = pick(text)
    assert (choice.suffix, choice.source) == ("k1", "fallback")
    assert words in choice.reason
    assert len(choice.warnings) == 1
    with pytest.raises(tk.ManifestError, match="TUNEKIT_STRICT has manifest"):
        pick(text, settings=Settings(strict=frozenset({"manifest"})))


def test_a_byte_order_mark_is_no_fault() -> None:
    assert pick(b'\xef\xbb\xbf{"toy": "k2"}').suffix == "k2"


def test_a_row_that_nobody_built_says_how_to_build_it() -> None:
    choice = pick('{"toy": "k2"}', World("x86_64", frozenset(), {"reference": NO_NEEDS, "k1": NO_NEEDS}))
    assert choice.suffix == "k1"
    assert "python -m tunekit build --scope toyscope" in choice.reason


def test_a_row_that_the_compiler_dropped_says_why() -> None:
    world = World("x86_64", frozenset(), {"k1": NO_NEEDS}, {"k2": "gcc: line 3: error: no vpfoo"})
    assert "not built: gcc: line 3: error: no vpfoo" in pick('{"toy": "k2"}', world).reason


def test_needs_are_asked_before_requires_and_cannot_be_weakened() -> None:
    built = {**BUILT, "k2": (frozenset({"avx512f", "avx512vnni"}),)}
    choice = pick('{"toy": "k2"}', World("x86_64", frozenset({"sse2", "avx512f"}), built))
    assert choice.suffix == "k1"
    assert "this CPU lacks avx512vnni" in choice.reason


def test_the_first_alternative_whose_needs_hold_is_taken() -> None:
    built = {**BUILT, "k2": (frozenset({"avxvnni"}), frozenset({"avx512vnni", "avx512vl"}))}
    for features, alternative in (({"avxvnni"}, 0), ({"avx512vnni", "avx512vl"}, 1), ({"avxvnni", "avx512vnni", "avx512vl"}, 0)):
        choice = pick('{"toy": "k2"}', World("x86_64", frozenset(features), built))
        assert (choice.suffix, choice.alternative) == ("k2", alternative)
    assert "lacks avxvnni or avx512vl" in pick('{"toy": "k2"}', World("x86_64", frozenset({"avx512vnni"}), built)).reason


@pytest.mark.parametrize("pin", ["toy=k2", "toyscope.toy=k2"])
def test_a_pin_comes_before_everything(pin: str) -> None:
    settings = read_settings({"TUNEKIT_PIN": pin, "TUNEKIT_POLICY": "reference"})
    assert (pick('{"toy": "k1"}', settings=settings).suffix, pick(settings=settings).source) == ("k2", "pin")


@pytest.mark.parametrize("row", ["k3", "k9", "k77"])
def test_a_pin_is_still_refused_where_the_row_cannot_run(row: str) -> None:
    choice = pick('{"toy": "k2"}', settings=Settings(pin=(("toy", row),)))
    assert (choice.suffix, choice.source) == ("k1", "fallback")
    assert "TUNEKIT_PIN" in choice.warnings[0]


def test_policy_reference_beats_the_manifest() -> None:
    choice = pick('{"toy": "k2"}', settings=Settings(policy="reference"))
    assert (choice.suffix, choice.source, choice.tier) == ("reference", "reference", "c")


def test_nothing_built_is_the_python_reference() -> None:
    choice = pick(world=World("x86_64", frozenset()))
    assert (choice.suffix, choice.source, choice.tier) == ("reference", "reference", "python")
    assert "k1: not built yet" in choice.reason


# --- the shelf -------------------------------------------------------------------------------------------

VNNI512_ROW = "dot_vpdpbusd_width512_mr32_kstep1_nr4_gstreams2_gahead0_bias128"
VNNI256_ROW = "dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128"
AVX2_ROW = "dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0"
SMMLA_ROW = "dot_smmla_mr8_kstep1_nr4"
SDOT_ROW = "mr8_kstep1_nr4"
# What the dispatcher must choose for each recorded CPU, with everything built that its architecture can have.
# fmt: off
SHELF_CHOICES = {
    "nehalem":                   "reference",
    "haswell":                   AVX2_ROW,
    "skylake-x":                 AVX2_ROW,
    "cascade-lake":              VNNI512_ROW,
    "ice-lake":                  VNNI512_ROW,
    "alder-lake-avx512":         VNNI512_ROW,
    "alder-lake":                VNNI256_ROW,
    "arrow-lake":                VNNI256_ROW,
    "arrow-lake-e-core":         VNNI256_ROW,
    "sapphire-rapids":           VNNI512_ROW,
    "sapphire-rapids-no-xcr0":   VNNI512_ROW,
    "sapphire-rapids-refused":   VNNI512_ROW,
    "sapphire-rapids-not-asked": VNNI512_ROW,
    "sapphire-rapids-ymm-only":  VNNI256_ROW,
    "granite-rapids":            VNNI512_ROW,
    "zen2":                      AVX2_ROW,
    "zen3":                      AVX2_ROW,
    "zen4":                      VNNI512_ROW,
    "zen4-guest":                VNNI512_ROW,
    "zen5":                      VNNI512_ROW,
    "guest-without-xsave":       "reference",
    "guest-without-ymm":         "reference",
    "qemu-unknown-model":        AVX2_ROW,
    "rosetta-like":              "reference",
    "cortex-a53":                "reference",
    "neoverse-n1":               SDOT_ROW,
    "neoverse-v1":               SMMLA_ROW,
    "neoverse-v2":               SMMLA_ROW,
    "apple-m1":                  SDOT_ROW,
    "apple-m4":                  SMMLA_ROW,
    "macos-aarch64":             "reference",
    "riscv64":                   "reference",
}
# fmt: on


def full_world(arch: str, features: frozenset[str]) -> World:
    """A world in which every row that the architecture can have is built."""
    from tunekit.build_tools.plan import plan

    from tunekit.q8.kernels import q8q8

    built: dict[str, tuple[frozenset[str], ...]] = {}
    for job in plan(q8q8.kernel, arch, None)[0]:
        built[job.suffix] = (*built.get(job.suffix, ()), job.needs)
    return World(arch, features, built)


def test_the_shelf_is_asserted_whole() -> None:
    assert set(SHELF_CHOICES) == set(load_shelf())
    assert len(SHELF_CHOICES) >= 21


@pytest.mark.parametrize("name", sorted(SHELF_CHOICES))
def test_every_recorded_cpu_gets_its_row_of_every_kernel(name: str) -> None:
    from tunekit.q8.kernels import q8q8

    entry = load_shelf()[name]
    world = full_world(entry.record.arch, entry.features)
    choice = choose(q8q8.kernel, None, world, NORMAL)
    assert choice.suffix == SHELF_CHOICES[name], choice.reason
    # ... and whatever a manifest says, no row runs whose needs are not met.
    for row in q8q8.kernel.rows:
        made = choose(q8q8.kernel, json.dumps({"q8q8": row.suffix}), world, NORMAL)
        if made.suffix != "reference":
            assert world.built[made.suffix][made.alternative] <= entry.features
    # The toy has no instruction set in it, and one row that asks for a baseline feature of either architecture.
    toy_choice = choose(TOY, '{"toy": "k4"}', World(entry.record.arch, entry.features, BUILT), NORMAL)
    assert toy_choice.suffix == ("k4" if entry.features & {"sse2", "neon"} else "k1")


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("alder-lake", "avxvnni"), ("cascade-lake", "avx512vl"), ("ice-lake", "avx512vl"), ("zen4", "avx512vl"), ("zen5", "avxvnni")],
)
def test_one_row_two_encodings(name: str, encoding: str) -> None:
    """The 256-bit VNNI rows are two objects, and each faults on the other's CPUs."""
    from tunekit.q8 import grid
    from tunekit.q8.kernels import q8q8

    entry = load_shelf()[name]
    choice = choose(q8q8.kernel, json.dumps({"q8q8": VNNI256_ROW}), full_world("x86_64", entry.features), NORMAL)
    assert choice.suffix == VNNI256_ROW
    assert encoding in grid.targets(q8q8.kernel.row(VNNI256_ROW))[choice.alternative]


@pytest.mark.parametrize("name", ["haswell", "zen4", "sapphire-rapids"])
def test_disabled_features_are_gone_in_every_path(name: str) -> None:
    from tunekit.cpu.features import without
    from tunekit.q8.kernels import q8q8

    entry = load_shelf()[name]
    world = full_world(entry.record.arch, without(entry.features, {"avx2"}))
    for manifest in (None, json.dumps({"q8q8": AVX2_ROW})):
        assert choose(q8q8.kernel, manifest, world, NORMAL).suffix == "reference"
    pinned = choose(q8q8.kernel, None, world, Settings(pin=(("q8q8", AVX2_ROW),)))
    assert pinned.suffix == "reference"
    assert "lacks" in pinned.warnings[0]


def test_forced_features_never_reach_a_choice() -> None:
    entry = load_shelf()["nehalem"]
    settings = read_settings({"TUNEKIT_FORCE_FEATURES": "avx2,fma,avx"})
    from tunekit.q8.kernels import q8q8

    world = full_world(entry.record.arch, entry.features)
    assert choose(q8q8.kernel, json.dumps({"q8q8": AVX2_ROW}), world, settings).suffix == "reference"
