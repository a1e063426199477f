# SPDX-License-Identifier: Apache-2.0
"""What the tests of emulated rows share: which gates they run, known mistakes put back in, what to do without a tool."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any, NoReturn

import pytest
from conftest import lacking

import emulate
from emulate import machine
from tunekit.q8 import kernels
from tunekit.rows import Row

KERNEL = kernels.q8q8.kernel

Object = tuple[Row, tuple[str, ...]]


UNKNOWN = re.compile(r"unrecognized command|unknown (target|argument|use)|no such instruction")
"""What compilers and assemblers say of an instruction that is younger than they are."""


def not_made(reason: str) -> NoReturn:
    """A row or a mutant that there is no object of: only a compiler that cannot know its instruction excuses that."""
    if UNKNOWN.search(reason):
        pytest.skip(reason)
    lacking(reason)


def name_of(item: Object) -> str:
    """An object's name in test ids."""
    return f"{item[0].suffix}-{item[1][-1]}" if item[0]["dot"] == "vpdpbusd" else item[0].suffix


def bind(item: Object) -> Any:
    """The object, so that every part of it runs here: on the CPU or while trapping, else in the machine."""
    row, features = item
    try:
        bound = emulate.bind(KERNEL, row.suffix, features, emulate.EMULATED | machine.FEATURES)
    except LookupError as error:
        not_made(str(error))
    if bound.built.needs <= emulate.own() | emulate.EMULATED:
        return bound
    if reason := machine.why_not():
        lacking(reason)
    return machine.within(bound)


def failures(bound: Any, gates: list[Any]) -> list[str]:
    """The reasons of the gates that a row does not pass."""
    return [f"{gate.name}: {reason}" for gate in gates if (reason := machine.guarded(gate.run, bound))]


def mutant(item: Object, old: str | re.Pattern[str], new: str, bound: Any) -> Any:
    """The row compiled from changed C, its functions in place of those of a bound one, none of them in the machine."""
    from tunekit.build_tools.plan import row_jobs
    from tunekit.build_tools.render import render

    row, features = item
    jobs = row_jobs(KERNEL, row, "x86_64")
    assert not isinstance(jobs, str)
    job = next(job for job in jobs if set(features) == set(job.features))
    text = render(KERNEL, row, "x86_64", job.alternative, job.features)
    text, changes = re.subn(re.escape(old) if isinstance(old, str) else old, new, text)
    assert changes, f"nothing to change: {old}"
    optional = re.findall(r"tunekit-optional-flag: (\S+)", text)
    for flags in (job.flags, [flag for flag in job.flags if flag not in optional]):
        try:
            library = emulate.compile_c(text, "mutant", *flags, "-O1", "-fvisibility=default")
            break
        except RuntimeError as error:
            problem = str(error)
    else:
        not_made(f"not compiled here: {problem}")
    symbols = [KERNEL.symbol(name, row.suffix, job.alternative) for name, _ in KERNEL.functions]
    addresses = tuple(int(ctypes.cast(getattr(library, s), ctypes.c_void_p).value or 0) for s in symbols)
    return dataclasses.replace(bound, built=dataclasses.replace(bound.built, addresses=addresses)), library
