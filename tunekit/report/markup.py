# SPDX-License-Identifier: Apache-2.0
"""Elements of HTML and SVG. Text is escaped unless it is :class:`Markup`, which :func:`tag` makes."""

from __future__ import annotations

import html
from collections.abc import Iterable

Value = str | float | None

_VOID = frozenset({"meta", "br", "hr"})
# What XML does not allow even escaped, and what would turn the direction of the text around it.
_DROPPED = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), " ")


class Markup(str):
    """Text that is markup already."""


def escape(value: str) -> Markup:
    """Text as markup; control characters become blanks."""
    clean = value.translate(_DROPPED).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(clean, quote=True))


def number(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _content(item: str) -> str:
    return item if isinstance(item, Markup) else escape(item)


def tag(name: str, /, *content: str, **attributes: Value) -> Markup:
    """An element. ``class_`` and ``for_`` lose their underscore, others become dashes; None leaves an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        text = number(value) if isinstance(value, float) else str(value)
        spelt = "viewBox" if key == "viewBox" else key.rstrip("_").replace("_", "-")
        words.append(f'{spelt}="{escape(text)}"')
    if name in _VOID:
        return Markup(f"<{' '.join(words)}>")
    return Markup(f"<{' '.join(words)}>{''.join(_content(item) for item in content)}</{name}>")


def join(items: Iterable[str], between: str = "") -> Markup:
    """Elements in a row."""
    return Markup(between.join(_content(item) for item in items))
