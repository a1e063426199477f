# SPDX-License-Identifier: Apache-2.0
"""Gates and regimes from samples alone: what each catches, and what an author's mistake is answered with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from conftest import ROOT

import tunekit as tk
from tunekit import declare, dispatch
from tunekit.errors import GateError
from tunekit.kernel import Kernel
from tunekit.measure.fixtures import EVERYTHING, Fixtures, Sample
from tunekit.measure.samples import fixtures_from, guarded
from tunekit.tuner import fixtures_of


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    tables: list[dict[str, Any]] = [declare._scopes, declare._declared, declare._companions, dispatch._kernels]
    saved = [dict(table) for table in tables]

    @tk.companion
    def total(x: Annotated[tk.In[tk.f32], "n"], n: tk.i32) -> tk.f32:
        return float(x.sum())

    @tk.tune(scope=tk.Scope("sampled"), template="toy/toy.c.j2", rows=[tk.perm(k=1)], companions=[total])
    def scale(y: Annotated[tk.Out[tk.f32], "n"], x: Annotated[tk.In[tk.f32], "n"], z: Annotated[tk.InOut[tk.i32], "n"], n: tk.i32) -> tk.i32:
        y[:] = 2 * x
        z += 1
        return n

    yield scale.kernel
    for table, before in zip(tables, saved, strict=True):
        table.clear()
        table.update(before)


@dataclass
class Row:
    """A built row whose code is Python."""

    body: Callable[..., Any]

    def call(self, name: str, *arguments: Any) -> Any:
        return self.body(*arguments)


def right(y: Any, x: Any, z: Any, n: int) -> int:
    y[:] = 2 * x
    z += 1
    return n


def sample(n: int = 5, **changes: Any) -> Sample:
    x = np.arange(n, dtype=np.float32)
    return Sample(f"n={n}", (np.zeros(n, np.float32), x, np.arange(n, dtype=np.int32), n), work=1, **changes)


def verdict(kernel: Kernel, body: Callable[..., Any], **changes: Any) -> str | None:
    (gate,) = fixtures_from(kernel, [sample(**changes)], "here").gates()
    return gate.run(Row(body))


def wrong_value(y: Any, x: Any, z: Any, n: int) -> int:
    right(y, x, z, n)
    y[3] += 1
    return n


def writes_its_input(y: Any, x: Any, z: Any, n: int) -> int:
    right(y, x, z, n)
    x[0] = 7
    return n


def skips_the_last(y: Any, x: Any, z: Any, n: int) -> int:
    y[:-1] = 2 * x[:-1]
    z += 1
    return n


def adds_to_its_output(y: Any, x: Any, z: Any, n: int) -> int:
    y += 2 * x
    z += 1
    return n


def leaves_the_integers(y: Any, x: Any, z: Any, n: int) -> int:
    y[:] = 2 * x
    return n


def returns_another(y: Any, x: Any, z: Any, n: int) -> int:
    return right(y, x, z, n) + 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (right, None),
        (wrong_value, r"y[3] is np.float32(7.0), the reference says np.float32(6.0) (1 of 5 differ)"),
        (writes_its_input, "x[0] is np.float32(7.0), the reference says np.float32(0.0)"),
        (skips_the_last, "y[4] is "),
        (adds_to_its_output, "y[0] is "),
        (leaves_the_integers, "z[0] is np.int32(0), the reference says np.int32(1) (5 of 5 differ)"),
        (returns_another, "the returned value is np.int32(6), the reference says np.int32(5)"),
    ],
)
def test_what_a_gate_catches(kernel: Kernel, body: Callable[..., Any], words: str | None) -> None:
    found = verdict(kernel, body)
    assert found == words if words is None else words in str(found)


def test_floats_are_compared_by_bits_unless_a_tolerance_is_given(kernel: Kernel) -> None:
    def off(y: Any, x: Any, z: Any, n: int) -> int:
        right(y, x, z, n)
        y[2] = np.nextafter(y[2], np.float32(9))
        return n

    assert "y[2]" in str(verdict(kernel, off))
    assert verdict(kernel, off, rtol=1e-6) is None

    def negative_zero(y: Any, x: Any, z: Any, n: int) -> int:
        right(y, x, z, n)
        y[0] = -0.0
        return n

    assert "y[0] is np.float32(-0.0)" in str(verdict(kernel, negative_zero))


def test_nothing_writes_into_a_sample(kernel: Kernel) -> None:
    one = sample()
    before = [np.copy(a) for a in one.arguments]
    made = fixtures_from(kernel, [one], "here")
    for gate in made.gates():
        gate.run(Row(right))
    assert all(np.array_equal(a, b) for a, b in zip(one.arguments, before, strict=True))


@pytest.mark.parametrize("end", [True, False])
def test_one_element_beyond_a_guarded_array_ends_the_process(end: bool) -> None:
    code = (
        "import ctypes, sys, numpy as np; from tunekit.measure.samples import guarded\n"
        f"a = guarded(np.arange(5, dtype=np.float32), {end})\n"
        "p = ctypes.cast(a.ctypes.data, ctypes.POINTER(ctypes.c_float))\n"
        "print(p[0], p[4], flush=True); p[int(sys.argv[1])]"
    )
    for index, dies in ((5, end), (-1, not end)):
        done = subprocess.run([sys.executable, "-c", code, str(index)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout == "0.0 4.0\n"
        assert (done.returncode < 0) is dies


@pytest.mark.parametrize("shape", [(0,), (3,), (5000,), (7, 11)])
def test_a_guarded_array_is_a_faithful_copy(shape: tuple[int, ...]) -> None:
    source = np.random.default_rng(0).standard_normal(shape)
    for end in (True, False):
        copy = guarded(source, end)
        assert copy.flags.c_contiguous
        assert copy.flags.aligned
        assert copy.flags.writeable
        assert np.array_equal(copy, source)
        copy[...] = 0


def test_the_first_timed_sample_decides_and_smaller_ones_are_checked_first(kernel: Kernel) -> None:
    plain = Sample("n=0", (np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.int32), 0))
    other = Sample("total", (np.ones(4, np.float32), 4), function="total", work=4)
    made = fixtures_from(kernel, [sample(100), other, plain], "here")
    assert isinstance(made, Fixtures)
    assert [g.name for g in made.gates()] == ["sample n=0", "sample total", "sample n=100"]
    assert [(r.name, r.decides) for r in made.regimes()] == [("n=100", EVERYTHING), ("total", ())]
    chosen = fixtures_from(kernel, [sample(100), Sample("total", other.arguments, 4, function="total", decides="*")], "here")
    assert [(r.name, r.decides) for r in chosen.regimes()] == [("n=100", ()), ("total", EVERYTHING)]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "here: no sample has work=, so nothing can be timed; give it to a large one"),
        ([3], "here gives int; it must name a list of tunekit.measure.fixtures.Sample"),
        ([sample(), sample()], "here: two samples are called 'n=5'; rename one"),
        ([Sample("s", (1, 2))], "sample 's' takes 4 arguments (y, x, z, n), got 2"),
        ([Sample("s", (np.zeros(2), np.zeros(2, np.float32), np.zeros(2, np.int32), 2))], "sample 's': y must have dtype float32, not float64"),
        ([Sample("s", (np.zeros(2, np.float32), 1), function="nothing")], "the kernel has no function 'nothing'; it has scale, total"),
    ],
)
def test_samples_that_cannot_be_used_name_the_mend(kernel: Kernel, samples: list[Any], words: str) -> None:
    with pytest.raises(GateError) as caught:
        fixtures_from(kernel, samples, "here")
    assert words in str(caught.value)


def test_a_sample_refuses_nonsense() -> None:
    with pytest.raises(TypeError, match="arguments must be a tuple, not list"):
        Sample("s", [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="work, rtol and atol must not be negative"):
        Sample("s", (), rtol=-1)


def raises() -> list[Sample]:
    raise RuntimeError("no data today")


def one_number() -> int:
    return 3


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("test_measure_samples:raises", "raised RuntimeError: no data today"),
        ("test_measure_samples:nothing_of_it", "raised AttributeError"),
        ("no_such_module:samples", "raised ModuleNotFoundError"),
        ("test_measure_samples:one_number", "gives int"),
    ],
)
def test_fixtures_that_raise_name_the_kernel_and_the_text(kernel: Kernel, named: str, words: str) -> None:
    import dataclasses

    with pytest.raises(GateError) as caught:
        fixtures_of(dataclasses.replace(kernel, fixtures=named))
    assert f"kernel sampled.scale: fixtures={named!r}" in str(caught.value)
    assert words in str(caught.value)


# --- the whole chain, with rows of C ---------------------------------------------------------------------

FAMILY = """
from typing import Annotated
import numpy as np
import tunekit as tk
from tunekit.measure.fixtures import Sample

def samples():
    x = np.arange(4099, dtype=np.float32)
    return [Sample("short", (np.empty(3, np.float32), x[:3].copy(), 3)), Sample("long", (np.empty_like(x), x, x.size), work=x.size)]

@tk.tune(scope=tk.Scope("chain"), template="chain.c.j2", reference="chain.c.j2", defaults={"how": "right"}, targets=lambda row: ((),),
         rows=[tk.perm(how=h) for h in ("right", "wrong", "long", "crash")], fallback="how_right", fixtures="chain:samples")
def triple(y: Annotated[tk.Out[tk.f32], "n"], x: Annotated[tk.In[tk.f32], "n"], n: tk.i32) -> None:
    y[:] = 3 * x
"""
CODE = """
${ preamble }
#include <stdint.h>
${ proto("triple") }
{
//% if how == "crash"
    *(volatile int *)8 = 1;
//% endif
    for (int32_t i = 0; i < n ${ "+ 1" if how == "long" else "" }; i++)
        y[i] = ${ 4 if how == "wrong" else 3 } * x[i];
}
"""


@pytest.mark.build
def test_an_author_who_gives_samples_gets_the_whole_chain(tmp_path: Path) -> None:
    import json
    import os

    (tmp_path / "chain.py").write_text(FAMILY)
    (tmp_path / "chain.c.j2").write_text(CODE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "tunekit.retune", "--module", "chain", "--scope", "chain", "--json"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (scope,) = json.loads(done.stdout)["scopes"]
    rows = {name: (row["verdict"], row["reason"]) for name, row in scope["record"]["kernels"]["triple"]["rows"].items()}
    # The reference is the same code as this row: which of the two leads is noise.
    (winner,) = (name for name, (verdict, _) in rows.items() if verdict == "winner")
    assert winner in ("reference", "how_right")
    assert rows["how_wrong"] == ("rejected", "sample short: y[1] is np.float32(4.0), the reference says np.float32(3.0) (2 of 3 differ) (each array ends at a guard page)")
    assert rows["how_long"] == ("rejected", "sample short: killed by SIGSEGV")
    assert rows["how_crash"] == ("rejected", "sample short: killed by SIGSEGV")
    assert json.loads(Path(scope["manifest"]).read_text()) == {"triple": winner}


@pytest.mark.build
def test_a_reference_that_disagrees_is_a_failure_and_names_the_sample(tmp_path: Path) -> None:
    import os

    (tmp_path / "chain.py").write_text(FAMILY.replace("y[:] = 3 * x", "y[:] = 5 * x"))
    (tmp_path / "chain.c.j2").write_text(CODE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "tunekit.retune", "--module", "chain", "--scope", "chain"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout
    assert "sample short: y[1] is np.float32(3.0), the reference says np.float32(5.0)" in done.stdout
    assert not list(tmp_path.rglob("chain.tune.json"))
