// SPDX-License-Identifier: Apache-2.0
/* The forward pass as Python sees it: capsules for models and sessions, buffers for everything else. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char model_name[] = "q8llama.model", session_name[] = "q8llama.session";

static model *model_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, model_name);
}

static session *session_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, session_name);
}

static void model_gone(PyObject *capsule)
{
    model_free(model_of(capsule));
}

static void session_gone(PyObject *capsule)
{
    session *const s = session_of(capsule);
    session_free(s);
    free(s);
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule)); /* the model */
}

static PyObject *new_model(PyObject *self, PyObject *args)
{
    long long layers, d, heads, kv_heads, hd, ff, vocab;
    float eps;
    Py_buffer turns;
    (void)self;
    if (!PyArg_ParseTuple(args, "LLLLLLLfy*", &layers, &d, &heads, &kv_heads, &hd, &ff, &vocab, &eps, &turns))
        return NULL;
    model *const m = calloc(1, sizeof *m);
    const int bad = layers < 1 || d < 32 || heads < 1 || kv_heads < 1 || heads % kv_heads || hd < 16 || hd % 16 || ff < 32 || vocab < 1
        || d % 32 || heads * hd % 32 || ff % 32 || turns.len != hd / 2 * (long long)sizeof(double);
    if (m == NULL || bad) {
        free(m);
        PyBuffer_Release(&turns);
        return m == NULL ? PyErr_NoMemory() : (PyErr_SetString(PyExc_ValueError, "these extents are no model's"), NULL);
    }
    m->layers = layers, m->d = d, m->heads = heads, m->kv_heads = kv_heads, m->hd = hd, m->ff = ff, m->vocab = vocab;
    m->group = heads / kv_heads, m->qd = heads * hd, m->kvd = kv_heads * hd, m->eps = eps;
    m->scale = 1.0f / sqrtf((float)hd); /* both rounded once, whatever the libm */
    m->turns = malloc((size_t)turns.len);
    m->layer = calloc((size_t)layers, sizeof *m->layer);
    if (m->turns != NULL)
        memcpy(m->turns, turns.buf, (size_t)turns.len);
    PyBuffer_Release(&turns);
    m->q8 = tunekit_q8_import();
    m->ops = m->q8 != NULL ? q8llama_kernels_import() : NULL;
    if (m->ops == NULL || m->turns == NULL || m->layer == NULL) {
        model_free(m);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return PyCapsule_New(m, model_name, model_gone);
}

/* layer -1 is outside the layers: matrix 0 the embedding, 1 the head. */
static matrix *matrix_of(model *m, long long at, int which)
{
    if (at < -1 || at >= m->layers || which < 0 || which >= (at < 0 ? 2 : MATRICES)) {
        PyErr_SetString(PyExc_ValueError, "no such matrix");
        return NULL;
    }
    return at < 0 ? (which ? &m->head : &m->embedding) : &m->layer[at].m[which];
}

enum { FLOAT32, FLOAT16, MXFP4 }; /* the scales of int8 weights; or the other format */

static PyObject *make(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long at, N, K;
    int which, kind;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLiLLi", &capsule, &at, &which, &N, &K, &kind))
        return NULL;
    model *const m = model_of(capsule);
    matrix *const to = m != NULL ? matrix_of(m, at, which) : NULL;
    if (to == NULL)
        return NULL;
    const int64_t d = m->d, ff = m->ff;
    const int64_t rows[] = {m->qd, m->kvd, m->kvd, d, ff, ff, d}, columns[] = {d, d, d, m->qd, d, d, ff};
    if ((to->N > 0 && !(to->ws_f16 != NULL && kind == FLOAT32)) || N != (at < 0 ? m->vocab : rows[which]) || K != (at < 0 ? d : columns[which])) {
        PyErr_SetString(PyExc_ValueError, "a matrix of another size, or made twice");
        return NULL;
    }
    if (kind < FLOAT32 || kind > MXFP4) {
        PyErr_SetString(PyExc_ValueError, "no such kind of matrix");
        return NULL;
    }
    if ((kind == MXFP4 ? m->q8->nibbles(N, K) : m->q8->weights(N, K)) < 0) {
        PyErr_SetString(PyExc_ValueError, "a matrix that does not fit into memory");
        return NULL;
    }
    if (kind == MXFP4) {
        to->nib = room_for(&m->planes, m->q8->nibbles(N, K));
        to->e = room_for(&m->planes, m->q8->exponents(N, K));
    } else {
        if (to->w == NULL)
            to->w = room_for(&m->planes, m->q8->weights(N, K));
        to->ws = kind == FLOAT32 ? room_for(&m->planes, m->q8->scales(N, K) * (int64_t)sizeof(float)) : NULL;
        to->ws_f16 = kind == FLOAT16 ? room_for(&m->planes, m->q8->scales(N, K) * (int64_t)sizeof(uint16_t)) : NULL;
    }
    if (kind == MXFP4 ? to->nib == NULL || to->e == NULL : to->w == NULL || (to->ws == NULL && to->ws_f16 == NULL))
        return PyErr_NoMemory();
    to->N = N;
    to->K = K;
    Py_RETURN_NONE;
}

/*
 * Rows from n on: float32, blocks of Q8_0, or blocks of MXFP4, as many as the buffer holds. False where a scale is no
 * float16: the matrix is to be made again, with float32 scales.
 */
static PyObject *fill(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long at, n;
    int which, floats;
    Py_buffer data;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLiLpy*", &capsule, &at, &which, &n, &floats, &data))
        return NULL;
    model *const m = model_of(capsule);
    const matrix *const to = m != NULL ? matrix_of(m, at, which) : NULL;
    int status = TUNEKIT_Q8_BAD_SIZE;
    if (to != NULL) {
        const int64_t K = to->K, row = K == 0 ? 0 : floats ? K * 4 : K / 32 * (to->w != NULL ? 34 : 17);
        const int64_t count = row > 0 ? data.len / row : 0;
        if (count > 0 && data.len % row == 0 && n >= 0 && n + count <= to->N && n % m->q8->unit_rows == 0 && !(floats && to->w == NULL)) {
            Py_BEGIN_ALLOW_THREADS
            if (to->w == NULL)
                status = m->q8->pack_mxfp4(to->nib + n * K / 2, to->e + n * K / 32, data.buf, count, K);
            else if (floats)
                status = to->ws != NULL ? m->q8->pack(to->w + n * K, to->ws + n * K / 32, data.buf, count, K)
                                        : m->q8->pack_f16(to->w + n * K, to->ws_f16 + n * K / 32, data.buf, count, K);
            else
                status = to->ws != NULL ? m->q8->pack_q8_0(to->w + n * K, to->ws + n * K / 32, data.buf, count, K)
                                        : m->q8->pack_q8_0_f16(to->w + n * K, to->ws_f16 + n * K / 32, data.buf, count, K);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&data);
    if (PyErr_Occurred())
        return NULL;
    if (status != TUNEKIT_Q8_OK && status != TUNEKIT_Q8_NO_FLOAT16)
        return PyErr_Format(PyExc_ValueError, "rows that do not belong there");
    return PyBool_FromLong(status == TUNEKIT_Q8_OK);
}

static PyObject *norm(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long at;
    int which;
    Py_buffer data;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLiy*", &capsule, &at, &which, &data))
        return NULL;
    model *const m = model_of(capsule);
    if (m != NULL && (at < -1 || at >= m->layers || which < 0 || which >= NORMS || data.len != m->d * 4)) {
        PyErr_SetString(PyExc_ValueError, "no such norm, or of another size");
    } else if (m != NULL) {
        float **const to = at < 0 ? &m->last_norm : &m->layer[at].norm[which];
        if (*to == NULL)
            *to = aligned_zeros(m->d * 4);
        if (*to == NULL)
            PyErr_NoMemory();
        else
            memcpy(*to, data.buf, (size_t)data.len);
    }
    PyBuffer_Release(&data);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static int64_t bytes_of(const model *m, const matrix *x)
{
    if (x->N == 0)
        return 0;
    return x->w != NULL ? m->q8->weights(x->N, x->K) + (x->ws != NULL ? 4 : 2) * m->q8->scales(x->N, x->K)
                        : m->q8->nibbles(x->N, x->K) + m->q8->exponents(x->N, x->K);
}

static PyObject *about(PyObject *self, PyObject *capsule)
{
    (void)self;
    const model *const m = model_of(capsule);
    if (m == NULL)
        return NULL;
    int64_t bytes = bytes_of(m, &m->embedding) + bytes_of(m, &m->head);
    for (int64_t i = 0; i < m->layers; i++)
        for (int j = 0; j < MATRICES; j++)
            bytes += bytes_of(m, &m->layer[i].m[j]);
    return Py_BuildValue("{sLsssssssssLsi}", "bytes", (long long)bytes, "row", m->q8->tk_row, "source", m->q8->tk_source, "attend",
        m->ops->tk_row_attend, "swiglu", m->ops->tk_row_swiglu, "unit_rows", (long long)m->q8->unit_rows, "lanes",
        (int)m->q8->team->live());
}

static PyObject *new_session(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long capacity;
    (void)self;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &capacity))
        return NULL;
    const model *const m = model_of(capsule);
    if (m == NULL)
        return NULL;
    int whole = m->last_norm != NULL && m->embedding.N > 0;
    for (int64_t i = 0; i < m->layers; i++) {
        for (int j = 0; j < MATRICES; j++)
            whole &= m->layer[i].m[j].N > 0;
        for (int j = 0; j < NORMS; j++)
            whole &= m->layer[i].norm[j] != NULL;
    }
    if (!whole || capacity < 1 || capacity > 1 << 20) {
        PyErr_SetString(PyExc_ValueError, whole ? "capacity is between 1 and 2**20 positions" : "the model is not complete");
        return NULL;
    }
    session *const s = malloc(sizeof *s);
    if (s == NULL || session_init(s, m, capacity) != 0) {
        free(s);
        return PyErr_NoMemory();
    }
    PyObject *const made = PyCapsule_New(s, session_name, session_gone);
    if (made == NULL) {
        session_free(s);
        free(s);
        return NULL;
    }
    Py_INCREF(capsule);
    PyCapsule_SetContext(made, capsule);
    return made;
}

/* Whether this thread may use the session now; with an error where another one does. */
static int take(session *s)
{
    if (!atomic_flag_test_and_set(&s->busy))
        return 1;
    PyErr_SetString(PyExc_RuntimeError, "the session is in use by another thread; each thread needs its own");
    return 0;
}

static PyObject *feed(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    Py_buffer tokens, logits;
    int all;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*w*p", &capsule, &tokens, &logits, &all))
        return NULL;
    session *const s = session_of(capsule);
    if (s != NULL && take(s)) {
        const int64_t count = tokens.len / 4, want = logits.len == 0 ? 0 : (all ? count : 1) * s->m->vocab * 4;
        int good = tokens.len % 4 == 0 && count > 0 && logits.len == want;
        for (int64_t i = 0; good && i < count; i++)
            good = ((const int32_t *)tokens.buf)[i] >= 0 && ((const int32_t *)tokens.buf)[i] < s->m->vocab;
        if (!good)
            PyErr_SetString(PyExc_ValueError, "tokens outside the vocabulary, or room for logits of another size");
        else if (s->position + count > s->capacity)
            PyErr_Format(PyExc_ValueError, "%lld tokens and %lld more do not fit into %lld positions", (long long)s->position,
                (long long)count, (long long)s->capacity);
        else {
            int status;
            Py_BEGIN_ALLOW_THREADS
            status = forward(s, tokens.buf, count, logits.len > 0 ? logits.buf : NULL, all);
            Py_END_ALLOW_THREADS
            if (status != 0)
                PyErr_NoMemory();
        }
        atomic_flag_clear(&s->busy);
    }
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&logits);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *position(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long to = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "O|L", &capsule, &to))
        return NULL;
    session *const s = session_of(capsule);
    if (s == NULL || !take(s))
        return NULL;
    const int64_t found = s->position;
    const int good = to <= found && to >= -1;
    if (good && to >= 0)
        s->position = to;
    atomic_flag_clear(&s->busy);
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "a session can be set back, and not forward");
        return NULL;
    }
    return PyLong_FromLongLong(to >= 0 ? to : found);
}

static PyObject *settings(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    int plain, profile;
    (void)self;
    if (!PyArg_ParseTuple(args, "Opp", &capsule, &plain, &profile))
        return NULL;
    session *const s = session_of(capsule);
    if (s == NULL || !take(s))
        return NULL;
    s->plain = plain;
    s->profile = profile;
    atomic_flag_clear(&s->busy);
    Py_RETURN_NONE;
}

static PyObject *counts(PyObject *self, PyObject *capsule)
{
    static const char *const names[PARTS] = {"embedding", "norm", "qkv", "rope", "attention", "attention out", "gate and up", "swiglu", "down", "head"};
    (void)self;
    session *const s = session_of(capsule);
    if (s == NULL || !take(s))
        return NULL;
    int64_t ns[PARTS];
    const int64_t ops = s->ops, rendezvous = s->rendezvous;
    memcpy(ns, s->ns, sizeof ns);
    s->ops = s->rendezvous = 0;
    memset(s->ns, 0, sizeof s->ns);
    atomic_flag_clear(&s->busy);
    PyObject *const parts = PyDict_New();
    if (parts == NULL)
        return NULL;
    for (int i = 0; i < PARTS; i++) {
        PyObject *const value = PyLong_FromLongLong(ns[i]);
        if (value == NULL || PyDict_SetItemString(parts, names[i], value) != 0) {
            Py_XDECREF(value);
            Py_DECREF(parts);
            return NULL;
        }
        Py_DECREF(value);
    }
    return Py_BuildValue("{sLsLsN}", "ops", (long long)ops, "rendezvous", (long long)rendezvous, "ns", parts);
}

static PyMethodDef methods[] = {
    {"model", new_model, METH_VARARGS, "model(layers, d, heads, kv_heads, head dimension, ff, vocabulary, eps, radians a position) -> model"},
    {"make", make, METH_VARARGS, "make(model, layer or -1, which, N, K, kind): room for a matrix; kind: scales of float32 (0), of float16 (1), or MXFP4 (2)"},
    {"fill", fill, METH_VARARGS, "fill(model, layer or -1, which, first row, floats, data) -> whether all scales fit; rows of a matrix"},
    {"norm", norm, METH_VARARGS, "norm(model, layer or -1, which, float32)"},
    {"about", about, METH_O, "about(model) -> what runs, and how large it is"},
    {"session", new_session, METH_VARARGS, "session(model, positions) -> session"},
    {"feed", feed, METH_VARARGS, "feed(session, int32 tokens, float32 logits (may be empty), all)"},
    {"position", position, METH_VARARGS, "position(session[, set back to]) -> tokens so far"},
    {"settings", settings, METH_VARARGS, "settings(session, plain attention, profile)"},
    {"counts", counts, METH_O, "counts(session) -> ops, rendezvous and nanoseconds since the last time"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "q8llama._engine", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__engine(void)
{
    return PyModule_Create(&definition);
}
