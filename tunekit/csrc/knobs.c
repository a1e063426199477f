// SPDX-License-Identifier: Apache-2.0
#include "knobs.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "q8.h"
#include "shape.h"
#include "team.h"

/* ---- numbers by name ------------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int32_t *narrow;
    int64_t *wide;
} knob;

/* The team's settings are copied out and in, so that it sees each change whole. */
static tk_team_settings of_team;

static const knob knobs[] = {
    {"target_chunk_work", NULL, &tk_q8_box.target_chunk_work},
    {"wake_work", NULL, &tk_q8_box.wake_work},
    {"q8_l2_budget", NULL, &tk_q8_box.q8_l2_budget},
    {"act_threshold", NULL, &tk_q8_box.act_threshold},
    {"q8_token_block", &tk_q8_box.q8_token_block, NULL},
    {"matmul_min_chunk_rows", &tk_q8_box.matmul_min_chunk_rows, NULL},
    {"matmul_min_chunk_rows_gemv", &tk_q8_box.matmul_min_chunk_rows_gemv, NULL},
    {"q8_batch_chunks_per_job", &tk_q8_box.q8_batch_chunks_per_job, NULL},
    {"q8_gemv_chunks_per_job", &tk_q8_box.q8_gemv_chunks_per_job, NULL},
    {"gemv_lane_cap", &tk_q8_box.gemv_lane_cap, NULL},
    {"batch_lane_cap", &tk_q8_box.batch_lane_cap, NULL},
    {"batch_grid_2d", &tk_q8_box.batch_grid_2d, NULL},
    {"gemv_wave_fill", &tk_q8_box.gemv_wave_fill, NULL},
    {"ceiling", &of_team.ceiling, NULL},
    {"dispatch_worker_limit", &of_team.worker_limit, NULL},
    {"team_rank_gate", &of_team.rank_gate, NULL},
    {"team_spin_us", &of_team.spin_us, NULL},
    {"team_join_poll", &of_team.join_poll, NULL},
    {"team_prof", &of_team.profile, NULL},
    {"pretend_lanes", &of_team.pretend, NULL},
};
enum { KNOBS = sizeof knobs / sizeof knobs[0] };

static int put(PyObject *dict, const char *name, long long value)
{
    PyObject *number = PyLong_FromLongLong(value);
    const int status = number != NULL ? PyDict_SetItemString(dict, name, number) : -1;
    Py_XDECREF(number);
    return status;
}

PyObject *tk_knobs(PyObject *self, PyObject *noargs)
{
    (void)self;
    (void)noargs;
    of_team = tk_team_get();
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < KNOBS; i++) {
        if (put(dict, knobs[i].name, knobs[i].narrow != NULL ? *knobs[i].narrow : *knobs[i].wide) != 0)
            Py_CLEAR(dict);
    }
    return dict;
}

/* Whole numbers from the arguments; 0 and an exception where they are not. */
static int numbers(const char *name, PyObject *const *args, Py_ssize_t nargs, int64_t *to, Py_ssize_t count)
{
    if (nargs != count) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, count, nargs);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(args[i]);
        if (to[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static int32_t narrow(int64_t n)
{
    return n > INT32_MAX ? INT32_MAX : n < INT32_MIN ? INT32_MIN : (int32_t)n;
}

PyObject *tk_set_knob(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    int64_t value;
    if (nargs != 2 || !numbers("set_knob", args + 1, 1, &value, 1)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "set_knob takes a name and a number");
        return NULL;
    }
    of_team = tk_team_get();
    for (int i = 0; i < KNOBS; i++) {
        PyObject *name = PyUnicode_FromString(knobs[i].name);
        const int same = name != NULL ? PyUnicode_Compare(args[0], name) == 0 : 0;
        Py_XDECREF(name);
        if (PyErr_Occurred())
            return NULL;
        if (!same)
            continue;
        if (knobs[i].narrow != NULL)
            *knobs[i].narrow = narrow(value);
        else
            *knobs[i].wide = value;
        tk_team_set(&of_team);
        Py_INCREF(Py_None);
        return Py_None;
    }
    PyErr_Format(PyExc_ValueError, "there is no knob %R", args[0]);
    return NULL;
}

/* ---- the team ------------------------------------------------------------------------------------- */

PyObject *tk_py_team_live(PyObject *self, PyObject *noargs)
{
    (void)self;
    (void)noargs;
    return PyLong_FromLong(tk_team_live());
}

PyObject *tk_py_team_workers(PyObject *self, PyObject *noargs)
{
    (void)self;
    (void)noargs;
    int32_t made, parked;
    tk_team_workers(&made, &parked);
    return Py_BuildValue("(ii)", made, parked);
}

PyObject *tk_py_team_counts(PyObject *self, PyObject *reset)
{
    (void)self;
    const int zero = PyObject_IsTrue(reset);
    if (zero < 0)
        return NULL;
    tk_team_counts c;
    tk_team_counted(&c, zero);
    const struct {
        const char *name;
        uint64_t value;
    } all[] = {{"ops", c.ops}, {"solo", c.solo}, {"busy", c.busy}, {"chunks", c.chunks}, {"own_chunks", c.own_chunks},
        {"publish_ns", c.publish_ns}, {"serve_ns", c.serve_ns}, {"join_ns", c.join_ns}, {"reacted", c.reacted},
        {"first_ns", c.first_ns}, {"last_ns", c.last_ns}};
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < sizeof all / sizeof all[0]; i++) {
        if (put(dict, all[i].name, (long long)all[i].value) != 0)
            Py_CLEAR(dict);
    }
    return dict;
}

static void nothing(void *context, int32_t chunk)
{
    (void)context;
    (void)chunk;
}

PyObject *tk_py_team_empty(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    enum { LANES, CHUNKS, STAGES, REPEATS, ALL };
    int64_t n[ALL];
    if (!numbers("team_empty", args, nargs, n, ALL))
        return NULL;
    const int32_t count = n[STAGES] < 1 ? 1 : n[STAGES] > TK_TEAM_STAGES ? TK_TEAM_STAGES : (int32_t)n[STAGES];
    const tk_stage one = {nothing, NULL, NULL, narrow(n[CHUNKS] < 0 ? 0 : n[CHUNKS])};
    tk_stage stages[TK_TEAM_STAGES];
    for (int32_t s = 0; s < count; s++)
        stages[s] = one;
    struct timespec begin, end;
    Py_BEGIN_ALLOW_THREADS
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int64_t i = 0; i < n[REPEATS]; i++)
        tk_team_run(stages, count, narrow(n[LANES]), 1);
    clock_gettime(CLOCK_MONOTONIC, &end);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(
        (long long)(end.tv_sec - begin.tv_sec) * 1000000000 + (long long)(end.tv_nsec - begin.tv_nsec));
}

/* ---- the shapers ---------------------------------------------------------------------------------- */

PyObject *tk_py_lanes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t n[4];
    (void)self;
    if (!numbers("lanes", args, nargs, n, 4))
        return NULL;
    return PyLong_FromLong(tk_lanes(n[0], n[1], narrow(n[2]), narrow(n[3])));
}

PyObject *tk_py_chunks(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t n[5];
    (void)self;
    if (!numbers("chunks", args, nargs, n, 5))
        return NULL;
    return PyLong_FromLong(tk_chunks(n[0], n[1], narrow(n[2]), narrow(n[3]), n[4] != 0));
}

PyObject *tk_py_cells(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t n[7];
    (void)self;
    if (!numbers("cells", args, nargs, n, 7))
        return NULL;
    const tk_grid grid = tk_cells(narrow(n[0]), n[1], n[2], narrow(n[3]), narrow(n[4]), (int)narrow(n[5]), n[6]);
    return Py_BuildValue("(ii)", grid.rows, grid.tokens);
}

PyObject *tk_py_part(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t n[3];
    (void)self;
    if (!numbers("part", args, nargs, n, 3))
        return NULL;
    return PyLong_FromLongLong(tk_part(n[0], n[1], n[2]));
}

PyObject *tk_py_token_block(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t n[3];
    (void)self;
    if (!numbers("token_block", args, nargs, n, 3))
        return NULL;
    return PyLong_FromLongLong(tk_token_block(n[0], n[1], n[2]));
}

PyObject *tk_py_admitted(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t n[4];
    (void)self;
    if (!numbers("admitted", args, nargs, n, 4))
        return NULL;
    return PyLong_FromLong(tk_admitted(narrow(n[0]), narrow(n[1]), narrow(n[2]), n[3] != 0));
}

/* ---- the capsule ---------------------------------------------------------------------------------- */

static int64_t target(void)
{
    return tk_q8_box.target_chunk_work;
}

static int64_t enough(void)
{
    return tk_q8_box.wake_work;
}

static int32_t cap(int32_t one_token)
{
    return one_token ? tk_q8_box.gemv_lane_cap : tk_q8_box.batch_lane_cap;
}

const tk_team_api tk_team_table = {
    TK_TEAM_ABI, sizeof(tk_team_api), tk_team_run, tk_team_live, tk_lanes, tk_chunks, tk_part, target,
    tk_team_worth_waking, enough, cap,
};

int tk_knobs_load(PyObject *module)
{
    tk_team_load();
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)&tk_team_table, "tunekit._core.team", NULL);
    const int status = capsule != NULL ? PyObject_SetAttrString(module, "team", capsule) : -1;
    Py_XDECREF(capsule);
    return status;
}
