# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while ``python -m tunekit...`` is still importing: one line and 130, as later, instead of a traceback.

The first thing that ``tunekit`` imports. Elsewhere than in tunekit's own commands nothing is touched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType


def own_command(words: Sequence[str]) -> bool:
    """Whether an interpreter's command line runs one of tunekit's commands."""
    if "-m" not in words[:-1]:
        return False
    module = words[words.index("-m") + 1]
    return module == "tunekit" or module.startswith("tunekit.")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    try:
        os.write(2, b"tunekit: interrupted; nothing was changed\n")
    finally:
        os._exit(130)


if own_command(sys.orig_argv):
    sys.excepthook = _hook
