# SPDX-License-Identifier: Apache-2.0
"""A CPU of software on this process's own memory: AVX-512 code executed where there is none.

Bochs (PyPI: ``bochscpu-python``) is lent the process as it stands. A linear address of the machine is an address of
the process, so a function of a loaded module runs in place and unchanged, on its own constants and its caller's
arrays, and what it calls of the C library runs so too. :func:`bind` gives such functions addresses that C calls like
any other.

The machine is a user program (ring 3) with page tables of our own. Bochs has 40 bits of physical address and the
process 47 of linear, so each gigabyte that is touched gets the next physical one, and each page is lent when it is
first asked for. There is one machine in a process, and it serves one thread at a time. A page that may not be
written is not told from one that may: a function that writes there ends the process, as it would without the machine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emulate
from tunekit import dispatch
from tunekit.cpu.features import implied
from tunekit.signature import CType, Parameter, Signature

FEATURES = implied(["avx2", "fma", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512vnni"])
"""Features whose instructions the machine executes: those of Sapphire Rapids that rows use, without AMX."""

WIDE = ("q8q8_gemv", "q8q8_gemv_f16", "q8q8_mx4_gemv", "q8q8_mx4_expand")
"""Functions that a row of matrix tiles has in AVX-512: the machine runs these, and the trap the tiles."""

VERSION = "0.4.0"  # of bochscpu-python: the order of its hooks is nowhere declared
MEND = "pip install bochscpu-python"

SAPPHIRE_RAPIDS, SKYLAKE_X = 30, 26  # places in Bochs' list of CPU models
model = SAPPHIRE_RAPIDS  # of the machine, once it is made
limit = 60.0  # seconds of one call

_PAGE, _GIB, _STACK = 1 << 12, 1 << 30, 1 << 18
_PROTECTION = 13
_VECTORS = {0: "#DE", 1: "#DB", 3: "#BP", 6: "#UD", 7: "#NM", 12: "#SS", 13: "#GP", 14: "#PF", 17: "#AC", 19: "#XM"}

# Physical memory. Frame 1 is the top table; 256 tables of gigabytes follow, and tables of 2 MiB pages stand from
# _TABLES on, one for each gigabyte of linear addresses. Lent gigabytes begin above the 4 GiB where devices are.
_TABLES, _LENT = 1 << 30, 4 << 30

_REGISTERS = (7, 6, 2, 1, 8, 9)  # rdi, rsi, rdx, rcx, r8, r9, as instructions number them
_RAX = 0
_VECTOR_REGISTERS = 8  # xmm0 and up have floating-point arguments, xmm0 the result
_FLOATS = (ctypes.c_float, ctypes.c_double)

Argument = int | ctypes.c_float | ctypes.c_double

_HOOKS = (
    "ctx reset hlt mwait cnear_branch_taken cnear_branch_not_taken ucnear_branch far_branch opcode interrupt exception "
    "hw_interrupt tlb_cntrl cache_cntrl prefetch_hint clflush before_execution after_execution repeat_iteration inp inp2 "
    "outp lin_access phy_access wrmsr vmexit"
).split()


class MachineFault(RuntimeError):
    """Code that the machine could not run to its end."""


class _Hooks(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _HOOKS]


_word = ctypes.c_uint64
_OnException = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)
_OnMissing = ctypes.CFUNCTYPE(None, _word)


def _library() -> ctypes.CDLL:
    """The wheel's shared object, not imported: its C interface needs no Python, and lazy binding no newer C library.

    Raises:
        RuntimeError: there is none, or not the one that is known here.
    """
    if not emulate.possible():
        raise RuntimeError("the machine is written for Linux on x86-64")
    spec = importlib.util.find_spec("bochscpu")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"no bochscpu here; {MEND}")
    version = importlib.metadata.version("bochscpu-python")
    if version != VERSION:
        raise RuntimeError(f"bochscpu-python is {version}, and the machine knows {VERSION}; {MEND}=={VERSION}")
    (path,) = Path(spec.origin).parent.glob("_bochscpu*.so")
    system = ctypes.CDLL(None)
    system.dlopen.restype, system.dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    system.dlerror.restype = ctypes.c_char_p
    handle = system.dlopen(os.fsencode(path), os.RTLD_LAZY)
    if not handle:
        raise RuntimeError(f"bochscpu does not load: {system.dlerror().decode()}")
    library = ctypes.CDLL(str(path), handle=handle)
    for name in ("bochscpu_cpu_new", "sim_get_param_enum"):
        getattr(library, name).restype = ctypes.c_void_p
    library.cpu_get_pc.restype = library.cpu_get_reg64.restype = _word
    return library


class Machine:
    """The CPU and what is lent to it."""

    def __init__(self) -> None:
        self._bochs = bochs = _library()
        choose = bochs._ZN14bx_param_num_c15set_initial_valEl  # bx_param_num_c::set_initial_val(long)
        choose(ctypes.c_void_p(bochs.sim_get_param_enum(b"cpu.model")), ctypes.c_long(model))
        self._cpu = ctypes.c_void_p(bochs.bochscpu_cpu_new(0))
        self._system = ctypes.CDLL(None)
        self._system.pthread_self.restype = _word
        self._kept: list[Any] = []  # memory and callbacks that Bochs holds addresses of
        self._lent: list[int] = []  # gigabytes of linear addresses, in the order of their physical ones
        self._lock = threading.Lock()
        self._end: tuple[int, int] | str | None = None
        self.calls = 0  # that returned
        self._probe = os.pipe()
        self._deadline: float | None = None
        self._watched = threading.Event()

        tables = self._memory(257 * _PAGE)
        for i in range(256):
            _write(tables + 8 * i, (i + 2) * _PAGE | 7)
            _write(tables + (i + 1) * _PAGE, *(_TABLES + (512 * i + j) * _PAGE | 7 for j in range(512)))
        for i in range(257):
            self._insert((i + 1) * _PAGE, tables + i * _PAGE)
        self._top = self._memory(_STACK) + _STACK
        self._halt = self._memory(_PAGE)  # where functions return to: no program of ring 3 may halt
        ctypes.memset(self._halt, 0xF4, 1)
        self._hooks = self._callbacks()
        self._state(0)
        threading.Thread(target=self._watch, daemon=True).start()

    def _memory(self, size: int) -> int:
        self._kept.append(mmap.mmap(-1, size))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._kept[-1]))

    def _insert(self, physical: int, address: int) -> None:
        self._bochs.bochscpu_mem_page_insert(_word(physical), ctypes.c_void_p(address))

    def _state(self, thread: int) -> None:
        """Long mode with all vector state, ring 3, the floating-point environment that rows run in."""
        bochs = self._bochs
        bochs.cpu_set_cr0(0, 0x80010033)
        bochs.cpu_set_cr3(0, _word(_PAGE))
        bochs.cpu_set_cr4(0, _word(0x40620))  # OSXSAVE, OSXMMEXCPT, OSFXSR, PAE
        bochs.cpu_set_efer(0, 0xD01)
        bochs.cpu_set_xcr0(0, 0xE7)
        bochs.cpu_set_mxcsr(0, 0x1F80)
        for segment in range(6):
            self._segment(segment, 0)
        bochs.bochscpu_cpu_set_mode(self._cpu)
        self._thread = thread

    def _segment(self, segment: int, base: int) -> None:
        selector, attributes = (0x33, 0xA0FB) if segment == 1 else (0x2B, 0xC0F3)  # cs is 64-bit code
        self._bochs.cpu_set_seg(0, segment, 1, selector, _word(base), 0xFFFFFFFF, attributes)

    def _callbacks(self) -> Any:
        bochs, cpu = self._bochs, self._cpu

        @_OnException
        def on_exception(context: int, cpu_id: int, vector: int, code: int) -> None:
            self._end = self._end or (vector, code)
            bochs.bochscpu_cpu_stop(cpu)

        @_OnMissing
        def on_missing(physical: int) -> None:
            physical &= -_PAGE
            if physical < _LENT:  # a table of 2 MiB pages, for a gigabyte that was not touched before
                address = self._memory(_PAGE)
                first = _LENT + len(self._lent) * _GIB
                _write(address, *(first + (j << 21) | 0xE7 for j in range(512)))
                self._lent.append((physical - _TABLES) // _PAGE)
            else:
                lent, offset = divmod(physical - _LENT, _GIB)
                address = self._lent[lent] * _GIB + offset
                if not self._readable(address):
                    self._end = f"there is no memory at {address:#x}"
                    bochs.bochscpu_cpu_stop(cpu)
                    return
            self._insert(physical, address)

        bochs.bochscpu_mem_missing_page(on_missing)
        hooks = _Hooks(exception=ctypes.cast(on_exception, ctypes.c_void_p))
        self._kept += [on_exception, on_missing, hooks]
        return (ctypes.c_void_p * 2)(ctypes.addressof(hooks), None)

    def _readable(self, address: int) -> bool:
        """Whether the process has such a page: the kernel says so, where a look would be the end."""
        reader, writer = self._probe
        if self._system.write(writer, ctypes.c_void_p(address), ctypes.c_size_t(1)) != 1:
            return False
        os.read(reader, 1)
        return True

    def _watch(self) -> None:
        """Stops what runs beyond its limit; a hook on every instruction would cost more than the instructions."""
        while True:
            self._watched.wait()
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._end = self._end or f"it did not end within {limit:g} s"
                self._bochs.bochscpu_cpu_stop(self._cpu)
            time.sleep(0.05)

    def call(self, address: int, *arguments: Argument, result: type | None = None) -> int:
        """Call a C function.

        Args:
            address: where it is.
            arguments: integers and pointers as numbers; floating-point ones as ctypes objects.
            result: the ctypes type of what it returns, where that is a floating-point one.

        Returns:
            What it leaves in rax, or the bits of its floating-point result.

        Raises:
            MachineFault: it did not return.
        """
        bochs = self._bochs
        whole, floats, rest = _places(arguments)
        with self._lock:
            thread = self._system.pthread_self()
            if thread != self._thread:  # fs holds the thread's own data, the stack protector's among it
                self._segment(4, thread)
                self._thread = thread
            for register, value in zip(_REGISTERS, whole, strict=False):
                bochs.cpu_set_reg64(0, register, _word(value))
            for register, value in enumerate(floats):
                bochs.cpu_set_zmm(0, register, (_word * 8)(value))
            stack = self._top - (8 * len(rest) + 15) // 16 * 16 - 8  # 16 bytes, and the return address below them
            _write(stack, self._halt, *(value & 0xFFFFFFFFFFFFFFFF for value in rest))
            bochs.cpu_set_sp(0, _word(stack))
            bochs.cpu_set_pc(0, _word(address))
            bochs.cpu_set_eflags(0, 2)
            self._end = None
            self._deadline = time.monotonic() + limit
            self._watched.set()
            bochs.bochscpu_cpu_run(self._cpu, self._hooks)
            self._watched.clear()
            self._deadline = None
            at = bochs.cpu_get_pc(0)
            if self._end == (_PROTECTION, 0) and at == self._halt + 1:
                self.calls += 1
                if result not in _FLOATS:
                    return int(bochs.cpu_get_reg64(0, _RAX))
                vector = (_word * 8)()
                bochs.cpu_get_zmm(0, 0, vector)
                return vector[0] & (1 << 8 * ctypes.sizeof(result)) - 1
            end = self._end
        if isinstance(end, tuple):
            end = f"{_VECTORS.get(end[0], f'exception {end[0]}')}, error code {end[1]:#x}"
        raise MachineFault(f"{end}; the instruction ends at {at:#x}{self._place(at)}")

    def _place(self, address: int) -> str:
        """Where an address of code is, in words."""
        found = (_word * 4)()  # Dl_info: file, where it begins, symbol, where that begins
        if not self._system.dladdr(_word(address), found) or not found[0]:
            return ""
        name = Path(os.fsdecode(ctypes.string_at(found[0]))).name
        return f", {name}+{address - found[1]:#x}"

    def forget_code(self) -> None:
        """Decode afresh: a library may stand where another one stood."""
        self._bochs._Z12flushICachesv()


def _places(arguments: Sequence[Argument]) -> tuple[list[int], list[int], list[int]]:
    """Where System V's convention has arguments: in general registers, in vectors, and the rest on the stack."""
    whole: list[int] = []
    floats: list[int] = []
    rest: list[int] = []
    for value in arguments:
        if isinstance(value, _FLOATS):
            bits = int.from_bytes(bytes(value), "little")
            (floats if len(floats) < _VECTOR_REGISTERS else rest).append(bits)
        else:
            (whole if len(whole) < len(_REGISTERS) else rest).append(value)
    return whole, floats, rest


def _write(address: int, *words: int) -> None:
    ctypes.memmove(address, struct.pack(f"<{len(words)}Q", *words), 8 * len(words))


@functools.cache
def _load() -> Machine:
    return Machine()


def why_not() -> str | None:
    """Why there is no machine here, or None."""
    try:
        _load()
    except RuntimeError as error:
        return str(error)
    return None


def call(address: int, *arguments: Argument, result: type | None = None) -> int:
    """Run the function at an address of this process in the machine; see :meth:`Machine.call`."""
    return _load().call(address, *arguments, result=result)


def calls() -> int:
    """How many calls have returned from the machine."""
    return _load().calls


# --- rows -------------------------------------------------------------------------------------------------

_fault: MachineFault | None = None


def fault() -> MachineFault | None:
    """The first fault since the last look that C, between us and the function, could not be told of."""
    global _fault
    found, _fault = _fault, None
    return found


def _scalar(kind: CType) -> Any:
    return getattr(ctypes, "c_" + {"float32": "float", "float64": "double"}.get(kind.dtype, kind.dtype))


def _ctype(parameter: Parameter) -> Any:
    return ctypes.c_void_p if parameter.is_pointer else _scalar(parameter.ctype)


@functools.cache  # for good: C keeps the addresses
def _outside(name: str, address: int, signature: Signature) -> Any:
    """A C function that runs the one at an address in the machine."""
    result = _scalar(signature.returns) if signature.returns else None
    types = [_ctype(p) for p in signature.parameters]

    def run(*arguments: Any) -> Any:
        global _fault
        passed = [t(v) if t in _FLOATS else v or 0 for t, v in zip(types, arguments, strict=True)]
        try:
            found = call(address, *passed, result=result)
        except MachineFault as error:
            _fault = _fault or MachineFault(f"{name}: {error}")
            return 0
        return result.from_buffer_copy(_word(found)).value if result else None

    return ctypes.CFUNCTYPE(result, *types)(run)


@dataclasses.dataclass(frozen=True)
class InMachine(dispatch.BoundRow):
    """A row whose functions, or some of them, run in the machine, whoever calls them."""

    def call(self, name: str, *arguments: Any) -> Any:
        """As of any row.

        Raises:
            MachineFault: the function did not return.
        """
        result = super().call(name, *arguments)
        if found := fault():
            raise found
        return result


def within(bound: dispatch.BoundRow) -> InMachine:
    """The row with its functions in the machine; of a row of matrix tiles, its AVX-512 companions."""
    tiles = any(feature.startswith("amx") for feature in bound.built.features)
    addresses = []
    for (name, signature), address in zip(bound.kernel.functions, bound.built.addresses, strict=True):
        if name in WIDE or not tiles:
            address = int(ctypes.cast(_outside(name, address, signature), ctypes.c_void_p).value or 0)
        addresses.append(address)
    _load().forget_code()
    built = dataclasses.replace(bound.built, addresses=tuple(addresses))
    return InMachine(bound.kernel, bound.suffix, bound.row, bound.source, bound.module, built)


def bind(kernel: Any, suffix: str, features: tuple[str, ...] = ()) -> InMachine:
    """A built row in the machine; one of matrix tiles is to be called while trapping.

    Raises:
        LookupError: see :func:`emulate.bind`.
        RuntimeError: see :func:`why_not`.
    """
    return within(emulate.bind(kernel, suffix, features, emulate.EMULATED | FEATURES))


def guarded(run: Callable[[Any], str | None], bound: Any) -> str | None:
    """Run a gate; a fault that it was not told of is its reason."""
    fault()
    try:
        reason = run(bound)
    except MachineFault as error:
        return str(error)
    found = fault()
    return str(found) if found else reason
