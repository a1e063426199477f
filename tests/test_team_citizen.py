# SPDX-License-Identifier: Apache-2.0
"""A good citizen: affinity, quotas, limits, forks, signals, exit, threads, subinterpreters; each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_python

from tunekit import core
from tunekit.cpu.quota import cgroup_quota

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(core.core() is None or sys.platform != "linux", reason="tunekit._core is not built here"),
]

BEGIN = """
import os, sys, threading, time
import numpy as np
import tunekit
from tunekit import q8, core, team
rng = np.random.default_rng(1)
m = q8.pack(rng.standard_normal((600, 512), dtype=np.float32))
x = rng.standard_normal((16, 512), dtype=np.float32)
want = q8.oracle.matmul(q8.quantize(x), m).tobytes()
own = core.core()
def good():
    return q8.matmul(x, m).tobytes() == want
def workers():
    return own.team_workers()[0]
own.set_knob("target_chunk_work", 1)
"""


def check(code: str, variables: dict[str, str] | None = None, timeout: float = 60) -> str:
    done = run_python(BEGIN + code, variables, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


many = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one CPU: one lane"
)


# --- how many lanes --------------------------------------------------------------------------------------


def test_no_thread_before_the_first_large_product() -> None:
    code = (
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "own.set_knob('target_chunk_work', 1_000_000); before = threads()\n"
        "small = q8.pack(np.ones((32, 32), np.float32)); q8.matmul(np.ones((1, 32), np.float32), small)\n"
        "assert threads() == before and workers() == 0, (before, threads())\n"
        "own.set_knob('pretend_lanes', 4); own.set_knob('target_chunk_work', 1)\n"
        "assert good() and workers() == 3 and threads() == before + 3\n"
    )
    check(code)


@many
def test_a_shrinking_affinity_takes_lanes_and_workers_along() -> None:
    code = (
        "cpus = sorted(os.sched_getaffinity(0)); assert tunekit.lanes() == len(cpus) and good()\n"
        "os.sched_setaffinity(0, cpus[:1]); assert tunekit.lanes() == 1 and good()\n"
        "os.sched_setaffinity(0, cpus); assert tunekit.lanes() == len(cpus) and good()\n"
        # Two lanes on one CPU: the workers must come to the caller's CPU.
        "own.set_knob('pretend_lanes', 2); os.sched_setaffinity(0, cpus[1:2]); time.sleep(0.05)\n"
        "assert good()\n"
        "masks = [os.sched_getaffinity(int(t)) for t in os.listdir('/proc/self/task')]\n"
        "names = [open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')]\n"
        "ours = [mask for mask, name in zip(masks, names) if name == 'tunekit']\n"
        "assert ours and all(mask == {cpus[1]} for mask in ours), (names, masks)\n"
    )
    check(code)


@many
def test_threads_bounds_lanes_for_a_while() -> None:
    code = (
        "full = tunekit.lanes(); assert full > 1\n"
        "with tunekit.threads(1):\n"
        "    assert tunekit.lanes() == 1 and good() and workers() == 0\n"
        "    with tunekit.threads(99): assert tunekit.lanes() == 1\n"
        "    seen = []; t = threading.Thread(target=lambda: seen.append(tunekit.lanes())); t.start(); t.join()\n"
        "    assert seen == [1]\n"
        "assert tunekit.lanes() == full and good() and workers() == full - 1\n"
        "@tunekit.threads(1)\n"
        "def inside(): return tunekit.lanes()\n"
        "assert inside() == 1 and inside() == 1 and tunekit.lanes() == full\n"
        # Contexts that end in another order than they began.
        "a, b = tunekit.threads(1), tunekit.threads(2); a.__enter__(); b.__enter__(); a.__exit__(None, None, None)\n"
        "assert tunekit.lanes() == min(2, full); b.__exit__(None, None, None); assert tunekit.lanes() == full\n"
        "for bad, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), ('2', TypeError), (None, TypeError)):\n"
        "    try: tunekit.threads(bad)\n"
        "    except error: pass\n"
        "    else: raise AssertionError(bad)\n"
    )
    check(code)


def test_a_worker_above_the_limit_sleeps_and_no_op_wakes_it() -> None:
    code = (
        "own.set_knob('pretend_lanes', 4); own.set_knob('team_spin_us', 10_000_000); assert good() and workers() == 3\n"
        "with tunekit.threads(2):\n"
        "    end = time.time() + 20\n"
        "    while own.team_workers()[1] < 2 and time.time() < end: good()\n"
        "    assert own.team_workers()[1] == 2\n"  # not for the ten seconds of spinning
        "    for _ in range(200): assert good()\n"
        "    assert own.team_workers()[1] == 2\n"
        "assert all(good() for _ in range(20))\n"
    )
    check(code)


def test_tunekit_threads_bounds_lanes() -> None:
    assert check("print(tunekit.lanes(), good(), workers())", {"TUNEKIT_THREADS": "1"}).split() == ["1", "True", "0"]


def fake(root: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join(mounts) + "\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def v1(group: str, quota: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu,cpuacct/{group}"
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "quota"),
    [
        ("0::/\n", [V2], {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/\n", [V2], {"sys/fs/cgroup/cpu.max": "765000 100000\n"}, 7.65),
        ("0::/a/b\n", [V2], {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", [V2], {"sys/fs/cgroup/a/b/cpu.max": "50000 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 0.5),
        # A container without a namespace of its own sees the host's path; the mount shows its end.
        (
            "0::/docker/abc\n",
            [V2.replace("0:26 / ", "0:26 /docker/abc ")],
            {"sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2.0,
        ),
        ("4:memory:/x\n2:cpu,cpuacct:/\n0::/\n", [V1, V2], v1("", -1), None),
        ("2:cpu,cpuacct:/job\n", [V1], v1("job/", 350000), 3.5),
        ("2:cpu,cpuacct:/job\n", [V1], {"sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "garbage\n"}, None),
        ("0::/\n", [V2], {"sys/fs/cgroup/cpu.max": "100000 0\n"}, None),
        ("", [], {}, None),
    ],
)
def test_quotas(tmp_path: Path, cgroup: str, mounts: list[str], files: dict[str, str], quota: float | None) -> None:
    assert cgroup_quota(fake(tmp_path, cgroup, mounts, files)) == quota


def test_no_files_are_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "lanes"), [(7.65, 7), (1.9, 1), (0.3, 1), (64.0, 8)])
def test_a_quota_is_rounded_down_and_shortens_spinning(quota: float, lanes: int) -> None:
    code = (
        f"team.forget(); team.cgroup_quota = lambda: {quota}; team.start(); own.set_knob('pretend_lanes', 8)\n"
        "print(tunekit.lanes(), own.knobs()['team_spin_us'])\n"
    )
    assert check(code).split() == [str(lanes), "50"]


# --- forks -----------------------------------------------------------------------------------------------

FORK = """
own.set_knob('pretend_lanes', 3)
def child():
    pid = os.fork()
    if pid == 0:
        ok = all(good() for _ in range(20)) and workers() == 2
        inner = os.fork()
        if inner == 0:
            os._exit(0 if good() else 1)
        os._exit(0 if ok and os.waitpid(inner, 0)[1] == 0 else 1)
    return pid
"""


@pytest.mark.parametrize("first", ["", "assert good()\n"], ids=["before first use", "after"])
def test_fork(first: str) -> None:
    code = (
        FORK + first + "pids = [child() for _ in range(8)]\n"
        "assert all(good() for _ in range(20)) and workers() == 2\n"
        "pids.append(child())\n"
        "assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)\n"
        "assert good()\n"
    )
    check("import warnings; warnings.simplefilter('ignore')\n" + code)


def test_fork_while_others_multiply() -> None:
    code = (
        FORK + "import warnings; warnings.simplefilter('ignore')\n"
        "stop = threading.Event(); faults = []\n"
        "def busy():\n"
        "    while not stop.is_set():\n"
        "        if not good(): faults.append(1)\n"
        "threads = [threading.Thread(target=busy) for _ in range(2)]\n"
        "[t.start() for t in threads]\n"
        "with tunekit.threads(2):\n"
        "    assert all(os.waitpid(child_plain(), 0)[1] == 0 for _ in range(30))\n"
        "import subprocess\n"
        "assert all(subprocess.run(['true']).returncode == 0 for _ in range(5))\n"
        "stop.set(); [t.join() for t in threads]; assert not faults\n"
    ).replace("stop = threading", "def child_plain():\n    pid = os.fork()\n    if pid == 0:\n"
              "        with tunekit.threads(3): os._exit(0 if all(good() for _ in range(5)) else 1)\n    return pid\n"
              "stop = threading")  # fmt: skip
    check(code)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, warnings\nimport numpy as np\nfrom tunekit import q8\nfrom tunekit.core import core\n"
        "def product(seed):\n"
        "    rng = np.random.default_rng(seed)\n"
        "    m = q8.pack(rng.standard_normal((300, 256), dtype=np.float32))\n"
        "    x = rng.standard_normal((16, 256), dtype=np.float32)\n"
        "    q8.quantize(x); core().set_knob('pretend_lanes', 3); core().set_knob('target_chunk_work', 1)\n"
        "    return q8.matmul(x, m).tobytes()\n"
        "if __name__ == '__main__':\n"
        "    warnings.simplefilter('ignore')\n"
        "    want = [product(seed) for seed in range(4)]\n"
        f"    with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "        assert pool.map(product, range(4)) == want\n"
        "    assert product(0) == want[0]\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=clean())
    assert done.returncode == 0, done.stderr


def clean() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# --- threads, exit, signals ------------------------------------------------------------------------------


def test_calls_from_many_threads_at_once() -> None:
    code = (
        "own.set_knob('pretend_lanes', 3); faults = []\n"
        "def loop():\n"
        "    for _ in range(60):\n"
        "        if not good(): faults.append(1)\n"
        "threads = [threading.Thread(target=loop) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not faults and workers() == 2\n"
    )
    check(code)


EXITS = {
    "atexit": "import atexit; atexit.register(lambda: print(good()))\ngood()",
    "first ever in atexit": "import atexit; atexit.register(lambda: print(good()))",
    "del at shutdown": "class Late:\n    def __del__(self): print(self.run())\nlate = Late(); late.run = good; good()",
    "daemon thread": (
        "def loop():\n    while True: good()\n"
        "[threading.Thread(target=loop, daemon=True).start() for _ in range(3)]\ntime.sleep(0.3); print(good())"
    ),
    "thread exits": "t = threading.Thread(target=lambda: (print(good()), sys.exit(3))); t.start(); t.join()",
    "os._exit": "print(good()); sys.stdout.flush(); os._exit(0)",
}


@pytest.mark.parametrize("how", EXITS)
def test_exit(how: str) -> None:
    out = check("own.set_knob('pretend_lanes', 3)\n" + EXITS[how] + "\n", timeout=30)
    assert out.strip() == "True"


def test_signals_during_products() -> None:
    """A handler runs in the main thread, never in a worker; and Ctrl-C ends a loop of products."""
    code = (
        "import signal; own.set_knob('pretend_lanes', 4); good()\n"
        "hits = []\n"
        "signal.signal(signal.SIGALRM, lambda *_: hits.append(threading.get_ident()))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)\n"
        "end = time.time() + 1\n"
        "while time.time() < end: assert good()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "assert len(hits) > 10 and set(hits) == {threading.get_ident()}\n"
        "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    end = time.time() + 20\n"
        "    while time.time() < end: good()\n"
        "    print('never')\n"
        "except KeyboardInterrupt:\n"
        "    print(good())\n"
    )
    assert check(code).strip() == "True"


def test_a_subinterpreter_is_refused_clearly() -> None:
    code = (
        "try:\n    import _interpreters as sub\nexcept ImportError:\n    import _xxsubinterpreters as sub\n"
        "one = sub.create()\n"
        "sub.run_string(one, '''\n"
        "import sys; sys.path.insert(0, ROOT)\n"
        "from tunekit.core import core\n"
        "try:\n    core()\nexcept RuntimeError as error:\n    print(error)\nelse:\n    print(\"went through\")\n"
        "''')\n"
    ).replace("ROOT", repr(str(ROOT)).replace("'", '"'))
    done = run_python(code)
    assert "main interpreter alone" in done.stdout, done.stdout + done.stderr


def test_counters_behind_their_switch() -> None:
    done = run_python(
        BEGIN + "own.set_knob('pretend_lanes', 3); assert good(); print(json.dumps(team.counts()))".replace(
            "json", "__import__('json')"
        ),
        {"TUNEKIT_TEAM_PROF": "1"},
    )
    found = json.loads(done.stdout)
    assert found["ops"] == 1 and found["chunks"] >= found["own_chunks"] > 0
    assert found["publish_ns"] > 0 and found["serve_ns"] > 0
    assert done.stderr.startswith("tunekit: team: 1 ops"), done.stderr
    assert json.loads(check("own.set_knob('pretend_lanes', 3); good(); print(__import__('json').dumps(team.counts()))"))["ops"] == 0


def test_a_third_party_runs_its_own_work_on_the_team(tmp_path: Path) -> None:
    """A library of somebody else, built against the header alone, takes the table from the capsule."""
    (tmp_path / "other.c").write_text(
        '#include "team.h"\n'
        "typedef struct { const double *x; double *part; int64_t n; int32_t chunks; const tk_team_api *team; } job;\n"
        "static void sum(void *c, int32_t i) { job *j = c; double s = 0;\n"
        "  for (int64_t k = j->team->part(j->n, j->chunks, i); k < j->team->part(j->n, j->chunks, i + 1); k++) s += j->x[k];\n"
        "  j->part[i] = s; }\n"
        "static void add(void *c, int32_t i) { job *j = c; (void)i; for (int32_t k = 1; k < j->chunks; k++) j->part[0] += j->part[k]; }\n"
        "double total(const tk_team_api *team, const double *x, int64_t n, int32_t *lanes) {\n"
        "  if (team->abi != TK_TEAM_ABI || team->size < sizeof(tk_team_api)) return -1;\n"
        "  double part[64]; const int32_t live = team->live();\n"
        "  job j = {x, part, n, team->chunks(n, 1000, team->lanes(n, 10000, live, 0), 4, 0), team};\n"
        "  tk_stage stages[2] = {{sum, 0, &j, j.chunks}, {add, 0, &j, 1}};\n"
        "  *lanes = team->run(stages, 2, live, 1); return part[0]; }\n"
    )
    library = tmp_path / "other.so"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-shared", "-fPIC", "-O2"]
    subprocess.run(["cc", *flags, "-I", str(ROOT / "tunekit/csrc"), str(tmp_path / "other.c"), "-o", str(library)], check=True)
    code = (
        "import ctypes\nown.set_knob('pretend_lanes', 4)\n"
        "get = ctypes.pythonapi.PyCapsule_GetPointer; get.restype = ctypes.c_void_p\n"
        "get.argtypes = [ctypes.py_object, ctypes.c_char_p]\n"
        "table = get(own.team, b'tunekit._core.team')\n"
        f"total = ctypes.CDLL({str(library)!r}).total; total.restype = ctypes.c_double\n"
        "x = np.arange(100000, dtype=np.float64); lanes = ctypes.c_int32()\n"
        "found = total(ctypes.c_void_p(table), x.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size), ctypes.byref(lanes))\n"
        "print(found == x.sum(), lanes.value)\n"
    )
    assert check(code).split() == ["True", "4"]


def test_small_products_in_a_row_are_worth_a_wake_and_single_ones_are_not() -> None:
    """A decoder's products: none of them wakes the team alone, and it must not run on one lane for ever."""
    code = (
        "one = q8.pack(rng.standard_normal((600, 512), dtype=np.float32)); y = np.empty((1, 600), np.float32)\n"
        "own.set_knob('wake_work', 10 * 600 * 512); own.set_knob('team_prof', 1); own.set_knob('pretend_lanes', 2)\n"
        "q8.matmul(x[:1], one, out=y); own.team_counts(True)\n"  # packing is work for the team, too
        "for _ in range(40): time.sleep(0.003); q8.matmul(x[:1], one, out=y)\n"
        "apart = own.team_counts(True)\n"
        "end = time.monotonic() + 30; row = {'ops': 0}\n"
        "while not row['ops'] and time.monotonic() < end:\n"
        "    for _ in range(200): q8.matmul(x[:1], one, out=y)\n"
        "    row = own.team_counts(False)\n"
        "print(apart['ops'], apart['solo'], row['ops'] > 0, row['solo'] >= 8)\n"
    )
    assert check(code).split() == ["0", "40", "True", "True"]


# --- forks, signals and threads around what is decided once -----------------------------------------------


@pytest.mark.parametrize("delay", [0, 0.001, 0.004])
def test_a_fork_beside_another_threads_first_product(delay: float) -> None:
    """The choice of a row is made under a lock; the child must not wait for a thread that it does not have."""
    code = (
        "import os, threading, time\nimport numpy as np\nfrom tunekit import q8\n"
        "m = q8.pack(np.ones((64, 64), np.float32)); x = np.ones((2, 64), np.float32)\n"
        "first = threading.Thread(target=q8.matmul, args=(x, m)); first.start()\n"
        f"time.sleep({delay}); pid = os.fork()\n"
        "same = q8.matmul(x, m).tobytes() == q8.oracle.matmul(q8.quantize(x), m).tobytes()\n"
        "if pid == 0: os._exit(not same)\n"
        "first.join(); print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), same)\n"
    )
    done = run_python(code, timeout=60)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_a_child_is_not_bound_by_blocks_of_threads_that_it_lacks() -> None:
    code = (
        "inside, end = threading.Event(), threading.Event()\n"
        "def block():\n"
        "    with tunekit.threads(1): inside.set(); end.wait(30)\n"
        "own.set_knob('pretend_lanes', 4); other = threading.Thread(target=block); other.start(); inside.wait(30)\n"
        "with tunekit.threads(2):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(tunekit.lanes())\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), tunekit.lanes())\n"
        "end.set(); other.join(); print(tunekit.lanes())\n"
    )
    assert check(code).split() == ["2", "1", "4"]


def test_a_start_that_was_interrupted_is_begun_again_and_others_wait_for_it() -> None:
    code = (
        "team.forget(); real = team.profile; calls = []\n"
        "def stops():\n"
        "    calls.append(1)\n"
        "    if len(calls) == 1: raise KeyboardInterrupt\n"
        "    time.sleep(0.2); return real()\n"
        "team.profile = stops\n"
        "try: tunekit.lanes()\nexcept KeyboardInterrupt: pass\n"
        "found = []; threads = [threading.Thread(target=lambda: found.append(tunekit.lanes())) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; print(found, len(calls))\n"
    )
    assert check(code, {"TUNEKIT_THREADS": "1"}).strip() == "[1, 1, 1, 1] 2"


def test_a_block_that_a_signal_ends_leaves_no_limit() -> None:
    """Exceptions of signal handlers come anywhere, on the way into a block and out of it, too."""
    code = (
        "import signal\nclass Stop(Exception): pass\n"
        "def stop(*_): raise Stop\n"
        "own.set_knob('pretend_lanes', 4); signal.signal(signal.SIGALRM, stop); stopped = 0\n"
        "end = time.monotonic() + 4\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.0001)\n"
        "        while True:\n"
        "            with tunekit.threads(1): pass\n"
        "    except Stop: stopped += 1\n"
        "print(stopped > 100, tunekit.lanes(), len(team._limits))\n"
    )
    assert check(code).split() == ["True", "4", "0"]


def test_a_signal_handler_may_ask_for_lanes() -> None:
    code = (
        "import signal\nseen = []\n"
        "signal.signal(signal.SIGALRM, lambda *_: seen.append(tunekit.lanes()))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001); end = time.monotonic() + 1\n"
        "while time.monotonic() < end:\n"
        "    with tunekit.threads(1): pass\n"
        "signal.setitimer(signal.ITIMER_REAL, 0); print(len(seen) > 10)\n"
    )
    assert check(code).strip() == "True"


def test_threads_on_a_generator_is_refused() -> None:
    code = (
        "def plain(): return tunekit.lanes()\ndef later(): yield 1\nasync def task(): pass\n"
        "own.set_knob('pretend_lanes', 4); print(tunekit.threads(2)(plain)(), tunekit.lanes())\n"
        "for f in (later, task):\n"
        "    try: tunekit.threads(1)(f)\n"
        "    except TypeError as error: print('inside it' in str(error))\n"
    )
    assert check(code).split() == ["2", "4", "True", "True"]


def test_a_huge_number_of_threads_is_all_there_are() -> None:
    done = run_python(BEGIN + "print(good(), tunekit.lanes() >= 1)", {"TUNEKIT_THREADS": "9" * 30})
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_child_counts_from_nothing() -> None:
    code = (
        "own.set_knob('team_prof', 1); own.set_knob('pretend_lanes', 2); good(); pid = os.fork()\n"
        "if pid == 0: os._exit(min(team.counts()['ops'], 100))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), team.counts()['ops'] > 0)\n"
    )
    assert check(code).split() == ["0", "True"]
