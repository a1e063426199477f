// SPDX-License-Identifier: Apache-2.0
#include "pack.h"

#include <stdint.h>
#include <string.h>

#include "shape.h"
#include "team.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#define TK_PACK_VECTORS 1
#define UNROLLED _Pragma("GCC unroll 8") /* the vectors of a turn stay in registers */
#endif

enum {
    RUN = 8,                /* blocks of a row that are taken together: few streams at a time, and what is written stays near */
    ENOUGH = 1 << 19        /* bytes that are worth a lane */
};

typedef struct {
    uint8_t *out;
    const uint8_t *source;
    int64_t stride, N, blocks, bytes, mr, kgroup, groups;
    uint8_t flip;
    int32_t chunks;
} packing;

/* One block of some rows, word by word: what the vectors below do not do. */
#define WORDS(type, size) \
    static void words##size(const packing *o, uint8_t *to, const uint8_t *from, int64_t row_bytes, int64_t r0, int64_t r1) \
    { \
        const type flip = (type)(o->flip * (type)0x0101010101010101u); \
        for (int64_t r = r0; r < r1; r++) { \
            const uint8_t *in = from + r * row_bytes; \
            uint8_t *at = to + r * size; \
            for (int64_t k = 0; k < o->bytes; k += size, at += o->mr * size) { \
                type word; \
                memcpy(&word, in + k, size); \
                word ^= flip; \
                memcpy(at, &word, size); \
            } \
        } \
    }
WORDS(uint8_t, 1)
WORDS(uint16_t, 2)
WORDS(uint32_t, 4)
WORDS(uint64_t, 8)

static void words(const packing *o, uint8_t *to, const uint8_t *from, int64_t row_bytes, int64_t r0, int64_t r1)
{
    if (o->kgroup == 1)
        words1(o, to, from, row_bytes, r0, r1);
    else if (o->kgroup == 2)
        words2(o, to, from, row_bytes, r0, r1);
    else if (o->kgroup == 4)
        words4(o, to, from, row_bytes, r0, r1);
    else
        words8(o, to, from, row_bytes, r0, r1);
}

#ifdef TK_PACK_VECTORS
static inline __m128i load(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static inline void store(uint8_t *p, __m128i v, __m128i flip)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm_xor_si128(v, flip));
}

/* 16 bytes each of 8, 4 or 2 rows become the same k of all of them side by side: a transposition of words. */
static inline void turn2(uint8_t *to, int64_t step, const uint8_t *in, int64_t row, __m128i flip)
{
    __m128i a[8], b[8];
    UNROLLED for (int i = 0; i < 8; i++)
        a[i] = load(in + i * row);
    UNROLLED for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    UNROLLED for (int i = 0; i < 2; i++) {
        UNROLLED for (int h = 0; h < 2; h++) {
            a[4 * i + 2 * h] = _mm_unpacklo_epi32(b[4 * i + h], b[4 * i + 2 + h]);
            a[4 * i + 2 * h + 1] = _mm_unpackhi_epi32(b[4 * i + h], b[4 * i + 2 + h]);
        }
    }
    UNROLLED for (int k = 0; k < 4; k++) {
        store(to + 2 * k * step, _mm_unpacklo_epi64(a[k], a[4 + k]), flip);
        store(to + (2 * k + 1) * step, _mm_unpackhi_epi64(a[k], a[4 + k]), flip);
    }
}

static inline void turn4(uint8_t *to, int64_t step, const uint8_t *in, int64_t row, __m128i flip)
{
    const __m128i a = load(in), b = load(in + row), c = load(in + 2 * row), d = load(in + 3 * row);
    const __m128i ab = _mm_unpacklo_epi32(a, b), ab2 = _mm_unpackhi_epi32(a, b);
    const __m128i cd = _mm_unpacklo_epi32(c, d), cd2 = _mm_unpackhi_epi32(c, d);
    store(to, _mm_unpacklo_epi64(ab, cd), flip);
    store(to + step, _mm_unpackhi_epi64(ab, cd), flip);
    store(to + 2 * step, _mm_unpacklo_epi64(ab2, cd2), flip);
    store(to + 3 * step, _mm_unpackhi_epi64(ab2, cd2), flip);
}

static inline void turn8(uint8_t *to, int64_t step, const uint8_t *in, int64_t row, __m128i flip)
{
    const __m128i a = load(in), b = load(in + row);
    store(to, _mm_unpacklo_epi64(a, b), flip);
    store(to + step, _mm_unpackhi_epi64(a, b), flip);
}

/* One block of as many whole bundles of rows as there are; the first row that is left. */
static int64_t vectors(const packing *o, uint8_t *to, const uint8_t *from, int64_t row_bytes, int64_t r0, int64_t r1)
{
    const int64_t step = o->mr * o->kgroup, bundle = 16 / o->kgroup;
    const __m128i flip = _mm_set1_epi8((char)o->flip);
    if (o->kgroup == 1 || o->bytes % 16 != 0)
        return r0;
    for (; r0 + bundle <= r1; r0 += bundle) {
        const uint8_t *in = from + r0 * row_bytes;
        uint8_t *at = to + r0 * o->kgroup;
        for (int64_t k = 0; k < o->bytes; k += 16, in += 16, at += bundle * step) {
            if (o->kgroup == 2)
                turn2(at, step, in, row_bytes, flip);
            else if (o->kgroup == 4)
                turn4(at, step, in, row_bytes, flip);
            else
                turn8(at, step, in, row_bytes, flip);
        }
    }
    return r0;
}
#else
static int64_t vectors(const packing *o, uint8_t *to, const uint8_t *from, int64_t row_bytes, int64_t r0, int64_t r1)
{
    (void)o, (void)to, (void)from, (void)row_bytes, (void)r1;
    return r0;
}
#endif

/* Groups of rows: some blocks of eight rows, then of the next eight, so that whole lines are read while they are near. */
static void pack_part(void *context, int32_t chunk)
{
    const packing *const o = context;
    const int64_t block = o->mr * o->bytes, row_bytes = o->blocks * o->stride;
    const int64_t last = tk_part(o->groups, o->chunks, chunk + 1);
    for (int64_t g = tk_part(o->groups, o->chunks, chunk); g < last; g++) {
        const int64_t rows = o->N - g * o->mr < o->mr ? o->N - g * o->mr : o->mr;
        const uint8_t *const from = o->source + g * o->mr * row_bytes;
        uint8_t *const to = o->out + g * o->blocks * block;
        if (rows < o->mr)
            memset(to, o->flip, (size_t)(o->blocks * block));
        if (o->mr == 1 && o->flip == 0) { /* row by row: nothing to turn */
            if (o->stride == o->bytes)
                memcpy(to, from, (size_t)(o->blocks * block));
            else if (o->bytes == 32) /* a size that is known is a move or two */
                for (int64_t b = 0; b < o->blocks; b++)
                    memcpy(to + b * 32, from + b * o->stride, 32);
            else if (o->bytes == 2)
                for (int64_t b = 0; b < o->blocks; b++)
                    memcpy(to + b * 2, from + b * o->stride, 2);
            else
                for (int64_t b = 0; b < o->blocks; b++)
                    memcpy(to + b * block, from + b * o->stride, (size_t)block);
            continue;
        }
        for (int64_t b0 = 0; b0 < o->blocks; b0 += RUN) {
            const int64_t b1 = b0 + RUN < o->blocks ? b0 + RUN : o->blocks;
            for (int64_t r0 = 0; r0 < rows; r0 += 8) {
                const int64_t r1 = r0 + 8 < rows ? r0 + 8 : rows;
                for (int64_t b = b0; b < b1; b++) {
                    const int64_t done = vectors(o, to + b * block, from + b * o->stride, row_bytes, r0, r1);
                    words(o, to + b * block, from + b * o->stride, row_bytes, done, r1);
                }
            }
        }
    }
}

static int32_t lanes_of(int64_t bytes)
{
    return bytes >= 2 * ENOUGH ? tk_lanes(bytes, ENOUGH, tk_team_live(), 0) : 1;
}

static void in_parts(void (*part)(void *, int32_t), void *context, int32_t chunks, int32_t lanes)
{
    const tk_stage stage = {part, NULL, context, chunks};
    tk_team_run(&stage, 1, lanes, lanes > 1); /* half a millisecond of work and more: worth a wake */
}

/* ---- Python ------------------------------------------------------------------------------------- */

/* Two buffers, and `count` whole numbers that are not negative after them; 0, or -1 with an exception. */
static int arguments(const char *name, PyObject *const *args, Py_ssize_t nargs, Py_buffer *views, int64_t *number, int count)
{
    if (nargs != 2 + count) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", name, 2 + count, nargs);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        number[i] = PyLong_AsLongLong(args[2 + i]);
        if (number[i] == -1 && PyErr_Occurred())
            return -1;
        if (number[i] < 0 || number[i] > INT64_MAX / 4) {
            PyErr_Format(PyExc_ValueError, "%s: argument %d is out of range", name, 3 + i);
            return -1;
        }
    }
    if (PyObject_GetBuffer(args[0], views, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0)
        return -1;
    if (PyObject_GetBuffer(args[1], views + 1, PyBUF_C_CONTIGUOUS) != 0) {
        PyBuffer_Release(views);
        return -1;
    }
    return 0;
}

/* Where `count` items of so many bytes end, `stride` apart from `first` on; 0 without any, -1 where it does not fit. */
static int64_t span_of(int64_t first, int64_t count, int64_t stride, int64_t bytes)
{
    if (count <= 0)
        return count;
    const int64_t span = tk_times(count - 1, stride);
    return span < 0 || span > INT64_MAX - first - bytes ? -1 : first + span + bytes;
}

static PyObject *finish(Py_buffer *views)
{
    PyBuffer_Release(views);
    PyBuffer_Release(views + 1);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static int does_not_fit(const char *name, const Py_buffer *views, int64_t out, int64_t source)
{
    if (out >= 0 && source >= 0 && views[0].len == (Py_ssize_t)out && views[1].len >= (Py_ssize_t)source)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: buffers of %zd and %zd bytes do not fit these numbers", name, views[0].len, views[1].len);
    return 1;
}

PyObject *tk_py_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    Py_buffer views[2];
    int64_t n[8]; /* first, stride, N, blocks, bytes, mr, kgroup, flip */
    if (arguments("pack", args, nargs, views, n, 8) != 0)
        return NULL;
    const int64_t first = n[0], stride = n[1], N = n[2], blocks = n[3], bytes = n[4], mr = n[5], kgroup = n[6], flip = n[7];
    if (mr < 1 || mr > 1024 || (kgroup != 1 && kgroup != 2 && kgroup != 4 && kgroup != 8) || bytes % kgroup != 0 ||
        stride < bytes || first > stride || (flip != 0 && flip != 128)) {
        PyErr_SetString(PyExc_ValueError, "pack: no such layout");
        return finish(views);
    }
    const int64_t groups = (N + mr - 1) / mr, total = tk_times(tk_times(groups, mr), tk_times(blocks, bytes));
    if (does_not_fit("pack", views, total, span_of(first, tk_times(N, blocks), stride, bytes)))
        return finish(views);
    const int32_t lanes = lanes_of(total);
    const int32_t chunks = tk_chunks(groups, 1, lanes, 4, 0);
    packing o = {views[0].buf, (const uint8_t *)views[1].buf + first, stride, N, blocks, bytes, mr, kgroup, groups, (uint8_t)flip, chunks};
    Py_BEGIN_ALLOW_THREADS
    if (total > 0)
        in_parts(pack_part, &o, o.chunks, lanes);
    Py_END_ALLOW_THREADS
    return finish(views);
}
