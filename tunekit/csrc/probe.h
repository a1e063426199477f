/* SPDX-License-Identifier: Apache-2.0 */
/* What the CPU and the operating system say about themselves, raw. tunekit/cpu/features.py reads the bits. */
#ifndef TK_PROBE_H
#define TK_PROBE_H

#include <Python.h>

/* probe() -> dict: arch, leaves {(leaf, subleaf): (eax, ebx, ecx, edx)}, xcr0, tiles (always None here), hwcap,
 * hwcap2, midr. Costs microseconds (on AArch64 it reads one small sysfs file); keeps no state. */
PyObject *tk_probe(PyObject *self, PyObject *noargs);

/* request_tiles() -> bool: asks the kernel, once per process, for the AMX tile registers. False wherever the CPU
 * or XCR0 lacks them, without asking. Call it before worker threads start. */
PyObject *tk_request_tiles(PyObject *self, PyObject *noargs);

#endif
