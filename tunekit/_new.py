# SPDX-License-Identifier: Apache-2.0
"""``python -m tunekit new mylib``: a package of one tuned kernel to start from, as files that a person edits."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tunekit import _templates
from tunekit.errors import DeclarationError, TunekitError
from tunekit.signature import C_WORDS

FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "{name}/__init__.py": "init.py.txt",
    "{name}/kernels.py": "kernels.py.txt",
    "{name}/axpy.c.j2": "axpy.c.j2.txt",
    "tests/test_{name}.py": "test.py.txt",
}
"""What is written, and from which template; the word NAME in both stands for the package."""


def write_package(name: str, folder: Path) -> list[Path]:
    """Write a new package's files into ``folder/name``, all of them or none.

    Args:
        name: of the package, its scope and its distribution: a Python and C identifier in lower case.
        folder: an existing folder.

    Returns:
        The files, in the order in which one reads them.

    Raises:
        DeclarationError: the name will not do.
        TunekitError: ``folder/name`` is there already, or cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or name in C_WORDS:
        raise DeclarationError(
            f"{name!r} cannot name a package with a C module: use lower-case letters, digits and single underscores, a "
            f"letter first, and no keyword of Python or C"
        )
    if name in sys.stdlib_module_names or name in ("tunekit", "tests", "numpy") or name.startswith("tk_"):
        raise DeclarationError(f"{name!r} is the name of something else that Python or tunekit imports; choose another")
    target = folder / name
    if target.exists():
        raise TunekitError(f"{target} is there already; name another package, or another folder with --to")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
            made = Path(scratch) / name
            for path, source in FILES.items():
                text = _templates.own_templates().joinpath("new", source).read_text(encoding="utf-8")
                file = made / path.format(name=name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text.replace("NAME", name), encoding="utf-8")
            shutil.move(made, target)
    except OSError as error:
        raise TunekitError(f"cannot write {target}: {error.strerror or error}") from error
    return [target / path.format(name=name) for path in FILES]
