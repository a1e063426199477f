// SPDX-License-Identifier: Apache-2.0
/*
 * tunekit._core: what exists once per process. The probe of this CPU, the AMX permission and the Q8
 * traversal. Baseline code on the limited API, so that one file serves every CPython from 3.11 on.
 */
#include <Python.h>

#include "probe.h"
#include "q8.h"

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

static PyMethodDef methods[] = {
    {"probe", tk_probe, METH_NOARGS, "The raw identification words of this CPU, as a dict."},
    {"request_tiles", tk_request_tiles, METH_NOARGS, "Ask the kernel for AMX tile data, once; True when granted."},
    {"q8_row", FAST(tk_q8_py_row), "q8_row(tile, gemv, acts_bytes, prepare, quantize, amx_cfg, mr, tokstep, groups[, mx4_gemv, mx4_expand]) "
                              "-> capsule"},
    {"q8_matmul", FAST(tk_q8_py_matmul), "q8_matmul(row, y, x, w, ws, T, N, K)"},
    {"q8_matmul_acts", FAST(tk_q8_py_matmul_acts), "q8_matmul_acts(row, y, q, s, w, ws, T, N, K)"},
    {"q8_mx4_matmul", FAST(tk_q8_py_mx4_matmul), "q8_mx4_matmul(row, y, x, nib, e, T, N, K)"},
    {"q8_mx4_matmul_acts", FAST(tk_q8_py_mx4_matmul_acts), "q8_mx4_matmul_acts(row, y, q, s, nib, e, T, N, K)"},
    {"q8_quantize", FAST(tk_q8_py_quantize), "q8_quantize(row, q, s, x, T, K)"},
    {"q8_api", FAST(tk_q8_py_api), "q8_api(row, kgroup, bias, maker, name, source) -> capsule of the table in tunekit_q8.h"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tunekit._core",
    .m_doc = "What tunekit has once per process, in C.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module);
}
