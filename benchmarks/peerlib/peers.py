# SPDX-License-Identifier: Apache-2.0
"""Who is measured. A peer loads a work's weights in its own format, and plans one call that does the work.

Activations come in as float32 and results go out as float32 everywhere but where a label says "kernel"; results
lie in memory that was made before. A peer that is not there says how to install it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tunekit import q8, threads
from tunekit.q8 import kernels

from . import ggml, limits, onednn
from .work import BLOCK, Work

Run = Callable[[], object]
Result = Callable[[int], Any]
SCRIPT = "bash benchmarks/peers.sh"
# Relative errors (2-norm) against float32: what activations in 8-bit blocks cost is 0.005 of normal values.
EIGHT_BITS, SINGLE, COARSE = 0.01, 2e-5, 0.05


class MissingPeer(Exception):
    """A peer that is not installed, or that this build or CPU has not: the reason, and the mend."""


class Model:
    """A work's weights, loaded; ``plan`` makes a call, ``close`` gives the memory back."""

    def __init__(self, plan: Callable[[Work], tuple[Run, Result]], close: Run = lambda: None) -> None:
        self.plan, self.close = plan, close


class Peer:
    """One contender.

    Attributes:
        label: its name in tables.
        form: whose values it multiplies: ``q8_0`` or ``mxfp4``.
        exact: it computes every product of integers exactly, or in float32.
        kernel: activations are quantised before the call.
        tolerance: of its relative error against float32.
        settle: seconds until its threads have stopped waiting for more.
    """

    label = ""
    form = "q8_0"
    exact = True
    kernel = False
    tolerance = EIGHT_BITS
    settle = 0.0

    def __init__(self, count: int, folder: Path | None) -> None:
        """Make ready for so many threads.

        Raises:
            MissingPeer: it is not there.
        """
        self.count, self.folder = count, folder

    @property
    def version(self) -> str:
        return ""

    def bytes(self, k: int, n: int) -> int:
        """Of a matrix as it is held."""
        return ggml.row_bytes(self.form, k, n)

    def load(self, work: Work) -> Model:
        raise NotImplementedError


def outputs(work: Work) -> list[np.ndarray]:
    return [np.empty((work.acts[a].shape[0], work.weights[w].n), np.float32) for w, a in work.steps]


# --- ours ------------------------------------------------------------------------------------------------


class Tunekit(Peer):
    label = "tunekit"
    settle = 0.005  # workers spin for 2 ms

    def __init__(self, count: int, folder: Path | None) -> None:
        super().__init__(count, folder)
        self.limit = threads(count)
        self.limit.__enter__()

    @property
    def version(self) -> str:
        bound = kernels.q8q8.bound()
        own = metadata.version("tunekit-native")
        return f"{own}, {bound.suffix} ({bound.source})" if bound else f"{own}, the Python reference"

    def bytes(self, k: int, n: int) -> int:
        return n * k // BLOCK * {"q8_0": 34, "mxfp4": 17}[self.form]

    def load(self, work: Work) -> Model:
        read = q8.from_q8_0 if self.form == "q8_0" else q8.from_mxfp4
        held = [read(w.blocks, w.n, w.k) for w in work.weights]

        def plan(at: Work) -> tuple[Run, Result]:
            ys, matmul = outputs(at), q8.matmul
            acts = [q8.quantize(x) for x in at.acts] if self.kernel else at.acts
            calls = [(acts[a], held[w], y) for (w, a), y in zip(at.steps, ys, strict=True)]
            if len(calls) == 1:
                x, m, y = calls[0]
                return (lambda: matmul(x, m, out=y)), ys.__getitem__

            def run() -> None:
                for x, m, y in calls:
                    matmul(x, m, out=y)

            return run, ys.__getitem__

        return Model(plan, held.clear)


class TunekitQuantised(Tunekit):
    label = "tunekit, kernel (activations quantised before)"
    kernel = True


class TunekitMxfp4(Tunekit):
    label = "tunekit MXFP4"
    form = "mxfp4"


# --- ggml ------------------------------------------------------------------------------------------------


class Ggml(Peer):
    project, distribution = "llama.cpp", "llama-cpp-python"
    type_name = "q8_0"
    repack = ""
    settle = 0.008  # OpenMP's threads spin that long
    _open: dict[tuple[str, int], ggml.Library] = {}  # noqa: RUF012

    def __init__(self, count: int, folder: Path | None) -> None:
        super().__init__(count, folder)
        path = ggml.find_library(folder, self.project, self.distribution)
        if path is None:
            raise MissingPeer(f"no libggml of {self.project}; to build it: {SCRIPT} {self.project}")
        key = (str(path), count)
        if key not in self._open:
            try:
                self._open[key] = ggml.Library(path, count)
            except (OSError, AttributeError) as error:
                raise MissingPeer(f"{path} cannot be used ({error}); to build it: {SCRIPT} {self.project}") from error
        self.path, self.own = path, self._open[key]

    @property
    def version(self) -> str:
        return f"{self.distribution} {ggml.version_of(self.path, self.distribution)}"

    def buffer_type(self) -> int:
        return int(self.own.plain)

    def load(self, work: Work) -> Model:
        held = ggml.Held(self.own, work, self.type_name, self.buffer_type(), self.repack)
        return Model(held.plan, held.close)


class LlamaQ8(Ggml):
    label = "llama.cpp Q8_0"


class LlamaMxfp4(Ggml):
    label = "llama.cpp MXFP4 repacked"
    form = type_name = "mxfp4"

    def buffer_type(self) -> int:
        try:
            return self.own.repacking()
        except LookupError as error:
            raise MissingPeer(str(error)) from error


class LlamaDot(Ggml):
    """Its dot product of two rows, over all rows and tokens, on one thread."""

    label = "llama.cpp Q8_0, kernel (vec_dot, activations quantised before)"
    kernel = True

    def __init__(self, count: int, folder: Path | None) -> None:
        super().__init__(count, folder)
        if count > 1:
            raise MissingPeer("a dot product has one thread")
        self.traits = self.own.lib.ggml_get_type_traits_cpu(ggml.TYPES["q8_0"]).contents
        convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        other = self.own.lib.ggml_get_type_traits_cpu(self.traits.vec_dot_type).contents
        self.quantise = convert(other.from_float)
        self.loop = limits.loops().loop_vec_dot

    def load(self, work: Work) -> Model:
        held = [w.blocks.copy() for w in work.weights]

        def plan(at: Work) -> tuple[Run, Result]:
            ys, calls = outputs(at), []
            for (w, a), y in zip(at.steps, ys, strict=True):
                x, known = at.acts[a], at.weights[w]
                row = known.k // BLOCK * 34
                codes = np.empty((x.shape[0], row), np.uint8)
                for t in range(x.shape[0]):
                    self.quantise(x[t].ctypes.data, codes[t].ctypes.data, known.k)
                size, pointer = ctypes.c_size_t, ctypes.c_void_p
                calls.append((
                    (pointer(self.traits.vec_dot), known.k, ctypes.c_int64(known.n), ctypes.c_int64(x.shape[0]),
                     pointer(y.ctypes.data), pointer(held[w].ctypes.data), size(row), pointer(codes.ctypes.data),
                     size(row)),
                    codes,
                ))  # fmt: skip

            def run() -> None:
                for arguments, _ in calls:
                    self.loop(*arguments)

            return run, ys.__getitem__

        return Model(plan, held.clear)


class IkQ8(Ggml):
    label = "ik_llama.cpp Q8_0"
    project, distribution = "ik_llama.cpp", "ik-llama-cpp-python"


class IkQ8R8(IkQ8):
    label = "ik_llama.cpp Q8_0 by 8 rows (q8_0_r8)"
    repack = "iqk_repack_tensor"


class IkMxfp4(IkQ8):
    label = "ik_llama.cpp MXFP4"
    form = type_name = "mxfp4"


# --- ONNX Runtime ----------------------------------------------------------------------------------------


class Onnx(Peer):
    label = "ONNX Runtime MatMulNBits 8 bits, block 32"

    def __init__(self, count: int, folder: Path | None) -> None:
        super().__init__(count, folder)
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise MissingPeer(f"{error}; to install it: {SCRIPT} onnxruntime") from error
        self.onnx, self.runtime = onnx, onnxruntime

    @property
    def version(self) -> str:
        return f"onnxruntime {self.runtime.__version__}"

    def bytes(self, k: int, n: int) -> int:
        return n * k // BLOCK * 36

    def node(self, index: int, x: str, w: Any) -> tuple[Any, list[Any]]:
        """The operator of a step and its constants."""
        helper, numpy = self.onnx.helper, self.onnx.numpy_helper
        nb = w.k // BLOCK
        bytes_ = (w.codes.view(np.uint8) ^ 0x80).reshape(w.n, nb, BLOCK)
        constants = [numpy.from_array(bytes_, f"b{index}"), numpy.from_array(w.scales.reshape(w.n, nb), f"s{index}")]
        made = helper.make_node(
            "MatMulNBits", [x, f"b{index}", f"s{index}"], [f"y{index}"], domain="com.microsoft",
            K=w.k, N=w.n, bits=8, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip
        return made, constants

    def session(self, work: Work) -> Any:
        """A model whose outputs are the work's results."""
        helper, f32 = self.onnx.helper, self.onnx.TensorProto.FLOAT
        nodes, constants = [], []
        for index, (w, a) in enumerate(work.steps):
            made, parts = self.node(index, f"x{a}", work.weights[w])
            nodes.append(made)
            constants += parts
        xs = [
            helper.make_tensor_value_info(f"x{a}", f32, [f"t{a}", work.acts[a].shape[1]])
            for a in sorted({a for _, a in work.steps})
        ]
        ys = [
            helper.make_tensor_value_info(f"y{i}", f32, [f"t{a}", work.weights[w].n])
            for i, (w, a) in enumerate(work.steps)
        ]
        graph = helper.make_graph(nodes, "work", xs, ys, constants)
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        made = helper.make_model(graph, opset_imports=imports, ir_version=9)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.count, 1
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        return self.runtime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def load(self, work: Work) -> Model:
        def plan(at: Work) -> tuple[Run, Result]:
            found, session = outputs(at), self.session(at)
            binding = session.io_binding()
            for a in {a for _, a in at.steps}:
                x = at.acts[a]
                binding.bind_input(f"x{a}", "cpu", 0, np.float32, x.shape, x.ctypes.data)
            for i, y in enumerate(found):
                binding.bind_output(f"y{i}", "cpu", 0, np.float32, y.shape, y.ctypes.data)
            run = session.run_with_iobinding
            return (lambda: run(binding)), found.__getitem__

        return Model(plan)


class OnnxDynamic(Onnx):
    label = "ONNX Runtime DynamicQuantizeMatMul (not exact: saturates, per tensor)"
    exact = False
    tolerance = COARSE

    def bytes(self, k: int, n: int) -> int:
        return n * k

    def node(self, index: int, x: str, w: Any) -> tuple[Any, list[Any]]:
        helper, numpy = self.onnx.helper, self.onnx.numpy_helper
        floats = w.floats
        scales = np.abs(floats).max(axis=1) / np.float32(127)
        codes = np.rint(floats / scales[:, None]).astype(np.int8)
        constants = [
            numpy.from_array(np.ascontiguousarray(codes.T), f"b{index}"),
            numpy.from_array(scales.astype(np.float32), f"s{index}"),
        ]
        names = [x, f"b{index}", f"s{index}"]
        return helper.make_node("DynamicQuantizeMatMul", names, [f"y{index}"], domain="com.microsoft"), constants


# --- OpenVINO --------------------------------------------------------------------------------------------


class OpenVino(Peer):
    label = "OpenVINO int8, group 32"

    def __init__(self, count: int, folder: Path | None) -> None:
        super().__init__(count, folder)
        os.environ.setdefault("OPENVINO_TELEMETRY", "0")
        try:
            import openvino
            from openvino import opset13
        except ImportError as error:
            raise MissingPeer(f"{error}; to install it: {SCRIPT} openvino") from error
        self.vino, self.ops, self.core = openvino, opset13, openvino.Core()

    @property
    def version(self) -> str:
        return f"openvino {self.vino.__version__.partition('-')[0]}"

    def bytes(self, k: int, n: int) -> int:
        return n * k // BLOCK * 36

    def load(self, work: Work) -> Model:
        ops = self.ops
        settings = {
            "INFERENCE_NUM_THREADS": self.count, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": BLOCK, "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False,
        }  # fmt: skip

        def plan(at: Work) -> tuple[Run, Result]:
            used = sorted({a for _, a in at.steps})
            xs = {a: ops.parameter(list(at.acts[a].shape), np.float32, name=f"x{a}") for a in used}
            results = []
            for w, a in at.steps:
                known = at.weights[w]
                nb = known.k // BLOCK
                codes = ops.constant(known.codes.reshape(known.n, nb, BLOCK))
                scales = ops.constant(known.scales.reshape(known.n, nb, 1))
                wide = ops.multiply(ops.convert(codes, "f32"), scales)
                flat = ops.reshape(wide, ops.constant(np.array([known.n, known.k], np.int64)), False)
                results.append(ops.matmul(xs[a], flat, False, True))
            compiled = self.core.compile_model(self.vino.Model(results, list(xs.values()), "work"), "CPU", settings)
            request = compiled.create_infer_request()
            found = outputs(at)
            for i, a in enumerate(used):
                request.set_input_tensor(i, self.vino.Tensor(at.acts[a], shared_memory=True))
            for i, y in enumerate(found):
                request.set_output_tensor(i, self.vino.Tensor(y, shared_memory=True))
            kept = (request, compiled)
            # The binding below infer() would only look at the inputs again.
            start = super(type(request), request).infer
            nothing: dict[Any, Any] = {}
            return (lambda: kept and start(nothing, True, True)), found.__getitem__

        return Model(plan)


# --- oneDNN ----------------------------------------------------------------------------------------------


class OneDnn(Peer):
    label = "oneDNN float32 by int8, group 32"
    tolerance = SINGLE
    settle = 0.01

    def __init__(self, count: int, folder: Path | None) -> None:
        super().__init__(count, folder)
        place = Path(sys.prefix) / "lib"
        # PyPI's wheel is built on SYCL, whose CPU is an OpenCL driver that lies beside it.
        os.environ.setdefault("OCL_ICD_FILENAMES", str(place / "libintelocl.so"))
        os.environ["DPCPP_CPU_NUM_CUS"] = str(count)
        try:
            self.own = onednn.Library(place / "libdnnl.so.3")
        except (OSError, AttributeError) as error:
            raise MissingPeer(f"{error}; to install it with the SYCL that it needs: {SCRIPT} onednn") from error

    @property
    def version(self) -> str:
        return f"onednn {metadata.version('onednn')}"

    def bytes(self, k: int, n: int) -> int:
        return n * k // BLOCK * 36

    def load(self, work: Work) -> Model:
        def plan(at: Work) -> tuple[Run, Result]:
            own = self.own
            made = [own.product(at.acts[a], at.weights[w], at.weights[w].codes) for w, a in at.steps]

            def run() -> None:
                for primitive, values, _ in made:
                    own.execute(primitive, values)
                own.wait()

            def result(index: int) -> np.ndarray:
                w, a = at.steps[index]
                found = np.empty((at.acts[a].shape[0], at.weights[w].n), np.float32)
                own.copy(made[index][2], found, out=True)
                return found

            result.close = own.release  # type: ignore[attr-defined]
            return run, result

        return Model(plan)


# --- numpy -----------------------------------------------------------------------------------------------


class Numpy(Peer):
    label = "numpy float32"
    tolerance = SINGLE
    settle = 0.03  # OpenBLAS's threads yield that long

    @property
    def version(self) -> str:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"numpy {np.__version__}, {blas.get('name', '?')} {blas.get('version', '')}"

    def bytes(self, k: int, n: int) -> int:
        return 4 * n * k

    def load(self, work: Work) -> Model:
        held = [w.floats.copy() for w in work.weights]

        def plan(at: Work) -> tuple[Run, Result]:
            ys, matmul = outputs(at), np.matmul
            calls = [(at.acts[a], held[w].T, y) for (w, a), y in zip(at.steps, ys, strict=True)]

            def run() -> None:
                for x, w, y in calls:
                    matmul(x, w, out=y)

            return run, ys.__getitem__

        return Model(plan, held.clear)


ALL: tuple[type[Peer], ...] = (
    Tunekit, LlamaQ8, IkQ8, IkQ8R8, Onnx, OpenVino, OneDnn, Numpy, OnnxDynamic,
    TunekitQuantised, LlamaDot, TunekitMxfp4, LlamaMxfp4, IkMxfp4,
)  # fmt: skip


def start(count: int, folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are there, ours first, and why each other one is not."""
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for kind in ALL:
        try:
            found.append(kind(count, folder))
        except MissingPeer as error:
            missing[kind.label] = str(error)
    return found, missing
