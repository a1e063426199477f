# SPDX-License-Identifier: Apache-2.0
"""The text of templates: tunekit's own through ``importlib.resources``, others beside the declaring file.

Apart from rendering, so that the status can say that a template has changed where jinja2 is not installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tunekit.errors import TemplateError


def own_templates() -> Any:
    """The folder of tunekit's templates as an importlib.resources traversable."""
    import importlib.resources  # for tools, and for a status that has a record to compare with

    try:
        return importlib.resources.files("tunekit.templates")
    except ModuleNotFoundError:
        # The build of tunekit itself: nothing is installed yet and the folder lies beside this package.
        return Path(__file__).resolve().parent.parent / "templates"


def read_template(name: str, folder: Path) -> str:
    """The text of a template. Raises TemplateError where it is not there."""
    if name.startswith("tunekit/"):
        found = own_templates().joinpath(*name.split("/")[1:])
        if found.is_file():
            return str(found.read_text(encoding="utf-8"))
        raise TemplateError(f"tunekit has no template {name!r}")
    for root in (folder, folder.parent):
        path = root / name
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TemplateError(f"template {path} cannot be read: {error}") from error
    raise TemplateError(f"template {name!r} is neither in {folder} nor in {folder.parent}; correct the path")


def lost(names: Iterable[str | None], folder: Path) -> bool:
    """Whether a template of a declaration is not on disk: a zipped or frozen application, or a package without them."""
    own = [name for name in names if name and not name.startswith("tunekit/")]
    return any(not any((root / name).is_file() for root in (folder, folder.parent)) for name in own)


def sources(names: Iterable[str | None], folder: Path) -> str | None:
    """A digest of every text that rendering these templates may read, or None where they are not on disk.

    That is each ``.j2`` and ``.h`` in their folders, which travel with the package, and tunekit's own where one of
    them is a template or is mentioned.
    """
    texts: dict[str, str] = {}
    own = False
    for name in filter(None, names):
        if name.startswith("tunekit/"):
            own = True
            continue
        path = next((root / name for root in (folder, folder.parent) if (root / name).is_file()), None)
        if path is None:
            return None
        for file in path.parent.iterdir():
            if file.suffix in (".j2", ".h") and file.is_file():
                texts[file.name] = file.read_text(encoding="utf-8", errors="replace")
    if own or any("tunekit/" in text for text in texts.values()):
        for part in ("isa", "q8q8"):
            for file in own_templates().joinpath(part).iterdir():
                if file.name.endswith((".j2", ".h")):
                    texts[f"tunekit/{part}/{file.name}"] = file.read_text(encoding="utf-8")
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()[:16]


def template_digest(text: str) -> str:
    """What a stamp and a run record keep of a template's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed(name: str, folder: Path, digest: str) -> str | None:
    """The digest of a template now, where it is another one than ``digest``; None where not, or where it is gone."""
    try:
        now = template_digest(read_template(name, folder))
    except TemplateError:
        return None  # a frozen install, or a declaration whose build left its templates behind
    return None if now == digest else now
