# SPDX-License-Identifier: Apache-2.0
"""oneDNN's matmul of float32 by int8 weights with scales in groups, through its C API; its memory is SYCL's."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import numpy as np

from .work import BLOCK

F32, S8 = 3, 5
CPU, IN_ORDER, ANY_LAYOUT, ANY_MODE = 1, 1, 1, 3
SRC, WEIGHTS, DST, SCALES = 1, 33, 17, 4096
WEIGHTS_LAYOUT = 131  # dnnl_query_weights_md
ALLOCATE = c.c_void_p(2**64 - 1)
Handle = c.c_void_p


class Argument(c.Structure):
    _fields_ = [("name", c.c_int), ("memory", Handle)]


def arguments(pairs: dict[int, Any]) -> Any:
    return (Argument * len(pairs))(*(Argument(name, memory) for name, memory in pairs.items()))


class Library:
    """An engine and a stream of the CPU.

    Raises:
        OSError: it does not load, or has no CPU to run on.
    """

    def __init__(self, path: Path) -> None:
        # The library does not say that what it needs lies beside it; what is loaded already is found by its name.
        for name in ("libintlc.so.5", "libimf.so", "libsvml.so", "libtbb.so.12", "libhwloc.so.15", "libsycl.so.9"):
            if (path.parent / name).exists():
                c.CDLL(str(path.parent / name))
        self.lib = c.CDLL(str(path))
        self.engine, self.stream = Handle(), Handle()
        self.memories: list[Any] = []
        self.ask("dnnl_engine_create", c.byref(self.engine), CPU, c.c_size_t(0))
        self.ask("dnnl_stream_create", c.byref(self.stream), self.engine, IN_ORDER)
        query = self.lib.dnnl_primitive_desc_query_md
        query.restype, query.argtypes = Handle, [Handle, c.c_int, c.c_int]

    def ask(self, name: str, *values: Any) -> None:
        status = getattr(self.lib, name)(*values)
        if status:
            raise OSError(f"{name} answers {status}")

    def layout(self, dims: tuple[int, int], kind: int, strides: tuple[int, int] | None = None) -> Any:
        """A description of memory; without strides the library chooses."""
        made, numbers = Handle(), (c.c_int64 * 2)(*dims)
        if strides is None:
            self.ask("dnnl_memory_desc_create_with_tag", c.byref(made), 2, numbers, kind, ANY_LAYOUT)
        else:
            steps = (c.c_int64 * 2)(*strides)
            self.ask("dnnl_memory_desc_create_with_strides", c.byref(made), 2, numbers, kind, steps)
        return made

    def memory(self, layout: Any, array: np.ndarray | None = None) -> Any:
        made = Handle()
        self.ask("dnnl_memory_create", c.byref(made), layout, self.engine, ALLOCATE)
        self.memories.append(made)
        if array is not None:
            self.copy(made, array, out=False)
        return made

    def release(self) -> None:
        """Give back the memory of every product so far."""
        while self.memories:
            self.ask("dnnl_memory_destroy", self.memories.pop())

    def copy(self, memory: Any, array: np.ndarray, out: bool) -> None:
        place = Handle()
        self.ask("dnnl_memory_map_data", memory, c.byref(place))
        pair = (array.ctypes.data, place) if out else (place, array.ctypes.data)
        c.memmove(*pair, array.nbytes)
        self.ask("dnnl_memory_unmap_data", memory, place)

    def primitive(self, description: Any) -> Any:
        made = Handle()
        self.ask("dnnl_primitive_create", c.byref(made), description)
        return made

    def execute(self, primitive: Any, values: Any) -> None:
        self.ask("dnnl_primitive_execute", primitive, self.stream, len(values), values)

    def wait(self) -> None:
        self.ask("dnnl_stream_wait", self.stream)

    def product(self, x: np.ndarray, w: Any, source: Any) -> tuple[Any, Any, Any]:
        """A matmul of ``x`` by these weights: the primitive, its arguments, the memory of its result."""
        t, k, n = x.shape[0], w.k, w.n
        attributes, made = Handle(), Handle()
        self.ask("dnnl_primitive_attr_create", c.byref(attributes))
        self.ask("dnnl_primitive_attr_set_fpmath_mode_v2", attributes, ANY_MODE, 1)
        groups = (c.c_int64 * 2)(BLOCK, 1)
        self.ask("dnnl_primitive_attr_set_scales", attributes, WEIGHTS, 3, 2, groups, F32)
        xs, ys, ws = self.layout((t, k), F32, (k, 1)), self.layout((t, n), F32, (n, 1)), self.layout((k, n), S8)
        self.ask("dnnl_matmul_primitive_desc_create", c.byref(made), self.engine, xs, ws, None, ys, attributes)
        own = Handle(self.lib.dnnl_primitive_desc_query_md(made, WEIGHTS_LAYOUT, 0))
        plain, packed, reorder = self.layout((k, n), S8, (1, k)), self.memory(own), Handle()
        engine = self.engine
        self.ask("dnnl_reorder_primitive_desc_create", c.byref(reorder), plain, engine, own, engine, None)
        self.execute(self.primitive(reorder), arguments({SRC: self.memory(plain, source), DST: packed}))
        self.wait()
        scales = np.ascontiguousarray(w.scales.reshape(n, k // BLOCK).T)
        known, y = self.memory(self.layout((k // BLOCK, n), F32, (n, 1)), scales), self.memory(ys)
        values = {SRC: self.memory(xs, x), WEIGHTS: packed, DST: y, SCALES | WEIGHTS: known}
        return self.primitive(made), arguments(values), y
