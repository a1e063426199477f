# SPDX-License-Identifier: Apache-2.0
"""The box: this machine as far as code generation and timing care, and its readable, filesystem-safe name.

The box labels records and folders. It never gates execution: only features do.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.cpu.features import usable
from tunekit.cpu.record import CpuRecord

# MIDR_EL1 bits 31:24, the implementer codes of the Arm Architecture Reference Manual and of Linux's cputype.h.
_IMPLEMENTERS = {
    0x41: "Arm", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA",
    0x50: "APM", 0x51: "Qualcomm", 0x53: "Samsung", 0x56: "Marvell", 0x61: "Apple", 0x66: "Faraday",
    0x69: "Intel", 0x6D: "Microsoft", 0x70: "Phytium", 0xC0: "Ampere",
}  # fmt: skip

_CORE_KINDS = {0x20: "E", 0x40: "P"}


@dataclass(frozen=True)
class Box:
    """A machine's identity.

    Attributes:
        arch: ``x86_64``, ``aarch64``, or another machine's name.
        vendor: CPUID's vendor string, or the name of MIDR's implementer; ``unknown`` where neither is shown.
        family: x86 display family; AArch64 part number.
        model: x86 display model; AArch64 variant.
        stepping: x86 stepping; AArch64 revision.
        features: usable features, sorted.
        core: on a hybrid part ``P`` or ``E`` (one core), ``hybrid`` (a process that may run on both); else empty.
    """

    arch: str
    vendor: str
    family: int
    model: int
    stepping: int
    features: tuple[str, ...]
    core: str = ""

    @property
    def key(self) -> str:
        """Short name for folders: ``x86_64-AuthenticAMD-25-17-1-1a2b3c4d``; the last part digests the features."""
        digest = hashlib.sha256(",".join(self.features).encode()).hexdigest()[:8]
        parts = (self.arch, self.vendor, str(self.family), str(self.model), str(self.stepping), digest)
        return "-".join(_safe(part) for part in parts)

    def differences(self, other: Box) -> list[str]:
        """What tells another box from this one, field by field, as ``"model: 17 here, 1 there"``; empty if nothing."""
        found = [
            f"{name}: {getattr(self, name) or 'none'} here, {getattr(other, name) or 'none'} there"
            for name in ("arch", "vendor", "family", "model", "stepping", "core")
            if getattr(self, name) != getattr(other, name)
        ]
        here, there = set(self.features), set(other.features)
        if here - there:
            found.append(f"features: {', '.join(sorted(here - there))} only here")
        if there - here:
            found.append(f"features: {', '.join(sorted(there - here))} only there")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; :meth:`from_json` gives back an equal box."""
        return {
            "arch": self.arch,
            "vendor": self.vendor,
            "family": self.family,
            "model": self.model,
            "stepping": self.stepping,
            "features": list(self.features),
            "core": self.core,
        }

    @classmethod
    def from_json(cls, data: object) -> Box:
        """The box of :meth:`to_json`'s data; raises ValueError that names the malformed field."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a box is a JSON object, not {type(data).__name__}")
        features = data.get("features")
        if not isinstance(features, list | tuple) or not all(isinstance(name, str) for name in features):
            raise ValueError("box: 'features' must be a list of names")
        return cls(
            arch=_text(data, "arch"),
            vendor=_text(data, "vendor"),
            family=_number(data, "family"),
            model=_number(data, "model"),
            stepping=_number(data, "stepping"),
            features=tuple(sorted(set(features))),
            core=_text({"core": "", **data}, "core"),
        )


def box_of(record: CpuRecord) -> Box:
    """The box of a recorded CPU."""
    features = tuple(sorted(usable(record)))
    if record.arch == "x86_64" and record.leaves:
        family, model, stepping = _signature(record.registers(1)[0])
        return Box(record.arch, _vendor(record), family, model, stepping, features, _core(record))
    if record.midr is not None:
        midr = record.midr
        implementer = midr >> 24 & 0xFF
        vendor = _IMPLEMENTERS.get(implementer, f"implementer{implementer:02x}")
        return Box(record.arch, vendor, midr >> 4 & 0xFFF, midr >> 20 & 0xF, midr & 0xF, features)
    return Box(record.arch, "unknown", 0, 0, 0, features)


def _signature(eax: int) -> tuple[int, int, int]:
    """Display family, display model and stepping: the extended parts count only for the families that use them."""
    family, model = eax >> 8 & 0xF, eax >> 4 & 0xF
    if family in (0x6, 0xF):
        model |= (eax >> 16 & 0xF) << 4
    if family == 0xF:
        family += eax >> 20 & 0xFF
    return family, model, eax & 0xF


def _vendor(record: CpuRecord) -> str:
    _, b, c, d = record.registers(0)
    raw = struct.pack("<3I", b, d, c).decode("ascii", "replace")
    return "".join(ch for ch in raw if ch.isprintable() and ch.isascii()).strip() or "unknown"


def _core(record: CpuRecord) -> str:
    hybrid = record.registers(7)[3] >> 15 & 1
    return _CORE_KINDS.get(record.registers(0x1A)[0] >> 24, "") if hybrid else ""


def _safe(part: str) -> str:
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._") else "_" for c in part)
    return plain.lstrip(".") or "unknown"  # no hidden folder, no ".."


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise ValueError(f"box: {name!r} must be a string")
    return value


def _number(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"box: {name!r} must be a whole number")
    return value
