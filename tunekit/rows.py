# SPDX-License-Identifier: Apache-2.0
"""Rows of a grid and their names.

A row's name is derived from its arguments in the order written: ``perm(kstep=2, dot="maddubs", pipe=True, k=0.5)``
is ``kstep2_dot_maddubs_pipe_k0d5`` (false: ``nopipe``). :func:`parse_suffix` reads a name back into arguments;
every derived name of a grid must come back unchanged, or the declaration is refused. A row's identity is its
parsed arguments and never a prefix of its name: ``kstep2_gkstep2_bias128`` starts with ``kstep2_gkstep2``, which
is another row on another weight plane.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunekit.errors import DeclarationError

Value = bool | int | float | str

REFERENCE = "reference"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SUFFIX = re.compile(r"[A-Za-z0-9_]+\Z")
_COMPILER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*\Z")


def _token(name: str, value: Value) -> str:
    if value is True:
        return name
    if value is False:
        return "no" + name
    if isinstance(value, str):
        return f"{name}_{value}"
    if isinstance(value, float):
        return name + repr(value).replace(".", "d")
    return f"{name}{value}"


def by_compiler(suffix: str, compiler: str) -> str:
    """The name of a row as another compiler than the usual one builds it: ``kstep2@clang``."""
    return f"{suffix}@{compiler}" if compiler else suffix


def is_compiler(name: str) -> bool:
    """Whether a name can be that of a compiler on PATH, and part of a file's name."""
    return _COMPILER.match(name) is not None


def split_name(name: str) -> tuple[str, str]:
    """A row's suffix, and the compiler that the name asks for (empty: the usual one)."""
    suffix, _, compiler = name.partition("@")
    return suffix, compiler


def compilers_in(names: Iterable[str | None]) -> tuple[str, ...]:
    """The compilers that names of rows ask for, each once."""
    found = dict.fromkeys(split_name(name)[1] for name in names if name)
    return tuple(name for name in found if is_compiler(name))


def derive_suffix(args: Sequence[tuple[str, Value]]) -> str:
    """The name of a row with these arguments."""
    return "_".join(_token(name, value) for name, value in args)


@dataclass(frozen=True)
class Row:
    """One point of a grid: arguments for the template, a name, and what it requires.

    Attributes:
        args: (name, value) pairs in the order written.
        suffix: the row's name, derived from ``args`` unless given.
        requires: which features it asks for, in the grammar of :mod:`tunekit.cpu.requires`.
        named: whether the suffix was given rather than derived.
    """

    args: tuple[tuple[str, Value], ...]
    suffix: str
    requires: str = ""
    named: bool = False

    def __getitem__(self, name: str) -> Value:
        return dict(self.args)[name]

    def get(self, name: str, default: Value) -> Value:
        return dict(self.args).get(name, default)

    def without(self, *names: str) -> tuple[tuple[str, Value], ...]:
        """The arguments less those named, sorted: the key under which rows that differ only in these are one."""
        return tuple(sorted((n, v) for n, v in self.args if n not in names))


def perm(*, suffix: str | None = None, requires: str = "", **args: Value) -> Row:
    """Write one row of a grid.

    Args:
        suffix: a name instead of the derived one.
        requires: the features that the row asks for, such as ``"avx2,fma"`` or ``"avxvnni|avx512vnni"``.
        **args: the arguments that the template is rendered with: bool, int, float or str.

    Raises:
        DeclarationError: no arguments and no suffix, the reserved suffix, a value of another type, or a name
            that C cannot spell.
    """
    shown = suffix or ", ".join(f"{k}={v!r}" for k, v in args.items()) or "perm()"
    if not args and not suffix:
        raise DeclarationError("row perm(): it has neither arguments nor a suffix; give it one of them")
    for name, value in args.items():
        if not isinstance(value, (bool, int, float, str)):
            raise DeclarationError(
                f"row {shown}: argument {name} is a {type(value).__name__}; rows take bool, int, float and str"
            )
    if not isinstance(requires, str):
        raise DeclarationError(f"row {shown}: requires must be text such as 'avx2,fma', not {type(requires).__name__}")
    pairs = tuple(args.items())
    text = derive_suffix(pairs) if suffix is None else suffix
    if text == REFERENCE:
        raise DeclarationError(f"row {shown}: the suffix {REFERENCE!r} is reserved for the reference; choose another")
    if not _SUFFIX.match(text) or "__" in text:
        raise DeclarationError(
            f"row {shown}: the suffix {text!r} cannot be part of a C name (letters, digits and single underscores); "
            f"give the row suffix='...'"
        )
    return Row(pairs, text, requires, suffix is not None)


def _matches(text: str, name: str, examples: frozenset[Value]) -> Iterator[tuple[Value, str]]:
    """Ways in which ``text`` starts with a token of ``name``: (value, what is left)."""
    kinds = {type(example) for example in examples}
    found: list[tuple[Value, int]] = []
    if bool in kinds:
        found += [(True, len(name))] if text.startswith(name) else []
        found += [(False, len(name) + 2)] if text.startswith("no" + name) else []
    if text.startswith(name):
        rest = text[len(name) :]
        if int in kinds and (match := re.match(r"\d+(?![0-9d])", rest)):
            found.append((int(match.group()), len(name) + match.end()))
        if float in kinds and (match := re.match(r"(\d+)d(\d+)", rest)):
            found.append((float(match.group().replace("d", ".")), len(name) + match.end()))
        # A string value may hold underscores, so only the values that the grid uses are recognised.
        for example in examples:
            if isinstance(example, str) and rest.startswith("_" + example):
                found.append((example, len(name) + 1 + len(example)))
    for value, end in found:
        if end == len(text):
            yield value, ""
        elif text[end] == "_" and end + 1 < len(text):
            yield value, text[end + 1 :]


def vocabulary_of(rows: Sequence[Row]) -> dict[str, frozenset[Value]]:
    """The argument names of a grid, each with the values that its rows use."""
    values: dict[str, set[Value]] = {}
    for row in rows:
        for name, value in row.args:
            values.setdefault(name, set()).add(value)
    return {name: frozenset(found) for name, found in values.items()}


def parse_suffix(suffix: str, vocabulary: Mapping[str, frozenset[Value]]) -> tuple[tuple[str, Value], ...]:
    """Read a derived name back into arguments, in the order written.

    Args:
        suffix: the name, such as ``dot_maddubs_width256_mr8_kstep2``.
        vocabulary: the grid's argument names and values, from :func:`vocabulary_of`.

    Raises:
        ValueError: the name cannot be read with this vocabulary, or can be read in two ways.
    """

    def walk(text: str, used: frozenset[str]) -> Iterator[tuple[tuple[str, Value], ...]]:
        if not text:
            yield ()
            return
        for name, examples in vocabulary.items():
            if name not in used:
                for value, rest in _matches(text, name, examples):
                    for tail in walk(rest, used | {name}):
                        yield ((name, value), *tail)

    readings = list(dict.fromkeys(walk(suffix, frozenset()))) if suffix else []
    if not readings:
        raise ValueError(f"{suffix!r} is not made of the arguments {', '.join(vocabulary)}")
    if len(readings) > 1:
        raise ValueError(f"{suffix!r} can be read in {len(readings)} ways: {readings[0]} or {readings[1]}")
    return readings[0]


def check_grid(where: str, rows: Sequence[Row]) -> None:
    """Refuse duplicate names, and derived names that do not read back. Raises DeclarationError."""
    seen: set[str] = set()
    vocabulary = vocabulary_of(rows)
    for name in vocabulary:
        if not _NAME.match(name):
            raise DeclarationError(f"{where}: row argument {name!r} is not a name")
    for row in rows:
        if row.suffix in seen:
            raise DeclarationError(
                f"{where}: row {row.suffix!r} appears twice; change an argument or give one a suffix"
            )
        seen.add(row.suffix)
        if row.named:
            continue
        try:
            back = parse_suffix(row.suffix, vocabulary)
        except ValueError as error:
            raise DeclarationError(
                f"{where}: row {row.suffix!r}: its name does not read back ({error}); give it a suffix"
            ) from None
        if back != row.args:
            raise DeclarationError(
                f"{where}: row {row.suffix!r}: its name reads back as {dict(back)}; give it a suffix"
            )
