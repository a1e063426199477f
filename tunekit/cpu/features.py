# SPDX-License-Identifier: Apache-2.0
"""The features by name: where the CPU says each one, and what the operating system must have enabled for it.

A feature is usable when its bit is set, its register state is enabled, and every feature that it builds on is
usable. Bits: Intel SDM volume 2A (CPUID) and the Instruction Set Extensions reference, AMD APM volume 3, Linux
``arch/arm64/include/uapi/asm/hwcap.h``. Names are those of LLVM and of the compilers' flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tunekit.cpu.record import CpuRecord

#: XCR0 bits that must all be set before a register file may be touched: SSE+AVX; and opmask, ZMM; tile config, data.
STATES = {"none": 0x0, "ymm": 0x6, "zmm": 0xE6, "tile": 0x60000}

_REGISTERS = ("EAX", "EBX", "ECX", "EDX")


@dataclass(frozen=True)
class X86Feature:
    """A CPUID bit: leaf, subleaf, register (0 EAX .. 3 EDX), and the state it needs.

    With ``version`` the register's low byte is a number and must be at least that; ``bit`` is then unused.
    """

    name: str
    leaf: int
    subleaf: int
    register: int
    bit: int
    state: str
    implies: tuple[str, ...]
    version: int = 0

    arch = "x86_64"

    def present(self, record: CpuRecord) -> bool:
        """Whether CPUID reports the feature."""
        word = record.registers(self.leaf, self.subleaf)[self.register]
        if self.version:
            # Leaf 0x24 means something only where leaf 7.1 announces AVX10.
            return bool(record.registers(7, 1)[D] >> 19 & 1) and (word & 0xFF) >= self.version
        return bool(word >> self.bit & 1)

    def where(self) -> str:
        """The place of the bit, in words."""
        what = f"version below {self.version}" if self.version else f"bit {self.bit} is clear"
        return f"CPUID leaf {self.leaf:#x}.{self.subleaf} {_REGISTERS[self.register]} {what}"


@dataclass(frozen=True)
class ArmFeature:
    """Bits of AT_HWCAP and AT_HWCAP2 that must all be set."""

    name: str
    hwcap: tuple[int, ...]
    hwcap2: tuple[int, ...]
    implies: tuple[str, ...]

    arch = "aarch64"

    def present(self, record: CpuRecord) -> bool:
        """Whether the kernel reports the feature."""
        return all(record.hwcap >> bit & 1 for bit in self.hwcap) and all(
            record.hwcap2 >> bit & 1 for bit in self.hwcap2
        )

    def where(self) -> str:
        """The place of the bits, in words."""
        words = [f"AT_HWCAP bit {bit}" for bit in self.hwcap]
        words += [f"AT_HWCAP2 bit {bit}" for bit in self.hwcap2]
        return " or ".join(words) + " is clear"


Feature = X86Feature | ArmFeature

A, B, C, D = range(4)

# What a name implies is what a compiler may emit under its flag: gcc's -msse4.2 turns POPCNT on, and both gcc and
# clang use FMA and F16C under AVX-512F. So an object's needs are the closure of its flags.
# fmt: off
_X86 = (
  *(X86Feature(*row) for row in (
    # name               leaf        sub reg bit state   implies
    ("sse2",               0x00000001, 0, D, 26, "none", ()),
    ("sse3",               0x00000001, 0, C,  0, "none", ("sse2",)),
    ("ssse3",              0x00000001, 0, C,  9, "none", ("sse3",)),
    ("popcnt",             0x00000001, 0, C, 23, "none", ()),
    ("sse4.1",             0x00000001, 0, C, 19, "none", ("ssse3",)),
    ("sse4.2",             0x00000001, 0, C, 20, "none", ("sse4.1", "popcnt")),
    ("movbe",              0x00000001, 0, C, 22, "none", ()),
    ("aes",                0x00000001, 0, C, 25, "none", ()),
    ("pclmul",             0x00000001, 0, C,  1, "none", ("sse2",)),
    ("lzcnt",              0x80000001, 0, C,  5, "none", ()),
    ("bmi",                0x00000007, 0, B,  3, "none", ()),
    ("bmi2",               0x00000007, 0, B,  8, "none", ()),
    ("adx",                0x00000007, 0, B, 19, "none", ()),
    ("sha",                0x00000007, 0, B, 29, "none", ("sse2",)),
    ("gfni",               0x00000007, 0, C,  8, "none", ("sse2",)),
    ("avx",                0x00000001, 0, C, 28, "ymm",  ("sse4.2",)),
    ("f16c",               0x00000001, 0, C, 29, "ymm",  ("avx",)),
    ("fma",                0x00000001, 0, C, 12, "ymm",  ("avx",)),
    ("avx2",               0x00000007, 0, B,  5, "ymm",  ("avx",)),
    ("vaes",               0x00000007, 0, C,  9, "ymm",  ("avx2", "aes")),
    ("vpclmulqdq",         0x00000007, 0, C, 10, "ymm",  ("avx", "pclmul")),
    ("avxvnni",            0x00000007, 1, A,  4, "ymm",  ("avx2",)),
    ("avxifma",            0x00000007, 1, A, 23, "ymm",  ("avx2",)),
    ("avxvnniint8",        0x00000007, 1, D,  4, "ymm",  ("avx2",)),
    ("avxneconvert",       0x00000007, 1, D,  5, "ymm",  ("avx2",)),
    ("avxvnniint16",       0x00000007, 1, D, 10, "ymm",  ("avx2",)),
    ("avx512f",            0x00000007, 0, B, 16, "zmm",  ("avx2", "fma", "f16c")),
    ("avx512dq",           0x00000007, 0, B, 17, "zmm",  ("avx512f",)),
    ("avx512ifma",         0x00000007, 0, B, 21, "zmm",  ("avx512f",)),
    ("avx512cd",           0x00000007, 0, B, 28, "zmm",  ("avx512f",)),
    ("avx512bw",           0x00000007, 0, B, 30, "zmm",  ("avx512f",)),
    ("avx512vl",           0x00000007, 0, B, 31, "zmm",  ("avx512f",)),
    ("avx512vbmi",         0x00000007, 0, C,  1, "zmm",  ("avx512bw",)),
    ("avx512vbmi2",        0x00000007, 0, C,  6, "zmm",  ("avx512bw",)),
    ("avx512vnni",         0x00000007, 0, C, 11, "zmm",  ("avx512f",)),
    ("avx512bitalg",       0x00000007, 0, C, 12, "zmm",  ("avx512bw",)),
    ("avx512vpopcntdq",    0x00000007, 0, C, 14, "zmm",  ("avx512f",)),
    ("avx512vp2intersect", 0x00000007, 0, D,  8, "zmm",  ("avx512f",)),
    ("avx512fp16",         0x00000007, 0, D, 23, "zmm",  ("avx512bw", "avx512dq", "avx512vl")),
    ("avx512bf16",         0x00000007, 1, A,  5, "zmm",  ("avx512bw",)),
    ("amx-tile",           0x00000007, 0, D, 24, "tile", ()),
    ("amx-int8",           0x00000007, 0, D, 25, "tile", ("amx-tile",)),
    ("amx-bf16",           0x00000007, 0, D, 22, "tile", ("amx-tile",)),
    ("amx-fp16",           0x00000007, 1, A, 21, "tile", ("amx-tile",)),
    ("amx-complex",        0x00000007, 1, D,  8, "tile", ("amx-tile",)),
    ("amx-fp8",            0x0000001E, 1, A,  4, "tile", ("amx-tile",)),
    ("amx-tf32",           0x0000001E, 1, A,  6, "tile", ("amx-tile",)),
    ("amx-avx512",         0x0000001E, 1, A,  7, "tile", ("amx-tile", "avx512f")),
    ("amx-movrs",          0x0000001E, 1, A,  8, "tile", ("amx-tile",)),
)),
    # AVX10 is one converged set with a version number, instead of a bit per extension.
    X86Feature("avx10.1",  0x00000024, 0, B, -1, "zmm",  ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd",
                                                           "avx512vnni", "avx512vbmi", "avx512vbmi2", "avx512ifma",
                                                           "avx512bitalg", "avx512vpopcntdq", "avx512bf16",
                                                           "avx512fp16"), version=1),
    X86Feature("avx10.2",  0x00000024, 0, B, -1, "zmm",  ("avx10.1",), version=2),
)

# Two bits where the compiler's flag covers two of the kernel's names (+aes has PMULL, +fp16 scalar and vector).
_ARM = tuple(ArmFeature(*row) for row in (
    # name          AT_HWCAP   AT_HWCAP2 implies
    ("neon",         (1,),      (),       ()),
    ("aes",          (3, 4),    (),       ()),
    ("sha2",         (5, 6),    (),       ("neon",)),
    ("sha3",         (17, 21),  (),       ("sha2",)),
    ("crc",          (7,),      (),       ()),
    ("lse",          (8,),      (),       ()),
    ("fp16",         (9, 10),   (),       ("neon",)),
    ("rdm",          (12,),     (),       ("neon",)),
    ("jscvt",        (13,),     (),       ()),
    ("fcma",         (14,),     (),       ("neon",)),
    ("rcpc",         (15,),     (),       ()),
    ("dotprod",      (20,),     (),       ("neon",)),
    ("fhm",          (23,),     (),       ("fp16",)),
    ("sb",           (29,),     (),       ()),
    ("i8mm",         (),        (13,),    ("neon",)),
    ("bf16",         (),        (14,),    ("neon",)),
    ("sve",          (22,),     (),       ("fp16",)),
    ("f32mm",        (),        (10,),    ("sve",)),
    ("f64mm",        (),        (11,),    ("sve",)),
    ("sve2",         (),        (1,),     ("sve",)),
    ("sve2-aes",     (),        (2, 3),   ("sve2", "aes")),
    ("sve2-bitperm", (),        (4,),     ("sve2",)),
    ("sve2-sha3",    (),        (5,),     ("sve2", "sha3")),
    ("sve2p1",       (),        (36,),    ("sve2",)),
    ("sme",          (),        (23,),    ("bf16", "fp16")),
    ("sme-i16i64",   (),        (24,),    ("sme",)),
    ("sme-f64f64",   (),        (25,),    ("sme",)),
    ("sme-fa64",     (),        (30,),    ("sme", "sve2")),
    ("sme2",         (),        (37,),    ("sme",)),
    ("sme2p1",       (),        (38,),    ("sme2",)),
))
# fmt: on

#: By architecture, then by name. A name that both have (``aes``) implies nothing beyond their baselines, so that
#: :func:`implied` needs no architecture.
TABLES: dict[str, dict[str, Feature]] = {
    "x86_64": {row.name: row for row in _X86},
    "aarch64": {row.name: row for row in _ARM},
}

#: Every feature by name (where both architectures have one: that of x86-64).
FEATURES: dict[str, Feature] = {**TABLES["aarch64"], **TABLES["x86_64"]}

#: Every name that ``requires`` may hold.
KNOWN_FEATURES: frozenset[str] = frozenset(FEATURES)

# What other sources call the same thing. Never accepted, only suggested: one spelling keeps rows comparable.
_OTHER_SPELLINGS = {
    "abm": "lzcnt", "asimd": "neon", "asimddp": "dotprod", "asimdfhm": "fhm", "asimdhp": "fp16", "asimdrdm": "rdm",
    "atomics": "lse", "bmi1": "bmi", "crc32": "crc", "fp16fml": "fhm", "fphp": "fp16", "fullfp16": "fp16",
    "lrcpc": "rcpc", "pclmulqdq": "pclmul", "pni": "sse3", "sha-ni": "sha", "svei8mm": "i8mm",
}  # fmt: skip


def implied(names: Iterable[str]) -> frozenset[str]:
    """The names and everything that they build on (``avx512vl`` -> ``avx512f`` -> ``avx2`` -> ``avx`` ...).

    Unknown names stay as they are.
    """
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            feature = FEATURES.get(name)
            todo += feature.implies if feature is not None else ()
    return frozenset(found)


def usable(record: CpuRecord) -> frozenset[str]:
    """The features that code may use on a CPU: reported, enabled by the operating system, and whole."""
    table = TABLES.get(record.arch, {})
    return frozenset(name for name in table if _blocked(record, table, name) is None)


def without(features: Iterable[str], disabled: Iterable[str]) -> frozenset[str]:
    """The features minus the disabled ones and everything that builds on them."""
    gone = frozenset(disabled)
    return frozenset(name for name in features if not implied((name,)) & gone)


def why_not(record: CpuRecord, name: str) -> str | None:
    """Why a feature cannot be used on a CPU, as a sentence's end; None where it can."""
    if name not in KNOWN_FEATURES:
        hint = suggestion(name)
        return f"{name} is an unknown feature" + (f" (tunekit calls it {hint})" if hint else "")
    table = TABLES.get(record.arch, {})
    if name not in table:
        homes = " and ".join(arch for arch, features in TABLES.items() if name in features)
        return f"{name} belongs to {homes}; this machine is {record.arch}"
    return _blocked(record, table, name)


def suggestion(name: str) -> str | None:
    """The known spelling of a name that another tool spells differently (``avx512_vnni``, ``asimddp``), or None."""
    lower = name.strip().lower()
    if lower in KNOWN_FEATURES:
        return lower
    if lower in _OTHER_SPELLINGS:
        return _OTHER_SPELLINGS[lower]
    bare = _bare(lower)
    return next((known for known in sorted(KNOWN_FEATURES) if _bare(known) == bare), None)


def _bare(name: str) -> str:
    return "".join(c for c in name if c.isalnum())


def _blocked(record: CpuRecord, table: dict[str, Feature], name: str) -> str | None:
    feature = table[name]
    if not feature.present(record):
        return f"the CPU lacks {name} ({feature.where()})"
    if isinstance(feature, X86Feature):
        reason = _state(record, feature)
        if reason is not None:
            return reason
    for base in feature.implies:
        if base in table:
            reason = _blocked(record, table, base)
            if reason is not None:
                return f"{name} builds on {base}: {reason}"
    return None


def _state(record: CpuRecord, feature: X86Feature) -> str | None:
    mask = STATES[feature.state]
    if not mask:
        return None
    # OSXSAVE is asked first: a record may hold an XCR0 that nobody could have read.
    if not record.registers(1)[C] >> 27 & 1 or record.xcr0 is None:
        return (
            f"the operating system has not enabled the {feature.state} state that {feature.name} needs "
            "(OSXSAVE is clear: the system, or a hypervisor, hides XSAVE)"
        )
    if record.xcr0 & mask != mask:
        return (
            f"the operating system has not enabled the {feature.state} state that {feature.name} needs "
            f"(XCR0 is {record.xcr0:#x}, it takes {mask:#x})"
        )
    if feature.state == "tile" and not record.tiles:
        if record.tiles is None:
            return f"the AMX tile permission that {feature.name} needs was never asked for"
        return f"the kernel refused the AMX tile permission that {feature.name} needs"
    return None


def wants_tiles(record: CpuRecord) -> bool:
    """Whether the tile permission is worth asking for: CPUID and XCR0 have tiles, and nobody asked yet."""
    mask = STATES["tile"]
    return (
        record.arch == "x86_64"
        and record.tiles is None
        and TABLES["x86_64"]["amx-tile"].present(record)
        and bool(record.registers(1)[C] >> 27 & 1)
        and record.xcr0 is not None
        and record.xcr0 & mask == mask
    )
