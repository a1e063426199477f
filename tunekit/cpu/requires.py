# SPDX-License-Identifier: Apache-2.0
"""The ``requires`` grammar: ``,`` is AND over groups, ``|`` is OR inside a group, and there is nothing else.

``"avx2,avxvnni|avx512vnni"`` holds where ``avx2`` is there and one of the other two. Blank groups and alternatives
are skipped; an empty text always holds. A name that nobody knows is false, and :meth:`Requires.unknown` lists it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass

from tunekit.cpu.features import KNOWN_FEATURES, suggestion
from tunekit.errors import DeclarationError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

#: A row is built once per alternative, so a text with more than this is a slip of the pen.
MAX_ALTERNATIVES = 64


@dataclass(frozen=True)
class Requires:
    """A parsed text: every group must hold, and a group holds when one of its names does."""

    groups: tuple[tuple[str, ...], ...] = ()

    def holds(self, features: Collection[str]) -> bool:
        """Whether a CPU with these features meets the text."""
        return all(any(name in features for name in group) for group in self.groups)

    def missing(self, features: Collection[str]) -> tuple[str, ...]:
        """The groups that do not hold, each as it is written (``"avxvnni|avx512vnni"``)."""
        return tuple("|".join(group) for group in self.groups if not any(name in features for name in group))

    def unknown(self) -> tuple[str, ...]:
        """Names that no architecture knows, in the order written."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.groups))
        return tuple(name for name in names if name not in KNOWN_FEATURES)

    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        """Every way to meet the text, as tuples of names; first alternatives first. Empty text: one empty way."""
        ways = (tuple(dict.fromkeys(way)) for way in itertools.product(*self.groups))
        return tuple(dict.fromkeys(ways))

    def __str__(self) -> str:
        return ",".join("|".join(group) for group in self.groups)


def parse(text: str) -> Requires:
    """Parse a ``requires`` text; raises DeclarationError that quotes the part and says how to write it."""
    if not isinstance(text, str):
        raise DeclarationError(f"requires={text!r}: write a string of feature names, as requires='avx2,fma'")
    groups: dict[tuple[str, ...], None] = {}
    for part in text.split(","):
        names = [_name(text, word.strip()) for word in part.split("|") if word.strip()]
        if names:
            groups[tuple(dict.fromkeys(names))] = None
    ways = 1
    for group in groups:
        ways *= len(group)
    if ways > MAX_ALTERNATIVES:
        raise DeclarationError(
            f"requires={text!r}: {ways} alternatives, at most {MAX_ALTERNATIVES} are built; split the row"
        )
    return Requires(tuple(groups))


def _name(text: str, word: str) -> str:
    if _NAME.fullmatch(word):
        return word
    where = f"requires={text!r}: {word!r}"
    if "(" in word or ")" in word:
        raise DeclarationError(f"{where}: there are no parentheses; ',' is AND over groups, '|' is OR inside one")
    if word[0] in "!~-+" or word.startswith("not "):
        raise DeclarationError(f"{where}: there is no negation; say in 'declines' what a row must not run on")
    if any(c.isspace() for c in word):
        raise DeclarationError(f"{where}: a space inside a name; put ',' (AND) or '|' (OR) between two features")
    if "&" in word or ";" in word:
        raise DeclarationError(f"{where}: write ',' for AND")
    if word != word.lower():
        raise DeclarationError(f"{where}: names are lower case; write {suggestion(word) or word.lower()!r}")
    raise DeclarationError(f"{where}: a feature name holds lower-case letters, digits, '.', '-' and '_'")
