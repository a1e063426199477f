# SPDX-License-Identifier: Apache-2.0
"""A tuner that takes no time, and does what ``FAKE`` says: the good, the idle, the failing and the ones that never end."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

how = os.environ.get("FAKE", "writes")
manifest = Path(os.environ["TUNEKIT_MANIFEST"])
scope = manifest.name.partition(".")[0]
with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
    log.write(f"{scope} {os.environ['TUNEKIT_MODE']} {os.environ['TUNEKIT_RAIL']} {os.getpid()} {sys.flags.optimize}\n")
print(f"tuning {scope}", flush=True)

if how == "fails":
    sys.exit(7)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(f"grandchild {child.pid}\n")
    time.sleep(600)
if how == "tears":
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text('{"toy": "k2', encoding="utf-8")
if how == "nests":  # an application with a policy, and the rail's own variables taken away
    own = {k: v for k, v in os.environ.items() if k not in ("TUNEKIT_MODE", "TUNEKIT_MANIFEST")}
    done = subprocess.run([sys.executable, os.environ["NESTED"]], env=own, check=False)
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(f"nested ended {done.returncode}\n")
if how == "sleeps":
    time.sleep(1.5)
if how in ("writes", "sleeps", "writes and fails", "nests"):
    family = importlib.import_module(scope)
    assert [suffix for suffix, _ in family.toy.variants()] == ["reference", "k1", "k2", "k9"]
    family.toy.manifest_set(os.environ.get("FAKE_ROW", "k2"))
sys.exit(5 if how == "writes and fails" else 0)
