# SPDX-License-Identifier: Apache-2.0
"""llama.cpp and ik_llama.cpp: their ggml library, called through ctypes as the projects themselves call it.

Weights lie in a buffer of the CPU backend (llama.cpp's repacking one where it takes the type), activations and
results in its plain one; one call computes a graph that holds every ``ggml_mul_mat`` of the work.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .work import Work

TYPES = {"f32": 0, "q8_0": 8, "mxfp4": 39, "q8_0_r8": 208}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class TypeTraits(ctypes.Structure):
    _fields_ = [("from_float", c_void_p), ("vec_dot", c_void_p), ("vec_dot_type", c_int), ("nrows", c_int64)]


PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
}
QUIET = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda level, text, data: None)
MAINLINE: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_type_traits_cpu": (POINTER(TypeTraits), [c_int]),
    "ggml_log_set": (None, [c_void_p, c_void_p]),
    "ggml_backend_cpu_reg": (c_void_p, []),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
}


def find_library(folder: Path | None, project: str, distribution: str) -> Path | None:
    """libggml.so of ``FOLDER/PROJECT`` as ``peers.sh`` built it, or else of the installed distribution."""
    if folder is not None:
        found = sorted((folder / project).rglob("libggml.so"))
        if found:
            return found[0]
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name == "libggml.so"), None)


def version_of(path: Path, distribution: str) -> str:
    """The distribution's version: installed, or in the name of the sdist that peers.sh unpacked."""
    marker = next((p / "VERSION" for p in path.parents if (p / "VERSION").is_file()), None)
    if marker is not None:
        return marker.read_text().strip()
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "?"


class Library:
    """A loaded libggml with a CPU backend of so many threads."""

    def __init__(self, path: Path, threads: int) -> None:
        self.lib = ctypes.CDLL(str(path))  # local: two libraries of one name keep their symbols to themselves
        mainline = hasattr(self.lib, "ggml_get_type_traits_cpu")
        names = PROTOTYPES | (MAINLINE if mainline else {})
        for name, (result, arguments) in names.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        if mainline:
            self.lib.ggml_log_set(QUIET, None)
        self.backend = self.lib.ggml_backend_cpu_init()
        self.lib.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.plain = self.lib.ggml_backend_cpu_buffer_type()

    def repacking(self) -> int:
        """The buffer type that reorders weights as they are set.

        Raises:
            LookupError: this build has none.
        """
        registry = self.lib.ggml_backend_cpu_reg()
        device = self.lib.ggml_backend_reg_dev_get(registry, 0)
        address = self.lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            raise LookupError("this build offers no further buffer types")
        types = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
        name = self.lib.ggml_backend_buft_name
        name.restype, name.argtypes = c_char_p, [c_void_p]
        index = 0
        while types and types[index]:
            if name(types[index]) == b"CPU_REPACK":
                return int(types[index])
            index += 1
        raise LookupError("this build does not repack")

    def context(self, tensors: int, graph: int = 0) -> int:
        size = (tensors + 8) * self.lib.ggml_tensor_overhead()
        size += self.lib.ggml_graph_overhead_custom(graph, False) if graph else 0
        return int(self.lib.ggml_init(InitParams(size, None, True)))


class Held:
    """The weights of a work in a library's own memory."""

    def __init__(self, own: Library, work: Work, form: str, buffer_type: int, repack: str = "") -> None:
        self.own = own
        lib = own.lib
        self.context = own.context(len(work.weights))
        self.tensors = [lib.ggml_new_tensor_2d(self.context, TYPES[form], w.k, w.n) for w in work.weights]
        self.buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self.context, buffer_type)
        if not self.buffer:
            raise MemoryError("ggml could not allocate the weights")
        for tensor, w in zip(self.tensors, work.weights, strict=True):
            blocks = w.blocks
            lib.ggml_backend_tensor_set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
            if repack:
                function = getattr(lib, repack)
                function.restype, function.argtypes = None, [c_void_p]
                function(tensor)

    def plan(self, work: Work) -> tuple[Any, Any]:
        """A call that does the work, and one that gives the result of a step."""
        own, lib = self.own, self.own.lib
        graph_size = 2 * len(work.steps) + 16
        context = own.context(len(work.acts) + len(work.steps), graph_size)
        xs = [lib.ggml_new_tensor_2d(context, TYPES["f32"], x.shape[1], x.shape[0]) for x in work.acts]
        graph = lib.ggml_new_graph_custom(context, graph_size, False)
        ys = []
        for w, a in work.steps:
            ys.append(lib.ggml_mul_mat(context, self.tensors[w], xs[a]))
            lib.ggml_build_forward_expand(graph, ys[-1])
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, own.plain)
        for tensor, x in zip(xs, work.acts, strict=True):
            lib.ggml_backend_tensor_set(tensor, x.ctypes.data, 0, x.nbytes)
        compute, backend = lib.ggml_backend_graph_compute, own.backend

        def result(index: int) -> np.ndarray:
            w, a = work.steps[index]
            found = np.empty((work.acts[a].shape[0], work.weights[w].n), np.float32)
            lib.ggml_backend_tensor_get(ys[index], found.ctypes.data, 0, found.nbytes)
            return found

        def close() -> None:
            lib.ggml_backend_buffer_free(buffer)
            lib.ggml_free(context)

        result.close = close  # type: ignore[attr-defined]
        return lambda: compute(backend, graph), result

    def close(self) -> None:
        self.own.lib.ggml_backend_buffer_free(self.buffer)
        self.own.lib.ggml_free(self.context)


def row_bytes(form: str, k: int, n: int) -> int:
    """Bytes of a matrix in ggml's format."""
    return n * k // 32 * {"q8_0": 34, "mxfp4": 17}[form]
