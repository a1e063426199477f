# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peers.py: who is refused and who is named, how parts are merged, what the bars say; no time is asserted."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("work", "ggml", "limits", "peers", "measure", "bars", "chart"):
        importlib.import_module(f"peerlib.{name}")
    return sys.modules["peerlib"]


@pytest.fixture
def command(lib: Any) -> Any:
    return importlib.import_module("peers")


def fake(lib: Any, name: str, scale: float) -> Any:
    """A peer that computes in NumPy, off by a factor."""

    class Fake(lib.peers.Numpy):
        label = name

        def load(self, work: Any) -> Any:
            def plan(at: Any) -> Any:
                found = [np.float32(scale) * (at.acts[a] @ at.weights[w].floats.T) for w, a in at.steps]
                return (lambda: None), found.__getitem__

            return lib.peers.Model(plan)

    return Fake(1, None)


def test_a_peer_that_computes_something_else_is_named_and_not_timed(lib: Any) -> None:
    cell = lib.measure.Cell("64x32", 3, "hot")
    peers = [fake(lib, "right", 1.0), fake(lib, "wrong", 1.01)]
    record = lib.measure.measure(cell, peers, 1, 0.0, lib.measure.Loaded())
    assert set(record["peers"]) == {"right"}
    assert "computes something else" in record["refused"]["wrong"]
    assert (record["k"], record["n"]) == (64, 32)


def test_a_peer_that_fails_is_named(lib: Any) -> None:
    class Broken(lib.peers.Numpy):
        label = "broken"

        def load(self, work: Any) -> Any:
            raise RuntimeError("no such kernel\nmore")

    record = lib.measure.measure(lib.measure.Cell("64x32", 1, "hot"), [Broken(1, None)], 1, 0.0, lib.measure.Loaded())
    assert record["refused"] == {"broken": "no such kernel"}


def test_peers_that_are_not_installed_are_named_with_what_installs_them(lib: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib.peers, "ALL", (lib.peers.Tunekit, lib.peers.LlamaQ8, lib.peers.IkQ8))
    monkeypatch.setattr(lib.ggml, "find_library", lambda *_: None)
    found, missing = lib.peers.start(1, tmp_path)
    for peer in found:
        peer.limit.__exit__(None, None, None)
    assert [p.label for p in found] == ["tunekit"]
    assert "bash benchmarks/peers.sh llama.cpp" in missing["llama.cpp Q8_0"]
    assert "bash benchmarks/peers.sh ik_llama.cpp" in missing["ik_llama.cpp Q8_0"]


@pytest.mark.parametrize("form", ["q8_0", "mxfp4"])
def test_weights_mean_what_their_blocks_say(lib: Any, form: str) -> None:
    gguf = pytest.importorskip("gguf")
    w = lib.work.Weights(64, 24, form)
    kind = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "mxfp4": gguf.GGMLQuantizationType.MXFP4}[form]
    right = gguf.quants.dequantize(w.blocks.reshape(24, -1), kind)
    np.testing.assert_array_equal(w.floats, right.reshape(24, 64))


def test_streamed_works_take_four_caches_and_chains_the_whole_model(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib.measure, "last_cache", lambda: 1 << 16)
    peer = fake(lib, "any", 1.0)
    work = lib.measure.Cell("64x32", 1, "streamed").work(peer)
    assert len(work.steps) * peer.bytes(64, 32) >= 4 << 16
    assert len({w.blocks.tobytes() for w in work.weights[:32]}) == 32, "equal constants may be stored once"
    np.testing.assert_array_equal(work.weights[3].floats[3:], work.weights[0].floats[:-3])
    assert (len(work.steps) - 1) * peer.bytes(64, 32) < 4 << 16
    model = lib.work.chain(4)
    assert len(model.steps) == 211
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    assert model.macs == 4 * 30 * layer + 576 * 49152


def test_our_own_results_pass_as_hot_streamed_and_mxfp4(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib.measure, "last_cache", lambda: 1 << 14)
    for kind in (lib.peers.Tunekit, lib.peers.TunekitQuantised, lib.peers.TunekitMxfp4):
        peer = kind(1, None)
        for regime in ("hot", "streamed"):
            cell = lib.measure.Cell("64x48", 5, regime, peer.form)
            record = lib.measure.measure(cell, [peer], 1, 0.0, lib.measure.Loaded())
            assert not record["refused"], record
            assert record["peers"][peer.label]["error"] > 1e-4, "8-bit activations cost something"
        peer.limit.__exit__(None, None, None)


def cell(shape: str, tokens: int, rates: dict[str, float], **other: Any) -> dict[str, Any]:
    peers = {
        label: {"gmacs": rate, "seconds": 1.0, "median": 1.0, "error": 0.0, "exact": True, "kernel": False, "version": "1",
                "bytes": rate * 1e9}
        for label, rate in rates.items()
    }  # fmt: skip
    return {"shape": shape, "k": 64, "n": 64, "tokens": tokens, "regime": "hot", "form": "q8_0", "threads": 1,
            "peers": peers, "refused": {}, **other}  # fmt: skip


def test_a_bar_is_met_in_the_mean_with_no_cell_far_below(lib: Any) -> None:
    def tile(*ratios: float) -> dict[str, Any]:
        cells = [cell(f"s{i}", 8, {"tunekit": r, "llama.cpp Q8_0": 1.0}) for i, r in enumerate(ratios)]
        return next(b for b in lib.bars.judge(cells, {}) if b["against"] == "llama.cpp Q8_0")

    assert tile(1.95, 1.95)["met"]
    assert tile(1.8, 2.2)["met"]
    assert not tile(1.94, 1.94)["met"]
    low = tile(1.7, 3.0)
    assert not low["met"], "a cell below nine tenths"
    assert low["where"] == "s0 T=8"
    assert low["mean"] == pytest.approx((1.7 * 3.0) ** 0.5)


def test_bars_compare_with_the_best_of_a_project_and_give_five_per_cent_on_all_cores(lib: Any) -> None:
    rates = {"tunekit": 1.2, "ik_llama.cpp Q8_0": 0.5, "ik_llama.cpp Q8_0 by 8 rows (q8_0_r8)": 1.0}
    one = lib.bars.judge([cell("s", 16, rates)], {})
    assert [(b["mean"], b["met"]) for b in one] == [(1.2, False)]
    two = lib.bars.judge([cell("s", 16, rates, threads=2)], {})
    assert [(b["mean"], b["met"]) for b in two] == [(1.2, True)]
    streamed = cell("s", 1, {"tunekit": 19.0}, regime="streamed", read=20.0)
    limits = {"1": {"read": 30.0, "port": 100.0, "tile": 65.0}}
    read = lib.bars.judge([streamed], limits)
    assert {b["bar"]: b["met"] for b in read} == {"tile alone": False, "GEMV, streamed": True}
    slow = lib.bars.judge([{**streamed, "read": 30.0}], limits)
    assert {b["bar"]: b["met"] for b in slow} == {"tile alone": False, "GEMV, streamed": False}


def test_the_table_of_bars_says_which_are_missed(lib: Any) -> None:
    lines = lib.bars.table(lib.bars.judge([cell("s", 1, {"tunekit": 2.0, "llama.cpp Q8_0": 1.0})], {}))
    assert len(lines) == 2
    assert "NO" in lines[1]
    assert "GEMV, hot" in lines[1]


def test_parts_are_merged_by_cell(command: Any) -> None:
    first = {"cells": [cell("a", 1, {"tunekit": 1.0}), cell("b", 1, {"tunekit": 1.0})], "limits": {"1": {"read": 5.0}},
             "missing": {"tunekit": "never", "other": "not installed"}}  # fmt: skip
    second = {"cells": [cell("a", 1, {"tunekit": 2.0})], "limits": {"1": {"read": 4.0, "port": 9.0}}}
    found = command.merged([first, second])
    assert [c["peers"]["tunekit"]["gmacs"] for c in found["cells"]] == [2.0, 1.0]
    assert found["limits"] == {"1": {"read": 5.0, "port": 9.0}}
    assert found["missing"] == {"other": "not installed"}


def test_the_chart_has_a_line_for_everyone(lib: Any) -> None:
    cells = [cell("a", t, {"tunekit": 50.0 + t, "x<y": 20.0}) for t in (1, 4, 16)]
    root = ET.fromstring(lib.chart.svg(cells))
    lines = [e for e in root if e.tag.endswith("polyline")]
    assert len(lines) == 2
    assert all(len(e.attrib["points"].split()) == 3 for e in lines)
    ET.fromstring(lib.chart.svg([]))


def test_the_command_merges_without_measuring(tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    measured = cell("a", 8, {"tunekit": 4.0, "llama.cpp Q8_0": 1.0})
    part.write_text(json.dumps({"cells": [measured], "missing": {"OpenVINO": "No module; to install it: this"}}))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), "--merge", str(part), "--bars", "--chart", str(tmp_path / "c.svg")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not measured: OpenVINO: No module; to install it: this" in done.stdout
    assert "tile, T >= 8" in done.stdout
    ET.parse(tmp_path / "c.svg")


@pytest.mark.parametrize("arguments", [["--shapes", "30x64"], ["--shapes", "big"], ["--tokens", "0"]])
def test_wrong_shapes_are_refused(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / "peers.py"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_a_chain_is_timed_layer_by_layer_and_its_parts_are_the_whole(lib: Any) -> None:
    cell = lib.measure.Cell("SmolLM2-135M", 1, "chain")
    work = lib.work.Work([None] * 15, [np.zeros((2, 32), np.float32)], [(i, 0) for i in range(15)])
    parts = lib.measure.parts_of(cell, work)
    assert [len(part.steps) for part in parts] == [7, 7, 1]
    assert [step for part in parts for step in part.steps] == work.steps
    assert lib.measure.parts_of(lib.measure.Cell("a", 1, "hot"), work) == [work]
    timed = lib.measure.Contender(None, [], [], 1, 1, [[1.0, 5.0], [2.0, 3.0]])
    assert timed.best == 4.0
    assert timed.rounds == [6.0, 5.0]
