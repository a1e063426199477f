# SPDX-License-Identifier: Apache-2.0
"""Prototypes from annotations, and the errors of a call with arrays that do not fit."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import numpy as np
import pytest

import tunekit as tk
from tunekit.signature import check_call, quick_check, signature_of


def gemm(
    a: Annotated[tk.In[tk.f32], "m", "k"],
    b: Annotated[tk.In[tk.f32], "k*n"],
    c: Annotated[tk.Out[tk.f32], "m", "n"],
    m: tk.i32,
    k: tk.i32,
    n: tk.i32,
) -> None:
    del a, b, c, m, k, n


SIGNATURE = signature_of(gemm, "kernel 'gemm'")
A, B, C = np.zeros((2, 3), np.float32), np.zeros(12, np.float32), np.zeros((2, 4), np.float32)


def call(a: Any = A, b: Any = B, c: Any = C, m: Any = 2, k: Any = 3, n: Any = 4) -> list[Any]:
    return check_call("gemm", SIGNATURE, [a, b, c, m, k, n])


def test_prototype() -> None:
    assert SIGNATURE.prototype("tk_gemm") == (
        "void tk_gemm(const float *restrict a, const float *restrict b, float *restrict c, "
        "int32_t m, int32_t k, int32_t n)"
    )


def test_what_fits_is_passed_without_a_copy() -> None:
    assert call()[0] is A
    assert call(a=A.ravel())[0].base is not None  # 1-D of as many elements is as good


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": A.tolist()}, TypeError, "a must be a NumPy array of float32, not list"),
        ({"a": A.astype(np.float64)}, TypeError, r"dtype float32, not float64; convert it with \.astype"),
        ({"a": A.astype(">f4")}, TypeError, "dtype float32, not >f4"),
        ({"a": A.astype(object)}, TypeError, "dtype float32, not object"),
        ({"a": np.zeros((2, 6), np.float32)[:, ::2]}, ValueError, "a must be C-contiguous"),
        ({"a": A[::-1]}, ValueError, "a must be C-contiguous"),
        ({"a": np.zeros((3, 2), np.float32)}, ValueError, r"a must have shape \(m, k\) = \(2, 3\), got \(3, 2\)"),
        ({"a": np.zeros(5, np.float32)}, ValueError, "a must have shape"),
        ({"a": np.zeros((), np.float32)}, ValueError, "a must have shape"),
        ({"m": 2.0}, TypeError, "m must be a whole number"),
        ({"m": "2"}, TypeError, "m must be a whole number"),
        ({"m": 2**31}, ValueError, "m=2147483648 does not fit i32"),
        ({"m": -2}, ValueError, "must have shape"),
    ],
)
def test_what_does_not_fit_names_argument_and_mend(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(**change)


def test_a_read_only_output_is_refused_and_a_read_only_input_is_fine() -> None:
    frozen = C.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="c is an output and the array is read-only"):
        call(c=frozen)
    read = A.copy()
    read.flags.writeable = False
    assert call(a=read)[0] is read


def test_an_unaligned_array_is_refused() -> None:
    raw = np.zeros(4 * 6 + 1, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="not aligned"):
        call(a=raw)


def test_an_output_that_overlaps_an_input_is_refused() -> None:
    whole = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="output c overlaps a"):
        call(a=whole[:6], c=whole[5:13])


def test_wrong_number_of_arguments() -> None:
    with pytest.raises(TypeError, match=r"gemm takes 6 arguments \(a, b, c, m, k, n\), got 1"):
        check_call("gemm", SIGNATURE, [A])


def test_empty_arrays_are_arrays() -> None:
    empty = np.zeros((0, 3), np.float32)
    assert call(a=empty, c=np.zeros((0, 4), np.float32), m=0)[0] is empty


# --- the quick check: a part of what the full one accepts, and the same values ----------------------------


def _mixed(
    y: Annotated[tk.InOut[tk.f32], "n", "2*m"], x: Annotated[tk.In[tk.i8], "n // m"], z: tk.In[tk.f64], a: tk.f32, n: tk.i32, m: tk.u8
) -> tk.i32: ...


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _full(signature: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    try:
        checked = check_call("f", signature, arguments)
    except (TypeError, ValueError):
        return None
    return tuple(_address(v) if isinstance(v, np.ndarray) else v for v in checked)


def test_the_quick_check_takes_what_plainly_fits() -> None:
    signature = signature_of(_mixed, "f")
    quick = quick_check(signature, _address)
    plain = (np.zeros((6, 4), np.float32), np.zeros(3, np.int8), np.zeros(5), 1.5, 6, 2)
    assert quick(*plain) == _full(signature, plain) is not None


def test_the_quick_check_never_takes_what_the_full_one_refuses() -> None:
    """Every argument replaced by everything that is odd, alone and in pairs."""
    signature = signature_of(_mixed, "f")
    quick = quick_check(signature, _address)
    memory = np.zeros(4096, np.uint8)
    y, x, z = np.zeros((6, 4), np.float32), np.zeros(3, np.int8), np.zeros(5)
    frozen = y.copy()
    frozen.flags.writeable = False
    arrays: list[Any] = [
        y, x, z, frozen, y.ravel(), y.T, y[::-1], y.astype(">f4"), y.astype(np.float64), y.view(np.matrix), y[:5], y[:0],
        np.zeros((6, 8), np.float32)[:, ::2], np.frombuffer(memory, np.float32, 24, 1).reshape(6, 4),
        np.frombuffer(memory, np.float32, 24).reshape(6, 4), np.frombuffer(memory, np.float64, 5, 16), np.frombuffer(memory, np.float64, 5, 1),
        np.frombuffer(memory, np.int8, 3, 95), np.frombuffer(memory, np.int8, 3, 96), x[:2], np.zeros(3, np.uint8),
        z[::2], np.zeros(0), np.zeros((2, 2)), [0.0] * 5, None, b"abc", np.float32(1), memory.data,
    ]  # fmt: skip
    numbers: list[Any] = [1.5, 6, 2, 0, -1, 256, 2**31, True, 1e300, float("nan"), "6", b"6", None, np.int64(6), np.float32(1)]
    plain = (y, x, z, 1.5, 6, 2)
    pools = [arrays, arrays, arrays, numbers, numbers, numbers]
    taken = 0
    for i, j in itertools.combinations(range(6), 2):
        for first, second in itertools.product(pools[i], pools[j]):
            arguments = list(plain)
            arguments[i], arguments[j] = first, second
            found = quick(*arguments)
            if found is not None:
                taken += 1
                assert repr(found) == repr(_full(signature, tuple(arguments))), arguments
    assert taken > 50


def test_names_of_parameters_do_not_meet_the_quick_checks_own() -> None:
    def odd(flags: Annotated[tk.Out[tk.f32], "address"], ndarray: tk.In[tk.f32], address: tk.i32, type: tk.i32) -> None: ...

    signature = signature_of(odd, "f")
    arguments = (np.zeros(3, np.float32), np.zeros(2, np.float32), 3, 7)
    assert quick_check(signature, _address)(*arguments) == _full(signature, arguments) is not None
