# SPDX-License-Identifier: Apache-2.0
"""The six values of a policy, ``TUNEKIT_POLICY`` over the declaration, and where a policy is off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rails import APP, Machine, said, values

import tunekit as tk
from tunekit.environment import POLICIES


def test_fallback_is_silent_and_spawns_nothing(machine: Machine) -> None:
    done = machine.app(MISSING="fallback")
    assert (values(done), done.stderr, machine.log) == ([6], "", [])


def test_warn_gives_a_banner_with_the_exact_command_once(machine: Machine) -> None:
    done = machine.app(MISSING="warn")
    assert (values(done), machine.log) == ([6], [])
    assert done.stderr.count("scope alpha is untuned on this box") == 1
    (command,) = re.findall(r"to tune it: (.*)", done.stderr)
    # The command, typed into a shell elsewhere, tunes this box.
    own = {k: v for k, v in machine.environment().items() if k != "PYTHONPATH"}
    subprocess.run(command, shell=True, env={**own, "TUNEKIT_RAIL": "tuner"}, cwd="/", check=True, capture_output=True, timeout=100)
    tuned = machine.app(MISSING="warn")
    assert (values(tuned), tuned.stderr) == ([7], "")


def test_error_stops_with_the_same_words(machine: Machine) -> None:
    done = machine.app(MISSING="error")
    assert (done.returncode, done.stdout, machine.log) == (1, "", [])
    assert "PolicyError: scope alpha is untuned on this box: no row for it in" in done.stderr
    assert "-m faketuner" in done.stderr
    machine.write("alpha", {"toy": "k2"})
    assert values(machine.app(MISSING="error")) == [7]


def test_restart_tunes_and_ends_with_3(machine: Machine) -> None:
    done = machine.app(MISSING="restart", WITH_BETA="1")
    assert (done.returncode, done.stdout) == (3, "")
    assert [line.split()[0] for line in machine.log] == ["alpha", "beta"]
    assert "please start it again" in done.stderr
    assert values(machine.app(MISSING="restart", WITH_BETA="1")) == [7, 7]
    assert len(machine.log) == 2


def test_reference_runs_reference_bodies_whatever_is_tuned(machine: Machine) -> None:
    machine.write("alpha", {"toy": "k2"})
    for variables in ({"MISSING": "reference"}, {"MISSING": "auto", "TUNEKIT_POLICY": "reference"}):
        assert values(machine.app(**variables)) == [5]
    late = "import alpha, tunekit as tk\nalpha.toy(2, 3)\ntk.policy(missing='reference').apply()"
    done = machine.run(sys.executable, "-c", late)
    assert "ChoiceError: the policy reference comes too late: alpha.toy has been used already" in done.stderr


def test_the_variable_beats_the_declaration(machine: Machine) -> None:
    kill = machine.app(MISSING="auto", TUNEKIT_POLICY="fallback")
    assert (values(kill), kill.stderr, machine.log) == ([6], "", [])
    kill = machine.app("--", "--tune", MISSING="auto", TUNEKIT_POLICY="fallback")
    assert (values(kill), said(kill)["argv"], machine.log) == ([6], [], [])
    assert "--tune does nothing here: TUNEKIT_POLICY is fallback" in kill.stderr
    assert machine.app(MISSING="fallback", TUNEKIT_POLICY="error").returncode == 1
    assert machine.app(MISSING="error", TUNEKIT_POLICY="").returncode == 1  # empty is "not set"
    assert values(machine.app(MISSING="fallback", TUNEKIT_POLICY="auto")) == [7]


@pytest.mark.parametrize("value", ["Auto", "auto ", "sometimes"])
def test_an_unknown_value_names_the_legal_ones(machine: Machine, value: str) -> None:
    done = machine.app(TUNEKIT_POLICY=value)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"TUNEKIT_POLICY={value!r} is not legal; it takes one of: {', '.join(POLICIES)}" in done.stderr
    with pytest.raises(tk.DeclarationError, match=f"it takes one of: {', '.join(POLICIES)}"):
        tk.policy(missing=value)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "5", True])
def test_a_time_limit_is_a_positive_number(limit: object) -> None:
    with pytest.raises(tk.DeclarationError, match="not a positive number of seconds"):
        tk.policy(missing="auto", time_limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["tune", "test"])
def test_a_policy_is_off_in_grid_modes(machine: Machine, mode: str) -> None:
    done = machine.app("--", "--tune", MISSING="error", TUNEKIT_MODE=mode)
    assert (values(done), said(done)["argv"], machine.log) == ([6], [], [])
    assert f"--tune does nothing here: TUNEKIT_MODE is {mode}" in done.stderr


@pytest.mark.parametrize("content", [None, "", "{", '{"toy": "k2"}'])
def test_a_policy_is_off_where_the_environment_names_the_manifest(machine: Machine, content: str | None) -> None:
    path = machine.folder / "own.json"
    if content is not None:
        path.write_text(content)
    done = machine.app(MISSING="error", TUNEKIT_MANIFEST=str(path))
    assert (values(done), machine.log) == ([7 if content and "k2" in content else 6], [])
    assert values(machine.app(MISSING="error", TUNEKIT_MANIFEST="")) == [6]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\0\0", '{"other": "k2"}', '{"toy": 3}', "{}"])
@pytest.mark.parametrize("policy", ["error", "auto"])
def test_a_manifest_that_names_no_row_is_as_good_as_missing(machine: Machine, content: str, policy: str) -> None:
    path = machine.write("alpha", content)
    done = machine.app(MISSING=policy)
    if policy == "error":
        assert done.returncode == 1
        assert "PolicyError: scope alpha is untuned" in done.stderr
        assert path.read_text() == content
        return
    assert (values(done), len(machine.log)) == ([7], 1)
    assert json.loads(path.read_text())["toy"] == "k2"
    assert ("other" in content) == ("other" in path.read_text())
    bad = path.with_name(path.name + ".bad")
    assert not bad.exists() or bad.read_text() == content


def test_a_folder_or_an_unreadable_file_in_the_manifests_place(machine: Machine) -> None:
    machine.manifest("alpha").mkdir(parents=True)
    done = machine.app()
    assert (values(done), machine.log) == ([6], [])
    assert "is a folder" in done.stderr
    done = machine.app(MISSING="error")
    assert "is not usable: it cannot be read (it is not a regular file)" in done.stderr


def test_an_entry_that_cannot_run_here_is_no_missing_manifest(machine: Machine) -> None:
    machine.write("alpha", {"toy": "k9"})
    done = machine.app()
    assert (values(done), machine.log) == ([6], [])
    assert "declined: k 9 is declined on purpose" in done.stderr


def test_a_library_that_is_imported_after_the_guard(machine: Machine) -> None:
    def late(value: str) -> subprocess.CompletedProcess[str]:
        return machine.run(sys.executable, "-c", f"import tunekit as tk\ntk.policy(missing={value!r}).apply()\nimport alpha\nprint(alpha.toy(2, 3), alpha.toy(2, 3))")

    for value in ("warn", "auto"):
        done = late(value)
        assert (done.stdout, machine.log) == ("6 6\n", [])
        assert done.stderr.count("scope alpha is untuned on this box") == 1
        assert ("auto acts as warn for it: it was imported after the policy was applied" in done.stderr) == (value == "auto")
    done = late("error")
    assert "PolicyError: scope alpha is untuned" in done.stderr
    assert late("fallback").stderr == ""


@pytest.mark.slow
def test_tunekits_own_retune_is_the_tuner_of_a_scope_without_one(machine: Machine, tmp_path: Path) -> None:
    """A library that nobody installed, declared beside the script: its module is named to the tuner."""
    banner = machine.app(MISSING="warn", ALPHA_TUNER="", ALPHA_FIXTURES="toy.fixtures:FIXTURES", PYTHONPATH=f"{APP.parent}:{APP.parent.parent}")
    assert "-m tunekit.retune --scope alpha --module alpha" in banner.stderr
    done = machine.app(ALPHA_TUNER="", ALPHA_FIXTURES="toy.fixtures:FIXTURES", PYTHONPATH=f"{APP.parent}:{APP.parent.parent}")
    assert said(done)["environment"] == {"TUNEKIT_RAIL": "again"}, done.stderr
    entry = json.loads(machine.manifest("alpha").read_text())["toy"]
    assert values(done) == [{"k1": 6, "k2": 7, "reference": 5}[entry]]
    assert done.stdout.count("\n") == 1  # retune's tables went to standard error
    assert "alpha.toy" in done.stderr


def test_an_error_that_was_caught_comes_again(machine: Machine) -> None:
    text = (
        "import alpha, tunekit as tk\n"
        "@tk.policy(missing='error')\n"
        "def main(): return alpha.toy(2, 3)\n"
        "for _ in range(2):\n"
        "    try: print(main())\n"
        "    except tk.PolicyError: print('refused')\n"
    )
    assert machine.run(sys.executable, "-c", text).stdout == "refused\nrefused\n"


def test_a_guard_that_is_never_applied_says_so() -> None:
    with pytest.warns(tk.TunekitWarning, match="made and never applied"):
        tk.policy(missing="auto")
    with pytest.raises(tk.DeclarationError, match="which is no function"):
        tk.policy(missing="auto")(7)  # type: ignore[type-var]
