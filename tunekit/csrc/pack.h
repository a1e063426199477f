// SPDX-License-Identifier: Apache-2.0
/* Laying matrices out: from rows of blocks to the planes of tunekit/q8/layout.py. */
#ifndef TK_PACK_H
#define TK_PACK_H

#include <Python.h>

/*
 * For the module's method table, METH_FASTCALL:
 *   pack(out, source, first, stride, N, blocks, bytes, mr, kgroup, flip) -> None
 *     out: the plane of N rows padded to whole groups of mr: (groups, blocks, bytes / kgroup, mr, kgroup) bytes, all
 *     written, rows beyond N as 0 (and flipped like the others). source: block b of row r is the `bytes` bytes at
 *     first + (r * blocks + b) * stride. flip: 0, or 128 to flip the highest bit of every byte.
 *     bytes is a multiple of kgroup, which is 1, 2, 4 or 8.
 * Buffers are C-contiguous and hold what is asked for, or it is a ValueError. It uses the lanes that the work is worth.
 */
PyObject *tk_py_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
