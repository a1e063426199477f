# SPDX-License-Identifier: Apache-2.0
"""What the tests of the policy rail share: a box of its own, applications on it, and a log of what its tuner did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import ROOT

RAIL = ROOT / "tests" / "rail"
APP = RAIL / "app.py"


@dataclass
class Machine:
    """One untuned box: its folders, and the applications that are started on it."""

    folder: Path
    cache: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> list[str]:
        """One line for each start of the tuner."""
        path = self.folder / "log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def environment(self, **variables: str) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("TUNEKIT_", "PYTHON"))}
        return {
            **own,
            "PYTHONPATH": str(RAIL),
            "TUNEKIT_HOME": str(self.folder / "state"),
            "TUNEKIT_CACHE": str(self.cache),
            "FAKE_LOG": str(self.folder / "log"),
            **self.variables,
            **variables,
        }

    def begin(self, *words: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(word) for word in words], env=self.environment(**variables), cwd=cwd or self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, *words: str | Path, cwd: Path | None = None, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the box."""
        return subprocess.run(
            [str(word) for word in words], env=self.environment(**variables), cwd=cwd or self.folder, text=True,
            capture_output=True, timeout=120, check=False, **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
        )  # fmt: skip

    def app(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the application as a script."""
        return self.run(sys.executable, APP, *words, **variables)

    def manifest(self, scope: str) -> Path:
        """Where the box keeps a scope's winners."""
        from tunekit import cpu

        return self.folder / "state" / cpu.this_box().key / f"{scope}.tune.json"

    def write(self, scope: str, entries: Any) -> Path:
        path = self.manifest(scope)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(entries if isinstance(entries, str) else json.dumps(entries), encoding="utf-8")
        return path


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one report that an application printed on standard output, and nothing beside it."""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, (done.returncode, done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(lines[0])
    return found


def values(done: subprocess.CompletedProcess[str]) -> Sequence[int]:
    found: Sequence[int] = said(done)["values"]
    return found
