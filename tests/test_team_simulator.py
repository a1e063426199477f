# SPDX-License-Identifier: Apache-2.0
"""The simulator of dispatch: it runs the shipped shapers, and finds what larger machines were seen to do."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from tunekit import core

pytestmark = pytest.mark.skipif(core.core() is None, reason="tunekit._core is not built")


@pytest.fixture(scope="module")
def sim() -> Any:
    spec = importlib.util.spec_from_file_location("simulate", ROOT / "benchmarks/simulate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate"] = module
    spec.loader.exec_module(module)
    return module


def test_chunks_are_all_of_the_work_for_1_to_256_lanes(sim: Any) -> None:
    knobs = replace(sim.Knobs(), grid=2)
    ops = [sim.Op(1, 576, 192), sim.Op(130, 576, 576), sim.Op(512, 2048, 2040)]
    for op, lanes in itertools.product(ops, range(1, 257)):
        assert sum(sim.cells_of(op, lanes, knobs)) == op.t * op.k * op.n


def test_more_lanes_are_never_slower_in_batches(sim: Any) -> None:
    knobs = replace(sim.Knobs(), grid=2)
    times = [sim.forward("1B", 512, lanes, knobs, sim.Costs()) for lanes in (1, 2, 4, 8, 16, 32, 64)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] > 7


@pytest.mark.parametrize("lanes", [48, 192])
def test_the_rank_gate_helps_small_models_on_many_lanes(sim: Any, lanes: int) -> None:
    costs = sim.machine(lanes)
    on, off = replace(sim.Knobs(), target=sim.target(costs)), replace(sim.Knobs(), target=sim.target(costs), gate=0)

    def gain(model: str, t: int, live: int = lanes) -> float:
        return float(sim.forward(model, t, live, off, costs) / sim.forward(model, t, live, on, costs))

    assert gain("135M", 1) > 1.1
    assert gain("135M", 1) > gain("8B", 1) >= 0.999
    assert gain("8B", 512) == pytest.approx(1, abs=0.01)
    assert gain("135M", 1, 4) == pytest.approx(1, abs=0.01)  # few lanes: nothing to keep out


@pytest.mark.parametrize("lanes", [8, 48, 192])
@pytest.mark.parametrize("mode", [1, 2])
def test_cutting_tokens_helps_where_rows_starve_lanes_alone(sim: Any, lanes: int, mode: int) -> None:
    costs = sim.machine(lanes)
    base = replace(sim.Knobs(), target=sim.target(costs))
    gains = {}
    for model, t in itertools.product(sim.MODELS, (1, 128, 512)):
        gain = sim.forward(model, t, lanes, base, costs) / sim.forward(model, t, lanes, replace(base, grid=mode), costs)
        assert gain > 0.99, (model, t, gain)  # never worse
        gains[model, t] = gain
    if lanes == 8:
        assert set(gains.values()) == {1.0}  # nothing is starved: nothing changes
    else:
        assert gains["135M", 512] > 1.1 and gains["135M", 512] > gains["8B", 512]


@pytest.mark.parametrize("lanes", [8, 48])
def test_oversplit_evens_stragglers(sim: Any, lanes: int) -> None:
    costs = sim.machine(lanes)
    four = replace(sim.Knobs(), target=sim.target(costs))
    one = replace(four, oversplit=1)
    slow = [0.4 if lane % 4 == 0 else 1.0 for lane in range(lanes)]
    assert sim.forward("8B", 512, lanes, one, costs, slow) > 1.3 * sim.forward("8B", 512, lanes, four, costs, slow)
    assert sim.forward("8B", 512, lanes, four, costs) < 1.02 * sim.forward("8B", 512, lanes, one, costs)


def test_costs_come_from_a_probe(sim: Any, tmp_path: Path) -> None:
    dispatch = {"macs_per_ns": 33.0, "op_ns": {"2": 80.0, "16": 140.0}, "per_chunk_ns": 4.0}
    (tmp_path / "p.json").write_text(json.dumps({"measured": {"dispatch": dispatch, "stream_gbs": {"1": 9.0}}}))
    found = sim.machine(48, sim.costs_of(tmp_path / "p.json"))
    assert (found.macs_per_ns, found.publish_ns, found.chunk_ns, found.lane_bytes) == (33.0, 80.0, 4.0, 9.0)
    assert found.transfer_ns == sim.MACHINES[48].transfer_ns
