# SPDX-License-Identifier: Apache-2.0
"""The cut-down model of examples/q8llama on row after row, of the products and of the model's own kernels.

``q8llama_rows.py MODEL``, in a process of its own, goes through the objects that this CPU cannot run: AVX-512 and
AVX-VNNI run in the machine, the rest is trapped. Prints a JSON object: the object's name to what ran, how, and the
digest of its logits, or to why there is no such object. :func:`native` goes through the rows that it can run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulate
import small
from emulate import machine
from q8llama import kernels as own

from tunekit import dispatch, linking
from tunekit.q8 import capi, kernels, product

PRODUCTS = kernels.q8q8.kernel
KERNELS = (PRODUCTS, own.attend.kernel, own.swiglu.kernel)
_tables: list[Any] = []  # which C has had pointers to


def objects() -> Iterator[tuple[str, Any]]:
    """Name and object of what can be emitted for this architecture and is not for this CPU, or why it was not built."""
    for kernel in KERNELS:
        for row in kernel.rows:
            for features in (kernel.targets(row) or ((),)) if kernel.refuses(row, "x86_64") is None else ():
                name = f"{kernel.name}={row.suffix} ({','.join(features)})"
                try:
                    bound = emulate.bind(kernel, row.suffix, features, emulate.EMULATED | machine.FEATURES)
                except LookupError as error:
                    yield name, str(error)
                else:
                    if not bound.built.needs <= emulate.own():
                        yield name, bound


def _forget_tables() -> None:
    """The next model asks for its pointers anew."""
    capi._made.clear()
    _tables.append(linking._tables.pop(own.__name__, None))


@contextlib.contextmanager
def chosen(bound: Any) -> Iterator[None]:
    """The object is what models run: below the dispatcher, which would refuse it."""
    key, native, usual = bound.kernel.key, product.native, dispatch.bind(bound.kernel)
    if bound.kernel is PRODUCTS:
        made = product.bind(bound)
        product.native = lambda: made
    choice = dataclasses.replace(usual.choice, suffix=bound.suffix)
    dispatch._bindings[key] = dataclasses.replace(usual, choice=choice, bound=bound)
    _forget_tables()
    try:
        yield
    finally:
        product.native = native
        dispatch._bindings[key] = usual
        _forget_tables()


def native(path: Path) -> dict[str, Any]:
    """What ran and its digest, for every row that runs here by itself."""
    found = {}
    for kernel in KERNELS:
        for suffix, bound in dispatch.grid_rows(kernel).items():
            with chosen(bound):
                found[f"{kernel.name}={suffix}"] = small.digest(path)
    return found


def emulated(path: Path, bound: Any) -> dict[str, Any]:
    """The model on the object, all else as it is chosen here."""
    by_trap = bound.built.needs <= emulate.own() | emulate.EMULATED
    inside = not by_trap or bound.built.needs <= emulate.own() | machine.FEATURES
    # A trap for every 32 products: a part of the second pass is enough.
    cuts = small.CUTS if inside or "amx-tile" in bound.built.needs else small.CUTS[:5]
    before = machine.calls()
    with emulate.trapping() as trap, chosen(machine.within(bound) if inside else bound):
        trapped = trap.retired()
        said = small.digest(path, cuts=cuts)
        trapped = trap.retired() - trapped
    said |= {"trapped": sum(trapped.values()), "calls": machine.calls() - before, "fault": str(machine.fault() or "")}
    return said


if __name__ == "__main__":
    found = {}
    for name, bound in objects():
        found[name] = {"missing": bound} if isinstance(bound, str) else emulated(Path(sys.argv[1]), bound)
    print(json.dumps(found))
