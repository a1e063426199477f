/* SPDX-License-Identifier: Apache-2.0 */
/* The team, the box profile's numbers and the shapers, as Python sees them. tunekit/team.py is their one client. */
#ifndef TK_KNOBS_H
#define TK_KNOBS_H

#include <Python.h>

#include "tunekit_team.h"

/* What the capsule tunekit._core.team points to. */
extern const tk_team_api tk_team_table;

/* Adds the capsule "team" to the module; -1 and an exception where it cannot. */
int tk_knobs_load(PyObject *module);

PyObject *tk_knobs(PyObject *self, PyObject *noargs);                                 /* -> {name: int} */
PyObject *tk_set_knob(PyObject *self, PyObject *const *args, Py_ssize_t nargs);       /* (name, value) */
PyObject *tk_py_team_live(PyObject *self, PyObject *noargs);                          /* -> lanes */
PyObject *tk_py_team_workers(PyObject *self, PyObject *noargs);                       /* -> (made, parked) */
PyObject *tk_py_team_counts(PyObject *self, PyObject *reset);                         /* -> {name: int} */
PyObject *tk_py_team_empty(PyObject *self, PyObject *const *args, Py_ssize_t nargs);  /* -> ns of all repeats */
PyObject *tk_py_lanes(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_py_chunks(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_py_cells(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_py_part(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_py_token_block(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_py_admitted(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
