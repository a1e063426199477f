# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C before a command has begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tunekit._early import own_command


@pytest.mark.parametrize("module", ["tunekit.retune", "tunekit"])
def test_an_interrupt_within_the_imports_is_one_line(module: str, tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, "-P", "-m", module, "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "tunekit: interrupted; nothing was changed\n"


def test_other_programs_keep_their_own_way() -> None:
    for words in (["python", "-m", "tunekit"], ["python", "-X", "dev", "-m", "tunekit.retune", "--all"]):
        assert own_command(words)
    for words in (["python", "app.py", "tunekit"], ["python", "-m", "pytest", "-m", "tunekit"], ["python", "-m"], []):
        assert not own_command(words)
