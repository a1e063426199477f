# SPDX-License-Identifier: Apache-2.0
"""CPU truth: what this CPU can really do, the ``requires`` grammar, and the box and its identity.

``record`` is raw data, ``features`` and ``box`` read it, ``requires`` compares; all of that is pure and works on
recorded CPUs. Only this module asks the machine, once per process. ``brand`` is for tools and is not imported here.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import replace

from tunekit.core import core
from tunekit.cpu.box import Box, box_of
from tunekit.cpu.features import usable, wants_tiles, without
from tunekit.cpu.record import CpuRecord
from tunekit.environment import settings

__all__ = ["Box", "CpuRecord", "box_of", "forget", "this_box", "this_cpu", "this_features"]

_ARCH_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


@functools.cache
def this_cpu() -> CpuRecord:
    """This CPU, probed once per process; an empty record (no features) where ``tunekit._core`` was not built.

    On a CPU with AMX this also asks the kernel for the tile registers, so that the record is the truth: call it
    before worker threads start. A refusal is data, never an error.
    """
    own = core()
    if own is None:
        machine = platform.machine().lower()
        return CpuRecord(_ARCH_NAMES.get(machine, machine) or "unknown")
    record = CpuRecord.from_probe(own.probe())
    if wants_tiles(record):
        record = replace(record, tiles=own.request_tiles())
    return record


@functools.cache
def this_features() -> frozenset[str]:
    """What rows may use here: usable features, less ``TUNEKIT_DISABLE_FEATURES`` and what builds on those.

    ``TUNEKIT_FORCE_FEATURES`` has no say in it: it can never make code run that the CPU cannot run.
    """
    return without(usable(this_cpu()), settings().disable_features)


@functools.cache
def this_box() -> Box:
    """This machine's identity. Disabled features do not change it: the machine is still the same."""
    box = box_of(this_cpu())
    # The kind of the one core that ran the probe is chance: a box must not change its name between two runs.
    return replace(box, core="hybrid") if box.core else box


def forget() -> None:
    """Ask the machine again (after a core was built in this process)."""
    for asked in (this_cpu, this_features, this_box):
        asked.cache_clear()
