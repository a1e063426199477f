# SPDX-License-Identifier: Apache-2.0
"""What llvm-mca is asked: the loop that multiplies most, as an assembler reads it, for CPUs that could run it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT, lacking

from tunekit import verify
from tunekit.errors import ToolchainError
from tunekit.q8 import grid

pytestmark = [pytest.mark.build, pytest.mark.slow]

CHAIN = ["dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0", "mr8_kstep1_nr4"]


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("no checkout: benchmarks are no part of an sdist")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import predict as module

    if module.program() is None:
        lacking("llvm-mca")
    yield module
    for name in ("predict", "instructions"):
        sys.modules.pop(name, None)


def test_every_loop_is_taken_by_the_cpus_that_could_run_it(predict: Any) -> None:
    try:
        found = predict.predictions(predict.program(), CHAIN, ["gcc"])
    except ToolchainError as error:
        lacking(str(error))
    assert {entry["row"] for entry in found} <= set(CHAIN) and found
    for entry in found:
        row = next(row for row in grid.ROWS if row.suffix == entry["row"])
        arch = grid.leg_of(row).arch  # type: ignore[union-attr]
        assert not entry.get("problems"), entry["problems"]
        for cpu in predict.CPUS[arch]:
            # More than a multiply-accumulate, and less than four of 512 bits, a cycle.
            for what, rate in entry[cpu].items():
                if what == "mxfp4 tile" and not grid.looks_up(row):
                    assert rate is None  # it has none of its own
                else:
                    assert 1 < rate < 256, entry
        assert not any(cpu in entry for other in predict.CPUS if other != arch for cpu in predict.CPUS[other])
    shown = predict.table(found)
    assert shown.count("\n") == len(found) + 1 and all(f"`{row}`" in shown for row in {e["row"] for e in found})


def test_a_loop_that_nobody_understands_is_an_error(predict: Any) -> None:
    proof = verify.emission([predict.counted.KERNEL], CHAIN[:1], ["gcc"]).proofs[0]
    loop, macs = predict.stand_in(proof, "_q8q8__")
    assert macs == 16 * 5 * 32  # rows, tokens, a block
    with pytest.raises(ToolchainError, match="does not take"):
        predict.cycles(predict.program(), "x86_64", "no-such-cpu", loop)
    with pytest.raises(ToolchainError, match="does not take"):
        predict.cycles(predict.program(), "aarch64", "neoverse-v2", loop)


def test_a_cpu_is_not_asked_for_what_it_lacks(predict: Any) -> None:
    assert predict.runs_on(("avx2", "fma"), "znver3") and not predict.runs_on(("avx2", "avxvnni"), "znver3")
    assert predict.runs_on(("dotprod",), "apple-m1") and not predict.runs_on(("dotprod", "i8mm"), "apple-m1")


def test_the_command_says_what_is_missing(
    predict: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["predict.py"])
    assert predict.main() == 1
    assert "apt install llvm-19" in capsys.readouterr().err
