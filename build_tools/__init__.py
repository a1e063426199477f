# SPDX-License-Identifier: Apache-2.0
"""From declarations to modules: render, compile, link, stamp.

Nothing here is imported at run time by a tuned application; ``setup.py``, ``python -m tunekit`` and the tuner use
it. The entry points are :func:`build_into` (an install), :func:`build_cached` (grid, stamped and late fat modules
in the user's cache) and :func:`row_source` (what ``python -m tunekit show`` prints).
"""

from __future__ import annotations

from .build import Report, build_cached, build_into, build_named, fat_rows, row_assembly, row_source
from .cross import named, others
from .objects import Progress
from .toolchain import Runner, Toolchain, find_toolchain

__all__ = [
    "Progress", "Report", "Runner", "Toolchain", "build_cached", "build_into", "build_named", "fat_rows",
    "find_toolchain", "named", "others", "row_assembly", "row_source",
]
