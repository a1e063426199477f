# SPDX-License-Identifier: Apache-2.0
"""A CPU as raw words: what CPUID, XCR0 and the kernel's hardware-capability words said, and nothing more.

Everything that decides (features, requires, box) takes a :class:`CpuRecord`, so a recorded CPU is replayed on any
machine by loading its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Leaf = tuple[int, int]
Registers = tuple[int, int, int, int]

# Leaves whose subleaf 0 holds the highest subleaf in EAX.
_COUNTED = (0x07, 0x1E)

_WORD = 1 << 32
_DWORD = 1 << 64


@dataclass(frozen=True)
class CpuRecord:
    """One logical CPU and what its operating system enabled.

    Attributes:
        arch: ``"x86_64"``, ``"aarch64"``, or another machine's name (which has no features here).
        leaves: CPUID answers, ``{(leaf, subleaf): (eax, ebx, ecx, edx)}``; empty off x86-64.
        xcr0: XGETBV(0), or None where OSXSAVE is clear or off x86-64.
        tiles: the AMX tile permission: granted, refused, or None (never asked, or not applicable).
        hwcap: Linux ``AT_HWCAP``; 0 off AArch64.
        hwcap2: Linux ``AT_HWCAP2``; 0 off AArch64.
        midr: AArch64 ``MIDR_EL1``, or None where the kernel does not show it.
    """

    arch: str
    leaves: Mapping[Leaf, Registers] = field(default_factory=dict, hash=False)
    xcr0: int | None = None
    tiles: bool | None = None
    hwcap: int = 0
    hwcap2: int = 0
    midr: int | None = None

    def registers(self, leaf: int, subleaf: int = 0) -> Registers:
        """The four registers of a leaf; zeros where the CPU does not define it.

        A leaf past the maximum that the CPU reports counts as absent even when a dump holds it: Intel answers such
        a leaf with the data of its last one.
        """
        nothing = (0, 0, 0, 0)
        base = leaf & 0x80000000
        if leaf != base and self.leaves.get((base, 0), nothing)[0] < leaf:
            return nothing
        if leaf in _COUNTED and subleaf > self.leaves.get((leaf, 0), nothing)[0]:
            return nothing
        return self.leaves.get((leaf, subleaf), nothing)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; words as hexadecimal text. :meth:`from_json` gives back an equal record."""
        return {
            "arch": self.arch,
            "leaves": {
                f"{leaf:08x}.{sub}": [f"{word:08x}" for word in registers]
                for (leaf, sub), registers in sorted(self.leaves.items())
            },
            "xcr0": None if self.xcr0 is None else f"{self.xcr0:x}",
            "tiles": self.tiles,
            "hwcap": f"{self.hwcap:x}",
            "hwcap2": f"{self.hwcap2:x}",
            "midr": None if self.midr is None else f"{self.midr:x}",
        }

    @classmethod
    def from_json(cls, data: object) -> CpuRecord:
        """The record of :meth:`to_json`'s data; raises ValueError that names the malformed field."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a CPU record is a JSON object, not {type(data).__name__}")
        arch = data.get("arch")
        if not isinstance(arch, str) or not arch:
            raise ValueError("CPU record: 'arch' must be a non-empty string")
        tiles = data.get("tiles")
        if tiles is not None and not isinstance(tiles, bool):
            raise ValueError("CPU record: 'tiles' must be true, false or null")
        raw = data.get("leaves", {})
        if not isinstance(raw, Mapping):
            raise ValueError("CPU record: 'leaves' must be an object")
        return cls(
            arch=arch,
            leaves=dict(_leaf(key, words) for key, words in raw.items()),
            xcr0=_optional("xcr0", data.get("xcr0")),
            tiles=tiles,
            hwcap=_optional("hwcap", data.get("hwcap")) or 0,
            hwcap2=_optional("hwcap2", data.get("hwcap2")) or 0,
            midr=_optional("midr", data.get("midr")),
        )

    @classmethod
    def from_probe(cls, raw: Mapping[str, Any]) -> CpuRecord:
        """The record of what ``tunekit._core.probe()`` returned."""
        return cls(
            arch=raw["arch"],
            leaves=dict(raw["leaves"]),
            xcr0=raw["xcr0"],
            tiles=raw["tiles"],
            hwcap=raw["hwcap"],
            hwcap2=raw["hwcap2"],
            midr=raw["midr"],
        )


def _hex(name: str, text: object, limit: int) -> int:
    digits = "0123456789abcdefABCDEF"
    if not isinstance(text, str) or not text or any(c not in digits for c in text):
        raise ValueError(f"CPU record: {name!r} must be hexadecimal text, not {text!r}")
    value = int(text, 16)
    if value >= limit:
        raise ValueError(f"CPU record: {name!r} does not fit its word: {text!r}")
    return value


def _optional(name: str, text: object) -> int | None:
    return None if text is None else _hex(name, text, _DWORD)


def _leaf(key: object, words: object) -> tuple[Leaf, Registers]:
    leaf, _, sub = str(key).partition(".")
    if not (sub.isascii() and sub.isdigit()):
        raise ValueError(f"CPU record: leaf {key!r} must read LEAF.SUBLEAF, as '00000007.0'")
    if not isinstance(words, list | tuple) or len(words) != 4:
        raise ValueError(f"CPU record: leaf {key!r} must hold the four registers eax, ebx, ecx, edx")
    a, b, c, d = (_hex(str(key), word, _WORD) for word in words)
    return (_hex(str(key), leaf, _WORD), int(sub)), (a, b, c, d)
