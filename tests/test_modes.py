# SPDX-License-Identifier: Apache-2.0
"""Modes in fresh processes: what ``variants()`` holds, and what the C symbol behind each row computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python

from tunekit import cpu

# A row's fingerprint is what its C symbol computes: never a name. k 3 asks for a feature that no CPU has, k 9 declines.
CODE = """
import ctypes, json
import numpy as np
import toy.kernels as t

I = ctypes.c_int32
F = ctypes.POINTER(ctypes.c_float)

def toy(v): return ctypes.CFUNCTYPE(I, I, I)(v.address())(2, 3)
def toy_k(v): return ctypes.CFUNCTYPE(I)(v.address())()
def toy_sum(v):
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    ctypes.CFUNCTYPE(None, F, F, I)(v.address())(y.ctypes.data_as(F), x.ctypes.data_as(F), 3)
    return y.tolist()

def called(v):
    y = np.zeros(3, np.float32)
    return v(y, np.arange(3, dtype=np.float32), 3) or y.tolist()

print(json.dumps({
    "names": [[s for s, _ in f.variants()] for f in (t.toy, t.toy_k, t.toy_sum)],
    "symbols": [v.__name__ for _, v in t.toy_k.variants()],
    "toy": [toy(v) for _, v in t.toy.variants()],
    "toy_k": [toy_k(v) for _, v in t.toy_k.variants()],
    "toy_sum": [toy_sum(v) for _, v in t.toy_sum.variants()],
    "called": [[v(2, 3) for _, v in t.toy.variants()], [v() for _, v in t.toy_k.variants()], [called(v) for _, v in t.toy_sum.variants()]],
    "used": list(__import__("tunekit.dispatch").dispatch.used()),
    "runs": toy(t.toy),
}))
"""
K4 = 4 if {"sse2", "neon"} & set(cpu.this_features()) else 0
KS = [0, 1, 2, 0, K4, 0]


def report(cache: Path, **variables: str) -> dict[str, Any]:
    done = run_python(CODE, {"TUNEKIT_CACHE": str(cache), **{f"TUNEKIT_{k}": v for k, v in variables.items()}})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mode", ["tune", "test"])
def test_grid_modes_hold_the_reference_and_then_every_row_in_order(toy_cache: Path, mode: str) -> None:
    found = report(toy_cache, MODE=mode)
    order = ["reference", "k1", "k2", "k3", "k4", "k9"]
    assert found["names"] == [order] * 3
    assert found["symbols"] == [f"toy_k__{suffix}" for suffix in order]
    assert found["toy"] == [5 + k for k in KS]
    assert found["toy_k"] == KS
    assert found["toy_sum"] == [[float(k), 1.0 + k, 2.0 + k] for k in KS]
    assert found["called"] == [found["toy"], found["toy_k"], found["toy_sum"]]
    assert found["used"] == []  # looking at a grid is no choice


@pytest.mark.parametrize("variables", [{}, {"MODE": ""}, {"MODE": "normal"}])
@pytest.mark.parametrize("winner", [None, "k2"])
def test_normal_mode_holds_the_reference_alone_and_runs_one_winner(
    toy_cache: Path, toy: Any, variables: dict[str, str], winner: str | None
) -> None:
    if winner:
        toy.toy.manifest_set(winner)
    found = report(toy_cache, **variables)
    assert found["names"] == [["reference"]] * 3
    assert (found["toy"], found["toy_k"], found["toy_sum"]) == ([5], [0], [[0.0, 1.0, 2.0]])
    assert found["runs"] == (7 if winner else 6)


@pytest.mark.parametrize("mode", ["Tune", "tuning", "fat", "normal "])
def test_any_other_mode_is_an_error_that_names_the_three(mode: str) -> None:
    done = run_python("import toy.kernels as t; t.toy.variants()", {"TUNEKIT_MODE": mode})
    assert done.returncode == 1
    assert f"TUNEKIT_MODE={mode!r} is not legal; it takes one of: normal, tune, test" in done.stderr


def test_without_any_module_every_row_behaves_as_the_reference(tmp_path: Path) -> None:
    code = (
        "import toy.kernels as t, tunekit as tk\n"
        "print([v(2, 3) for _, v in t.toy.variants()], [v() for _, v in t.toy_k.variants()])\n"
        "try: t.toy.variants()[2][1].address()\n"
        "except tk.ChoiceError as e: print(e)"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(tmp_path / "empty"), "TUNEKIT_MODE": "test"})
    assert done.stdout.splitlines()[0] == "[5, 5, 5, 5, 5, 5] [0, 0, 0, 0, 0, 0]", done.stderr
    assert "toyscope.toy has no native code here" in done.stdout
