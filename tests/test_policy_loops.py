# SPDX-License-Identifier: Apache-2.0
"""Loop protection: tuners that write nothing, fail, are killed, are absent or never end; hosts; nested tuners; signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rails import APP, Machine, said, values


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return True


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds."""
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nothing", "its tuner ended with status 0 and wrote no winner to"),
        ("fails", "its tuner ended with status 7 and wrote no winner to"),
        ("killed", "its tuner was killed by SIGKILL and wrote no winner to"),
        ("tears", "(it is not JSON"),
    ],
)
@pytest.mark.parametrize("policy", ["auto", "restart"])
def test_a_tuner_that_brings_nothing_leaves_the_fallback_and_no_second_start(
    machine: Machine, how: str, words: str, policy: str
) -> None:
    done = machine.app(FAKE=how, MISSING=policy)
    assert (values(done), done.returncode, len(machine.log)) == ([6], 0, 1), done.stderr
    assert said(done)["environment"] == {}  # not started again
    assert words in done.stderr
    assert "running on the fallback" in done.stderr


def test_a_tuner_that_is_absent(machine: Machine) -> None:
    done = machine.app(ALPHA_TUNER="no_such_module")
    assert (values(done), said(done)["environment"]) == ([6], {})
    assert "No module named no_such_module" in done.stderr
    assert "ended with status 1 and wrote no winner" in done.stderr


def test_what_a_failing_tuner_wrote_counts(machine: Machine) -> None:
    done = machine.app(FAKE="writes and fails")
    assert (values(done), len(machine.log)) == ([7], 1)
    assert "although its tuner ended with status 5" in done.stderr


def test_a_tuner_that_never_ends_is_stopped_with_all_that_it_started(machine: Machine) -> None:
    started = time.monotonic()
    done = machine.app(FAKE="hangs", LIMIT="1.5")
    assert values(done) == [6]
    assert "was stopped after 1.5 s, the policy's time limit" in done.stderr
    assert time.monotonic() - started < 30
    (first, second) = machine.log
    assert gone(int(first.split()[3]))
    assert gone(int(second.split()[1]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_tuner_and_then_the_application(machine: Machine, number: signal.Signals) -> None:
    process = machine.begin(sys.executable, APP, FAKE="hangs")
    while len(machine.log) < 2:
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(60)
    if number == signal.SIGKILL:  # nobody was left to end what a tuner of this kind had started
        os.kill(int(machine.log[1].split()[1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", -number)
    assert gone(int(machine.log[0].split()[3]))
    assert gone(int(machine.log[1].split()[1]))
    assert not machine.manifest("alpha").exists()
    # The next start is not held up by the dead one's lock.
    assert values(machine.app()) == [7]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_spare_the_tuner(machine: Machine, number: signal.Signals) -> None:
    process = machine.begin(sys.executable, APP, FAKE="hangs")
    while len(machine.log) < 2:
        time.sleep(0.05)
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.3)
    process.communicate(timeout=60)
    assert process.returncode == -number
    assert gone(int(machine.log[0].split()[3]))
    assert gone(int(machine.log[1].split()[1]))


def test_a_scope_with_neither_tuner_nor_fixtures_is_an_error(machine: Machine) -> None:
    for words, policy in (((), "auto"), ((), "restart"), (("--", "--tune"), "fallback")):
        done = machine.app(*words, MISSING=policy, ALPHA_TUNER="")
        assert (done.returncode, done.stdout, machine.log) == (1, "", [])
        assert "PolicyError: scope alpha cannot be tuned: it declares neither a tuner" in done.stderr
    done = machine.app(MISSING="warn", ALPHA_TUNER="")
    assert values(done) == [6]
    assert "declares neither a tuner" in done.stderr


def test_a_nested_application_in_a_tuner_never_tunes(machine: Machine) -> None:
    """The tuner starts the very application that waits for it, with the rail's variables taken away."""
    done = machine.app(FAKE="nests", NESTED=str(APP))
    assert (values(done), [line.split()[0] for line in machine.log]) == ([7], ["alpha", "nested"])
    assert machine.log[1] == "nested ended 0"


def test_a_process_tree_starts_again_at_most_once(machine: Machine) -> None:
    """The fresh process meets an untuned scope once more: its manifest went away meanwhile."""
    text = (
        "import os, alpha, tunekit as tk\n"
        "if os.environ.get('TUNEKIT_RAIL'): os.unlink(os.environ['VICTIM'])\n"
        "tk.policy(missing='auto').apply()\n"
        "print(alpha.toy(2, 3))"
    )
    done = machine.run(sys.executable, "-c", text, VICTIM=str(machine.manifest("alpha")))
    assert (done.stdout, len(machine.log)) == ("6\n", 1)
    assert "auto acts as warn here: this process tree was started again once already" in done.stderr


# fmt: off
HOSTS = {
    "a forked worker":   "import os, sys\npid = os.fork()\nif pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n{app}",
    "a worker forked after the import": "import alpha, tunekit, os, sys\npid = os.fork()\nif pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n{app}",
    "a frozen executable": "import sys\nsys.frozen = True\n{app}",
    "a Jupyter kernel":  "import sys, types\nsys.modules['ipykernel'] = types.ModuleType('ipykernel')\n{app}",
    "inside gunicorn":   "import sys, types\nsys.modules['gunicorn.arbiter'] = types.ModuleType('arbiter')\n{app}",
    "embedded in":       "import sys\nsys.executable = '/bin/sh'\n{app}",
    "embedded in another program": "import sys\nsys.executable = ''\n{app}",
    "inside IPython":    "import builtins\nbuiltins.get_ipython = lambda: None\n{app}",
    "a debugger": "import sys, types\nsys.modules['pydevd'] = types.ModuleType('pydevd')\n{app}",
    "not the main thread": "import threading\ndef run():\n  exec({app!r}, {{}})\nt = threading.Thread(target=run); t.start(); t.join()",
}
# fmt: on
APPLICATION = "import alpha, tunekit as tk\ntk.policy(missing='auto').apply()\nprint(alpha.toy(2, 3), flush=True)\n"


@pytest.mark.parametrize("host", HOSTS)
def test_where_a_fresh_process_would_kill_the_host_auto_warns(machine: Machine, host: str) -> None:
    done = machine.run(sys.executable, "-c", HOSTS[host].format(app=APPLICATION))
    assert (done.stdout, done.returncode, machine.log) == ("6\n", 0, []), done.stderr
    assert "scope alpha is untuned on this box" in done.stderr
    words = host.replace("a worker forked after the import", "a forked worker")
    assert re.search(f"auto acts as warn here: .*{words}", done.stderr)


def test_a_program_from_standard_input(machine: Machine) -> None:
    for words in ([], ["-"]):
        done = machine.run(sys.executable, *words, stdin=APPLICATION)
        assert (done.stdout, machine.log) == ("6\n", []), done.stderr
        assert "the program came from standard input" in done.stderr


def test_an_interactive_interpreter(machine: Machine) -> None:
    done = machine.run(sys.executable, "-i", "-q", stdin="\n".join(["import alpha, tunekit as tk", "tk.policy(missing='auto').apply()", "print(alpha.toy(2, 3))"]))
    assert (done.stdout.split(), machine.log) == (["6"], []), done.stderr
    assert "this is an interactive interpreter" in done.stderr


def test_inside_pytest(machine: Machine) -> None:
    (machine.folder / "test_own.py").write_text(APPLICATION.replace("tk.", "def test_it():\n  tk.", 1).replace("\nprint(alpha.toy(2, 3), flush=True)", "\n  assert alpha.toy(2, 3) == 6"))
    done = machine.run(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_own.py")
    assert (done.returncode, machine.log) == (0, []), done.stdout + done.stderr
    assert "this runs inside pytest" in done.stderr


def test_tune_and_its_separator_leave_the_arguments_where_nothing_starts_again(machine: Machine) -> None:
    done = machine.run(sys.executable, "-c", "import sys\nsys.frozen = True\n" + APPLICATION + "print(sys.argv)", "x", "--", "--tune")
    assert done.stdout == "6\n['-c', 'x']\n"
    assert "--tune does nothing here: this is a frozen executable" in done.stderr


def test_bent_features_never_reach_the_boxs_manifest(machine: Machine) -> None:
    done = machine.app(TUNEKIT_DISABLE_FEATURES="avx2")
    assert (values(done), machine.log) == ([6], [])
    assert "TUNEKIT_DISABLE_FEATURES bends what this box can run" in done.stderr


def test_a_state_folder_that_cannot_be_written_is_said_before_the_tuner_runs(machine: Machine) -> None:
    (machine.folder / "file").write_text("")
    done = machine.app(TUNEKIT_HOME=str(machine.folder / "file" / "below"))
    assert (values(done), machine.log) == ([6], [])
    assert "scope alpha is not tuned: the manifest cannot be written" in done.stderr
    assert "TUNEKIT_HOME" in done.stderr


def test_a_full_disk_while_the_tuner_writes_leaves_the_fallback(machine: Machine) -> None:
    """A size limit of three bytes on every file: the tuner's save fails, and says so."""
    limit = "import resource, signal, runpy, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))\n"
    (machine.folder / "smalltuner.py").write_text(limit + "import alpha\nalpha.toy.manifest_set('k2')\n")
    done = machine.app(ALPHA_TUNER="smalltuner", PYTHONPATH=f"{machine.folder}:{APP.parent}")
    assert values(done) == [6]
    assert "cannot write" in done.stderr
    assert "ended with status 1 and wrote no winner" in done.stderr
    assert [p.name for p in machine.manifest("alpha").parent.iterdir() if p.name.endswith((".new", ".json"))] == []


def test_closed_standard_streams(machine: Machine) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} {APP} >out.json 2>&- <&-"], env=machine.environment(), cwd=machine.folder, check=False, timeout=100
    )
    assert done.returncode == 0
    assert json.loads((machine.folder / "out.json").read_text())["values"] == [7]


def test_without_standard_error_no_file_of_the_application_is_written(machine: Machine) -> None:
    """Descriptor 2 is then the next file that the application opens."""
    (machine.folder / "data.py").write_text(
        "f = open('data.bin', 'ab'); f.write(b'%d ' % f.fileno()); f.flush()\n"
        "import alpha, tunekit as tk\n"
        "tk.policy(missing='auto').apply()\n"
        "print(alpha.toy(2, 3)); f.write(b'end')\n"
    )
    line = f"exec {sys.executable} data.py >out 2>&-"
    done = subprocess.run(["/bin/sh", "-c", line], env=machine.environment(), cwd=machine.folder, check=False, timeout=100)
    assert (done.returncode, (machine.folder / "out").read_text(), len(machine.log)) == (0, "7\n", 1)
    assert (machine.folder / "data.bin").read_bytes() == b"2 2 end"


def test_a_debugger_is_a_host(machine: Machine) -> None:
    (machine.folder / "mine.py").write_text(APPLICATION)
    done = machine.run(sys.executable, "-m", "pdb", "mine.py", stdin="c\nq\n")
    assert "auto acts as warn here: this runs in a debugger" in done.stderr, done.stdout
    assert machine.log == []


@pytest.mark.parametrize("missing", ["fallback", "auto"])
def test_a_sub_interpreter_is_a_host(machine: Machine, missing: str) -> None:
    module = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    inner = f"import tunekit as tk\ntk.policy(missing={missing!r}).apply()\nprint('on', flush=True)"
    # CPython 3.13 isolates by default, and modules of one phase (cffi's) are refused there.
    make = "s.create('legacy')" if sys.version_info >= (3, 13) else "s.create()"
    run = "s.exec(i, {inner!r})" if sys.version_info >= (3, 13) else "s.run_string(i, {inner!r})"
    done = machine.run(sys.executable, "-W", "ignore", "-c", f"import {module} as s\ni = {make}\nprint({run.format(inner=inner)})")
    assert done.stdout.startswith("on\n"), done.stdout + done.stderr
    assert machine.log == []


def test_the_working_directory_is_on_the_tuners_path_only_where_it_is_on_ours(machine: Machine) -> None:
    elsewhere = machine.folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("random.py", "faketuner.py", "tunekit.py"):
        (elsewhere / name).write_text("raise SystemExit(3)\n")
    done = machine.run(sys.executable, APP, cwd=elsewhere)
    assert (values(done), len(machine.log)) == ([7], 1), done.stderr


def test_a_library_that_isolated_python_keeps_from_a_child_is_named(machine: Machine) -> None:
    text = f"import sys\nsys.path[:0] = [{str(APP.parent)!r}]\n{APPLICATION}"
    done = machine.run(sys.executable, "-I", "-c", text)
    assert (done.stdout, machine.log) == ("6\n", []), done.stderr
    assert "module faketuner lies in a folder that python -E and -I keep from a child; to tune it: " in done.stderr
    command = done.stderr.partition("to tune it: ")[2].splitlines()[0]
    assert machine.run("/bin/sh", "-c", command, TUNEKIT_RAIL="tuner").returncode == 0
    assert machine.run(sys.executable, "-I", "-c", text).stdout == "7\n"


def test_a_row_that_the_grid_no_longer_has_is_missing(machine: Machine) -> None:
    machine.write("alpha", {"toy": "renamed"})
    done = machine.app(MISSING="error")
    assert (done.returncode, done.stdout) == (1, "")
    assert "scope alpha is untuned on this box" in done.stderr
    assert (values(machine.app()), len(machine.log)) == ([7], 1)


def test_handlers_are_as_they_were(machine: Machine) -> None:
    text = (
        "import signal, os, alpha, tunekit as tk\n"
        "before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)], os.getcwd(), dict(os.environ)\n"
        "tk.policy(missing='auto').apply()\n"
        "after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)], os.getcwd(), dict(os.environ)\n"
        "print(before == after)"
    )
    assert machine.run(sys.executable, "-c", text, FAKE="nothing").stdout == "True\n"
