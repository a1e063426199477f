// SPDX-License-Identifier: Apache-2.0
/*
 * tunekit._core: what exists once per process. The probe of this CPU, the AMX permission, the thread team, the box
 * profile's numbers and the Q8 traversals. Baseline code on the limited API, so that one file serves every CPython
 * from 3.11 on.
 */
#include <Python.h>

#include <stdint.h>

#include "knobs.h"
#include "pack.h"
#include "probe.h"
#include "q8.h"

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

/* Of the functions below, as tunekit/core.py calls them: counted up there and here when one of them changes. */
enum { TK_CORE_ABI = 2 };

static PyMethodDef methods[] = {
    {"probe", tk_probe, METH_NOARGS, "The raw identification words of this CPU, as a dict."},
    {"request_tiles", tk_request_tiles, METH_NOARGS, "Ask the kernel for AMX tile data, once; True when granted."},
    {"q8_row", FAST(tk_q8_py_row), "q8_row(tile, gemv, acts_bytes, prepare, quantize, amx_cfg, tile_f16, gemv_f16, mr, tokstep, groups[, mx4_gemv, mx4_room, mx4_expand, mx4_tile]) "
                              "-> capsule"},
    {"q8_matmul", FAST(tk_q8_py_matmul), "q8_matmul(row, y, x, w, ws, T, N, K)"},
    {"q8_matmul_acts", FAST(tk_q8_py_matmul_acts), "q8_matmul_acts(row, y, q, s, w, ws, T, N, K)"},
    {"q8_mx4_matmul", FAST(tk_q8_py_mx4_matmul), "q8_mx4_matmul(row, y, x, nib, e, T, N, K)"},
    {"q8_mx4_matmul_acts", FAST(tk_q8_py_mx4_matmul_acts), "q8_mx4_matmul_acts(row, y, q, s, nib, e, T, N, K)"},
    {"q8_prepared", FAST(tk_q8_py_prepared), "q8_prepared(row, first, second, N, K, mx4) -> capsule"},
    {"q8_product", FAST(tk_q8_py_product), "q8_product(prepared, x, y) -> whether it was done"},
    {"q8_quantize", FAST(tk_q8_py_quantize), "q8_quantize(row, q, s, x, T, K)"},
    {"q8_api", FAST(tk_q8_py_api), "q8_api(row, kgroup, nibble_kgroup, bias, maker, name, source) -> capsule of the table in tunekit_q8.h"},
    {"q8_regions", FAST(tk_q8_py_regions), "q8_regions(row, x | None, q | None, s | None, T, K, regions)"},
    {"pack", FAST(tk_py_pack), "pack(out, source, first, stride, N, blocks, bytes, mr, kgroup, flip)"},
    {"knobs", tk_knobs, METH_NOARGS, "The numbers that dispatch goes by, by name."},
    {"set_knob", FAST(tk_set_knob), "set_knob(name, value)"},
    {"team_live", tk_py_team_live, METH_NOARGS, "Lanes that a product may have now."},
    {"team_workers", tk_py_team_workers, METH_NOARGS, "(workers made, of them parked)"},
    {"team_counts", tk_py_team_counts, METH_O, "team_counts(reset) -> the counters, by name"},
    {"team_empty", FAST(tk_py_team_empty), "team_empty(lanes, chunks, stages, repeats) -> nanoseconds of all repeats"},
    {"lanes", FAST(tk_py_lanes), "lanes(work, target, live, cap)"},
    {"chunks", FAST(tk_py_chunks), "chunks(units, grain, lanes, oversplit, fill)"},
    {"cells", FAST(tk_py_cells), "cells(chunks, tokens, tiles, lanes, oversplit, mode, most) -> (row cells, token cells)"},
    {"part", FAST(tk_py_part), "part(total, parts, i)"},
    {"token_block", FAST(tk_py_token_block), "token_block(block, budget, each)"},
    {"admitted", FAST(tk_py_admitted), "admitted(workers, lanes, widest, gate)"},
    {NULL, NULL, 0, NULL},
};

static int load(PyObject *self)
{
    /* Not an ImportError: that would read as "not built", and run on the slow reference without a word. */
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_RuntimeError,
            "tunekit works in the main interpreter alone: its thread team and its choice of rows exist once per "
            "process; run it there, or in a process of its own (multiprocessing)");
        return -1;
    }
    tk_q8_load();
    return PyModule_AddIntConstant(self, "abi", TK_CORE_ABI) != 0 ? -1 : tk_knobs_load(self);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)(uintptr_t)load},
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
