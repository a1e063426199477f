# SPDX-License-Identifier: Apache-2.0
"""The same logits, bit for bit: every row, number of lanes, way of cutting a prompt, and decode as prefill."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import DIGEST

HERE = Path(__file__).parent


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def runnable() -> list[str]:
    from q8llama import kernels

    from tunekit import dispatch
    from tunekit.q8 import kernels as q8

    found = [f"tunekit.q8q8={row}" for row in dispatch.grid_rows(q8.q8q8.kernel)]
    for kernel in (kernels.attend.kernel, kernels.swiglu.kernel):
        found += [f"{kernel.key}={row}" for row in dispatch.grid_rows(kernel)]
    return found


def test_every_row_that_runs_here_gives_the_same_bits(python: Any, small: Path) -> None:
    pins = runnable()
    assert len(pins) >= 6

    def run(pin: str) -> Any:
        return json.loads(python(HERE / "small.py", small, TUNEKIT_PIN=pin).stdout)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(pins, pool.map(run, pins), strict=True))
    assert {pin: (said["digest"], said["cut the same"]) for pin, said in found.items()} == dict.fromkeys(pins, (DIGEST, True))
    for pin, said in found.items():
        kernel, row = pin.rpartition(".")[2].split("=")
        assert said[{"q8q8": "row"}.get(kernel, kernel)] == row


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_lanes_change_nothing(python: Any, small: Path, lanes: int) -> None:
    said = json.loads(python(HERE / "small.py", small, lanes).stdout)
    assert (said["lanes"], said["digest"], said["cut the same"]) == (lanes, DIGEST, True)


@pytest.fixture(scope="module")
def whole(model: Any) -> tuple[list[int], Any]:
    """600 tokens and their logits, as two batches."""
    text = (HERE / "text.txt").read_text(encoding="utf-8")
    tokens = (model.tokenizer.encode(text) * 2)[:600]
    return tokens, model.session(600).feed(tokens, every=True)


@pytest.mark.parametrize("cuts", [(1, 2, 10, 255, 256, 300), (17, 500), (599,), (511, 513)])
def test_how_a_prompt_is_cut_changes_nothing(model: Any, whole: Any, cuts: tuple[int, ...]) -> None:
    tokens, want = whole
    session = model.session(600)
    for a, b in zip((0, *cuts), (*cuts, 600), strict=True):
        assert same(session.feed(tokens[a:b], every=True), want[a:b]), (a, b)


def test_one_by_one_is_as_all_at_once(model: Any, whole: Any) -> None:
    tokens, want = whole
    session = model.session(600)
    session.feed(tokens[:240], logits=False)
    for plain in (False, True):
        session.back(240)
        session.settings(plain=plain)
        for t in (*range(240, 280), *range(505, 520)):  # around the ends of the first two slices
            if t == 505:
                session.feed(tokens[280:505], logits=False)
            assert same(session.feed([tokens[t]]), want[t]), t
    session.settings(profile=True)
    session.back(500)
    assert same(session.feed([tokens[500]]), want[500])


@pytest.mark.parametrize("pin", ["tunekit.q8q8=reference", "q8llama.attend=reference"])
def test_the_real_model_on_the_reference(python: Any, model: Any, whole: Any, pin: str, tmp_path: Path) -> None:
    tokens, want = whole
    code = (
        f"import numpy as np, sys; from q8llama import Model; m = Model.load(); s = m.session(64)\n"
        f"a = s.feed({tokens[:20]}, every=True); b = s.feed([{tokens[20]}]); np.save(sys.argv[1], np.r_[a, b[None]])"
    )
    python("-c", code, tmp_path / "got.npy", TUNEKIT_PIN=pin)
    assert same(np.load(tmp_path / "got.npy"), want[:21])


def test_set_back_and_gone_on_is_as_never_gone(model: Any, whole: Any) -> None:
    tokens, want = whole
    session = model.session(600)
    session.feed(tokens[:300], logits=False)
    session.back(100)
    assert session.position == 100 and same(session.feed(tokens[100:200]), want[199])


def test_the_environment_of_floats_is_nobodys_business(python: Any, small: Path) -> None:
    """Rounding upwards and flush to zero, set by whoever came before, change nothing."""
    code = (
        "import ctypes, platform, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import numpy as np, small; from q8llama import Model\n"
        "m, libm = Model.load(sys.argv[1]), ctypes.CDLL('libm.so.6')\n"
        "t, want = list(range(280)), m.session(280)\n"
        "a = [want.feed(t[:270], every=True), *(want.feed([i])[None] for i in t[270:])]\n"
        "assert libm.fesetround(0x800 if platform.machine() == 'x86_64' else 0x400000) == 0\n"
        "assert np.float32(1) + np.float32(2.0 ** -30) > 1\n"
        "got = m.session(280)\n"
        "b = [got.feed(t[:270], every=True), *(got.feed([i])[None] for i in t[270:])]\n"
        "print(all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b)))"
    )
    assert python("-c", code, small, HERE).stdout == "True\n"
