# SPDX-License-Identifier: Apache-2.0
"""A declared family as measuring needs it: its fixtures, its rows in a child, its chains in an arm, its digests."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from tunekit import dispatch
from tunekit.errors import GateError, TunekitError, told
from tunekit.kernel import Kernel
from tunekit.measure import samples
from tunekit.measure.fixtures import EVERYTHING, BoundRow, Chain, ConfirmFixtures, Fixtures, Part
from tunekit.rows import REFERENCE, Row, by_compiler

OWN_REGIMES = "its own regimes"
"""The chain of a family that declares none: one pass of every regime that chooses, on all lanes."""


class NoFixtures(TunekitError):
    """A kernel declares no ``fixtures=``: it is meant to be chosen by hand, and to tune it is no failure."""


def fixtures_of(kernel: Kernel) -> Fixtures:
    """What ``fixtures="module:attribute"`` of a declaration names; samples as gates and regimes.

    Raises:
        NoFixtures: it names nothing.
        GateError: what it names cannot be found, raises, or is neither fixtures nor samples.
    """
    if not kernel.fixtures:
        raise NoFixtures(f"kernel {kernel.key} declares no fixtures=, so its rows can be neither checked nor timed")
    module, _, attribute = kernel.fixtures.partition(":")
    where = f"kernel {kernel.key}: fixtures={kernel.fixtures!r}"
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        if (callable(found) and not hasattr(found, "gates")) or isinstance(found, type):
            found = found()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an author's own code, which may even exit
        raise GateError(f"{where} raised {told(error)}") from error
    if isinstance(found, Fixtures):
        return found
    try:
        listed = list(found)
    except TypeError:
        listed = [found]
    return samples.fixtures_from(kernel, listed, where)


# --- in children -----------------------------------------------------------------------------------------


def pair_name(row: str, seats: Mapping[str, str]) -> str:
    """How a child is asked for a row with other rows in its seats: ``row+seat=other``."""
    return "+".join([row, *(f"{seat}={other}" for seat, other in seats.items())])


def load_rows(module: str, scope: str, name: str, *pairs: str) -> tuple[Mapping[str, BoundRow], Fixtures]:
    """The rows and fixtures of a kernel, in the child process that checks them; ``pairs`` as :func:`pair_name` says.

    Rows of a compiler other than the usual one are there where ``pairs`` has its ``@name``.
    """
    kernel = _find(module, scope, name)
    compilers = [word.removeprefix("@") for word in pairs if word.startswith("@")]
    rows: dict[str, Any] = dict(dispatch.grid_rows(kernel, compilers))
    for pair in (word for word in pairs if not word.startswith("@")):
        row, *seats = pair.split("+")
        own = dict(seat.split("=", 1) for seat in seats)
        rows[pair] = dispatch.seated(rows[row], {seat: rows[other] for seat, other in own.items()})
    return rows, fixtures_of(kernel)


def load_chain(
    module: str, scope: str, name: str, chain: str, model: str = ""
) -> tuple[Chain, Callable[[], dict[str, Any] | None]]:
    """A chain of a kernel and the witness of what ran, in the process that is one arm of a confirmation."""
    kernel = _find(module, scope, name)
    found = next((c for c in chains_of(kernel, fixtures_of(kernel), model or None) if c.name == chain), None)
    if found is None:
        raise TunekitError(f"kernel {kernel.key} has no chain {chain!r} here")

    def witness() -> dict[str, Any] | None:
        if kernel.key not in dispatch.used():
            return None
        choice = dispatch.peek(kernel).choice
        seats = {seat: own.name for seat, own in choice.seats.items()}
        return {"row": choice.name, "tier": choice.tier, "seats": seats}

    return found, witness


def _find(module: str, scope: str, name: str) -> Kernel:
    importlib.import_module(module)
    kernel = next((k for k in dispatch.kernels(scope) if k.name == name), None)
    if kernel is None:
        raise TunekitError(f"module {module} declares no kernel {name!r} in scope {scope!r}")
    return kernel


# --- chains ----------------------------------------------------------------------------------------------


def chains_of(kernel: Kernel, fixtures: Fixtures, model: str | None) -> list[Chain]:
    """What a kernel's winner is confirmed on: the family's chains, or one of its own regimes.

    Raises:
        ValueError: the family cannot read the model.
        GateError: its ``confirm`` returns no chains.

    What else the family's code raises is passed on.
    """
    if isinstance(fixtures, ConfirmFixtures):
        return _chains(fixtures.confirm(model), kernel)
    regimes = [regime for regime in fixtures.regimes() if regime.chooses]

    def prepare() -> Callable[[str], int]:
        bound = dispatch.functions_of(kernel)[kernel.name].bound()
        if bound is None:
            raise GateError(f"{kernel.key} has no native code in this process")
        calls = {regime.name: regime.prepare(bound) for regime in regimes}
        # As many calls as fill a window, else a part would measure how a process looks at its clock.
        count = {name: _calls(call) for name, call in calls.items()}

        def run(part: str) -> int:
            call = calls[part]
            for _ in range(count[part]):
                call()
            return count[part]

        return run

    def decides(regime: Any) -> tuple[str, ...]:
        return (*((EVERYTHING,) if regime.decides else ()), *((regime.seat,) if regime.seat else ()))

    parts = tuple(Part(regime.name, regime.work, decides(regime)) for regime in regimes)
    return [Chain(OWN_REGIMES, parts, prepare, regimes[0].unit)]


def _chains(found: Any, kernel: Kernel) -> list[Chain]:
    """What a family's ``confirm`` returned, looked at. Raises GateError."""
    where = f"kernel {kernel.key}: confirm(model)"
    try:
        chains = list(found)
    except TypeError:
        raise GateError(f"{where} returned {found!r:.60}; it must return a list of Chain") from None
    for chain in chains:
        if not isinstance(chain, Chain):
            raise GateError(f"{where} returned {chain!r:.60} in its list; it must return a list of Chain")
        parts = chain.parts if isinstance(chain.parts, (tuple, list)) else ()
        if not parts or not all(isinstance(part, Part) for part in parts) or not callable(chain.prepare):
            raise GateError(f"{where}: chain {chain.name!r:.60} needs a tuple of at least one Part, and prepare=")
        names = [part.name for part in parts]
        if len(set(names)) < len(names):
            raise GateError(f"{where}: chain {chain.name!r:.60} has two parts of one name")
    names = [chain.name for chain in chains]
    if len(set(names)) < len(names):
        raise GateError(f"{where} returned two chains of one name")
    return chains


def _calls(call: Callable[[], None]) -> int:
    """How many calls take a fifth of a second."""
    import time

    call()
    start = time.perf_counter()
    call()
    return max(1, min(1 << 16, int(0.2 / max(time.perf_counter() - start, 1e-6))))


# --- what a journal depends on ---------------------------------------------------------------------------


def row_digests(kernel: Kernel, compilers: Mapping[str, str] | None = None) -> dict[str, str]:
    """A digest of each row's own part of the declaration, the reference's among them.

    Args:
        kernel: the declaration.
        compilers: version lines of others than the usual one, by name: of their rows there are digests, too.
    """

    def digest(row: Row | None) -> str:
        data: Any = None
        if row is not None:
            data = [list(row.args), row.requires, kernel.targets(row), list(kernel.inside(row))]
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]

    own = {row.suffix: digest(row) for row in kernel.rows}
    made = {
        by_compiler(suffix, name): f"{found} {label}"
        for name, label in (compilers or {}).items()
        for suffix, found in own.items()
    }
    return {REFERENCE: digest(None), **own, **made}


def declaration_digest(kernel: Kernel) -> str:
    """A digest of the declaration but its rows, and of the file that its fixtures lie in."""
    data: list[Any] = [
        [[name, signature.describe()] for name, signature in kernel.functions],
        dict(kernel.defaults),
        list(kernel.cflags),
        [kernel.template, kernel.reference, kernel.fixtures, list(kernel.fallback)],
    ]
    module = importlib.import_module((kernel.fixtures or "tunekit").partition(":")[0])
    text = b""
    if module.__file__:
        with open(module.__file__, "rb") as file:
            text = file.read()
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode() + text).hexdigest()[:16]
