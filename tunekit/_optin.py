# SPDX-License-Identifier: Apache-2.0
"""``[tool.tunekit]`` of a project's ``pyproject.toml``: the opt-in to the build hook without a ``setup.py``.

setuptools calls :func:`look` for every project that is built where tunekit is installed. In a project without that
table it reads one file and does nothing; only with it are the build tools imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEYS = ("modules",)
"""What the table may hold. ``modules``: what ``setup(tunekit_modules=...)`` takes."""


def look(distribution: Any) -> None:
    """Read the table and, where there is one, hand its modules to the hook. Called by setuptools.

    Raises:
        DeclarationError: the table holds something else, or the hook refuses it.
    """
    try:
        text = Path("pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if "tunekit" not in text:
        return
    import tomllib

    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError:
        return  # setuptools says it better
    if not isinstance(tool, dict) or "tunekit" not in tool:
        return
    from tunekit.errors import DeclarationError

    table = tool["tunekit"]
    where = "pyproject.toml, [tool.tunekit]"
    if not isinstance(table, dict):
        raise DeclarationError(f"{where} is no table; write modules = [\"mylib/kernels.py\"] below it")
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise DeclarationError(f"{where} has {', '.join(map(repr, unknown))}; it may hold: {', '.join(KEYS)}")
    if "modules" in table:
        from tunekit.build_tools.hook import tunekit_modules

        tunekit_modules(distribution, f"{where} modules", table["modules"])
