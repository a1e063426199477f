# SPDX-License-Identifier: Apache-2.0
"""Seats: a companion that runs another row than its kernel's, where both read the same operands."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy.kernels
from conftest import run_python

import tunekit as tk
from tunekit import _manifest, _policy, _status, dispatch, linking, q8
from tunekit.choose import Choice, World, choose
from tunekit.environment import Settings
from tunekit.errors import ManifestError
from tunekit.kernel import Kernel
from tunekit.q8 import fixtures, kernels, product
from tunekit.q8.layout import layout_of

TOY: Kernel = toy.kernels.toy.kernel
NO_NEEDS = (frozenset[str](),)
WORLD = World("x86_64", frozenset({"sse2"}), dict.fromkeys(("reference", "k1", "k2", "k3", "k4"), NO_NEEDS))


def pick(manifest: Any, world: World = WORLD, **settings: Any) -> Choice:
    text = json.dumps(manifest) if isinstance(manifest, dict) else manifest
    return choose(TOY, text, world, Settings(**settings))


def seat(choice: Choice) -> str:
    """The row that the companion runs."""
    return choice.seats["toy_k"].suffix if choice.seats else choice.suffix


def test_a_seat_has_an_entry_of_its_own() -> None:
    choice = pick({"toy": "k1", "toy_k": "k2"})
    assert (choice.suffix, seat(choice), choice.warnings, choice.unseated) == ("k1", "k2", (), {})
    line = "tunekit: toyscope.toy_k <- k2 (manifest, c): the manifest names it"
    assert choice.seats["toy_k"].log_line() == line


@pytest.mark.parametrize("spelt", ["toy_k", "toyscope.toy_k"])
def test_a_seat_beside_the_fallback_and_by_its_whole_name(spelt: str) -> None:
    assert seat(pick({spelt: "k2"})) == "k2"


def test_an_entry_equal_to_the_kernels_is_no_seat() -> None:
    choice = pick({"toy": "k2", "toy_k": "k2"})
    assert (choice.seats, choice.unseated, choice.warnings) == ({}, {}, ())


# fmt: off
@pytest.mark.parametrize(("entries", "words"), [
    ({"toy": "k1", "toy_k": "k4"},        "names 'k4', which reads another layout than k1"),
    ({"toy": "k4", "toy_k": "k1"},        "names 'k1', which reads another layout than k4"),
    ({"toy": "k1", "toy_k": "k3"},        "names 'k3': its requires 'amx-tf32,sme2p1' do not hold here"),
    ({"toy": "k1", "toy_k": "k9"},        "names 'k9': declined: k 9 is declined on purpose"),
    ({"toy": "k1", "toy_k": "k77"},       "names 'k77': the grid of toy has no row 'k77'"),
    ({"toy": "k1", "toy_k": "reference"}, "names 'reference', which reads another layout than k1"),
    ({"toy": "reference", "toy_k": "k1"}, "names 'k1', which reads another layout than reference"),
    ({"toy": "k1", "toy_k": 7},           "entry 'toy_k': its value is 7, not the name of a row"),
])
def test_what_a_seat_cannot_have_is_not_used_for_one_reason(entries: dict[str, Any], words: str) -> None:
    choice = pick(entries)
    assert choice.suffix == entries["toy"] and not choice.seats
    assert words in choice.unseated["toy_k"]
    assert len(choice.warnings) == 1 and words in choice.warnings[0]
    with pytest.raises(ManifestError, match="TUNEKIT_STRICT has manifest"):
        pick(entries, strict=frozenset({"manifest"}))


def test_a_row_that_is_not_built_is_no_seat() -> None:
    world = dataclasses.replace(WORLD, built={"k1": NO_NEEDS})
    assert "not built yet" in pick({"toy": "k1", "toy_k": "k2"}, world).unseated["toy_k"]


def test_on_the_python_tier_there_is_no_seat() -> None:
    assert not pick({"toy_k": "k2"}, World("x86_64", frozenset())).seats


def test_a_pinned_kernel_takes_its_companions_with_it_unless_they_are_pinned() -> None:
    entries = {"toy": "k1", "toy_k": "k2"}
    assert not pick(entries, pin=(("toy", "k2"),)).seats
    choice = pick({}, pin=(("toy", "k1"), ("toyscope.toy_k", "k2")))
    assert (choice.suffix, seat(choice), choice.seats["toy_k"].source) == ("k1", "k2", "pin")
    assert not pick(entries, policy="reference").seats


def test_a_file_above_that_names_the_kernel_hides_the_seats_below() -> None:
    above = _manifest.parse_manifest('{"toy": "k2"}', Path("/above"))
    below = _manifest.parse_manifest('{"toy": "k2", "toy_k": "k1"}', Path("/below"))
    assert seat(choose(TOY, [above, below], WORLD, Settings())) == "k2"
    other = _manifest.parse_manifest('{"another": "k2"}', Path("/above"))
    choice = choose(TOY, [other, below], WORLD, Settings())
    assert (seat(choice), choice.seats["toy_k"].manifest) == ("k1", Path("/below"))


def test_a_seat_without_a_layout_is_a_declaration_error() -> None:
    @tk.companion(seat=True)
    def lonely() -> tk.i32:
        return 0

    with pytest.raises(tk.DeclarationError, match="companion 'lonely' has seat=True.*give layout="):

        @tk.tune(scope=toy.kernels.SCOPE, template="toy/toy.c.j2", rows=[tk.perm(k=1)], companions=[lonely])
        def unseated() -> tk.i32:
            return 0


@pytest.mark.parametrize("named", ["nobody", "plain"])
def test_a_companion_goes_with_one_that_has_a_seat_and_no_other(named: str) -> None:
    @tk.companion
    def plain() -> tk.i32:
        return 0

    @tk.companion(seat=True)
    def seated() -> tk.i32:
        return 0

    @tk.companion(seat=named)
    def follower() -> tk.i32:
        return 0

    words = f"companion 'follower' has seat='{named}'.*there: seated.*name one of them"
    with pytest.raises(tk.DeclarationError, match=words):

        @tk.tune(
            scope=toy.kernels.SCOPE,
            template="toy/toy.c.j2",
            rows=[tk.perm(k=1)],
            layout=lambda row: "one",
            companions=[plain, seated, follower],
        )
        def followed() -> tk.i32:
            return 0


# --- in force -------------------------------------------------------------------------------------------


def test_the_companion_runs_its_own_row_and_every_caller_sees_it(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "_tables", {})  # a process has one table; another test may have made it
    toy.toy.manifest_set("k1", {"toy_k": "k2"})
    assert (toy.toy(2, 3), toy.toy_k()) == (6, 2)
    bound = toy.toy.bound()
    assert bound.call("toy_k") == 2 and bound.ready("toy_k")() == 2 and toy.toy_k.c_function()() == 2
    table = linking.unit_of(toy.__name__)
    words = struct.unpack(table.layout, ctypes.string_at(linking.table_address(toy.__name__), struct.calcsize(table.layout)))
    assert toy.toy_k.address() in words and toy.toy.address() in words


def test_setting_the_kernel_by_hand_frees_its_seats(toy: Any) -> None:
    path = toy.toy.manifest_set("k1", {"toy_k": "k2"})
    assert json.loads(path.read_text()) == {"toy": "k1", "toy_k": "k2"}
    assert _manifest.seats_get(TOY) == {"toy_k": "k2"} and _manifest.named_rows(TOY) == ["k1", "k2"]
    toy.toy.manifest_set("k2")
    assert json.loads(path.read_text()) == {"toy": "k2"}
    assert (toy.toy(2, 3), toy.toy_k()) == (7, 2)


@pytest.mark.parametrize(
    ("seats", "words"),
    [
        ({"toy_k": "k4"}, "different layouts"),
        ({"toy_k": "k77"}, "no row 'k77'"),
        ({"toy_sum": "k2"}, "no seat 'toy_sum'; its seats: toy_k"),
    ],
)
def test_what_cannot_be_a_seat_is_not_written(toy: Any, seats: dict[str, str], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        toy.toy.manifest_set("k1", seats)


def test_status_names_seats_and_why_one_is_not_used(toy: Any, environ: Callable[..., None], caplog: Any) -> None:
    path = toy.toy.manifest_set("k1", {"toy_k": "k2"})
    row = _status.status_of(TOY)
    assert row.seats["toy_k"]["suffix"] == "k2" and row.as_dict()["seats"] == row.seats
    assert "it runs as toy_k (manifest)" in _status.explain_row(TOY, "k2")
    with caplog.at_level(logging.INFO, "tunekit"):
        _status.log_status("app")
    assert "app: toyscope.toy_k: k2 (manifest)" in caplog.text
    path.write_text('{"toy": "k1", "toy_k": "k4"}')
    assert "another layout" in _status.status_of(TOY).unseated["toy_k"]
    assert "toy_k follows it: " in _status.explain_row(TOY, "k1")
    with pytest.warns(tk.TunekitWarning, match="toyscope.toy runs on k1: toy_k follows it"):
        assert toy.toy_k() == 1


def test_the_command_line_shows_seats_and_carries_them(toy_cache: Path, tmp_path: Path) -> None:
    folders = {"TUNEKIT_CACHE": str(toy_cache), "TUNEKIT_HOME": str(tmp_path)}

    def command(*words: str) -> str:
        code = f"import sys; from tunekit.__main__ import main; sys.exit(main({list(words)!r} + ['--module', 'toy.kernels']))"
        done = run_python(code, folders)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    run_python("import toy.kernels as t; t.toy.manifest_set('k1', {'toy_k': 'k2'})", folders)
    table = command("status", "--scope", "toyscope")
    assert "toyscope.toy_k  k2" in " ".join(table.split()).replace("toyscope.toy_k k2", "toyscope.toy_k  k2")
    document = tmp_path / "out.json"
    document.write_text(command("manifest", "export", "--scope", "toyscope"))
    assert json.loads(document.read_text())["scopes"]["toyscope"]["manifest"] == {"toy": "k1", "toy_k": "k2"}
    run_python("import toy.kernels as t; t.toy.manifest_set('k2')", folders)
    assert "toyscope.toy_k" in command("manifest", "diff", str(document), "--scope", "toyscope")
    assert "toyscope.toy_k: k2 (new)" in command("manifest", "import", str(document), "--scope", "toyscope")
    assert "no kernel" not in command("manifest", "import", str(document), "--scope", "toyscope")


def test_what_the_manifest_names_is_built_seats_too(toy: Any, tmp_path: Path, environ: Callable[..., None]) -> None:
    environ(CACHE=str(tmp_path / "fresh"))
    toy.toy.manifest_set("k1", {"toy_k": "k4"} if TOY.same_layout("k1", "k4") else {"toy_k": "k2"})
    from tunekit.build_tools import build_cached

    build_cached([TOY], "fat")
    assert _policy._needs_build("toyscope")
    build_cached([TOY], "stamped", {TOY.key: _manifest.named_rows(TOY)})
    dispatch.forget_modules()
    assert not _policy._needs_build("toyscope")
    assert (toy.toy(2, 3), toy.toy_k()) == (6, 2)


def test_a_standalone_build_ships_both_rows(toy: Any, tmp_path: Path) -> None:
    from tunekit.build_tools.build import build_into
    from tunekit.build_tools.hook import _winners

    toy.toy.manifest_set("k2", {"toy_k": "k1"})
    winners = _winners([TOY])
    assert winners == {"toyscope.toy": "k2", "toyscope.toy_k": "k1"}
    report = build_into([TOY], tmp_path / "to", tmp_path / "scratch", "standalone", {**winners, "toyscope.toy_k": "k4"})
    assert report.built[TOY.key] == ["reference", "k1", "k2", "k4"]


def test_a_frozen_build_runs_the_seats_that_it_ships(
    toy: Any, monkeypatch: pytest.MonkeyPatch, environ: Callable[..., None]
) -> None:
    shipped = {"frozen": "standalone", "winners": {"toyscope.toy": "k1", "toyscope.toy_k": "k2"}}
    modules = dispatch.loaded_modules(TOY, grid=True)
    monkeypatch.setattr(dispatch, "build_report", lambda kernel: shipped)
    monkeypatch.setattr(dispatch, "loaded_modules", lambda kernel, grid=False: modules)
    assert (toy.toy(2, 3), toy.toy_k()) == (6, 2)
    assert toy.toy.choice().seats["toy_k"].reason == "this frozen build names it"


# --- the family's own pairs ------------------------------------------------------------------------------


@pytest.fixture
def grid(q8_cache: Path, environ: Callable[..., None]) -> dict[str, Any]:
    """Every row of the family that this CPU can run."""
    environ(CACHE=str(q8_cache))
    return dict(dispatch.grid_rows(kernels.q8q8.kernel))


def pairs(grid: dict[str, Any]) -> list[tuple[str, str]]:
    """For each row that runs here another one of its layout, by turns the next of them."""
    rows = [s for s in grid if s != "reference"]
    found = []
    for suffix in rows:
        same = [s for s in rows if s != suffix and kernels.q8q8.kernel.same_layout(s, suffix)]
        later = [s for s in same if rows.index(s) > rows.index(suffix)]
        if same:
            found.append((suffix, (later or same)[0]))
    return found


def test_rows_of_one_layout_have_one_plane_and_one_prepared_form() -> None:
    for a in kernels.q8q8.kernel.rows:
        for b in kernels.q8q8.kernel.rows:
            if kernels.q8q8.kernel.same_layout(a.suffix, b.suffix):
                one, other = layout_of(a), layout_of(b)
                assert (one.plane, one.activations) == (other.plane, other.activations)


def test_mixed_pairs_give_the_oracles_bits(grid: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    tried = 0
    for tile, gemv in pairs(grid):
        bound = dispatch.seated(grid[tile], {"q8q8_gemv": grid[gemv]})
        for name in ("q8q8_gemv", "q8q8_gemv_f16"):  # the GEMV for float16 scales goes where that for float32 ones goes
            assert bound.address(name) == grid[gemv].address(name) != grid[tile].address(name)
        for name in ("q8q8", "q8q8_f16", "q8q8_mx4_gemv"):
            assert bound.address(name) == grid[tile].address(name)
        # Gates of the family on the pair as on a row: GEMV on planes and records that the tile's row made.
        for case in fixtures.FIXTURES.gates():
            if case.name.startswith(("schema", "gemv, full", "gemv, float16, full", "traversal")):
                assert case.run(bound) is None, (tile, gemv, case.name)
        row = product.bind(bound)
        for n, k, t in ((70, 96, 1), (33, 160, 1), (70, 96, 7)):
            a = q8.quantize(rng.standard_normal((t, k), dtype=np.float32))
            m = q8.pack(rng.standard_normal((n, k), dtype=np.float32))
            mx = q8.from_mxfp4(rng.integers(0, 256, n * (k // 32) * 17, np.uint8).tobytes(), n, k)
            y = np.empty((t, n), np.float32)
            row.core.q8_matmul_acts(row.row, y, a.codes, a.scales, *m.planes(row.layout), t, n, k)
            assert fixtures.difference("y", y, q8.oracle.matmul(a, m)) is None, (tile, gemv)
            row.core.q8_mx4_matmul_acts(row.row, y, a.codes, a.scales, *mx.nibble_planes(row.layout), t, n, k)
            assert fixtures.difference("y", y, q8.oracle.matmul_codes(a.codes, a.scales, mx.codes, mx.scales)) is None
        tried += 1
    if not tried:
        pytest.skip("no two rows of one layout run here")


def test_a_product_of_one_token_runs_the_seats_row(grid: dict[str, Any], q8_cache: Path, tmp_path: Path) -> None:
    """In a process as an application's is: the manifest names two rows, and T = 1 and T = 3 are the oracle's."""
    found = pairs(grid)
    if not found:
        pytest.skip("no two rows of one layout run here")
    tile, gemv = found[0]
    code = (
        "import numpy as np\nfrom tunekit import q8\nfrom tunekit.q8 import kernels, product\n"
        f"kernels.q8q8.manifest_set({tile!r}, {{'q8q8_gemv': {gemv!r}}})\n"
        "rng = np.random.default_rng(1)\n"
        "m = q8.pack(rng.standard_normal((48, 64), dtype=np.float32))\n"
        "for t in (1, 3):\n"
        "    x = rng.standard_normal((t, 64), dtype=np.float32)\n"
        "    assert np.array_equal(q8.matmul(x, m), q8.oracle.matmul(q8.quantize(x), m))\n"
        "bound = kernels.q8q8.bound()\n"
        "print(bound.suffix, bound.seats['q8q8_gemv'].suffix, product.native().suffix)"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(q8_cache), "TUNEKIT_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [tile, gemv, tile]
