# SPDX-License-Identifier: Apache-2.0
"""The hostile family in a whole retune, compiled and run for real: each row is rejected with its reason, status 0.

``PYTHONPATH=tests python -m tunekit.retune --module hostile.kernels --scope hostile --row-timeout 2 --dry-run`` prints
the table. The rows of tests/measure_hostile.py do the same and worse from Python, where no compiler is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TOY_ENVIRONMENT, processes

# fmt: off
EXPECTED = {
    "act_sigill":    r"sample small: killed by SIG(ILL|TRAP)",
    "act_sigsegv":   r"sample small: killed by SIGSEGV",
    "act_sigfpe":    r"sample small: (killed by SIGFPE|y\[0\] is .*)",  # AArch64 divides by zero without a word
    "act_abort":     r"sample small: killed by SIGABRT",
    "act_exits":     r"sample small: exit status 0 before the verdict",
    "act_hangs":     r"sample small: no answer in 2 s",
    "act_heap":      r"(sample \S+( \S+)*: killed by SIG(ABRT|SEGV)|the process was damaged).*",
    "act_memory":    r"sample small: killed by SIGSEGV",
    "act_past":      r"sample small: killed by SIGSEGV",
    "act_before":    r"sample small: killed by SIGSEGV",
    "act_half":      r"sample small: y\[12\] is .*, the reference says .*",
    "act_zeros":     r"sample small: y\[0\] is (np\.int32\()?0\)?, the reference says .*",
    "act_long_k":    r"sample K of 96: y\[0\] is .*",
    "act_minus_128": r"sample full range: y\[0\] is .*",
    # These pass every check, and end the process of the race.
    "act_late_exits":   r"large: exit status 0 before the end of the race while it was timed.*",
    "act_late_sigsegv": r"large: killed by SIGSEGV while it was timed.*",
    "act_late_hangs":   r"large: no answer in 2 s while it was timed.*",
    "act_late_heap":    r"large: killed by SIG(ABRT|SEGV).*",
}
# fmt: on


@pytest.fixture(scope="module")
def retuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any, str]:
    folder = tmp_path_factory.mktemp("hostile")
    import os

    environment = {
        **os.environ,
        **TOY_ENVIRONMENT,
        "TUNEKIT_HOME": str(folder / "state"),
        "TUNEKIT_CACHE": str(folder / "cache"),
    }
    words = ["--module", "hostile.kernels", "--scope", "hostile", "--row-timeout", "2", "--json"]
    command = [sys.executable, "-m", "tunekit.retune", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.build
def test_every_hostile_row_is_rejected_with_its_reason_and_the_run_ends_well(retuned: tuple[int, Any, str]) -> None:
    status, document, errors = retuned
    assert status == 0, errors
    (scope,) = document["scopes"]
    rows = scope["record"]["kernels"]["dot"]["rows"]
    for suffix, row in rows.items():
        print(f"{suffix:16} {row['verdict']:10} {row['reason']}")
    assert set(EXPECTED) == {suffix for suffix in rows if suffix.startswith("act_") and not suffix.startswith("act_none")}
    for suffix, reason in EXPECTED.items():
        assert rows[suffix]["verdict"] == "rejected", (suffix, rows[suffix])
        assert re.fullmatch(reason, rows[suffix]["reason"], re.DOTALL), (suffix, rows[suffix]["reason"])
    good = {suffix: rows[suffix]["verdict"] for suffix in ("reference", "act_none", "act_none_twice1")}
    assert sorted(good.values()).count("winner") == 1 and "rejected" not in good.values(), good
    assert json.loads(Path(scope["manifest"]).read_text()) == {"dot": scope["record"]["kernels"]["dot"]["winner"]}


@pytest.mark.build
def test_no_process_of_it_is_left(retuned: tuple[int, Any, str]) -> None:
    assert not processes("tunekit.measure.*hostile")
