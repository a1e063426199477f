// SPDX-License-Identifier: Apache-2.0
/*
 * The table of tunekit_q8.h: the traversal of q8.c on the row that was chosen, and packing for C.
 *
 * A choice holds for the process, so the row is a static of this file. Packing asks the row's layout numbers and
 * nothing else; tunekit/q8/layout.py states the plane, tunekit/q8/matrix.py the rounding.
 */
#include "q8.h"

#include <math.h>
#include <string.h>

#include "fpenv.h"
#include "knobs.h"
#include "shape.h"

enum { BLOCK = 32, Q8_0_BYTES = 2 + BLOCK };

static const tk_q8_row *chosen;
static int32_t kgroup, nibble_kgroup;
static uint8_t bias;

static int good(int64_t T, int64_t N, int64_t K)
{
    if (K < 0 || K % BLOCK != 0 || K / BLOCK > INT32_MAX || N < 0 || N > INT64_MAX - TK_Q8_MR_MAX)
        return 0;
    return tk_times(tk_times(T, N), sizeof(float)) >= 0 && tk_times(tk_times(T, K), sizeof(float)) >= 0
        && tk_times(tk_times(N + TK_Q8_MR_MAX, K), sizeof(float)) >= 0;
}

static int64_t padded(int64_t N)
{
    return (N + chosen->mr - 1) / chosen->mr * chosen->mr;
}

static int64_t weights_of(int64_t N, int64_t K)
{
    return good(0, N, K) ? padded(N) * K : -1;
}

static int64_t scales_of(int64_t N, int64_t K)
{
    return good(0, N, K) ? padded(N) * (K / BLOCK) : -1;
}

/* Row n, block bi of nb: its codes into the weight plane; returns the place of its scale in the other one. */
static int64_t place(int8_t *w, const int8_t *q, int64_t n, int64_t bi, int64_t nb)
{
    const int64_t mr = chosen->mr, g = n / mr, r = n % mr;
    uint8_t *const to = (uint8_t *)w + (g * nb + bi) * mr * BLOCK + r * kgroup;
    for (int32_t k = 0; k < BLOCK; k += kgroup)
        for (int32_t j = 0; j < kgroup; j++)
            to[k * mr + j] = (uint8_t)q[k + j] ^ bias;
    return (g * nb + bi) * mr + r;
}

/* Rows beyond N, up to a whole group: zeros. One of the two kinds of scales is given. */
static void pad(int8_t *w, float *ws, uint16_t *ws_f16, int64_t N, int64_t nb)
{
    static const int8_t none[BLOCK];
    for (int64_t n = N; n < padded(N); n++) {
        for (int64_t bi = 0; bi < nb; bi++) {
            const int64_t at = place(w, none, n, bi, nb);
            if (ws != NULL)
                ws[at] = 0.0f;
            else
                ws_f16[at] = 0;
        }
    }
}

/* A finite positive number rounded to float16, half to even; infinity where that has no room. */
static float through_half(float d)
{
    if (d < 0x1p-14f) /* a float16 below this is a whole number of 2^-24 */
        return rintf(d * 0x1p24f) * 0x1p-24f;
    uint32_t bits;
    memcpy(&bits, &d, sizeof bits);
    bits += 0xFFFu + (bits >> 13 & 1u);
    bits &= ~0x1FFFu;
    memcpy(&d, &bits, sizeof d);
    return d < 65536.0f ? d : INFINITY;
}

/* The bits of a scale that is a float16, zero or more, or a NaN. */
static uint16_t to_half(float d)
{
    uint32_t bits;
    memcpy(&bits, &d, sizeof bits);
    return (uint16_t)(isnan(d) ? 0x7E00u : d < 0x1p-14f ? (uint32_t)(d * 0x1p24f) : (bits >> 13) - (112u << 10));
}

/* One of the two kinds of scales is given. */
static int pack_floats(int8_t *w, float *ws, uint16_t *ws_f16, const float *weights, int64_t N, int64_t K)
{
    if (!good(0, N, K))
        return TUNEKIT_Q8_BAD_SIZE;
    const tk_fpenv caller = tk_fpenv_enter();
    const int64_t nb = K / BLOCK;
    int status = TUNEKIT_Q8_OK;
    for (int64_t n = 0; n < N && status == TUNEKIT_Q8_OK; n++) {
        for (int64_t bi = 0; bi < nb; bi++) {
            const float *const x = weights + n * K + bi * BLOCK;
            int8_t q[BLOCK] = {0};
            float most = 0.0f, scale = 0.0f;
            int finite = 1;
            for (int k = 0; k < BLOCK; k++) {
                const float a = fabsf(x[k]);
                finite &= a <= 3.4028234663852886e38f; /* false for a NaN, too */
                most = a > most ? a : most;
            }
            const float d = most / 127.0f;
            if (!finite) {
                scale = NAN;
            } else if (d >= 0x1p-126f) {
                const float half = through_half(d);
                const int fits = half > 0.0f && half < INFINITY;
                scale = fits ? half : d;
                if (!fits && ws == NULL)
                    status = TUNEKIT_Q8_NO_FLOAT16;
                for (int k = 0; k < BLOCK; k++) {
                    const float code = rintf(x[k] / scale);
                    q[k] = (int8_t)(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
                }
            }
            const int64_t at = place(w, q, n, bi, nb);
            if (ws != NULL)
                ws[at] = scale;
            else
                ws_f16[at] = to_half(scale);
        }
    }
    pad(w, ws, ws_f16, N, nb);
    tk_fpenv_leave(caller);
    return status;
}

static int pack(int8_t *w, float *ws, const float *weights, int64_t N, int64_t K)
{
    return pack_floats(w, ws, NULL, weights, N, K);
}

static int pack_f16(int8_t *w, uint16_t *ws, const float *weights, int64_t N, int64_t K)
{
    return pack_floats(w, NULL, ws, weights, N, K);
}

/* A float16, given as its bits. */
static float from_half(uint32_t h)
{
    const uint32_t exponent = h >> 10 & 31u, mantissa = h & 1023u;
    float f;
    if (exponent == 0) {
        f = (float)mantissa * 0x1p-24f;
        return h & 0x8000u ? -f : f;
    }
    const uint32_t bits = (h & 0x8000u) << 16 | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static int pack_blocks(int8_t *w, float *ws, uint16_t *ws_f16, const void *blocks, int64_t N, int64_t K)
{
    if (!good(0, N, K))
        return TUNEKIT_Q8_BAD_SIZE;
    const uint8_t *from = blocks;
    const int64_t nb = K / BLOCK;
    for (int64_t n = 0; n < N; n++) {
        for (int64_t bi = 0; bi < nb; bi++, from += Q8_0_BYTES) {
            int8_t q[BLOCK];
            memcpy(q, from + 2, sizeof q);
            const int64_t at = place(w, q, n, bi, nb);
            const uint32_t half = from[0] | (uint32_t)from[1] << 8;
            if (ws != NULL)
                ws[at] = from_half(half);
            else
                ws_f16[at] = (uint16_t)half;
        }
    }
    pad(w, ws, ws_f16, N, nb);
    return TUNEKIT_Q8_OK;
}

static int pack_q8_0(int8_t *w, float *ws, const void *blocks, int64_t N, int64_t K)
{
    return pack_blocks(w, ws, NULL, blocks, N, K);
}

static int pack_q8_0_f16(int8_t *w, uint16_t *ws, const void *blocks, int64_t N, int64_t K)
{
    return pack_blocks(w, NULL, ws, blocks, N, K);
}

static int quantize(int8_t *q, float *s, const float *x, int64_t T, int64_t K)
{
    if (!good(T, 0, K))
        return TUNEKIT_Q8_BAD_SIZE;
    tk_q8_quantize(chosen, q, s, x, T, K);
    return TUNEKIT_Q8_OK;
}

static int matmul(float *y, const float *x, const int8_t *w, const float *ws, int64_t T, int64_t N, int64_t K)
{
    if (!good(T, N, K))
        return TUNEKIT_Q8_BAD_SIZE;
    const tk_q8_region m = {.w = w, .ws = ws};
    return tk_q8_matmul(chosen, &m, y, x, NULL, NULL, T, N, K);
}

static int matmul_acts(float *y, const int8_t *q, const float *s, const int8_t *w, const float *ws, int64_t T,
    int64_t N, int64_t K)
{
    if (!good(T, N, K))
        return TUNEKIT_Q8_BAD_SIZE;
    const tk_q8_region m = {.w = w, .ws = ws};
    return tk_q8_matmul(chosen, &m, y, NULL, q, s, T, N, K);
}

static int gemv(float *y, const float *x, const int8_t *w, const float *ws, int64_t N, int64_t K)
{
    return matmul(y, x, w, ws, 1, N, K);
}

/* ---- MXFP4 ------------------------------------------------------------------------------------------ */

enum { MXFP4_BYTES = 1 + BLOCK / 2, EXPONENT_BIAS = 128 };

static int64_t nibbles_of(int64_t N, int64_t K)
{
    return good(0, N, K) ? padded(N) * (K / 2) : -1;
}

static int64_t exponents_of(int64_t N, int64_t K)
{
    return scales_of(N, K);
}

static int pack_mxfp4(uint8_t *nib, uint8_t *e, const void *blocks, int64_t N, int64_t K)
{
    if (!good(0, N, K) || chosen->mx4_gemv == NULL)
        return TUNEKIT_Q8_BAD_SIZE;
    static const uint8_t none[MXFP4_BYTES];
    const int64_t nb = K / BLOCK, mr = chosen->mr, group = nibble_kgroup;
    for (int64_t n = 0; n < padded(N); n++) {
        for (int64_t bi = 0; bi < nb; bi++) {
            const uint8_t *const from = n < N ? (const uint8_t *)blocks + (n * nb + bi) * MXFP4_BYTES : none;
            uint8_t *const to = nib + (n / mr * nb + bi) * mr * (BLOCK / 2) + n % mr * group;
            for (int64_t k = 0; k < BLOCK / 2; k += group)
                memcpy(to + k * mr, from + 1 + k, (size_t)group);
            e[(n / mr * nb + bi) * mr + n % mr] = from[0];
        }
    }
    return TUNEKIT_Q8_OK;
}

/* ---- a row back ------------------------------------------------------------------------------------- */

static float two_to(int32_t exponent) /* -128 to 127: a float32, or for the two lowest a subnormal one */
{
    const uint32_t bits = exponent >= -126 ? (uint32_t)(exponent + 127) << 23 : 0x400000u >> (-127 - exponent);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Codes with scales of either type, or nibbles with exponents. */
static int has_planes(const tunekit_q8_region *m, int64_t K)
{
    if (m->N == 0 || K == 0)
        return 1;
    return m->w != NULL ? m->ws != NULL || m->ws_f16 != NULL : m->nib != NULL && m->e != NULL;
}

static int row_of(float *x, const tunekit_q8_region *m, int64_t n, int64_t K)
{
    static const int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    if (!good(0, m->N, K) || n < 0 || n >= m->N || !has_planes(m, K))
        return TUNEKIT_Q8_BAD_SIZE;
    const tk_fpenv caller = tk_fpenv_enter();
    const int64_t nb = K / BLOCK, mr = chosen->mr, g = n / mr, r = n % mr;
    for (int64_t bi = 0; bi < nb; bi++) {
        if (m->w != NULL) {
            const uint8_t *const from = (const uint8_t *)m->w + (g * nb + bi) * mr * BLOCK + r * kgroup;
            const int64_t at = (g * nb + bi) * mr + r;
            const float scale = m->ws != NULL ? m->ws[at] : from_half(m->ws_f16[at]);
            for (int32_t k = 0; k < BLOCK; k++)
                x[bi * BLOCK + k] = (float)(int8_t)(from[k / kgroup * kgroup * mr + k % kgroup] ^ bias) * scale;
        } else {
            const uint8_t *const from = m->nib + (g * nb + bi) * mr * (BLOCK / 2) + r * nibble_kgroup;
            const float scale = two_to((int32_t)m->e[(g * nb + bi) * mr + r] - EXPONENT_BIAS);
            for (int32_t k = 0; k < BLOCK / 2; k++) {
                const uint8_t both = from[k / nibble_kgroup * nibble_kgroup * mr + k % nibble_kgroup];
                x[bi * BLOCK + k] = (float)e2m1[both & 15] * scale;
                x[bi * BLOCK + k + BLOCK / 2] = (float)e2m1[both >> 4] * scale;
            }
        }
    }
    tk_fpenv_leave(caller);
    return TUNEKIT_Q8_OK;
}

/* ---- several at once, and in pieces ------------------------------------------------------------------ */

static int fits(const tunekit_q8_region *m, int64_t T, int64_t K)
{
    return good(T, m->N, K) && m->ldy >= 0 && m->t0 >= 0 && m->t0 <= m->t1 && m->t1 <= T && has_planes(m, K)
        && (m->w != NULL || m->N == 0 || K == 0 || chosen->mx4_gemv != NULL);
}

static int regions(const tunekit_q8_region *all, int32_t count, const float *x, int64_t T, int64_t K)
{
    for (int32_t i = 0; i < count; i++)
        if (!fits(all + i, T, K))
            return TUNEKIT_Q8_BAD_SIZE;
    return good(T, 0, K) && count >= 0 ? tk_q8_regions(chosen, all, count, x, NULL, NULL, T, K) : TUNEKIT_Q8_BAD_SIZE;
}

static int64_t up(int64_t n)
{
    return n + (-n & 63);
}

/* prepared | codes | scales, on 64-byte boundaries */
static int64_t acts_bytes(int64_t T, int64_t K)
{
    /* No form takes more than 8 bytes a value and 512 more a token. */
    if (!good(T, 0, K) || tk_times(tk_times(T, K + 64), 8) < 0)
        return -1;
    return up(chosen->acts_bytes(T, (int32_t)(K / BLOCK))) + up(T * K) + up(T * (K / BLOCK) * (int64_t)sizeof(float));
}

static int acts(void *to, const float *x, int64_t T, int64_t t0, int64_t t1, int64_t K)
{
    if (!good(T, 0, K) || t0 < 0 || t1 > T)
        return TUNEKIT_Q8_BAD_SIZE;
    const int32_t nb = (int32_t)(K / BLOCK);
    uint8_t *const xa = to;
    int8_t *const q = (int8_t *)(xa + up(chosen->acts_bytes(T, nb)));
    float *const s = (float *)(void *)(q + up(T * K));
    if (t0 < t1 && K > 0) {
        chosen->quantize(q, s, x, t0, t1, nb);
        chosen->prepare(xa, q, s, T, t0, t1, nb);
    }
    return TUNEKIT_Q8_OK;
}

static int64_t units(int64_t N)
{
    return N > 0 ? (N - 1) / ((int64_t)chosen->mr * chosen->groups) + 1 : 0;
}

static void begin(void *unused)
{
    (void)unused;
    chosen->amx_cfg();
}

static int piece(const tunekit_q8_region *m, const void *prepared, int64_t T, int64_t t0, int64_t t1, int64_t u0,
    int64_t u1, int64_t K)
{
    if (!fits(m, T, K) || K == 0 || t0 < 0 || t1 > T || u0 < 0)
        return TUNEKIT_Q8_BAD_SIZE;
    return t0 < t1 && u0 < u1 ? tk_q8_piece(chosen, m, prepared, T, t0, t1, u0, u1, (int32_t)(K / BLOCK))
                              : TUNEKIT_Q8_OK;
}

static char words[3][512]; /* maker, row, source */

static tunekit_q8_api table = {
    TUNEKIT_Q8_ABI, sizeof table, words[0], words[1], words[2], weights_of, scales_of, pack, pack_q8_0,
    pack_f16, pack_q8_0_f16, quantize, matmul, matmul_acts, gemv, nibbles_of, exponents_of, pack_mxfp4, regions, row_of,
    acts_bytes, acts, 0, units, begin, piece, &tk_team_table,
};

PyObject *tk_q8_py_api(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 7) {
        PyErr_Format(PyExc_TypeError, "q8_api takes 7 arguments, not %zd", nargs);
        return NULL;
    }
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], TK_Q8_ROW_CAPSULE);
    if (row == NULL)
        return NULL;
    const long group = PyLong_AsLong(args[1]), nibbles = PyLong_AsLong(args[2]), added = PyLong_AsLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (group < 1 || BLOCK % group != 0 || nibbles < 1 || BLOCK / 2 % nibbles != 0 || (added != 0 && added != 128)) {
        PyErr_SetString(PyExc_ValueError, "q8_api: kgroup divides 32, nibble_kgroup 16, and bias is 0 or 128");
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        PyObject *const bytes = PyUnicode_AsUTF8String(args[4 + i]);
        if (bytes == NULL)
            return NULL;
        const Py_ssize_t size = PyBytes_Size(bytes), most = (Py_ssize_t)sizeof words[i] - 1;
        memset(words[i], 0, sizeof words[i]);
        memcpy(words[i], PyBytes_AsString(bytes), (size_t)(size < most ? size : most));
        Py_DECREF(bytes);
    }
    /* The capsule of the row is kept for good: C holds the table for as long as it likes. */
    Py_INCREF(args[0]);
    kgroup = (int32_t)group;
    nibble_kgroup = (int32_t)nibbles;
    bias = (uint8_t)added;
    chosen = row;
    table.unit_rows = (int64_t)row->mr * row->groups;
    return PyCapsule_New(&table, TUNEKIT_Q8_CAPSULE, NULL);
}
