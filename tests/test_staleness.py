# SPDX-License-Identifier: Apache-2.0
"""Staleness named field by field, entries used where they still run, and saves that lose nothing, whenever they end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python

from tunekit import _manifest, _status, _templates, cpu, dispatch
from tunekit.measure.record import KernelRecord, RunRecord


def record_of(toy: Any, **changes: Any) -> dict[str, Any]:
    """The record that a run here would leave, with changes to it."""
    kernel = toy.toy.kernel
    bound = dispatch.peek(kernel).bound
    assert bound is not None
    template = _templates.template_digest(_templates.read_template("toy/toy.c.j2", Path(kernel.file).parent))
    own = KernelRecord(
        "k2", compiler=str(bound.module.stamp["compiler"]), hashes={"grid": kernel.digest(), "template toy/toy.c.j2": template}
    )
    found = RunRecord("toyscope", cpu.this_box().to_json(), digests={kernel.key: kernel.digest()}, kernels={"toy": own}).to_json()
    for path, value in changes.items():
        place: Any = found
        *parents, last = path.split("__")
        for name in parents:
            place = place[name]
        place[last] = value
    return found


def stale(toy: Any, record: dict[str, Any]) -> tuple[str, ...]:
    path = _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k2"})
    _manifest.record_path(path).write_text(json.dumps(record))
    row = _status.status_of(toy.toy.kernel)
    assert (row.suffix, row.source) == ("k2", "manifest")  # stale and runnable: used
    return row.stale


def test_a_record_of_here_is_not_stale(toy: Any) -> None:
    assert stale(toy, record_of(toy)) == ()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("box__model", 99, "box.model: 99 there, {box[model]} here"),
        ("box__vendor", "Other", "box.vendor: 'Other' there, '{box[vendor]}' here"),
        ("box__features", ["mmx"], "box.features: ['mmx'] there, "),
        ("digests__toyscope.toy", "0" * 16, "grid of toy: 0000000000000000 there, "),
        ("kernels__toy__hashes__template toy/toy.c.j2", "1" * 16, "template toy/toy.c.j2: 1111111111111111 there, "),
        ("kernels__toy__compiler", "tcc 0.9", "compiler: 'tcc 0.9' there, "),
        ("schema", 2, "record schema: 2 there, 1 here"),
    ],
)
def test_each_field_that_differs_is_named_and_no_other(toy: Any, field: str, value: Any, words: str) -> None:
    (line,) = stale(toy, record_of(toy, **{field: value}))
    assert line.startswith(words.format(box=cpu.this_box().to_json()))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"box": 7, "kernels": [], "digests": 3}', '{"kernels": {"toy": {"hashes": 1}}}'])
def test_a_record_that_cannot_be_read_decides_and_breaks_nothing(toy: Any, text: str) -> None:
    path = toy.toy.manifest_set("k2")
    _manifest.record_path(path).write_text(text)
    row = _status.status_of(toy.toy.kernel)
    assert (row.suffix, row.stale) == ("k2", ())


def test_an_entry_that_no_longer_runs_is_kept_and_the_fallback_runs(toy: Any) -> None:
    path = _manifest.user_path("toyscope")
    path.parent.mkdir(parents=True)
    path.write_text('{"toy": "k77"}')
    assert toy.toy.choice().suffix == "k1"
    _manifest.save(path, {"another": "x"})
    assert json.loads(path.read_text()) == {"toy": "k77", "another": "x"}


@pytest.mark.parametrize(
    ("change", "ending"),
    [({"schema": 2}, "schema2"), ({"box__model": 99}, "old"), (None, "bad")],
)
def test_a_record_that_a_save_would_replace_is_kept_aside(toy: Any, change: dict[str, Any] | None, ending: str) -> None:
    old = "{torn" if change is None else json.dumps(record_of(toy, **change, seed=42))
    path = toy.toy.manifest_set("k1")
    record = _manifest.record_path(path)
    record.write_text(old)
    _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k2"}, record_of(toy))
    assert record.with_name(f"{record.name}.{ending}").read_text() == old
    assert json.loads(record.read_text())["schema"] == 1
    # A run of the same box and schema carries its predecessor on by itself, and leaves nothing aside.
    _manifest.manifest_set_many(toy.SCOPE, {toy.toy.kernel: "k1"}, record_of(toy))
    assert len(list(path.parent.glob("*.tune.run.json*"))) == 2


# --- a kill at every stage of a save ---------------------------------------------------------------------

KILL = """
import os, signal, sys
import toy.kernels as t
from tunekit import _manifest
from pathlib import Path
stage, seen = int(sys.argv[1]), 0
def dies(name, module):
    real = getattr(module, name)
    def call(*a, **k):
        global seen
        seen += 1
        if seen == stage: os.kill(os.getpid(), signal.SIGKILL)  # before this step, and so after the one before it
        return real(*a, **k)
    setattr(module, name, call)
import tempfile, json
t.toy.choice()
for name, module in (("mkstemp", tempfile), ("fdopen", os), ("fsync", os), ("replace", os), ("unlink", os)): dies(name, module)
_manifest.manifest_set_many(t.SCOPE, {t.toy.kernel: "k2"}, {"schema": 1, "box": {}, "seed": 2})
print("done")
"""


@pytest.mark.parametrize("before", ['{"toy": "k1", "kept": [1]}', "{torn"])
def test_a_kill_at_every_stage_leaves_the_old_file_or_the_new_one(
    toy: Any, before: str, environ: Callable[..., None]
) -> None:
    path = _manifest.user_path("toyscope")
    path.parent.mkdir(parents=True)
    seen = []
    for stage in range(1, 20):
        for extra in path.parent.glob("*"):
            extra.unlink()
        path.write_text(before)
        _manifest.record_path(path).write_text('{"schema": 1, "box": {"other": 1}, "seed": 1}')
        done = run_python(f"import sys; sys.argv = ['', '{stage}']\n{KILL}")
        state = path.read_text() if path.exists() else None
        kept = [p.read_text() for p in path.parent.iterdir() if p.is_file() and not p.name.endswith((".new", ".lock"))]
        seen.append(state)
        if before.startswith("{torn"):
            assert before in kept  # moved aside, or still there
            assert state in (before, None) or json.loads(state) == {"toy": "k2"}
        else:
            assert state is not None and json.loads(state) in ({"toy": "k1", "kept": [1]}, {"toy": "k2", "kept": [1]})
        assert any('"seed": 1' in text for text in kept)  # the old record, in its place or aside
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert stage > 6
    assert seen[0] == before
    assert json.loads(seen[-1] or "")["toy"] == "k2"
    # Nobody is locked out afterwards, and what the killed ones left half-written is swept away.
    (path.parent / f".{path.name}.left.new").write_text("half")
    toy.toy.manifest_set("k1")
    assert json.loads(path.read_text())["toy"] == "k1"
    assert list(path.parent.glob(".*.new")) == []
