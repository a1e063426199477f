/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A C program that multiplies with tunekit's Q8 products: pack, quantise, matmul, GEMV and status, all from C.
 *
 *     python=$PWD/.venv/bin/python        # an interpreter that has tunekit
 *     cc -std=c99 -O2 embed.c -o embed -I"$($python -m tunekit header tunekit --where)" \
 *         $(python3-config --includes) $(python3-config --embed --ldflags)
 *     ./embed "$python"
 *
 * Python is started once, to choose the row for this box; the products then run without it.
 */
#include <Python.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tunekit_q8.h>

enum { TOKENS = 5, ROWS = 67, COLUMNS = 256 };

/* Starts Python as the interpreter that the caller names, so that its packages are found. */
static int start_python(const char *interpreter)
{
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    PyStatus status = PyStatus_Ok();
    if (interpreter != NULL)
        status = PyConfig_SetBytesString(&config, &config.program_name, interpreter);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) {
        fprintf(stderr, "Python does not start: %s\n", status.err_msg != NULL ? status.err_msg : "unknown");
        return -1;
    }
    return 0;
}

static float noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state * 0x1p-31f;
}

static void fill(float *to, int64_t count, uint32_t seed)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = noise(&seed);
}

/* Everything that needs no Python. 0 when all agree. */
static int multiply(const tunekit_q8_api *api)
{
    int status = 1;
    float *const weights = malloc(ROWS * COLUMNS * sizeof(float)), *const x = malloc(TOKENS * COLUMNS * sizeof(float));
    int8_t *const w = malloc((size_t)api->weights(ROWS, COLUMNS)), *const q = malloc(TOKENS * COLUMNS);
    float *const ws = malloc((size_t)api->scales(ROWS, COLUMNS) * sizeof(float));
    float *const s = malloc(TOKENS * COLUMNS / 32 * sizeof(float));
    float *const y = malloc(TOKENS * ROWS * sizeof(float)), *const again = malloc(TOKENS * ROWS * sizeof(float));
    if (weights == NULL || x == NULL || w == NULL || q == NULL || ws == NULL || s == NULL || y == NULL || again == NULL) {
        fputs("out of memory\n", stderr);
        goto end;
    }
    fill(weights, ROWS * COLUMNS, 1);
    fill(x, TOKENS * COLUMNS, 2);
    if (api->pack(w, ws, weights, ROWS, COLUMNS) != TUNEKIT_Q8_OK
        || api->matmul(y, x, w, ws, TOKENS, ROWS, COLUMNS) != TUNEKIT_Q8_OK
        || api->quantize(q, s, x, TOKENS, COLUMNS) != TUNEKIT_Q8_OK
        || api->matmul_acts(again, q, s, w, ws, TOKENS, ROWS, COLUMNS) != TUNEKIT_Q8_OK) {
        fputs("a call failed\n", stderr);
        goto end;
    }
    /* Bits do not depend on the way: quantised before or on the way, one token or several. */
    int same = memcmp(y, again, TOKENS * ROWS * sizeof(float)) == 0;
    for (int t = 0; t < TOKENS; t++) {
        if (api->gemv(again, x + t * COLUMNS, w, ws, ROWS, COLUMNS) != TUNEKIT_Q8_OK)
            goto end;
        same = same && memcmp(y + t * ROWS, again, ROWS * sizeof(float)) == 0;
    }
    printf("status: %s (%s)\n", api->tk_row, api->tk_source);
    printf("gemv and quantised activations: %s\n", same ? "the same bits" : "OTHER BITS");
    printf("corners: %a %a %a\n", (double)y[0], (double)y[ROWS - 1], (double)y[TOKENS * ROWS - 1]);
    status = !same || api->matmul(y, x, w, ws, TOKENS, ROWS, COLUMNS + 1) != TUNEKIT_Q8_BAD_SIZE;
end:
    free(weights);
    free(x);
    free(w);
    free(q);
    free(ws);
    free(s);
    free(y);
    free(again);
    return status;
}

int main(int argc, char **argv)
{
    if (start_python(argc > 1 ? argv[1] : NULL) != 0)
        return 1;
    const tunekit_q8_api *const api = tunekit_q8_import();
    if (api == NULL) {
        PyErr_Print();
        return 1;
    }
    PyThreadState *const python = PyEval_SaveThread(); /* other threads may run Python meanwhile */
    const int status = multiply(api);
    PyEval_RestoreThread(python);
    return Py_FinalizeEx() < 0 ? 1 : status;
}
