# SPDX-License-Identifier: Apache-2.0
"""Every ``TUNEKIT_*`` environment variable, read once, in this one place; and the environment that a child gets.

``VARIABLES`` is the table behind the documentation (``docs/environment.md``) and behind the parser. An unknown
value is a :class:`~tunekit.errors.SettingError` that names the legal ones; an empty value means "not set",
except for ``TUNEKIT_MANIFEST``, where it means "no manifest".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import SettingError

MODES = ("normal", "tune", "test")
POLICIES = ("fallback", "warn", "error", "auto", "restart", "reference")
BUILDS = ("fat", "grid", "reference-only", "standalone", "none")
STRICT = ("compiler", "features", "manifest")
LOGS = ("choice", "build", "tune", "profile")
RAIL = ("tuner", "again")


@dataclass(frozen=True)
class Settings:
    """The environment as tunekit understood it. Immutable; see :func:`settings`."""

    mode: str = "normal"
    manifest: str | None = None
    policy: str | None = None
    home: str | None = None
    cache: str | None = None
    force_features: frozenset[str] = frozenset()
    disable_features: frozenset[str] = frozenset()
    pin: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    box_profile: str | None = None
    team_prof: bool = False
    log: frozenset[str] = frozenset()
    build: str = "fat"
    strict: frozenset[str] = frozenset()
    rail: frozenset[str] = frozenset()

    def pinned(self, kernel: str) -> str | None:
        """The suffix that ``TUNEKIT_PIN`` names for a kernel, or None."""
        return dict(self.pin).get(kernel)


def _choice(legal: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in legal:
            raise SettingError(f"{name}={text!r} is not legal; it takes one of: {', '.join(legal)}")
        return text

    return parse


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _subset(legal: tuple[str, ...]) -> Callable[[str, str], frozenset[str]]:
    def parse(name: str, text: str) -> frozenset[str]:
        names = _names(text)
        for part in names:
            if part not in legal:
                raise SettingError(
                    f"{name}={text!r}: {part!r} is not legal; it takes a comma list of: {', '.join(legal)}"
                )
        return frozenset(names)

    return parse


def _features(name: str, text: str) -> frozenset[str]:
    del name
    return frozenset(part.lower() for part in _names(text))


def _pin(name: str, text: str) -> tuple[tuple[str, str], ...]:
    pins: dict[str, str] = {}
    for part in _names(text):
        kernel, sign, suffix = part.partition("=")
        if not sign or not kernel.strip() or not suffix.strip():
            raise SettingError(
                f"{name}={text!r}: {part!r} is not of the form kernel=suffix (several: comma between them)"
            )
        pins[kernel.strip()] = suffix.strip()
    return tuple(sorted(pins.items()))


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise SettingError(f"{name}={text!r} is not legal; it takes a whole number of at least 1")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise SettingError(f"{name}={text!r} is not legal; it takes 0 or 1")
    return text == "1"


def _text(name: str, text: str) -> str:
    del name
    return text


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the field it fills, how it is parsed, and what it means."""

    name: str
    field: str
    parse: Callable[[str, str], Any]
    values: str
    meaning: str
    keeps_empty: bool = False


# fmt: off
VARIABLES: tuple[Variable, ...] = (
    Variable("TUNEKIT_MODE", "mode", _choice(MODES), "`normal`, `tune`, `test`",
             "`normal` runs one chosen row per kernel; `tune` and `test` expose the whole grid"),
    Variable("TUNEKIT_MANIFEST", "manifest", _text, "a file; empty = no manifest",
             "the one manifest to read and write, for every scope", keeps_empty=True),
    Variable("TUNEKIT_POLICY", "policy", _choice(POLICIES), ", ".join(f"`{p}`" for p in POLICIES),
             "overrides the policy that an application declares; `reference` runs reference bodies everywhere"),
    Variable("TUNEKIT_HOME", "home", _text, "a folder",
             "root of the manifests instead of the user's state directory"),
    Variable("TUNEKIT_CACHE", "cache", _text, "a folder",
             "root of built objects and modules instead of the user's cache directory"),
    Variable("TUNEKIT_FORCE_FEATURES", "force_features", _features, "comma list of feature names",
             "adds names for planning, rendering and cross-compiling only; never makes the dispatcher call such code"),
    Variable("TUNEKIT_DISABLE_FEATURES", "disable_features", _features, "comma list of feature names",
             "removes names (and what builds on them) everywhere, in every path alike"),
    Variable("TUNEKIT_PIN", "pin", _pin, "comma list of `kernel=suffix`",
             "pins a kernel's row; still refused where the CPU cannot run it"),
    Variable("TUNEKIT_THREADS", "threads", _count, "a number of at least 1",
             "upper bound on the lanes that a product uses, the calling thread among them"),
    Variable("TUNEKIT_BOX_PROFILE", "box_profile", _text, "a file",
             "the box profile to read instead of the one beside the manifests"),
    Variable("TUNEKIT_TEAM_PROF", "team_prof", _switch, "`0`, `1`",
             "counts what the thread team does (`tunekit.team.counts()`), and prints a line about it at exit"),
    Variable("TUNEKIT_LOG", "log", _subset(LOGS), "comma list of `choice`, `build`, `tune`, `profile`",
             "writes these log lines to stderr, one self-described line per decision"),
    Variable("TUNEKIT_BUILD", "build", _choice(BUILDS), ", ".join(f"`{b}`" for b in BUILDS),
             "what `pip install` builds: the fallback rows (`fat`), every row (`grid`), only references, or nothing"),
    Variable("TUNEKIT_STRICT", "strict", _subset(STRICT), "comma list of `compiler`, `features`, `manifest`",
             "turns a missing compiler or a row that an install cannot compile, an unknown feature name, or an "
             "unusable manifest into an error"),
    Variable("TUNEKIT_RAIL", "rail", _subset(RAIL), "`tuner`, `again`",
             "set by the policy rail for the processes that it starts: a tuner never tunes itself, and a process tree "
             "starts again once at most; leave it alone"),
)
# fmt: on


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Parse an environment into :class:`Settings`; raises :class:`SettingError`. Pure."""
    fields: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name)
        if text is None or (text == "" and not variable.keeps_empty):
            continue
        fields[variable.field] = variable.parse(variable.name, text)
    return Settings(**fields)


_settings: Settings | None = None


def settings() -> Settings:
    """The process's settings, read from ``os.environ`` at the first call and fixed from then on."""
    global _settings
    if _settings is None:
        _settings = read_settings(os.environ)
    return _settings


def for_child() -> dict[str, str]:
    """The environment of a child: it must import the very modules that this process did, wherever they were found."""
    path = [str(Path(entry).absolute()) for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def environment_table() -> str:
    """The variables as a Markdown table (the source of ``docs/environment.md``)."""
    lines = ["| variable | values | meaning |", "|---|---|---|"]
    lines += [f"| `{v.name}` | {v.values} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(lines) + "\n"
