# SPDX-License-Identifier: Apache-2.0
"""Scopes and layers: each library reads its own file; environment > application > user > machine, entry by entry."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rails import Machine

import tunekit as tk
from tunekit import _manifest, cpu, dispatch

BOTH = "import ctypes, alpha, beta\ndef v(f): return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)(f.address())(2, 3)\n"
SHOW = "print(v(alpha.toy), v(beta.toy))\n"


def both(machine: Machine, before: str = "", cwd: Path | None = None, **variables: str) -> str:
    done = machine.run(sys.executable, "-c", BOTH + before + SHOW, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_libraries_with_a_kernel_of_one_name_read_their_own_files(machine: Machine) -> None:
    assert both(machine) == "6 6"
    machine.write("alpha", {"toy": "k2", "beta.toy": "reference"})  # poison, under a name of the other scope
    assert both(machine) == "7 6"
    machine.write("beta", {"toy": "reference", "alpha.toy": "k1"})
    assert both(machine) == "7 5"


def test_every_application_on_the_box_shares_a_scopes_winners(machine: Machine) -> None:
    done = machine.run(sys.executable, "-c", "import alpha; alpha.toy.manifest_set('k2')")
    assert done.returncode == 0, done.stderr
    for folder in ("one", "two"):
        (machine.folder / folder).mkdir()
        assert both(machine, cwd=machine.folder / folder) == "7 6"


# --- the application's own manifest ----------------------------------------------------------------------


@pytest.fixture
def application(machine: Machine) -> Callable[..., str]:
    """Run a script with an application manifest; returns what it printed."""

    def run(entries: Any = None, *, late: bool = False, more: str = "", script: str | None = None, **variables: str) -> str:
        if entries is not None:
            (machine.folder / "my-app.tune.json").write_text(entries if isinstance(entries, str) else json.dumps(entries))
        declare = "import tunekit as tk\ntk.tune_manifest('my-app')\n"
        text = script or ((BOTH + declare if late else declare + BOTH) + more + SHOW)
        (machine.folder / "mine.py").write_text(text)
        done = machine.run(sys.executable, machine.folder / "mine.py", cwd=Path("/"), **variables)
        assert done.returncode == 0 and ("Traceback" not in done.stderr), done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("late", [False, True])
def test_its_entries_win_and_those_it_lacks_keep_the_scopes_winners(
    machine: Machine, application: Callable[..., str], late: bool
) -> None:
    """For kernels of required libraries, imported before the declaration or after it."""
    machine.write("alpha", {"toy": "reference"})
    machine.write("beta", {"toy": "reference"})
    assert application(None, late=late) == "5 5"
    assert application({"alpha.toy": "k2"}, late=late) == "7 5"
    assert application({"toy": "k2"}, late=late) == "7 7"
    assert application({"toy": "k2", "beta.toy": "k1"}, late=late) == "7 6"


def test_the_environment_beats_the_application(machine: Machine, application: Callable[..., str]) -> None:
    machine.write("alpha", {"toy": "reference"})
    (machine.folder / "env.json").write_text('{"toy": "k1"}')
    entries = {"toy": "k2"}
    assert application(entries, TUNEKIT_MANIFEST=str(machine.folder / "env.json")) == "6 6"
    assert application(entries, TUNEKIT_MANIFEST="") == "6 6"  # no manifest: the fallback
    assert application({"alpha.toy": "k2"}, TUNEKIT_MANIFEST=str(machine.folder / "env.json"), more="alpha.toy.manifest_set('k9')\n") == "6 6"
    assert json.loads((machine.folder / "my-app.tune.json").read_text()) == {"alpha.toy": "k2"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"alpha.toy": null}', '{"alpha.toy": "k77"}', '{"alpha.toy": "k9"}'])
def test_what_it_cannot_say_is_left_to_the_scope_with_a_warning(
    machine: Machine, application: Callable[..., str], content: str
) -> None:
    machine.write("alpha", {"toy": "k2"})
    assert application(content, PYTHONWARNINGS="ignore") == "7 6"
    done = machine.run(sys.executable, machine.folder / "mine.py", PYTHONWARNINGS="always")
    assert f"application manifest {machine.folder}/my-app.tune.json" in done.stderr
    assert machine.run(sys.executable, machine.folder / "mine.py", TUNEKIT_STRICT="manifest").returncode == 1


def test_manifest_set_writes_there(machine: Machine, application: Callable[..., str]) -> None:
    more = "print(alpha.toy.manifest_set('k2').name, alpha.toy.manifest_get(), beta.toy.manifest_get())\n"
    assert application(None, more=more) == "my-app.tune.json k2 None\n7 6"
    assert json.loads((machine.folder / "my-app.tune.json").read_text()) == {"alpha.toy": "k2"}
    assert not machine.manifest("alpha").exists()


def test_a_used_choice_is_never_changed(machine: Machine) -> None:
    late = "alpha.toy.address()\nimport tunekit as tk\ntk.tune_manifest('late')\n"
    done = machine.run(sys.executable, "-c", BOTH + late)
    assert "ChoiceError: the application manifest" in done.stderr
    assert "alpha.toy has been used already, and a choice holds for the process" in done.stderr
    # Looking is no use; neither is the same declaration once more.
    early = "alpha.toy.choice(); tk = __import__('tunekit'); tk.status()\ntk.tune_manifest('m'); tk.tune_manifest('m')\n"
    assert both(machine, early) == "6 6"
    done = machine.run(sys.executable, "-c", "import tunekit as tk\ntk.tune_manifest('one'); tk.tune_manifest('two')")
    assert "DeclarationError: the application manifest is declared twice" in done.stderr


def test_once_used_a_choice_holds_although_the_file_changes(machine: Machine) -> None:
    more = "print(v(alpha.toy), end=' ')\nalpha.toy.manifest_set('k2')\n"
    assert both(machine, more) == "6 6 6"
    assert both(machine) == "7 6"


def test_two_applications_in_one_folder_take_two_names(machine: Machine) -> None:
    for name, row in (("one", "k1"), ("two", "reference")):
        (machine.folder / f"{name}.py").write_text(
            f"import tunekit as tk\nprint(tk.tune_manifest({name!r}).parent)\n{BOTH}alpha.toy.manifest_set({row!r})\n"
        )
        assert machine.run(sys.executable, f"{name}.py").stdout.strip() == str(machine.folder)
    assert json.loads((machine.folder / "one.tune.json").read_text()) == {"alpha.toy": "k1"}
    assert json.loads((machine.folder / "two.tune.json").read_text()) == {"alpha.toy": "reference"}


def test_dir_is_absolute_or_relative_to_the_declaring_file(toy: Any, tmp_path: Path) -> None:
    assert tk.tune_manifest("a.b-c", dir=tmp_path) == tmp_path / "a.b-c.tune.json"
    dispatch._manifest.set_application(None)
    assert tk.tune_manifest("app", dir="rail") == Path(__file__).parent / "rail" / "app.tune.json"
    toy.toy.choice()


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".x", "a b", 7])
def test_a_name_that_makes_no_file(name: Any) -> None:
    with pytest.raises(tk.DeclarationError, match="the name must start with a letter or digit"):
        tk.tune_manifest(name)
    with pytest.raises(tk.DeclarationError, match="is no folder; make it"):
        tk.tune_manifest("app", dir="nowhere")


# --- the machine's manifest ------------------------------------------------------------------------------


def test_the_machines_file_sits_under_the_users_entry_by_entry(machine: Machine) -> None:
    site = machine.folder / "etc" / "tunekit" / cpu.this_box().key
    site.mkdir(parents=True)
    for scope, row in (("alpha", "k2"), ("beta", "reference")):
        (site / f"{scope}.tune.json").write_text(json.dumps({"toy": row}))
        (site / f"{scope}.tune.json").chmod(0o444)
    xdg = {"XDG_CONFIG_DIRS": str(machine.folder / "etc")}
    assert both(machine, **xdg) == "7 5"
    # The policy counts it; a torn file of the user's, or one without the entry, leaves it in force.
    assert machine.app(MISSING="error", **xdg).returncode == 0
    for content in ("{", {"other": "x"}):
        machine.write("alpha", content)
        assert both(machine, **xdg, PYTHONWARNINGS="ignore") == "7 5"
    machine.write("alpha", {"toy": "k1"})
    assert both(machine, **xdg) == "6 5"
    # What the user records goes to the user's file, never to the machine's.
    assert both(machine, "beta.toy.manifest_set('k2')\n", **xdg) == "6 7"
    assert json.loads((site / "beta.tune.json").read_text()) == {"toy": "reference"}


# --- the environment -------------------------------------------------------------------------------------


MALFORMED = (
    b"", b"  \n", b"{", b'{"toy": "k2"', b"\0\0\0", b"\xff\xfe", b"[]", b"null", b'"x"', b"7", b"[" * 100_000, b'{"toy": null}',
    b'{"toy": NaN}', b'{"toy": ["k2"]}', b'{"toy": "k77"}', b'{"toy": ""}', b'{"toy": "k9"}',
)  # fmt: skip


def test_every_malformed_manifest_through_every_layer_leaves_the_fallback(machine: Machine) -> None:
    site = machine.folder / "etc" / "tunekit" / cpu.this_box().key
    site.mkdir(parents=True)
    (machine.folder / "loop.py").write_text(
        "import sys, warnings; sys.path[:0] = ['/']\nimport json, os\nfrom pathlib import Path\n"
        "import alpha, tunekit as tk\nfrom tunekit import dispatch\n"
        "files = [Path(p) for p in json.loads(sys.argv[1])]\n"
        "contents = [bytes.fromhex(c) for c in json.loads(Path(sys.argv[2]).read_text())]\n"
        "tk.tune_manifest('loop', dir=files[0].parent)\n"
        "found = []\n"
        "for file in files:\n"
        "    file.parent.mkdir(parents=True, exist_ok=True)\n"
        "    for content in contents:\n"
        "        file.write_bytes(content)\n"
        "        choice = alpha.toy.choice()\n"
        "        found.append([choice.suffix, choice.source, str(file) in choice.reason, len(choice.warnings)])\n"
        "    file.unlink()\n"
        "print(json.dumps(found))"
    )
    files = [machine.folder / "loop.tune.json", machine.manifest("alpha"), site / "alpha.tune.json"]
    (machine.folder / "contents").write_text(json.dumps([c.hex() for c in MALFORMED]))
    words = [sys.executable, "loop.py", json.dumps([str(f) for f in files]), "contents"]
    done = machine.run(*words, XDG_CONFIG_DIRS=str(machine.folder / "etc"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == [["k1", "fallback", True, 1]] * (3 * len(MALFORMED))


def test_every_malformed_manifest_through_the_variable(toy: Any, environ: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    environ(MANIFEST=str(path))
    for content in MALFORMED:
        path.write_bytes(content)
        choice = toy.toy.choice()
        assert (choice.suffix, choice.source, len(choice.warnings)) == ("k1", "fallback", 1)
        assert str(path) in choice.reason


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TUNEKIT_HOME", "{file}", "is not a folder; name a folder or unset it"),
        ("TUNEKIT_CACHE", "{file}", "is not a folder; name a folder or unset it"),
        ("TUNEKIT_MODE", "TUNE", "it takes one of: normal, tune, test"),
        ("TUNEKIT_POLICY", "WARN", "it takes one of: fallback, warn"),
        ("TUNEKIT_RAIL", "yes", "it takes a comma list of: tuner, again"),
        ("TUNEKIT_STRICT", "Manifest", "it takes a comma list of: compiler"),
    ],
)
def test_variables_of_other_cases_and_kinds_are_clear_errors(machine: Machine, variable: str, value: str, words: str) -> None:
    (machine.folder / "file").write_text("")
    done = machine.app(MISSING="warn", **{variable: value.format(file=machine.folder / "file")})
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert variable in done.stderr


@pytest.mark.parametrize("variable", ["MODE", "POLICY", "HOME", "CACHE", "PIN", "STRICT", "RAIL", "LOG"])
def test_an_empty_variable_is_not_set(machine: Machine, variable: str) -> None:
    variables = {f"TUNEKIT_{variable}": ""}
    if variable in ("HOME", "CACHE"):
        variables |= {"XDG_STATE_HOME": str(machine.folder / "xdg"), "XDG_CACHE_HOME": str(machine.folder / "xdg")}
    done = machine.app(MISSING="fallback", **variables)
    if variable == "CACHE":  # the default cache, in which nothing is built
        assert "alpha.toy has no native code here" in done.stderr
    else:
        assert json.loads(done.stdout)["values"] == [6], done.stderr


@pytest.mark.parametrize("kind", ["folder", "missing", "unreadable", "pipe"])
def test_a_named_manifest_that_is_no_readable_file(machine: Machine, kind: str) -> None:
    path = machine.folder / "named"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_text('{"toy": "k2"}')
        path.chmod(0)
    done = machine.run(sys.executable, "-c", BOTH + "print(alpha.toy.choice().reason)\n" + SHOW, TUNEKIT_MANIFEST=str(path), PYTHONWARNINGS="ignore")
    readable = kind == "unreadable" and os.geteuid() == 0  # root reads everything
    assert done.stdout.splitlines()[-1] == ("7 7" if readable else "6 6"), done.stderr
    assert str(path) in done.stdout


def test_every_folder_of_the_systems_configuration_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("XDG_CONFIG_DIRS", f"{first}{os.pathsep}{second}")
    upper, lower = _manifest.site_paths("anything")
    assert upper.is_relative_to(first)
    assert [layer.path for layer in _manifest.layers("anything")][1:] == [upper]  # none is there: the one to write
    lower.parent.mkdir(parents=True)
    lower.write_text('{"toy": "k2"}')
    assert [layer.path for layer in _manifest.layers("anything")][1:] == [lower]
    upper.parent.mkdir(parents=True)
    upper.write_text("{}")
    assert [layer.path for layer in _manifest.layers("anything")][1:] == [upper, lower]
