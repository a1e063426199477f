# SPDX-License-Identifier: Apache-2.0
"""``auto`` in every form in which a Python program is started: it tunes once, starts again once, and then is tuned."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zipapp
from collections.abc import Callable
from pathlib import Path

import pytest
from rails import APP, RAIL, Machine, said, values

from tunekit import _policy

PACKAGE = "import sys\nfrom app import main\nsys.exit(main())\n"


def script(folder: Path) -> list[str | Path]:
    return [sys.executable, APP]


def module(folder: Path) -> list[str | Path]:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "__main__.py").write_text(PACKAGE)
    return [sys.executable, "-m", "package"]


def code(folder: Path) -> list[str | Path]:
    return [sys.executable, "-c", PACKAGE]


def console_script(folder: Path) -> list[str | Path]:
    """What pip writes for ``[project.scripts]``."""
    path = folder / "app-command"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom app import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    path.chmod(0o755)
    return [path]


def archive(folder: Path) -> list[str | Path]:
    source = folder / "source"
    source.mkdir()
    (source / "__main__.py").write_text(PACKAGE)
    (source / "app.py").write_text(APP.read_text())
    zipapp.create_archive(source, folder / "app.pyz")
    return [sys.executable, "app.pyz"]


@pytest.mark.parametrize("form", [script, module, code, console_script, archive])
def test_every_form_tunes_once_starts_again_once_and_converges(
    machine: Machine, form: Callable[[Path], list[str | Path]]
) -> None:
    command = form(machine.folder)
    process = machine.begin(*command, "in", "--", "put", MARK="kept", STATUS="4")
    out, err = process.communicate(timeout=120)
    first = json.loads(out)
    assert first["values"] == [7]
    assert process.returncode == 4  # of the fresh process, passed through
    assert first["argv"] == ["in", "--", "put"]
    assert first["folder"] == str(machine.folder)
    assert first["environment"] == {"TUNEKIT_RAIL": "again", "MARK": "kept"}
    assert first["pid"] == process.pid  # the process was replaced; whoever waits for it waits for the right one
    assert "scope alpha: it is untuned on this box: tuning it, once" in err
    assert "tuning alpha" in err  # the tuner's own words, and not on standard output
    assert [line.split()[:3] for line in machine.log] == [["alpha", "tune", "tuner"]]
    second = machine.run(*command, "in", STATUS="4")
    assert (values(second), second.returncode, second.stderr, len(machine.log)) == ([7], 4, "", 1)
    assert said(second)["environment"] == {}


def test_interpreter_flags_are_kept_and_given_to_the_tuner(machine: Machine) -> None:
    done = machine.run(sys.executable, "-OO", "-X", "dev", "-Wignore", APP)
    assert said(done)["flags"] == [2, True]
    assert machine.log[0].split()[4] == "2"


def test_a_relative_script_in_a_folder_that_the_program_left(machine: Machine) -> None:
    (machine.folder / "mine.py").write_text("import os\nimport alpha, tunekit as tk\nos.chdir('/')\n" + APP.read_text().partition("import tunekit as tk")[2].join(["import ctypes, json, sys\n", ""]))
    done = machine.run(sys.executable, "mine.py")
    assert (values(done), len(machine.log)) == ([7], 1), done.stderr


def test_a_script_that_left_its_folder_before_tunekit_was_imported(machine: Machine) -> None:
    (machine.folder / "mine.py").write_text("import os\nos.chdir('/')\n" + APP.read_text().replace("from __future__ import annotations\n", ""))
    done = machine.run(sys.executable, "mine.py")
    assert (values(done), len(machine.log)) == ([7], 1), done.stderr


def test_a_module_that_cannot_be_found_again_goes_on_and_says_so(machine: Machine) -> None:
    (machine.folder / "mine.py").write_text("import os\nos.chdir('/')\n" + APP.read_text().replace("from __future__ import annotations\n", ""))
    done = machine.run(sys.executable, "-m", "mine")
    assert (values(done), len(machine.log)) == ([7], 1), done.stderr  # nothing had been used: this process has them too
    assert "the process is not started again: from /, where it was when tunekit was imported" in done.stderr
    assert values(machine.run(sys.executable, "-m", "mine")) == [7]


def test_the_plain_call_and_the_function_it_guards_twice(machine: Machine) -> None:
    text = (
        "import alpha, tunekit as tk\n"
        "tk.policy(missing='auto').apply()\n"
        "@tk.policy(missing='error')\n"
        "def main(): return alpha.toy(2, 3)\n"
        "print(main(), main())\n"
    )
    done = machine.run(sys.executable, "-c", text)
    assert (done.stdout, len(machine.log)) == ("7 7\n", 1), done.stderr


def test_both_scopes_are_tuned_and_a_foreign_entry_is_never_read(machine: Machine) -> None:
    """The second scope's file holds a poisoned entry for the same kernel name under the first one's name."""
    machine.write("beta", {"toy": "k2", "alpha.toy": "k1"})
    done = machine.app(WITH_BETA="1", FAKE_ROW="reference")
    assert values(done) == [5, 7], done.stderr
    assert [line.split()[0] for line in machine.log] == ["alpha"]
    assert json.loads(machine.manifest("alpha").read_text()) == {"toy": "reference"}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_multiprocessing_run_what_the_application_was_tuned_to(machine: Machine, method: str) -> None:
    (machine.folder / "pool.py").write_text(
        "import multiprocessing, alpha, tunekit as tk\n"
        "def work(n): return alpha.toy(2, n)\n"
        "@tk.policy(missing='auto')\n"
        "def main():\n"
        f"    with multiprocessing.get_context({method!r}).Pool(2) as pool: print(pool.map(work, [3, 4]))\n"
        "if __name__ == '__main__': main()\n"
    )
    done = machine.run(sys.executable, "pool.py")
    assert (done.stdout, len(machine.log)) == ("[7, 8]\n", 1), done.stderr
    # A guard inside a worker of an application that has none, on an untuned box: a banner, and no new process.
    machine.manifest("alpha").unlink()
    (machine.folder / "pool.py").write_text(
        "import multiprocessing, alpha, tunekit as tk\n"
        "@tk.policy(missing='auto')\n"
        "def work(n): return alpha.toy(2, n)\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool: print(pool.map(work, [3]))\n"
    )
    done = machine.run(sys.executable, "pool.py")
    assert (done.stdout, len(machine.log)) == ("[6]\n", 1), done.stderr
    assert "auto acts as warn here: this is a multiprocessing worker" in done.stderr


def test_tune_is_only_heard_after_the_separator_and_is_stripped(machine: Machine) -> None:
    machine.write("alpha", {"toy": "k1"})
    deaf = machine.app("--tune", "x")
    assert (values(deaf), said(deaf)["argv"], machine.log) == ([6], ["--tune", "x"], [])
    for words, left in (
        (["x", "--", "--tune"], ["x"]),
        (["x", "--", "--tune", "y"], ["x", "--", "y"]),
        (["--", "y", "--tune", "--tune"], ["--", "y"]),
    ):
        before = len(machine.log)
        done = machine.app(*words)
        assert (values(done), said(done)["argv"], len(machine.log)) == ([7], left, before + 1), done.stderr
        assert "tuning it again" in done.stderr


@pytest.mark.parametrize("declared", ["fallback", "warn", "error"])
def test_tune_works_whatever_is_declared(machine: Machine, declared: str) -> None:
    done = machine.app("--", "--tune", MISSING=declared)
    assert (values(done), said(done)["argv"], len(machine.log)) == ([7], [], 1), done.stderr


def test_tune_without_a_tuned_library_is_a_note(machine: Machine) -> None:
    text = "import sys, tunekit as tk\ntk.policy(missing='auto').apply()\nprint(sys.argv)"
    done = machine.run(sys.executable, "-c", text, "--", "--tune")
    assert (done.stdout, done.returncode) == ("['-c']\n", 0)
    assert "no tuned library is imported yet" in done.stderr


def test_the_status_of_a_program_that_dies_by_a_signal_passes_through(machine: Machine) -> None:
    text = "import os, signal, alpha, tunekit as tk\ntk.policy(missing='auto').apply()\nos.kill(os.getpid(), signal.SIGTERM)"
    assert machine.run(sys.executable, "-c", text).returncode == -signal.SIGTERM
    assert len(machine.log) == 1


def test_what_was_printed_before_the_guard_is_not_lost(machine: Machine) -> None:
    text = "import alpha, tunekit as tk\nprint('before')\ntk.policy(missing='auto').apply()\nprint(alpha.toy(2, 3))"
    assert machine.run(sys.executable, "-c", text).stdout == "before\nbefore\n7\n"


def test_two_applications_at_once_tune_once(machine: Machine) -> None:
    started = time.monotonic()
    both = [machine.begin(sys.executable, APP, FAKE="sleeps") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert time.monotonic() - started < 110
    assert [json.loads(out)["values"] for out, _ in outputs] == [[7], [7]]
    assert len(machine.log) == 1, outputs
    waited = [err for _, err in outputs if "another application is tuning scope alpha" in err]
    # One was quicker by a whole start of Python, or the other waited and says so.
    if waited:
        assert "scope alpha was tuned by the other application" in waited[0]


def test_the_second_runs_on_the_fallback_where_it_may_not_wait(machine: Machine) -> None:
    first = machine.begin(sys.executable, APP, FAKE="hangs", LIMIT="20")
    try:
        while not machine.log:
            time.sleep(0.05)
        second = machine.app(LIMIT="0.3")
        assert values(second) == [6]
        assert "another application is tuning scope alpha" in second.stderr
        assert "the other application is not done: running on the fallback" in second.stderr
        assert len([line for line in machine.log if line.startswith("alpha")]) == 1
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)


@pytest.mark.parametrize(
    ("words", "flags", "kind", "head", "arguments"),
    [
        ("py a.py x -c", "", "script", "a.py", "x -c"),
        ("py -m a x", "", "module", "-m a", "x"),
        ("py -ma x", "", "module", "-ma", "x"),
        ("py -Im a x", "-I", "module", "-Im a", "x"),
        ("py -c a x", "", "code", "-c a", "x"),
        ("py -Bca x", "-B", "code", "-Bca", "x"),
        ("py -W error -Xdev -OO a x", "-W error -Xdev -OO", "script", "-W error -Xdev -OO a", "x"),
        ("py -BW error a", "-BW error", "script", "-BW error a", ""),
        ("py --check-hash-based-pycs always a", "--check-hash-based-pycs always", "script", "--check-hash-based-pycs always a", ""),
        ("py -u - x", "-u", "stdin", "-u -", "x"),
        ("py -q", "-q", "none", "-q", ""),
        ("py", "", "none", "", ""),
    ],
)
def test_command_lines_are_taken_apart_as_python_does(words: str, flags: str, kind: str, head: str, arguments: str) -> None:
    line = _policy.take_apart(words.split())
    assert line == _policy.CommandLine(tuple(flags.split()), kind, tuple(head.split()), tuple(arguments.split()))


def test_the_tuner_sees_what_the_application_sees(machine: Machine) -> None:
    """Its module lies beside the script, which is in a folder that is nobody's working directory."""
    folder = machine.folder / "elsewhere"
    folder.mkdir()
    for name in ("app.py", "alpha.py", "faketuner.py"):
        (folder / name).write_text((RAIL / name).read_text().replace('"toy/toy.c.j2"', '"toy.c.j2"'))
    (folder / "toy.c.j2").write_text((RAIL.parent / "toy" / "toy.c.j2").read_text())
    done = machine.run(sys.executable, folder / "app.py", cwd=Path("/"), PYTHONPATH="", TUNEKIT_CACHE=str(machine.folder / "cache"))
    # Another template, so nothing is built for it: the rail builds what the tuner named.
    assert values(done) == [7], done.stderr
    assert len(machine.log) == 1
    assert os.path.exists(machine.manifest("alpha"))  # noqa: PTH110
