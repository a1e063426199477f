# SPDX-License-Identifier: Apache-2.0
"""The box profile: what is read, refused and logged; the probe that mints it, and retune that runs the probe."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import run_python

from tunekit import _profile, core, probe, team
from tunekit.cpu import this_box
from tunekit.cpu.box import Box
from tunekit.errors import TunekitError

pytestmark = pytest.mark.build
OTHER = Box("x86_64", "GenuineIntel", 6, 143, 8, ("avx2",))
native = pytest.mark.skipif(core.core() is None, reason="tunekit._core is not built")


def parsed(data: Any) -> _profile.Profile:
    return _profile.parse(json.dumps(data), Path("here.json"), this_box())


def test_numbers_that_are_wrong_are_left_out_by_name() -> None:
    knobs = {"gemv_lane_cap": 8, "gemv_lane_kap": 8, "batch_grid_2d": 3, "team_rank_gate": True, "q8_token_block": "128"}
    found = parsed({"version": 1, "knobs": knobs})
    assert found.knobs == {"gemv_lane_cap": 8}
    text = "\n".join(found.problems)
    assert "did you mean 'gemv_lane_cap'" in text
    assert "batch_grid_2d = 3 is not between 0 and 2" in text
    assert "team_rank_gate must be a whole number" in text and "q8_token_block must be a whole number" in text
    assert len(found.problems) == 4 and all("here.json" in p for p in found.problems)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ('{"version": 1, "knobs"', "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ("[]", "no object 'knobs'"),
        ('{"version": 1}', "no object 'knobs'"),
        ('{"version": 2, "knobs": {}}', "version 2"),
        ('{"version": true, "knobs": {}}', "version True"),
        ('{"version": 1.0, "knobs": {}}', "version 1.0"),
        ('{"version": 1, "box": 3, "knobs": {}}', "a box is a JSON object"),
    ],
)
def test_a_damaged_file_is_ignored_by_name(text: str, says: str) -> None:
    found = _profile.parse(text, Path("here.json"), this_box())
    assert not found.knobs and says in found.problems[0] and "here.json" in found.problems[0]


def test_a_profile_of_another_box_is_ignored_by_name() -> None:
    found = parsed({"version": 1, "box": OTHER.to_json(), "knobs": {"gemv_lane_cap": 8}})
    assert not found.knobs
    assert OTHER.key in found.problems[0] and this_box().key in found.problems[0]


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    _profile.save(path, this_box(), {"gemv_lane_cap": 3}, {"why": 1})
    assert _profile.load(path, this_box()).knobs == {"gemv_lane_cap": 3}
    assert _profile.load(path, OTHER).problems
    assert not _profile.load(tmp_path / "none.json", this_box()).found
    with pytest.raises(ValueError, match="gemv_lane_cap = 999"):
        _profile.save(path, this_box(), {"gemv_lane_cap": 999}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@native
def test_the_profile_beside_the_manifests_applies(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    environ(LOG="profile")
    path = team.profile_path()
    path.parent.mkdir(parents=True)
    _profile.save(path, this_box(), {"gemv_lane_cap": 3, "target_chunk_work": 77, "threads": 5}, {})
    with caplog.at_level(logging.INFO, "tunekit"):
        assert team.start() == ()
    knobs = core.core().knobs()
    assert (knobs["gemv_lane_cap"], knobs["target_chunk_work"]) == (3, 77)
    lines = capsys.readouterr().err.splitlines()
    wanted = ["gemv_lane_cap = 3 ", "target_chunk_work = 77 ", "threads = 5 (advice) "]
    assert [line.startswith(f"tunekit: box profile: {w}") for line, w in zip(lines, wanted, strict=True)] == [True] * 3
    assert all(str(path) in line for line in lines)
    assert [r.message for r in caplog.records] == [line.removeprefix("tunekit: ") for line in lines]


@native
def test_the_environment_names_another_profile(environ: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"version": 1, "knobs": {"dispatch_worker_limit": 0, "batch_lane_cap": 2}}')
    environ(BOX_PROFILE=str(path))
    assert team.start() == () and core.core().knobs()["batch_lane_cap"] == 2
    assert team.lanes() == 1
    environ(BOX_PROFILE=str(tmp_path / "gone.json"))
    assert "does not exist" in team.start()[0]
    assert core.core().knobs()["batch_lane_cap"] == 0


@native
def test_a_bad_profile_is_said_once_and_products_run(tmp_path: Path) -> None:
    path = tmp_path / "torn.json"
    path.write_text('{"version": 1, "kno')
    code = (
        "import numpy as np\nfrom tunekit import q8\n"
        "for _ in range(3): q8.matmul(np.ones((1, 32), np.float32), q8.pack(np.ones((4, 32), np.float32)))\n"
    )
    done = run_python(code, {"TUNEKIT_BOX_PROFILE": str(path)})
    assert done.returncode == 0 and done.stderr.count("torn.json is not JSON") == 1, done.stderr


# --- the probe -------------------------------------------------------------------------------------------


def test_the_knee_is_the_last_doubling_that_pays() -> None:
    assert probe.knee([(1, 20.0), (2, 38.0), (4, 70.0), (8, 72.0), (16, 71.0)]) == 4
    assert probe.knee([(1, 20.0), (2, 21.0)]) == 1
    assert probe.knee([(1, 20.0), (2, 21.9), (4, 30.0)]) == 4
    assert [probe.ladder(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_default_goes_only_for_more_than_margin_and_noise() -> None:
    assert probe.pick(128, {64: 0.98, 128: 1.0}, 0.0) == 128
    assert probe.pick(128, {64: 0.95, 128: 1.0}, 0.0) == 64
    assert probe.pick(128, {64: 0.95, 128: 1.0}, 0.06) == 128
    assert probe.pick(128, {64: 0.5, 128: 1.0}, 0.5) == 128  # too noisy to say anything
    assert probe.target_of(3.0, 60.0) == 65536
    assert probe.target_of(1000.0, 10.0) == 80000


@native
@pytest.mark.slow
def test_the_probe_mints_a_profile_that_applies(tmp_path: Path) -> None:
    path = tmp_path / "mint.json"
    path.write_text('{"version": 1, "knobs": {"q8_batch_chunks_per_job": 6, "gemv_lane_cap": 250}}')
    variables = {"TUNEKIT_BOX_PROFILE": str(path)}
    done = run_python("from tunekit.__main__ import main; raise SystemExit(main(['probe', '--json']))", variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    saved = _profile.load(path, this_box())
    assert saved.problems == () and result["path"] == str(path)
    assert result["knobs"].items() <= saved.knobs.items()
    assert saved.knobs["q8_batch_chunks_per_job"] == 6  # set by hand, and kept
    assert saved.knobs.get("gemv_lane_cap") != 250
    assert set(result["measured"]) >= {"live", "q8_token_block", "q8_l2_budget"}
    if result["measured"]["live"] > 1:
        assert set(result["measured"]) >= {"dispatch", "stream_gbs", "team_rank_gate", "batch_grid_2d"}
    before = path.read_text()
    command = "from tunekit.__main__ import main; raise SystemExit(main(['probe', '--dry-run']))"
    done = run_python(command, variables)
    assert done.returncode == 0 and "box profile: not written" in done.stdout
    assert path.read_text() == before


class Talk:
    def __init__(self) -> None:
        self.complaints: list[str] = []

    def step(self, step: Any) -> None:
        pass

    def clear(self) -> None:
        pass

    def complain(self, text: str) -> None:
        self.complaints.append(text)


def retuned(monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], *words: str, scope: str = "tunekit") -> Any:
    """What retune's probe gives, and the commands that it started."""
    from tunekit import retune
    from tunekit.tuner import Options

    parser = argparse.ArgumentParser()
    retune.add_arguments(parser)
    arguments = parser.parse_args(words)
    started: list[Any] = []

    def run(command: Any, **how: Any) -> Any:
        started.append((command[1:], how["env"]["TUNEKIT_MODE"]))
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(retune.subprocess, "run", run)
    results: Any = [SimpleNamespace(status=0, record=SimpleNamespace(scope=scope))]
    talk: Any = Talk()
    options = Options(tuple(arguments.kernel), arguments.time_limit, arguments.dry_run)
    return retune._probe(arguments, options, talk, None, results), started, talk.complaints


def test_retune_probes_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found, started, complaints = retuned(monkeypatch, (0, '{"path": "p.json", "knobs": {}}', ""))
    assert found == {"path": "p.json", "knobs": {}} and complaints == []
    assert started == [(["-m", "tunekit", "probe", "--json"], "normal")]


@pytest.mark.parametrize("words", [["--no-probe"], ["--dry-run"], ["--kernel", "q8q8"], ["--time-limit", "5"]])
def test_retune_does_not_probe_where_it_was_told_less(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    assert retuned(monkeypatch, (0, "{}", ""), *words)[:2] == (None, [])


def test_retune_of_another_family_does_not_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert retuned(monkeypatch, (0, "{}", ""), scope="mylib")[:2] == (None, [])


@pytest.mark.parametrize("answer", [(1, "", "no row"), (0, "garbage", "")])
def test_a_probe_that_fails_is_said_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str]
) -> None:
    found, _, complaints = retuned(monkeypatch, answer)
    assert found is None and len(complaints) == 1 and "no box profile was made" in complaints[0]


def test_many_wrong_names_are_a_short_story() -> None:
    found = parsed({"version": 1, "knobs": {f"gemv_lane_cap{i}": [[0] * 100] for i in range(20_000)}})
    assert len(found.problems) == 21 and "19980 more" in found.problems[-1] and max(map(len, found.problems)) < 200


def test_a_pipe_and_a_device_are_no_profile(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large.json"
    with open(large, "wb") as file:
        file.truncate(1 << 40)  # sparse
    for path, says in ((tmp_path / "pipe", "regular file"), (Path("/dev/zero"), "regular file"), (large, "larger than 1 MiB")):
        found = _profile.load(path, this_box())
        assert says in found.problems[0] and found.refused == "damaged"


def test_a_user_that_nobody_knows_is_a_name_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEKIT_BOX_PROFILE", "~nobody-of-that-name/x")
    assert "does not exist" in team.profile().problems[0]


def test_a_probe_keeps_what_it_did_not_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("TUNEKIT_BOX_PROFILE", str(path))
    two = probe.Minted({"wake_work": 5, "gemv_lane_cap": 1}, {"live": 2, "stream_gbs": {"1": 3.0}})
    _profile.save(path, this_box(), {"team_spin_us": 7}, {})
    probe.write(two)
    probe.write(probe.Minted({"q8_token_block": 64}, {"live": 1}))  # on one CPU
    data = json.loads(path.read_text())
    assert data["knobs"] == {"team_spin_us": 7, "wake_work": 5, "gemv_lane_cap": 1, "q8_token_block": 64}
    assert data["measured"] == {"live": 1, "stream_gbs": {"1": 3.0}}


def test_a_probe_puts_a_torn_profile_aside_and_refuses_another_boxs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("TUNEKIT_BOX_PROFILE", str(path))
    torn = '{"version": 1, "knobs": {"team_spin_us": 7},}'
    path.write_text(torn)
    minted = probe.Minted({"q8_token_block": 64})
    probe.write(minted)
    assert (tmp_path / "profile.json.bad").read_text() == torn and "profile.json.bad" in minted.lines[-1]
    assert json.loads(path.read_text())["knobs"] == {"q8_token_block": 64}
    other = json.dumps({"version": 1, "box": OTHER.to_json(), "knobs": {"gemv_lane_cap": 8}})
    path.write_text(other)
    with pytest.raises(TunekitError, match="another box"):
        probe.check_writable()
    with pytest.raises(TunekitError, match="name another file"):
        probe.write(minted)
    assert path.read_text() == other
