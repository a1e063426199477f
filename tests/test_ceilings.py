# SPDX-License-Identifier: Apache-2.0
"""The ceilings of one lane: which legs are asked for, what stands in place of one that cannot be measured, and the C."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import lacking

from tunekit import _profile, ceilings, cpu
from tunekit.cpu.features import TABLES
from tunekit.errors import TunekitError


def asking(answers: dict[int, Any]) -> Any:
    def ask(number: int, features: Sequence[str], arguments: Sequence[str]) -> list[float]:
        answer = answers[number]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    return ask


def test_only_legs_of_this_cpu_are_asked_for_and_a_reason_stands_in_place_of_a_number() -> None:
    answers = {0: [100.0, 50.0], 1: TunekitError("an old compiler"), 2: [80.0]}
    found = ceilings.measure(asking(answers), "x86_64", frozenset({"avx2"}), 3 * ceilings.READ_BYTES[1])
    assert found["gmacs"] == {"maddubs": 80.0}
    assert found["missing"] == {"madd16": "an old compiler"}
    assert list(found["read_gbs"]) == [str(size) for size in ceilings.READ_BYTES[:2]]  # no room for the larger ones
    assert "no ceiling of madd16: an old compiler" in ceilings.lines(found)


def test_a_box_without_features_has_only_its_memory() -> None:
    found = ceilings.measure(asking({0: [1.0] * len(ceilings.READ_BYTES)}), "riscv64", frozenset(), None)
    assert found["gmacs"] == {} and len(found["read_gbs"]) == len(ceilings.READ_BYTES)
    found = ceilings.measure(asking({0: TunekitError("no memory")}), "riscv64", frozenset(), None)
    assert found["missing"] == {"read": "no memory"} and found["read_gbs"] == {}


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    found = ceilings.here()
    assert list(found) == ["problem"] and "/no/such/cc" in found["problem"]
    assert ceilings.lines(found)[0].startswith("ceilings of one lane: not measured")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('no tiles')", "its program failed: no tiles"),
        ("import os; os.kill(os.getpid(), 4)", "its program failed: status -4"),
        ("print('1.5 x')", "its program printed '1.5 x'"),
        ("print('1 2')", "its program printed '1 2'"),
    ],
)
def test_a_program_that_does_not_answer_is_a_reason(code: str, reason: str) -> None:
    with pytest.raises(TunekitError, match=f"^{reason}$"):
        ceilings.run_program([sys.executable, "-c", code], 1)
    with pytest.raises(TunekitError, match="its program cannot run: No such file"):
        ceilings.run_program([str(Path("no/such/program"))], 1)


def test_every_leg_names_features_that_exist() -> None:
    for leg in ceilings.LEGS:
        assert set(leg.features) <= set(TABLES[leg.arch])


@pytest.mark.build
def test_this_box_has_ceilings_and_its_own_caches_are_no_slower_than_its_memory() -> None:
    if shutil.which("cc") is None:
        lacking("a compiler")
    found = ceilings.here()
    wanted = {leg.name for leg in ceilings.LEGS if leg.arch == cpu.this_cpu().arch}
    assert set(found["gmacs"]) | set(found["missing"]) <= wanted
    assert all(rate > 0 for rate in [*found["gmacs"].values(), *found["read_gbs"].values()])
    assert str(ceilings.READ_BYTES[0]) in found["read_gbs"]


COUNTS = {"vpmaddubsw": ("maddubs", 10), "vpdpbusd": ("avx512vnni", 10), "tdpbssd": ("amx-int8", 4)}


@pytest.mark.build
@pytest.mark.parametrize("instruction", COUNTS)
def test_the_loop_is_made_of_the_instruction_that_it_counts(instruction: str, tmp_path: Path) -> None:
    from tunekit.build_tools import Runner, find_toolchain
    from tunekit.build_tools.toolchain import row_flags

    toolchain = find_toolchain(Runner())
    if toolchain.arch != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("counts x86-64 instructions with objdump")
    name, least = COUNTS[instruction]
    leg = next(leg for leg in ceilings.LEGS if leg.name == name)
    flags = [*row_flags("x86_64", leg.features), f"-DTK_LEG={leg.number}", "-Werror"]
    made = tmp_path / "ceiling.o"
    subprocess.run([*toolchain.command, *flags, "-c", str(ceilings.SOURCE), "-o", str(made)], check=True)
    text = subprocess.run(["objdump", "-d", str(made)], check=True, capture_output=True, text=True).stdout
    # Fewer would mean that the compiler moved products out of the loop.
    assert text.count(instruction) >= least


def test_a_profile_keeps_what_was_measured_and_a_foreign_one_does_not(tmp_path: Path) -> None:
    box = cpu.this_box()
    path = tmp_path / "box_profile.json"
    _profile.save(path, box, {}, {"ceilings": {"gmacs": {"maddubs": 80.0}}})
    assert _profile.load(path, box).measured["ceilings"]["gmacs"] == {"maddubs": 80.0}
    path.write_text(path.read_text().replace(box.vendor, "Other"), encoding="utf-8")
    assert _profile.load(path, box).measured == {}
