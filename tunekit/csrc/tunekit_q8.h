/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Q8 products of tunekit for C and C++: pack, quantise, multiply, on the row that was chosen for this box.
 *
 * Include Python.h first. Then, once, with the GIL held:
 *
 *     const tunekit_q8_api *api = tunekit_q8_import();      NULL with an ImportError set where it cannot be had
 *
 * The table lives as long as the process. Its functions need no GIL, may be called from any thread at once, set the
 * floating-point environment and restore the caller's, and give the same bits on every box and as tunekit.q8 in
 * Python. Sizes: N rows of weights, K values a row, a multiple of 32, T tokens. Each returns TUNEKIT_Q8_OK or one of
 * the other results, and then has written nothing that means anything. Pointers hold whole arrays, row by row,
 * aligned to their elements; an output overlaps no other argument. Planes are best on a 64-byte boundary. Rows from a
 * multiple of unit_rows on, n say, may be packed by themselves: at w + n * K, ws + n * K / 32 (nib + n * K / 2,
 * e + n * K / 32), into planes that have the size for all.
 */
#ifndef TUNEKIT_Q8_H
#define TUNEKIT_Q8_H

#include <stdint.h>

#include "tunekit_team.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TUNEKIT_Q8_ABI 3u
#define TUNEKIT_Q8_MODULE "tunekit.q8"
#define TUNEKIT_Q8_CAPSULE "tunekit.q8._C_API"

enum { TUNEKIT_Q8_OK = 0, TUNEKIT_Q8_NO_MEMORY = -1, TUNEKIT_Q8_BAD_SIZE = -2, TUNEKIT_Q8_NO_FLOAT16 = -3 };

/*
 * One matrix of a product: N rows of K, for tokens [t0, t1) of the product's T. Either w and ws, the planes that pack
 * and pack_q8_0 made; or w and ws_f16, those of their twins with _f16, and ws is NULL; or w is NULL and nib and e are those of
 * pack_mxfp4. y[t * ldy + n] is written for those tokens alone; y is the place of token 0. bias: N floats that are
 * added to each token's outputs, after the fold, or NULL.
 */
typedef struct tunekit_q8_region {
    const int8_t *w;
    const float *ws;
    const uint16_t *ws_f16; /* float16, as their bits */
    const uint8_t *nib, *e;
    const float *bias;
    float *y;
    int64_t ldy, N, t0, t1;
} tunekit_q8_region;

typedef struct tunekit_q8_api {
    uint32_t tk_abi;
    uint32_t tk_size;
    const char *tk_maker;  /* which tunekit made this table, and where it lies */
    const char *tk_row;    /* the row that runs, or "reference" */
    const char *tk_source; /* where the choice came from: pin, manifest, fallback, reference */

    /* Elements of the two planes of a packed matrix: int8_t and float (or uint16_t). -1 for a bad size. */
    int64_t (*weights)(int64_t N, int64_t K);
    int64_t (*scales)(int64_t N, int64_t K);

    /* Float weights (N, K) into planes, as tunekit.q8.pack. The planes are this row's: they go into no file. */
    int (*pack)(int8_t *w, float *ws, const float *weights, int64_t N, int64_t K);
    /* The same from ggml's Q8_0: N * K / 32 blocks of a little-endian float16 scale and 32 int8. */
    int (*pack_q8_0)(int8_t *w, float *ws, const void *blocks, int64_t N, int64_t K);
    /*
     * The same two with float16 scales, for regions: as many, of half the bytes. What is read from memory for each
     * token is a sixteenth less, and results have the same bits. A scale of Q8_0 is a float16, and so is one of pack
     * as a rule; where it is not, pack_f16 returns TUNEKIT_Q8_NO_FLOAT16, and pack is the way.
     */
    int (*pack_f16)(int8_t *w, uint16_t *ws, const float *weights, int64_t N, int64_t K);
    int (*pack_q8_0_f16)(int8_t *w, uint16_t *ws, const void *blocks, int64_t N, int64_t K);

    /* Codes (T, K) and scales (T, K / 32) of activations (T, K), as tunekit.q8.quantize. */
    int (*quantize)(int8_t *q, float *s, const float *x, int64_t T, int64_t K);

    /* y (T, N) = x (T, K) times the transposed matrix; x is quantised on the way. */
    int (*matmul)(float *y, const float *x, const int8_t *w, const float *ws, int64_t T, int64_t N, int64_t K);
    /* The same from quantised activations; codes lie in [-127, 127]. */
    int (*matmul_acts)(float *y, const int8_t *q, const float *s, const int8_t *w, const float *ws, int64_t T,
        int64_t N, int64_t K);
    /* One token: y (N) from x (K). */
    int (*gemv)(float *y, const float *x, const int8_t *w, const float *ws, int64_t N, int64_t K);

    /* MXFP4 weights: bytes of their two planes (-1 for a bad size), and N * K / 32 blocks of ggml's into them. */
    int64_t (*nibbles)(int64_t N, int64_t K);
    int64_t (*exponents)(int64_t N, int64_t K);
    int (*pack_mxfp4)(uint8_t *nib, uint8_t *e, const void *blocks, int64_t N, int64_t K);

    /* Several matrices of one K times x (T, K), in one dispatch: outputs overlap each other nowhere. */
    int (*regions)(const tunekit_q8_region *regions, int32_t count, const float *x, int64_t T, int64_t K);

    /* Row n of a matrix as K floats, code times scale: an embedding. Of the region only the planes and N are read. */
    int (*row)(float *x, const tunekit_q8_region *region, int64_t n, int64_t K);

    /*
     * Pieces, for ops of one's own on the team: a stage of pieces can be followed by other stages without a dispatch
     * between. They use one lane, check nothing but sizes, and are to be called from a stage of `team`, whose
     * floating-point environment is theirs. acts writes tokens [t0, t1) of x (T, K), quantised and prepared, into a
     * buffer of acts_bytes(T, K) bytes on a 64-byte boundary. piece multiplies tokens [t0, t1) of such a buffer by
     * the units [u0, u1) of a region: units(N) of them are a matrix, unit u has the rows from u * unit_rows on.
     * begin is for the stage of pieces: each lane calls it before its first.
     */
    int64_t (*acts_bytes)(int64_t T, int64_t K);
    int (*acts)(void *acts, const float *x, int64_t T, int64_t t0, int64_t t1, int64_t K);
    int64_t unit_rows;
    int64_t (*units)(int64_t N);
    void (*begin)(void *unused);
    int (*piece)(const tunekit_q8_region *region, const void *acts, int64_t T, int64_t t0, int64_t t1, int64_t u0,
        int64_t u1, int64_t K);

    /* The thread team, with the numbers of this box's profile. */
    const tk_team_api *team;
} tunekit_q8_api;

#ifdef Py_PYTHON_H

/* The table, or NULL with an exception set. Fixes the choice of the row for the process. */
static inline const tunekit_q8_api *tunekit_q8_import(void)
{
    PyObject *module = PyImport_ImportModule(TUNEKIT_Q8_MODULE);
    if (module == NULL)
        return NULL;
    PyObject *capsule = PyObject_GetAttrString(module, "_C_API");
    Py_DECREF(module);
    if (capsule == NULL)
        return NULL;
    const tunekit_q8_api *api = (const tunekit_q8_api *)PyCapsule_GetPointer(capsule, TUNEKIT_Q8_CAPSULE);
    Py_DECREF(capsule); /* the table outlives it */
    if (api != NULL && (api->tk_abi != TUNEKIT_Q8_ABI || api->tk_size != sizeof(tunekit_q8_api))) {
        PyErr_Format(PyExc_ImportError,
            TUNEKIT_Q8_CAPSULE " has abi %u and %u bytes, made by %s; this extension was compiled for abi %u and %u "
            "bytes; compile it again with the headers of the installed tunekit (python -m tunekit header tunekit "
            "--where)",
            (unsigned)api->tk_abi, (unsigned)api->tk_size,
            api->tk_abi == TUNEKIT_Q8_ABI ? api->tk_maker : "another tunekit", TUNEKIT_Q8_ABI,
            (unsigned)sizeof(tunekit_q8_api));
        return NULL;
    }
    return api;
}

#endif /* Py_PYTHON_H */

#ifdef __cplusplus
}
#endif

#endif
