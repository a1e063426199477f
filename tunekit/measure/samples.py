# SPDX-License-Identifier: Apache-2.0
"""Gates and regimes from input samples alone: the whole chain for a family that brings nothing but arguments.

The decorated Python body says what is right. Each sample is run twice by each row, its arrays lying with their ends
and then with their beginnings against a page that nobody may touch, so that one element too many kills the child and
rejects the row. Outputs are poisoned with one pattern in the first run and another in the second; what a function
declares as ``Out`` and does not write shows, and so does what it reads of it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit import dispatch
from tunekit.errors import GateError
from tunekit.kernel import Kernel
from tunekit.measure.fixtures import EVERYTHING, GateCase, Regime, Sample
from tunekit.signature import Signature, check_call

_POISON = (0xA5, 0x5B)
_NO_ACCESS = 0  # PROT_NONE


def guarded(array: NDArray[Any], end: bool) -> NDArray[Any]:
    """A copy with a page before and a page after it that fault when they are touched.

    Args:
        array: what to copy; its shape and dtype stay.
        end: whether its last byte, or else its first, lies against the page.

    Where pages cannot be protected (no ``mprotect``), it is an ordinary copy.
    """
    page = mmap.PAGESIZE
    room = max(-(-array.nbytes // page), 1) * page
    memory = mmap.mmap(-1, room + 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    start = whole.__array_interface__["data"][0]
    try:
        protect = ctypes.CDLL(None, use_errno=True).mprotect
    except (OSError, AttributeError):
        return array.copy()
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for edge in (start, start + page + room):
        protect(edge, page, _NO_ACCESS)
    at = page + (room - array.nbytes if end else 0)
    copy = whole[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _aligned(array: NDArray[Any], number: int) -> NDArray[Any]:
    """A copy for timing, on a 64-byte boundary, the arrays of a call a few lines apart modulo a page."""
    stagger = 64 * (1 + 5 * number)
    raw = np.empty(array.nbytes + 4096 + stagger, np.uint8)
    start = -raw.__array_interface__["data"][0] % 4096 + stagger
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _differs(name: str, got: Any, want: Any, sample: Sample) -> str | None:
    """What is wrong with a result, or None."""
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype.kind != "f":
        good = got == want
    elif sample.rtol or sample.atol:
        good = np.isclose(got, want, rtol=sample.rtol, atol=sample.atol, equal_nan=True)
    else:
        bits = np.dtype(f"u{got.dtype.itemsize}")
        same = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want.astype(got.dtype)).view(bits)
        good = same | (np.isnan(got) & np.isnan(want))
    if np.all(good):
        return None
    flat = np.ravel(~np.asarray(good))
    first = int(np.argmax(flat))
    count = f" ({int(flat.sum())} of {flat.size} differ)" if flat.size > 1 else ""
    place = f"{name}[{first}]" if flat.size > 1 or got.ndim else name
    return f"{place} is {np.ravel(got)[first]!r}, the reference says {np.ravel(want)[first]!r}{count}"


@dataclass(frozen=True)
class _Checked:
    """A sample that fits its function."""

    kernel: Kernel
    sample: Sample
    function: str
    signature: Signature
    arguments: tuple[Any, ...]

    @functools.cached_property
    def expected(self) -> tuple[Any, tuple[Any, ...]]:
        """What the Python body returns and leaves in its arguments."""
        copies = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in self.arguments)
        result = dispatch.functions_of(self.kernel)[self.function].__wrapped__(*copies)
        return result, copies

    def gate(self, row: Any) -> str | None:
        result, after = self.expected
        for end, poison in zip((True, False), _POISON, strict=True):
            given = []
            for p, value in zip(self.signature.parameters, self.arguments, strict=True):
                copy = guarded(value, end) if p.is_pointer else value
                if p.direction == "Out":
                    copy.view(np.uint8)[...] = poison
                given.append(copy)
            got = row.call(self.function, *given)
            side = "ends at" if end else "begins at"
            if self.signature.returns is not None:
                kind = np.dtype(self.signature.returns.dtype).type
                reason = _differs("the returned value", kind(got), kind(result), self.sample)
                if reason is not None:
                    return reason
            for p, copy, want in zip(self.signature.parameters, given, after, strict=True):
                if p.is_pointer:
                    exact = self.sample if p.writes else Sample("input", ())
                    reason = _differs(p.name, copy, want, exact)
                    if reason is not None:
                        return f"{reason} (each array {side} a guard page)"
        return None

    def prepare(self, row: Any) -> Callable[[], None]:
        copies = [_aligned(a, i) if isinstance(a, np.ndarray) else a for i, a in enumerate(self.arguments)]
        made: Callable[[], None] = row.ready(self.function, *copies)
        return made


def _check(kernel: Kernel, sample: Any, where: str) -> _Checked:
    if not isinstance(sample, Sample):
        raise GateError(
            f"{where} gives {type(sample).__name__}; it must name a list of tunekit.measure.fixtures.Sample, or an "
            f"object with gates() and regimes()"
        )
    function = sample.function or kernel.name
    signature = dict(kernel.functions).get(function)
    if signature is None:
        raise GateError(
            f"{where}, sample {sample.name!r}: the kernel has no function {function!r}; it has "
            f"{', '.join(name for name, _ in kernel.functions)}"
        )
    try:
        arguments = tuple(check_call(f"sample {sample.name!r}", signature, sample.arguments))
    except (TypeError, ValueError) as error:
        raise GateError(f"{where}: {error}") from error
    return _Checked(kernel, sample, function, signature, arguments)


@dataclass(frozen=True)
class SampledFixtures:
    """Fixtures made from samples."""

    checked: tuple[_Checked, ...]

    def gates(self) -> list[GateCase]:
        """One a sample, smallest operands first."""
        order = sorted(self.checked, key=lambda c: sum(getattr(a, "nbytes", 0) for a in c.arguments))
        return [GateCase(f"sample {c.sample.name}", c.gate) for c in order]

    def regimes(self) -> list[Regime]:
        """One a sample with ``work``; the first decides where none says what it does."""
        timed = [c for c in self.checked if c.sample.work]
        chosen = any(c.sample.decides == EVERYTHING for c in timed)
        found = []
        for c in timed:
            decides = c.sample.decides
            if decides is None:
                decides = () if chosen else EVERYTHING
                chosen = True
            found.append(Regime(c.sample.name, c.sample.work, c.sample.unit, decides, c.prepare))
        return found


def fixtures_from(kernel: Kernel, samples: Sequence[Any], where: str) -> SampledFixtures:
    """Gates and regimes of a kernel from its samples.

    Args:
        kernel: the declaration.
        samples: what its ``fixtures=`` names.
        where: how errors name that.

    Raises:
        GateError: something else than samples, arguments that do not fit, two of one name, or none that is timed.
    """
    checked = tuple(_check(kernel, sample, where) for sample in samples)
    names = [c.sample.name for c in checked]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise GateError(f"{where}: two samples are called {twice[0]!r}; rename one")
    if not any(c.sample.work for c in checked):
        raise GateError(f"{where}: no sample has work=, so nothing can be timed; give it to a large one")
    return SampledFixtures(checked)
