// SPDX-License-Identifier: Apache-2.0
#include "q8.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fpenv.h"

/* ---- scratch: one block a thread, grows, is freed when the thread ends ------------------------- */

typedef struct {
    void *memory;
    size_t size;
} scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static int scratch_ready;

static void scratch_free(void *p)
{
    scratch *own = p;
    free(own->memory);
    free(own);
}

static void scratch_start(void)
{
    scratch_ready = pthread_key_create(&scratch_key, scratch_free) == 0;
}

/* At least size bytes on a 64-byte boundary, contents unspecified; NULL where there is no memory. */
static uint8_t *scratch_get(size_t size)
{
    pthread_once(&scratch_once, scratch_start);
    if (!scratch_ready)
        return NULL;
    scratch *own = pthread_getspecific(scratch_key);
    if (own == NULL) {
        own = calloc(1, sizeof *own);
        if (own == NULL)
            return NULL;
        if (pthread_setspecific(scratch_key, own) != 0) {
            free(own);
            return NULL;
        }
    }
    if (own->size < size) {
        /* Freed first: the old contents are of no use, and both at once could be too much. */
        free(own->memory);
        own->memory = NULL;
        own->size = 0;
        /* A quarter more, so that slowly growing products do not allocate each time. */
        const size_t want = size <= SIZE_MAX - size / 4 ? size + size / 4 : size;
        if (posix_memalign(&own->memory, 64, want) == 0) {
            own->size = want;
        } else if (posix_memalign(&own->memory, 64, size) == 0) {
            own->size = size;
        } else {
            own->memory = NULL;
            return NULL;
        }
    }
    return own->memory;
}

/* ---- the traversal ------------------------------------------------------------------------------ */

/* a * b; -1 where it does not fit or a factor is negative (so that a mistake runs through a chain). */
static int64_t times(int64_t a, int64_t b)
{
    if (a < 0 || b < 0 || (b > 0 && a > INT64_MAX / b))
        return -1;
    return a * b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t round_up_64(int64_t n)
{
    return n + (-n & 63);
}

/*
 * One block of prepared tokens against groups [g0, g0 + ng), written at y with row distance ldy.
 * The tiles are near-equal (64 tokens in tiles of at most 5: twelve of 5 and one of 4): a tile of
 * full width and a sliver cost more than two of nearly half each.
 */
static void tiles(const tk_q8_row *row, float *y, int64_t ldy, const int8_t *w, const float *ws,
    const uint8_t *xa, int64_t tokens, int32_t nb, int32_t ng)
{
    if (tokens == 1) {
        row->gemv(y, w, ws, xa, tokens, 0, nb, ng);
        return;
    }
    const int64_t count = (tokens + row->tokstep - 1) / row->tokstep;
    const int64_t width = tokens / count, wider = tokens % count;
    int64_t t = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t nt = width + (i < wider);
        row->tile(y + t * ldy, ldy, w, ws, xa, tokens, t, (int32_t)nt, nb, ng);
        t += nt;
    }
}

enum {
    TOKENS = 128,                  /* tokens a block at most ... */
    TOKENS_BYTES = 4 * 1024 * 1024, /* ... while their prepared form stays in L2 or L3 */
    STEP_BYTES = 16 * 1024,        /* weights that meet all tokens of a block before the next ones */
    MX4_FEW = 4                    /* tokens up to which MXFP4 weights are looked up for each, and not expanded */
};

/* A packed matrix: the row's planes, or where w is NULL the nibble and exponent planes of MXFP4. */
typedef struct {
    const int8_t *w;
    const float *ws;
    const uint8_t *nib, *e;
} weights;

/* Room for some groups of expanded MXFP4 weights. */
typedef struct {
    int8_t *w;
    float *ws;
} expansion;

/* Groups [g, g + ng) against a block of prepared tokens. */
static void groups_of(const tk_q8_row *row, float *y, int64_t ldy, const weights *m, int64_t g, const uint8_t *xa,
    int64_t tokens, int32_t nb, int32_t ng, const expansion *room)
{
    const int64_t scales = (int64_t)row->mr * nb;
    const int8_t *w = m->w;
    const float *ws = m->ws;
    if (w != NULL) {
        w += g * scales * 32;
        ws += g * scales;
    } else {
        const uint8_t *const nib = m->nib + g * scales * 16, *const e = m->e + g * scales;
        if (tokens <= MX4_FEW) {
            for (int64_t t = 0; t < tokens; t++)
                row->mx4_gemv(y + t * ldy, nib, e, xa, tokens, t, nb, ng);
            return;
        }
        row->mx4_expand(room->w, room->ws, nib, e, nb, ng);
        w = room->w;
        ws = room->ws;
    }
    tiles(row, y, ldy, w, ws, xa, tokens, nb, ng);
}

static int multiply(const tk_q8_row *row, float *y, const float *x, const int8_t *q, const float *s,
    const weights *m, int64_t T, int64_t N, int64_t K)
{
    if (T <= 0 || N <= 0)
        return 0;
    if (K <= 0) {
        for (int64_t i = 0; i < T * N; i++)
            y[i] = 0.0f;
        return 0;
    }
    const int64_t mr = row->mr, nb64 = K / 32;
    const int32_t nb = (int32_t)nb64;
    const int64_t groups = N / mr, rest = N % mr;
    const int64_t plane = mr * K, scales = mr * nb64; /* one group's */
    /* Groups that stay near while the tiles of a block pass, but as many as a tile takes at once. */
    const int64_t few = STEP_BYTES / plane > 1 ? STEP_BYTES / plane : 1;
    const int64_t near = (few + row->groups - 1) / row->groups * row->groups;

    /* Asked of a whole block: a prepared form may have a least size, whatever the tokens. */
    const int64_t each = row->acts_bytes(TOKENS, nb) / TOKENS;
    const int64_t most = least(TOKENS, TOKENS_BYTES / each > 1 ? TOKENS_BYTES / each : 1);
    const int64_t blocks = (T + most - 1) / most;
    const int64_t widest = T / blocks + (T % blocks > 0);

    /* xa | codes | scales | expanded weights | their scales | the last group's outputs, on 64-byte boundaries */
    const int64_t xa_bytes = round_up_64(row->acts_bytes(widest, nb));
    const int64_t q_bytes = x != NULL ? round_up_64(widest * K) : 0;
    const int64_t s_bytes = x != NULL ? round_up_64(widest * nb64 * (int64_t)sizeof(float)) : 0;
    const int64_t edge_bytes = rest > 0 ? widest * mr * (int64_t)sizeof(float) : 0;
    const int64_t expanded = m->w == NULL && widest > MX4_FEW ? least(near, groups + (rest > 0)) : 0;
    const int64_t w_bytes = round_up_64(expanded * plane);
    const int64_t ws_bytes = round_up_64(expanded * scales * (int64_t)sizeof(float));
    const int64_t bytes = xa_bytes + q_bytes + s_bytes + w_bytes + ws_bytes + edge_bytes;
    if ((uint64_t)bytes > SIZE_MAX)
        return -1;
    uint8_t *const xa = scratch_get((size_t)bytes);
    if (xa == NULL)
        return -1;
    int8_t *const own_q = (int8_t *)(xa + xa_bytes);
    float *const own_s = (float *)(void *)(xa + xa_bytes + q_bytes);
    uint8_t *const own_w = xa + xa_bytes + q_bytes + s_bytes;
    const expansion room = {(int8_t *)own_w, (float *)(void *)(own_w + w_bytes)};
    float *const edge = (float *)(void *)(own_w + w_bytes + ws_bytes);

    const tk_fpenv caller = tk_fpenv_enter();
    row->amx_cfg();
    int64_t t0 = 0;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t tokens = T / blocks + (i < T % blocks);
        if (x != NULL) {
            row->quantize(own_q, own_s, x + t0 * K, 0, tokens, nb);
            row->prepare(xa, own_q, own_s, tokens, 0, tokens, nb);
        } else {
            row->prepare(xa, q + t0 * K, s + t0 * nb64, tokens, 0, tokens, nb);
        }
        /* One tile a block: all the groups in one call, if nothing has to be expanded for it. */
        const int one = m->w != NULL ? tokens <= row->tokstep : tokens == 1;
        const int64_t step = least(one ? groups : near, INT32_MAX);
        for (int64_t g = 0; g < groups; g += step)
            groups_of(row, y + t0 * N + g * mr, N, m, g, xa, tokens, nb, (int32_t)least(step, groups - g), &room);
        if (rest > 0) {
            groups_of(row, edge, mr, m, groups, xa, tokens, nb, 1, &room);
            for (int64_t t = 0; t < tokens; t++)
                memcpy(y + (t0 + t) * N + groups * mr, edge + t * mr, (size_t)rest * sizeof(float));
        }
        t0 += tokens;
    }
    tk_fpenv_leave(caller);
    return 0;
}

int tk_q8_matmul(const tk_q8_row *row, float *y, const float *x, const int8_t *q, const float *s,
    const int8_t *w, const float *ws, int64_t T, int64_t N, int64_t K)
{
    const weights m = {w, ws, NULL, NULL};
    return multiply(row, y, x, q, s, &m, T, N, K);
}

int tk_q8_mx4_matmul(const tk_q8_row *row, float *y, const float *x, const int8_t *q, const float *s,
    const uint8_t *nib, const uint8_t *e, int64_t T, int64_t N, int64_t K)
{
    const weights m = {NULL, NULL, nib, e};
    return multiply(row, y, x, q, s, &m, T, N, K);
}

void tk_q8_quantize(const tk_q8_row *row, int8_t *q, float *s, const float *x, int64_t T, int64_t K)
{
    if (T <= 0 || K <= 0)
        return;
    const tk_fpenv caller = tk_fpenv_enter();
    row->quantize(q, s, x, 0, T, (int32_t)(K / 32));
    tk_fpenv_leave(caller);
}

/* ---- Python ------------------------------------------------------------------------------------- */

static const char row_capsule[] = TK_Q8_ROW_CAPSULE;

static void row_free(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, row_capsule));
}

static int wrong_count(const char *name, Py_ssize_t nargs, Py_ssize_t want)
{
    if (nargs == want)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, want, nargs);
    return 1;
}

/* An int64 from a Python int; -1 and an exception where it is none. Negative values are errors. */
static int64_t size_of(PyObject *value, const char *what)
{
    const long long n = PyLong_AsLongLong(value);
    if (n == -1 && PyErr_Occurred())
        return -1;
    if (n < 0) {
        PyErr_Format(PyExc_ValueError, "%s is negative", what);
        return -1;
    }
    return n;
}

PyObject *tk_q8_py_row(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"tile", "gemv", "acts_bytes", "prepare", "quantize", "amx_cfg", "mx4_gemv", "mx4_expand"};
    enum { FIRST = 6, NUMBERS = 3, MX4 = 2 }; /* addresses, numbers, and two more addresses that may be left out */
    (void)self;
    const int mx4 = nargs == FIRST + NUMBERS + MX4;
    if (!mx4 && wrong_count("q8_row", nargs, FIRST + NUMBERS))
        return NULL;
    uintptr_t address[FIRST + MX4] = {0};
    for (int i = 0; i < FIRST + (mx4 ? MX4 : 0); i++) {
        address[i] = (uintptr_t)PyLong_AsVoidPtr(args[i < FIRST ? i : i + NUMBERS]);
        if (address[i] == 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "q8_row: the address of %s is 0", names[i]);
            return NULL;
        }
    }
    const int64_t mr = size_of(args[FIRST], "mr");
    if (mr < 0)
        return NULL;
    const int64_t tokstep = size_of(args[FIRST + 1], "tokstep");
    if (tokstep < 0)
        return NULL;
    const int64_t together = size_of(args[FIRST + 2], "groups");
    if (together < 0)
        return NULL;
    if (together < 1 || together > TK_Q8_GROUPS_MAX) {
        PyErr_SetString(PyExc_ValueError, "q8_row: groups is between 1 and 16");
        return NULL;
    }
    if (mr < 1 || mr > TK_Q8_MR_MAX || tokstep < 1 || tokstep > TK_Q8_TOKSTEP_MAX) {
        PyErr_SetString(PyExc_ValueError, "q8_row: mr and tokstep are between 1 and 64");
        return NULL;
    }
    tk_q8_row *row = PyMem_Malloc(sizeof *row);
    if (row == NULL)
        return PyErr_NoMemory();
    row->tile = (tk_q8_tile_fn *)address[0];
    row->gemv = (tk_q8_gemv_fn *)address[1];
    row->acts_bytes = (tk_q8_acts_bytes_fn *)address[2];
    row->prepare = (tk_q8_prepare_fn *)address[3];
    row->quantize = (tk_q8_quantize_fn *)address[4];
    row->mr = (int32_t)mr;
    row->tokstep = (int32_t)tokstep;
    row->amx_cfg = (tk_q8_amx_cfg_fn *)address[5];
    row->groups = (int32_t)together;
    row->mx4_gemv = (tk_q8_mx4_gemv_fn *)address[FIRST];
    row->mx4_expand = (tk_q8_mx4_expand_fn *)address[FIRST + 1];
    PyObject *capsule = PyCapsule_New(row, row_capsule, row_free);
    if (capsule == NULL)
        PyMem_Free(row);
    return capsule;
}

/* What is asked of one buffer argument. */
typedef struct {
    const char *name;
    char format;     /* 'f', 'b' or 'B', as in the struct module */
    int writable;
    int64_t count;   /* elements, exactly; negative where the number does not fit */
} wanted;

/* The format of one element, whatever byte order mark precedes it. Native order is what NumPy gives. */
static int format_is(const char *format, char want)
{
    if (format == NULL)
        return 0;
    if (*format == '@' || *format == '=')
        format++;
    return format[0] == want && format[1] == '\0';
}

/* Takes count buffers, or none and an exception (0, -1). */
static int take(Py_buffer *views, PyObject *const *objects, const wanted *want, int count)
{
    int i = 0;
    for (; i < count; i++) {
        const wanted *const w = want + i;
        const int64_t item = w->format == 'f' ? (int64_t)sizeof(float) : 1;
        const int64_t bytes = times(w->count, item);
        if (bytes < 0 || bytes > PY_SSIZE_T_MAX) {
            PyErr_Format(PyExc_ValueError, "%s: a buffer of this shape does not fit into memory", w->name);
            break;
        }
        if (PyObject_GetBuffer(objects[i], views + i,
                PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (w->writable ? PyBUF_WRITABLE : 0)) != 0)
            break;
        if (!format_is(views[i].format, w->format)) {
            PyErr_Format(PyExc_TypeError, "%s holds %s, not %s", w->name,
                views[i].format != NULL ? views[i].format : "bytes",
                w->format == 'f' ? "float32" : w->format == 'b' ? "int8" : "uint8");
        } else if (views[i].len != (Py_ssize_t)bytes) {
            PyErr_Format(PyExc_ValueError, "%s holds %zd bytes, not %zd", w->name, views[i].len, (Py_ssize_t)bytes);
        } else if (bytes > 0 && (uintptr_t)views[i].buf % (uintptr_t)item != 0) {
            PyErr_Format(PyExc_ValueError, "%s is not aligned to its elements", w->name);
        } else {
            continue;
        }
        i++; /* this one was taken too */
        break;
    }
    if (i == count && !PyErr_Occurred())
        return 0;
    while (i-- > 0)
        PyBuffer_Release(views + i);
    return -1;
}

static void give_back(Py_buffer *views, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(views + i);
}

/* Does the output meet an input? The kernels may then read what they have already written. */
static int overlaps(const Py_buffer *out, const Py_buffer *in)
{
    const uintptr_t a = (uintptr_t)out->buf, b = (uintptr_t)in->buf;
    return out->len > 0 && in->len > 0 && a < b + (uintptr_t)in->len && b < a + (uintptr_t)out->len;
}

static int outputs_apart(const Py_buffer *views, const wanted *want, int count)
{
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < count; j++) {
            if (i != j && want[i].writable && overlaps(views + i, views + j)) {
                PyErr_Format(PyExc_ValueError, "%s overlaps %s", want[i].name, want[j].name);
                return 0;
            }
        }
    }
    return 1;
}

static int k_is_whole(int64_t K)
{
    if (K % 32 == 0 && K / 32 <= INT32_MAX)
        return 1;
    PyErr_SetString(PyExc_ValueError, K % 32 != 0 ? "K is not a multiple of 32" : "K is too large");
    return 0;
}

static PyObject *matmul(const char *name, PyObject *const *args, Py_ssize_t nargs, int acts, int mx4)
{
    enum { Y, X, Q = X, S };
    const int planes = acts ? 3 : 2, count = planes + 2; /* the planes follow the activations */
    if (wrong_count(name, nargs, 1 + count + 3))
        return NULL;
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], row_capsule);
    if (row == NULL)
        return NULL;
    if (mx4 && row->mx4_gemv == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: the row was made without its functions for MXFP4", name);
        return NULL;
    }
    const int64_t T = size_of(args[count + 1], "T");
    if (T < 0)
        return NULL;
    const int64_t N = size_of(args[count + 2], "N");
    if (N < 0)
        return NULL;
    const int64_t K = size_of(args[count + 3], "K");
    if (K < 0 || !k_is_whole(K))
        return NULL;
    const int64_t nb = K / 32, groups = N / row->mr + (N % row->mr > 0), rows = times(groups, row->mr);
    wanted want[5] = {
        {"y", 'f', 1, times(T, N)},
        {"x", 'f', 0, times(T, K)},
        {"w", 'b', 0, times(rows, K)},
        {"ws", 'f', 0, times(rows, nb)},
    };
    if (mx4) {
        want[2] = (wanted){"nib", 'B', 0, times(rows, K / 2)};
        want[3] = (wanted){"e", 'B', 0, times(rows, nb)};
    }
    if (acts) {
        want[4] = want[3];
        want[3] = want[2];
        want[Q] = (wanted){"q", 'b', 0, times(T, K)};
        want[S] = (wanted){"s", 'f', 0, times(T, nb)};
    }
    Py_buffer views[5];
    if (take(views, args + 1, want, count) != 0)
        return NULL;
    int status = 1;
    if (outputs_apart(views, want, count)) {
        const float *const x = acts ? NULL : views[X].buf, *const s = acts ? views[S].buf : NULL;
        const int8_t *const q = acts ? views[Q].buf : NULL;
        const void *const first = views[planes].buf, *const second = views[planes + 1].buf;
        Py_BEGIN_ALLOW_THREADS
        status = mx4 ? tk_q8_mx4_matmul(row, views[Y].buf, x, q, s, first, second, T, N, K)
                     : tk_q8_matmul(row, views[Y].buf, x, q, s, first, second, T, N, K);
        Py_END_ALLOW_THREADS
    }
    give_back(views, count);
    if (status > 0)
        return NULL;
    if (status < 0)
        return PyErr_NoMemory();
    Py_INCREF(Py_None);
    return Py_None;
}

PyObject *tk_q8_py_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_matmul", args, nargs, 0, 0);
}

PyObject *tk_q8_py_matmul_acts(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_matmul_acts", args, nargs, 1, 0);
}

PyObject *tk_q8_py_mx4_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_mx4_matmul", args, nargs, 0, 1);
}

PyObject *tk_q8_py_mx4_matmul_acts(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_mx4_matmul_acts", args, nargs, 1, 1);
}

PyObject *tk_q8_py_quantize(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (wrong_count("q8_quantize", nargs, 6))
        return NULL;
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], row_capsule);
    if (row == NULL)
        return NULL;
    const int64_t T = size_of(args[4], "T");
    if (T < 0)
        return NULL;
    const int64_t K = size_of(args[5], "K");
    if (K < 0 || !k_is_whole(K))
        return NULL;
    const wanted want[3] = {
        {"q", 'b', 1, times(T, K)},
        {"s", 'f', 1, times(T, K / 32)},
        {"x", 'f', 0, times(T, K)},
    };
    Py_buffer views[3];
    if (take(views, args + 1, want, 3) != 0)
        return NULL;
    const int apart = outputs_apart(views, want, 3);
    if (apart) {
        Py_BEGIN_ALLOW_THREADS
        tk_q8_quantize(row, views[0].buf, views[1].buf, views[2].buf, T, K);
        Py_END_ALLOW_THREADS
    }
    give_back(views, 3);
    if (!apart)
        return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}
