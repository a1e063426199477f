# SPDX-License-Identifier: Apache-2.0
"""The thread team in C, alone: every chunk once, stages in order, forks, limits, failures; and under a sanitizer."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, lacking

pytestmark = [pytest.mark.build, pytest.mark.skipif(sys.platform != "linux", reason="the team's tests are for Linux")]

CSRC = ROOT / "tunekit" / "csrc"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-g", "-pthread"]


def build(folder: Path, *flags: str) -> Path:
    """The harness with the team in it; pthread_create of the team alone goes through the harness."""
    include, target = ["-I", str(CSRC)], folder / "harness"
    own = ["-Dpthread_create=harness_create"]
    team = ["cc", *WARNINGS, *flags, *own, *include, "-c", str(CSRC / "team.c"), "-o", str(folder / "team.o")]
    # glibc declares pthread_create: the renamed declaration is the harness's.
    rest = ["cc", *WARNINGS, *flags, *include, str(ROOT / "tests/team_harness.c"), str(CSRC / "shape.c")]
    for command in (team, [*rest, str(folder / "team.o"), "-o", str(target)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except FileNotFoundError:
            lacking("a C compiler")
        if done.returncode:
            raise RuntimeError(done.stderr)
    return target


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("team"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("tsan"), "-fsanitize=thread")
    except RuntimeError as error:
        if "tsan" in str(error):
            lacking("libtsan, gcc's thread sanitizer")
        raise


def run(program: Path, mode: str, rounds: int, timeout: float = 100) -> str:
    command = [str(program), mode, str(rounds)]
    if program.parent.name.startswith("tsan"):
        # The sanitizer's shadow memory needs the usual address layout, which newer kernels randomise further.
        command = ["setarch", platform.machine(), "-R", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        ("one", 20000),
        ("many", 5000),
        ("limits", 5000),
        ("parking", 2000),
        ("nested", 300),
        ("none", 500),
        ("few", 2000),
        ("signals", 1),
        ("slow", 1),
        ("fork", 60),
        ("forks", 20000),
        ("bad", 1),
    ],
)
def test_team(harness: Path, mode: str, rounds: int) -> None:
    run(harness, mode, rounds)


@pytest.mark.parametrize(("mode", "rounds"), [("one", 1500), ("many", 500), ("limits", 500), ("parking", 400), ("nested", 30)])
def test_no_data_race(sanitized: Path, mode: str, rounds: int) -> None:
    run(sanitized, mode, rounds)


def test_an_idle_team_uses_no_cpu(harness: Path) -> None:
    microseconds = int(run(harness, "idle", 1).split()[0])
    assert microseconds < 10_000  # of one second: below 1 %


def test_the_sanitizer_sees_a_race(tmp_path: Path) -> None:
    """The same build with a join that waits for nobody must be caught, or the clean runs above mean nothing."""
    folder = tmp_path / "tsan-broken"
    folder.mkdir()
    text = (CSRC / "team.c").read_text()
    joined = "    wait_done(count - 1, number, stages[count - 1].chunks);\n"
    assert text.count(joined) == 1
    (folder / "team.c").write_text(text.replace(joined, ""))
    flags = [*WARNINGS, "-fsanitize=thread", "-I", str(CSRC), "-Dpthread_create=harness_create"]
    subprocess.run(["cc", *flags, "-c", str(folder / "team.c"), "-o", str(folder / "team.o")], check=True)
    rest = [f for f in flags if not f.startswith("-Dpthread")]
    sources = [str(ROOT / "tests/team_harness.c"), str(CSRC / "shape.c"), str(folder / "team.o")]
    linked = subprocess.run(["cc", *rest, *sources, "-o", str(folder / "harness")], capture_output=True, text=True)
    if linked.returncode and "tsan" in linked.stderr:
        lacking("libtsan, gcc's thread sanitizer")
    command = ["setarch", platform.machine(), "-R", str(folder / "harness"), "one", "3000"]
    # At the first report: a join that waits for nobody may go wrong in any way afterwards, and hang too.
    stop = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=stop)
    assert done.returncode != 0 and "data race" in done.stderr


def test_the_benchmark_of_overheads_builds_without_a_warning(tmp_path: Path) -> None:
    sources = [str(ROOT / "benchmarks/team_overhead.c"), str(CSRC / "team.c"), str(CSRC / "shape.c")]
    command = ["cc", *WARNINGS, "-fopenmp", "-I", str(CSRC), *sources, "-o", str(tmp_path / "overhead")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "gomp" in done.stderr:
        lacking("libgomp")
    assert done.returncode == 0, done.stderr


ASIDE = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "team.h"

static atomic_int calls;
static cpu_set_t asked[64];
int told_cpu(void) { return 1; } /* caller and worker alike */
int told_mask(pid_t pid, size_t size, cpu_set_t *set)
{
    (void)pid;
    memset(set, 0, size);
    CPU_SET(0, set);
    CPU_SET(1, set);
    CPU_SET(3, set);
    return 0;
}
int ask_mask(pid_t pid, size_t size, const cpu_set_t *set)
{
    (void)pid;
    (void)size;
    const int n = atomic_fetch_add(&calls, 1);
    if (n < 64)
        asked[n] = *set;
    return 0;
}
static atomic_int there;
static void meet(void *context, int32_t chunk)
{
    (void)context;
    (void)chunk;
    atomic_fetch_add(&there, 1);
    while (atomic_load(&there) < 2)
        sched_yield();
}
int main(void)
{
    tk_team_load();
    const tk_stage stage = {meet, NULL, NULL, 2};
    for (int i = 0; i < 3; i++) {
        atomic_store(&there, 0);
        tk_team_run(&stage, 1, 2, 1);
        usleep(10000);
    }
    for (int n = 0; n < atomic_load(&calls); n++) {
        for (int cpu = 0; cpu < 8; cpu++)
            putchar('0' + !!CPU_ISSET(cpu, &asked[n]));
        putchar(' ');
    }
    return 0;
}
"""


def test_a_worker_steps_aside_from_its_callers_cpu(tmp_path: Path) -> None:
    """It forbids itself that CPU and allows it again. The system's calls are replaced: it says that both are on CPU 1."""
    (tmp_path / "aside.c").write_text(ASIDE)
    told = ["-Dsched_getcpu=told_cpu", "-Dsched_getaffinity=told_mask", "-Dsched_setaffinity=ask_mask"]
    sources = [str(tmp_path / "aside.c"), str(CSRC / "team.c"), str(CSRC / "shape.c")]
    program = tmp_path / "aside"
    subprocess.run(["cc", "-std=c11", "-O1", "-pthread", *told, "-I", str(CSRC), *sources, "-o", str(program)], check=True)
    masks = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert masks and masks == ["10010000", "11010000"] * (len(masks) // 2), masks
