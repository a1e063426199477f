# SPDX-License-Identifier: Apache-2.0
"""The errors of tunekit.

One base, :class:`TunekitError`, with a leaf for each thing that a caller can do something about. A message
says what is wrong, where, and what mends it; where a command mends it, the message carries that command.
Bad arrays are not here: they raise the builtins that NumPy users expect (``TypeError``, ``ValueError``).
"""

from __future__ import annotations

from collections.abc import Sequence


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an exception's own __str__ may raise, and even exit
        text = ""
    if len(text) > 1000:
        text = text[:1000] + " ..."
    return text


def told(error: BaseException) -> str:
    """Somebody else's exception in words: ``ValueError: no such thing``; the type alone where it cannot say more."""
    text = _said(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TunekitError(Exception):
    """Base of every error that tunekit raises on purpose."""


def in_words(error: BaseException) -> str:
    """An exception as one line of a reason: its own words where they are for a reader, else as :func:`told`.

    A :class:`TunekitError`, ``ValueError`` or ``OSError`` says what is wrong; of others the type is half of it.
    """
    plain = isinstance(error, (TunekitError, ValueError, OSError))
    return " ".join(((plain and _said(error)) or told(error)).split())


class SettingError(TunekitError, ValueError):
    """An environment variable ``TUNEKIT_*`` holds a value that is not legal; the message names the legal ones."""


class DeclarationError(TunekitError):
    """A kernel, row, companion or scope is declared wrongly. Raised when the declaring module is imported."""


class TemplateError(TunekitError):
    """A template cannot be found or rendered; names the template and the row."""


class ToolchainError(TunekitError):
    """No compiler, or a compiler or linker that failed where the build cannot go on.

    Attributes:
        command: the argument list that was run (empty when nothing was run).
        status: its exit status, or None.
        output: what it printed.
    """

    def __init__(
        self,
        message: str,
        command: Sequence[str] = (),
        status: int | None = None,
        output: str = "",
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.status = status
        self.output = output

    def __str__(self) -> str:
        text = super().__str__()
        if self.command:
            text += f"\n  command: {' '.join(self.command)}\n  status:  {self.status}"
        if self.output:
            text += "\n" + "\n".join("  | " + line for line in self.output.splitlines()[:40])
        return text


class ManifestError(TunekitError):
    """A manifest cannot be used or written."""


class StaleManifest(ManifestError):
    """A manifest's record names another grid, template or toolchain."""


class ForeignManifest(ManifestError):
    """A manifest's record names another box."""


class MalformedManifest(ManifestError):
    """A manifest is empty, torn, or not a flat JSON object of kernel to suffix."""


class GateError(TunekitError):
    """A row failed a check that it must pass before it may be timed or chosen."""


class FamilyError(GateError):
    """A family's own code cannot be used to tune it: what it raised, or how it ended the process that loaded it."""


class ChoiceError(TunekitError):
    """An attempt to change a choice that is already in use, or a pin that cannot be honoured."""


class PolicyError(TunekitError):
    """A policy stops the application: a scope's manifest is missing."""


class AbiError(TunekitError, ImportError):
    """A generated module does not fit this tunekit; the message names the differing field."""


class DamagedModule(AbiError):
    """A generated module's file cannot be loaded: cut short, of another architecture, or an unresolved symbol."""


class TunekitWarning(UserWarning):
    """Something that an operator should know, said once per process; nothing stops."""
