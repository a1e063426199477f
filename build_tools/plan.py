# SPDX-License-Identifier: Apache-2.0
"""Planning: which objects a module is made of, and why a row is not among them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tunekit.cpu.features import implied
from tunekit.kernel import Kernel
from tunekit.rows import REFERENCE, Row

from .toolchain import baseline_flags, row_flags


@dataclass(frozen=True)
class Job:
    """One object to compile: a row for one alternative, or the portable reference (row None)."""

    kernel: Kernel
    row: Row | None
    alternative: int
    features: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def suffix(self) -> str:
        return self.row.suffix if self.row else REFERENCE

    @property
    def needs(self) -> frozenset[str]:
        """What the object really requires of a CPU: the closure of the features that its flags, or its template for
        functions in it, switch on.

        ``requires`` is not asked: an author may narrow where a row runs, never widen it.
        """
        return implied(self.features)

    @property
    def label(self) -> str:
        several = f" [{','.join(self.features)}]" if self.alternative else ""
        return f"{self.kernel.name} {self.suffix}{several}"


def row_jobs(kernel: Kernel, row: Row, arch: str) -> list[Job] | str:
    """The objects of a row for an architecture, one per alternative, or the reason why it is declined."""
    reason = kernel.refuses(row, arch)
    if reason is not None:
        return reason
    inside = frozenset(kernel.inside(row))
    return [
        Job(
            kernel,
            row,
            index,
            tuple(features),
            (*row_flags(arch, [f for f in features if f not in inside]), *kernel.cflags),
        )
        for index, features in enumerate(kernel.targets(row) or ((),))
    ]


def reference_job(kernel: Kernel, arch: str) -> Job | None:
    """The portable C reference at the architecture's baseline, where the kernel has one."""
    if kernel.reference is None:
        return None
    return Job(kernel, None, 0, (), (*baseline_flags(arch), "-O3", *kernel.cflags))


def plan(
    kernel: Kernel, arch: str, rows: Collection[str] | None, reference: bool = True
) -> tuple[list[Job], dict[str, str]]:
    """The objects to compile, and suffix to reason for each row that is declined.

    Args:
        kernel: the declaration.
        arch: the compiler's architecture. This CPU is not asked: what a module holds never depends on it.
        rows: suffixes, or None for the whole grid.
        reference: whether the C reference belongs in it.
    """
    jobs: list[Job] = []
    declined: dict[str, str] = {}
    first = reference_job(kernel, arch) if reference else None
    if first is not None:
        jobs.append(first)
    for row in kernel.rows:
        if rows is not None and row.suffix not in rows:
            continue
        found = row_jobs(kernel, row, arch)
        if isinstance(found, str):
            declined[row.suffix] = found
        else:
            jobs += found
    return jobs, declined
