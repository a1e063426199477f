# SPDX-License-Identifier: Apache-2.0
"""A declared kernel as plain data: what the builder, the dispatcher, the tuner and the docs all read."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunekit.cpu.requires import Requires, parse
from tunekit.rows import REFERENCE, Row, split_name
from tunekit.signature import Signature

ABI = 1
"""Version of the interface between tunekit and the modules it generates."""


@dataclass(frozen=True)
class Target:
    """What a row is to be generated for. ``features`` are those that its code would be compiled with."""

    arch: str
    system: str = "linux"
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Scope:
    """The owner of a manifest: one library, shared by every application on the box.

    Args:
        name: a C identifier in lower case; the manifest is ``<name>.tune.json``.
        tuner: the module that tunes it (``python -m TUNER``), or None for tunekit's own.
    """

    name: str
    tuner: str | None = None


@dataclass(frozen=True)
class Companion:
    """A sibling function that is stamped with the kernel's row, never apart from it.

    Attributes:
        name: the function's name.
        signature: its C signature.
        seat: the companion whose manifest entry, under that one's name, may give both another row of the same layout
            than the kernel's; its own name where the entry is its own, and empty where there is none.
    """

    name: str
    signature: Signature
    seat: str = ""


def _never_declines(row: Row, target: Target) -> str | None:
    return None


def _requires_alternatives(row: Row) -> tuple[tuple[str, ...], ...]:
    return parse(row.requires).alternatives()


def _nothing_inside(row: Row) -> tuple[str, ...]:
    return ()


def _no_layout(row: Row | None) -> str:
    return ""


def _no_context(row: Row | None) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class Kernel:
    """One tuned function with its grid.

    Attributes:
        name: the function's name, the manifest's key.
        scope: who owns its manifest.
        signature: its C signature.
        template: the template of a row; ``tunekit/...`` is ours, else relative to the declaring file.
        reference: the template of the portable C reference, or None.
        rows: the grid, in order.
        defaults: row arguments that a row's name does not spell.
        fallback: suffixes, tried in order when the manifest has no runnable entry.
        companions: the functions stamped with the same row.
        declines: ``(row, target) -> reason`` where no row can be emitted, else None.
        targets: ``row -> alternatives``, each the features that one object of the row is compiled for.
        inside: ``row -> features`` among those of its alternatives that its template switches on itself, for some
            functions of the unit: they count among the object's needs, and are no flags of it.
        context: ``row -> names`` added to the template's context (None for the reference).
        layout: ``row -> name`` of the form that its operands have (None: the reference). Companions with a seat may run
            another row than the kernel's where both have the same; without seats nothing asks.
        cflags: further plain compiler flags of the row's objects.
        fixtures: ``module:attribute`` of the gates and regimes, or None.
        module: name of the declaring module.
        file: its file.
    """

    name: str
    scope: Scope
    signature: Signature
    template: str
    rows: tuple[Row, ...]
    fallback: tuple[str, ...] = ()
    companions: tuple[Companion, ...] = ()
    reference: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    declines: Callable[[Row, Target], str | None] = _never_declines
    targets: Callable[[Row], tuple[tuple[str, ...], ...]] = _requires_alternatives
    inside: Callable[[Row], tuple[str, ...]] = _nothing_inside
    context: Callable[[Row | None], dict[str, Any]] = _no_context
    layout: Callable[[Row | None], str] = _no_layout
    cflags: tuple[str, ...] = ()
    fixtures: str | None = None
    module: str = ""
    file: str = ""

    @functools.cached_property
    def key(self) -> str:
        """``scope.kernel``: unique in a process."""
        return f"{self.scope.name}.{self.name}"

    @property
    def functions(self) -> tuple[tuple[str, Signature], ...]:
        """The kernel and its companions, in the order of a module's function tables."""
        return ((self.name, self.signature), *((c.name, c.signature) for c in self.companions))

    @property
    def seats(self) -> tuple[str, ...]:
        """The companions that may have a manifest entry of their own."""
        return tuple(c.name for c in self.companions if c.seat == c.name)

    def seat_of(self, function: str) -> str:
        """The seat that decides which row a function of the kernel runs; empty where the kernel's own does."""
        return next((c.seat for c in self.companions if c.name == function), "")

    def same_layout(self, a: str, b: str) -> bool:
        """Whether two rows of the grid (or the reference) read the same operands, so that functions of both mix."""
        found = []
        for suffix in (a, b):
            try:
                found.append(self.layout(self.row(suffix)))
            except ValueError:  # a row that no box can have has no layout
                return False
        return found[0] == found[1]

    def row(self, suffix: str) -> Row | None:
        """The row of that name, or None; ``suffix@compiler`` is the row, whoever builds it."""
        wanted, _ = split_name(suffix)
        return next((row for row in self.rows if row.suffix == wanted), None)

    def requires(self, row: Row) -> Requires:
        return parse(row.requires)

    def symbol(self, function: str, suffix: str, alternative: int = 0) -> str:
        """The C symbol of the kernel or a companion for one row (and one of its alternatives)."""
        tail = f"__alt{alternative}" if alternative else ""
        return f"tk_{self.scope.name}_{function}__{suffix}{tail}"

    def full_args(self, row: Row | None) -> dict[str, Any]:
        """What the template is rendered with: defaults, then the row's own arguments."""
        return {**self.defaults, **(dict(row.args) if row else {})}

    def refuses(self, row: Row, arch: str) -> str | None:
        """The first reason why the row cannot be emitted for an architecture, or None."""
        for alternative in self.targets(row) or ((),):
            reason = self.declines(row, Target(arch, features=frozenset(alternative)))
            if reason is None:
                return None
        return reason

    def digest(self) -> str:
        """A hash of everything about the declaration that a built module depends on."""
        data = {
            "abi": ABI,
            "key": self.key,
            "functions": [[name, signature.describe()] for name, signature in self.functions],
            "rows": [[row.suffix, list(row.args), row.requires] for row in self.rows],
            "targets": [[list(alternative) for alternative in self.targets(row)] for row in self.rows],
            "inside": [list(self.inside(row)) for row in self.rows],
            "defaults": dict(self.defaults),
            "cflags": list(self.cflags),
            "templates": [self.template, self.reference],
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def knows(self, suffix: str) -> bool:
        return suffix == REFERENCE or self.row(suffix) is not None
