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
 * aligned to their elements; an output overlaps no other argument.
 */
#ifndef TUNEKIT_Q8_H
#define TUNEKIT_Q8_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TUNEKIT_Q8_ABI 1u
#define TUNEKIT_Q8_MODULE "tunekit.q8"
#define TUNEKIT_Q8_CAPSULE "tunekit.q8._C_API"

enum { TUNEKIT_Q8_OK = 0, TUNEKIT_Q8_NO_MEMORY = -1, TUNEKIT_Q8_BAD_SIZE = -2 };

typedef struct tunekit_q8_api {
    uint32_t tk_abi;
    uint32_t tk_size;
    const char *tk_maker;  /* which tunekit made this table, and where it lies */
    const char *tk_row;    /* the row that runs, or "reference" */
    const char *tk_source; /* where the choice came from: pin, manifest, fallback, reference */

    /* Elements of the two planes of a packed matrix: int8_t and float. -1 for a bad size. */
    int64_t (*weights)(int64_t N, int64_t K);
    int64_t (*scales)(int64_t N, int64_t K);

    /* Float weights (N, K) into planes, as tunekit.q8.pack. The planes are this row's: they go into no file. */
    int (*pack)(int8_t *w, float *ws, const float *weights, int64_t N, int64_t K);
    /* The same from ggml's Q8_0: N * K / 32 blocks of a little-endian float16 scale and 32 int8. */
    int (*pack_q8_0)(int8_t *w, float *ws, const void *blocks, int64_t N, int64_t K);

    /* Codes (T, K) and scales (T, K / 32) of activations (T, K), as tunekit.q8.quantize. */
    int (*quantize)(int8_t *q, float *s, const float *x, int64_t T, int64_t K);

    /* y (T, N) = x (T, K) times the transposed matrix; x is quantised on the way. */
    int (*matmul)(float *y, const float *x, const int8_t *w, const float *ws, int64_t T, int64_t N, int64_t K);
    /* The same from quantised activations; codes lie in [-127, 127]. */
    int (*matmul_acts)(float *y, const int8_t *q, const float *s, const int8_t *w, const float *ws, int64_t T,
        int64_t N, int64_t K);
    /* One token: y (N) from x (K). */
    int (*gemv)(float *y, const float *x, const int8_t *w, const float *ws, int64_t N, int64_t K);
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
