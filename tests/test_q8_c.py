# SPDX-License-Identifier: Apache-2.0
"""The Q8 operations from C: the same bits as from Python on every layout, and a whole program that embeds them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, lacking, run_python

pytestmark = pytest.mark.build

STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
CHECK = """
import ctypes as c, sys, numpy as np
from tunekit import core, dispatch, q8
from tunekit.q8 import product
from tunekit.q8.layout import aligned

class Api(c.Structure):
    P, I, N = c.c_void_p, c.c_int, c.c_int64
    _fields_ = [("abi", c.c_uint32), ("size", c.c_uint32), ("maker", c.c_char_p), ("row", c.c_char_p), ("source", c.c_char_p),
        ("weights", c.CFUNCTYPE(N, N, N)), ("scales", c.CFUNCTYPE(N, N, N)), ("pack", c.CFUNCTYPE(I, P, P, P, N, N)),
        ("pack_q8_0", c.CFUNCTYPE(I, P, P, P, N, N)), ("pack_f16", c.CFUNCTYPE(I, P, P, P, N, N)),
        ("pack_q8_0_f16", c.CFUNCTYPE(I, P, P, P, N, N)), ("quantize", c.CFUNCTYPE(I, P, P, P, N, N)),
        ("matmul", c.CFUNCTYPE(I, P, P, P, P, N, N, N)), ("matmul_acts", c.CFUNCTYPE(I, P, P, P, P, P, N, N, N)),
        ("gemv", c.CFUNCTYPE(I, P, P, P, P, N, N)), ("nibbles", c.CFUNCTYPE(N, N, N)), ("exponents", c.CFUNCTYPE(N, N, N)),
        ("pack_mxfp4", c.CFUNCTYPE(I, P, P, P, N, N)), ("regions", c.CFUNCTYPE(I, P, c.c_int32, P, N, N)),
        ("row_of", c.CFUNCTYPE(I, P, P, N, N)), ("acts_bytes", c.CFUNCTYPE(N, N, N)), ("acts", c.CFUNCTYPE(I, P, P, N, N, N, N)),
        ("unit_rows", N), ("units", c.CFUNCTYPE(N, N)), ("begin", c.CFUNCTYPE(None, P)),
        ("piece", c.CFUNCTYPE(I, P, P, N, N, N, N, N, N)), ("team", P)]

class Region(c.Structure):
    P, N = c.c_void_p, c.c_int64
    _fields_ = [("w", P), ("ws", P), ("ws_f16", P), ("nib", P), ("e", P), ("bias", P), ("y", P), ("ldy", N), ("N", N), ("t0", N), ("t1", N)]

get = c.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = c.c_void_p, (c.py_object, c.c_char_p)
api = Api.from_address(get(q8._C_API, b"tunekit.q8._C_API"))
assert q8._C_API is q8._C_API and (api.abi, api.size) == (3, c.sizeof(Api))
p = lambda a: a.ctypes.data
bits = lambda a: np.where(np.isnan(a), np.float32(0), a).view(np.uint32)

def same(a, b):
    return np.array_equal(bits(a), bits(b)) and np.array_equal(np.isnan(a), np.isnan(b))

rng = np.random.default_rng(5)
n, k = 67, 160
w = (rng.standard_normal((n, k)) * np.exp2(rng.integers(-30, 30, (n, k // 32)).repeat(32, 1))).astype(np.float32)
w[0, :32] = np.nan; w[1, 5] = np.inf; w[2, :32] = 0; w[3, :32] *= np.float32(1e-42); w[4, :32] = 3e38; w[5, :32] = 1e-37
w[6, :32] = np.float32(127) * np.float32(65519.996); w[7, :32] = np.float32(127 * 65520.0); w[8, :32] = -0.0
w[9, :32] = np.float32(127) * np.float32(2.0 ** -25); w[10, :32] = np.float32(127) * np.float32(1.5 * 2.0 ** -24)
w[11, :32] = np.arange(32) - 15.5; w[11, 0] = 127
for i in range(12, 40):  # scales half way between two float16
    w[i, :32] = np.float32(127) * np.float32((2 * i + 1) * 2.0 ** -12); w[i, 1:32] *= np.linspace(-1, 1, 31, dtype=np.float32)
m = q8.pack(w)
row = product.native()
want_w, want_s = m.planes(row.layout)
own_w, own_s = np.full(api.weights(n, k), 99, np.int8), np.full(api.scales(n, k), 99, np.float32)
assert own_w.shape == want_w.shape and own_s.shape == want_s.shape
assert api.pack(p(own_w), p(own_s), p(w), n, k) == 0
assert np.array_equal(own_w, want_w) and same(own_s, want_s) and want_s.dtype == np.float32  # some are no float16
own_h = np.empty(api.scales(n, k), np.float16)
own_wh = np.full(api.weights(n, k), 99, np.int8)
assert api.pack_f16(p(own_wh), p(own_h), p(w), n, k) == -3
h = rng.standard_normal((n, k)).astype(np.float32) * np.exp2(rng.integers(-12, 12, (n, k // 32)).repeat(32, 1)).astype(np.float32)
h[:3, :32], h[8:40, :32] = w[:3, :32], w[8:40, :32]  # NaN, infinity, zeros, subnormal float16, half way
h[9, :32] = 0
half = q8.pack(h)
assert half.scales_fit_float16
assert api.pack_f16(p(own_wh), p(own_h), p(h), n, k) == 0
assert np.array_equal(own_wh, half.planes(row.layout)[0]) and same(own_h.astype(np.float32), half.planes(row.layout)[1].astype(np.float32))
small = np.float32(127) * np.arange(2, 2050, dtype=np.float32)[:, None] * np.float32(2.0 ** -25) * np.ones((1, 32), np.float32)
few, short = np.empty(api.weights(2048, 32), np.int8), np.empty(api.scales(2048, 32), np.float16)  # subnormal scales
assert api.pack_f16(p(few), p(short), p(small), 2048, 32) == 0
assert np.array_equal(short, q8.pack(small).planes(row.layout)[1]) and (short[:8] > 0).all()
fits = range(21)
plain = q8.pack(rng.standard_normal((len(fits), k)).astype(np.float32))
blocks = np.frombuffer(plain.to_q8_0(), np.uint8)
a, b = np.empty(api.weights(len(fits), k), np.int8), np.empty(api.scales(len(fits), k), np.float32)
assert api.pack_q8_0(p(a), p(b), p(blocks), len(fits), k) == 0
other = q8.from_q8_0(blocks, len(fits), k).planes(row.layout)
assert np.array_equal(a, other[0]) and same(b, other[1].astype(np.float32)) and other[1].dtype == np.float16
a2, b2 = np.empty_like(a), np.empty(b.size, np.float16)
assert api.pack_q8_0_f16(p(a2), p(b2), p(blocks), len(fits), k) == 0
assert np.array_equal(a2, other[0]) and np.array_equal(b2.view(np.uint16), other[1].view(np.uint16))
halves = np.arange(65536, dtype=np.uint16)  # every float16 as a scale
every = np.zeros((65536, 34), np.uint8); every[:, :2] = halves.view(np.uint8).reshape(-1, 2)
a, b = np.empty(api.weights(65536, 32), np.int8), np.empty(api.scales(65536, 32), np.float32)
assert api.pack_q8_0(p(a), p(b), p(every), 65536, 32) == 0
assert same(np.ascontiguousarray(b.reshape(-1, row.layout.mr)).reshape(-1)[:65536], halves.view(np.float16).astype(np.float32))
b2 = np.empty(b.size, np.uint16)
assert api.pack_q8_0_f16(p(a), p(b2), p(every), 65536, 32) == 0
assert np.array_equal(b2.reshape(-1, row.layout.mr).reshape(-1)[:65536], halves)
for t in (1, 2, 7, 33):
    x = rng.standard_normal((t, k)).astype(np.float32)
    acts = q8.quantize(x)
    q, s = np.empty((t, k), np.int8), np.empty((t, k // 32), np.float32)
    assert api.quantize(p(q), p(s), p(x), t, k) == 0
    assert np.array_equal(q, acts.codes) and same(s, acts.scales)
    y, z = np.empty((t, n), np.float32), np.empty((t, n), np.float32)
    assert api.matmul(p(y), p(x), p(own_w), p(own_s), t, n, k) == 0
    assert api.matmul_acts(p(z), p(q), p(s), p(own_w), p(own_s), t, n, k) == 0
    assert same(y, q8.matmul(x, m)) and same(y, z) and same(y, q8.oracle.matmul(acts, m))
    assert api.gemv(p(z), p(x), p(own_w), p(own_s), n, k) == 0 and same(z[0], y[0])
mx = q8.from_mxfp4(rng.integers(0, 256, (n * k // 32, 17), np.uint8) & np.r_[127, [255] * 16].astype(np.uint8), n, k)
nib, e = np.full(api.nibbles(n, k), 99, np.uint8), np.full(api.exponents(n, k), 99, np.uint8)
assert api.pack_mxfp4(p(nib), p(e), mx.to_mxfp4(), n, k) == 0
assert all(np.array_equal(a, b) for a, b in zip((nib, e), mx.nibble_planes(row.layout)))
bias = rng.standard_normal(n).astype(np.float32)
for t in (1, 3, 40):
    x = rng.standard_normal((t, k)).astype(np.float32)
    want = [q8.matmul(x, m), q8.matmul(x, mx) + bias, q8.oracle.matmul(q8.quantize(x), half)]
    y, z, v = np.full((t, n + 5), 7, np.float32), np.full((t, n), 7, np.float32), np.full((t, n), 7, np.float32)
    r = (Region * 3)(Region(p(own_w), p(own_s), None, None, None, None, p(y), n + 5, n, 0, t), Region(None, None, None, p(nib), p(e), p(bias), p(z), n, n, 0, t),
        Region(p(own_wh), None, p(own_h), None, None, None, p(v), n, n, 0, t))
    assert api.regions(c.addressof(r), 3, p(x), t, k) == 0
    assert same(y[:, :n], want[0]) and same(z, want[1]) and same(v, want[2]) and (y[:, n:] == 7).all()
    y[:], z[:], v[:] = 7, 7, 7
    buffer = aligned(api.acts_bytes(t, k), np.uint8)
    assert api.acts(p(buffer), p(x), t, t // 2, t, k) == 0 and api.acts(p(buffer), p(x), t, 0, t // 2, k) == 0
    assert api.units(n) * api.unit_rows >= n > (api.units(n) - 1) * api.unit_rows and api.units(0) == 0
    api.begin(None)
    for one in r:
        for a, b in ((0, t // 2), (t // 2, t)):
            for u in range(api.units(n)):
                assert api.piece(c.addressof(one), p(buffer), t, a, b, u, u + 1, k) == 0
    assert same(y[:, :n], want[0]) and same(z, want[1]) and same(v, want[2]) and (y[:, n:] == 7).all()
    assert api.piece(c.addressof(r), p(buffer), t, 0, t + 1, 0, 1, k) == api.acts(p(buffer), p(x), t, 0, 1, 31) == -2
    for r[0].t0, r[0].t1 in ((0, t + 1), (1, 0)):
        assert api.regions(c.addressof(r), 3, p(x), t, k) == -2
    no_scales = Region(p(own_w), None, None, None, None, None, p(y), n + 5, n, 0, t)
    assert api.regions(c.addressof(no_scales), 1, p(x), t, k) == api.piece(c.addressof(no_scales), p(buffer), t, 0, t, 0, 1, k) == -2
    for lacking in (no_scales, Region(None, None, None, p(nib), None, None, None, 0, n, 0, t), Region(None, p(own_s), p(own_h), None, p(e), None, None, 0, n, 0, t)):
        assert api.row_of(p(x), c.addressof(lacking), 0, k) == api.regions(c.addressof(lacking), 1, p(x), t, k) == -2
codes, scales = m.codes, m.scales
one = np.empty(k, np.float32)
for i in (0, 1, 2, 20, n - 1):
    assert api.row_of(p(one), c.addressof(r), i, k) == 0 and same(one, (codes[i].reshape(-1, 32) * scales[i][:, None]).reshape(-1))
    assert api.row_of(p(one), c.addressof(r) + c.sizeof(Region), i, k) == 0
    assert same(one, (mx.codes[i].reshape(-1, 32) * mx.scales[i][:, None]).reshape(-1))
    assert api.row_of(p(one), c.addressof(r) + 2 * c.sizeof(Region), i, k) == 0
    assert same(one, (half.codes[i].reshape(-1, 32) * half.scales[i][:, None]).reshape(-1))
assert api.row_of(p(one), c.addressof(r), n, k) == api.row_of(p(one), c.addressof(r), -1, k) == -2
chunk = 2 * api.unit_rows  # rows packed by themselves
if chunk < n:
    part = np.zeros_like(own_w), np.zeros_like(own_s)
    for a in range(0, n, chunk):
        b = min(n, a + chunk)
        assert api.pack(p(part[0]) + a * k, p(part[1]) + a * k // 8, p(w) + 4 * a * k, b - a, k) == 0
    assert np.array_equal(part[0], own_w) and same(part[1], own_s)
for bad in ((1, 2, 33), (1, -1, 32), (-1, 2, 32), (1, 2, -32), (1 << 40, 1 << 40, 32), (1, 1 << 60, 64)):
    assert api.matmul(None, None, None, None, *bad) == -2, bad
assert api.weights(3, 31) == api.scales(-1, 32) == -1 and api.pack(None, None, None, 1, 31) == -2
assert api.matmul(p(y), p(x), p(own_w), p(own_s), 0, n, k) == 0
assert all(api.acts_bytes(1 << b, 0) == -1 for b in (57, 58, 60, 62)) and api.acts_bytes(3, 0) >= 0
print(api.row.decode(), api.source.decode(), row.layout)
"""


def test_every_operation_gives_the_bits_of_python_on_every_layout(q8_cache: Path) -> None:
    code = (
        "from tunekit import dispatch, q8\nfrom tunekit.q8 import kernels, layout\n"
        "rows = dispatch.grid_rows(kernels.q8q8.kernel)\nfirst = {}\n"
        "for s, r in rows.items(): first.setdefault(layout.layout_of(r.row).plane, s)\nprint(*first.values())"
    )
    rows = run_python(code, {"TUNEKIT_CACHE": str(q8_cache)}).stdout.split()
    assert len(rows) >= 2
    for row in rows:
        done = run_python(CHECK, {"TUNEKIT_CACHE": str(q8_cache), "TUNEKIT_PIN": f"q8q8={row}"})
        assert done.returncode == 0, (row, done.stderr)
        assert done.stdout.split()[:2] == [row, "pin"]


def test_without_native_code_the_table_is_an_import_error(tmp_path: Path) -> None:
    code = (
        "from tunekit import dispatch\ndispatch.module.find_beside = lambda kernel: []\n"
        "from tunekit import q8\ntry: q8._C_API\nexcept ImportError as e: print(e)"
    )
    done = run_python(code, {"TUNEKIT_CACHE": str(tmp_path)})
    assert done.stdout.startswith("tunekit.q8._C_API: there is no native code here: "), done.stderr
    assert "python -m tunekit build" in done.stdout


@pytest.mark.parametrize("words", [("gcc", "-std=c99"), ("g++", "-std=c++17", "-x", "c++"), ("clang-19", "-std=c17")], ids=lambda w: w[0])
def test_the_header_is_strict_c_and_cpp(words: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} here")
    (tmp_path / "a.c").write_text("#include <Python.h>\n#include <tunekit_q8.h>\nint main(void) { return tunekit_q8_import() == NULL; }\n")
    command = [*words, *STRICT, "-c", "-isystem", sysconfig.get_path("include"), "-I", ROOT / "tunekit" / "csrc", tmp_path / "a.c", "-o", tmp_path / "a.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_program_that_embeds_it_runs(q8_cache: Path, tmp_path: Path) -> None:
    name = str(sysconfig.get_config_var("LDLIBRARY"))
    roots = [Path(str(sysconfig.get_config_var("LIBDIR"))), Path(sys.base_prefix) / "lib"]
    # (Debian keeps it in a folder named by the triple.)
    places = [path.parent for root in roots for path in (root / name, *root.glob(f"*/{name}")) if path.is_file()]
    if not places:
        lacking("libpython (Debian and Ubuntu: apt-get install libpython3-dev)")
    libraries = places[0]
    program = tmp_path / "embed"
    library = re.sub(r"^lib|\.(so|a|dylib).*$", "", name)
    command = ["gcc", "-std=c99", "-O2", *STRICT, ROOT / "examples/embed_q8/embed.c", "-o", program, "-I", ROOT / "tunekit/csrc"]
    command += ["-isystem", sysconfig.get_path("include"), f"-L{libraries}", f"-l{library}", f"-Wl,-rpath,{libraries}", "-Wl,--export-dynamic", "-lm", "-ldl", "-lpthread", "-lutil"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    printed = set()
    for pin in ("q8q8=reference", ""):
        environment = {**os.environ, "TUNEKIT_CACHE": str(q8_cache), "TUNEKIT_PIN": pin, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([program, sys.executable], env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        status, agree, corners = done.stdout.splitlines()
        assert status == ("status: reference (pin)" if pin else status)
        assert re.fullmatch(r"status: \w+ \((pin|fallback)\)", status)
        assert agree == "gemv and quantised activations: the same bits"
        printed.add(corners)
    assert len(printed) == 1  # the same on every row
    code = (
        "import numpy as np; from tunekit import q8\n"
        "def fill(n, s):\n    out = np.empty(n, np.float32)\n    for i in range(n):\n        s = (s * 1664525 + 1013904223) % 2**32\n"
        "        out[i] = np.float32(np.uint32(s).astype(np.int32)) * np.float32(2.0 ** -31)\n    return out\n"
        "y = q8.oracle.matmul(q8.quantize(fill(5 * 256, 2).reshape(5, 256)), q8.pack(fill(67 * 256, 1).reshape(67, 256)))\n"
        "print(*(float(v).hex() for v in (y[0, 0], y[0, 66], y[4, 66])))"
    )
    wanted = [float.fromhex(v) for v in run_python(code, {"TUNEKIT_CACHE": str(q8_cache)}).stdout.split()]
    assert [float.fromhex(v) for v in printed.pop().split()[1:]] == wanted
