// SPDX-License-Identifier: Apache-2.0
/*
 * The Q8 traversal: how a whole product is cut into the tiles and GEMVs of one row.
 *
 * Baseline C without any instruction set in it: everything that a row decides (plane, prepared
 * form, tokens per tile) stays behind the row's own functions.
 */
#ifndef TUNEKIT_CSRC_Q8_H
#define TUNEKIT_CSRC_Q8_H

#include <Python.h> /* first: it sets feature macros */

#include <stdint.h>

#include "tunekit_q8.h"

/* One call: nt tokens from t0 on, ng groups. y[t * ldy + g * mr + r] is written. */
typedef void tk_q8_tile_fn(float *restrict y, int64_t ldy, const int8_t *restrict w, const float *restrict ws,
    const uint8_t *restrict xa, int64_t tokens, int64_t t0, int32_t nt, int32_t nb, int32_t ng);
/* One token, ng groups. */
typedef void tk_q8_gemv_fn(float *restrict y, const int8_t *restrict w, const float *restrict ws,
    const uint8_t *restrict xa, int64_t tokens, int64_t t, int32_t nb, int32_t ng);
/* The same two with float16 scales of the weights, given as their bits. */
typedef void tk_q8_tile_f16_fn(float *restrict y, int64_t ldy, const int8_t *restrict w, const uint16_t *restrict ws,
    const uint8_t *restrict xa, int64_t tokens, int64_t t0, int32_t nt, int32_t nb, int32_t ng);
typedef void tk_q8_gemv_f16_fn(float *restrict y, const int8_t *restrict w, const uint16_t *restrict ws,
    const uint8_t *restrict xa, int64_t tokens, int64_t t, int32_t nb, int32_t ng);
typedef int64_t tk_q8_acts_bytes_fn(int64_t tokens, int32_t nb);
typedef void tk_q8_prepare_fn(uint8_t *restrict xa, const int8_t *restrict q, const float *restrict s,
    int64_t tokens, int64_t t0, int64_t t1, int32_t nb);
typedef void tk_q8_quantize_fn(int8_t *restrict q, float *restrict s, const float *restrict x,
    int64_t t0, int64_t t1, int32_t nb);
/* Before the first tile of a traversal, on each thread that runs tiles. */
typedef void tk_q8_amx_cfg_fn(void);
/* One token, ng groups, of MXFP4 weights: nibble and exponent planes. */
typedef void tk_q8_mx4_gemv_fn(float *restrict y, const uint8_t *restrict nib, const uint8_t *restrict e,
    const uint8_t *restrict xa, int64_t tokens, int64_t t, int32_t nb, int32_t ng);
/*
 * The tile of MXFP4 weights: it looks the nibbles up itself, and the room of a group is 0; or it reads what expand made
 * of the same ng groups in a room of so many times as many bytes, on a 64-byte boundary.
 */
typedef int64_t tk_q8_mx4_room_fn(int32_t nb);
typedef void tk_q8_mx4_expand_fn(uint8_t *restrict room, const uint8_t *restrict nib, const uint8_t *restrict e,
    int32_t nb, int32_t ng);
typedef void tk_q8_mx4_tile_fn(float *restrict y, int64_t ldy, const uint8_t *restrict nib, const uint8_t *restrict e,
    const uint8_t *restrict room, const uint8_t *restrict xa, int64_t tokens, int64_t t0, int32_t nt, int32_t nb,
    int32_t ng);

/* The functions of one row, and the numbers of it that a traversal needs. */
typedef struct {
    tk_q8_tile_fn *tile;
    tk_q8_gemv_fn *gemv;
    tk_q8_acts_bytes_fn *acts_bytes;
    tk_q8_prepare_fn *prepare;
    tk_q8_quantize_fn *quantize;
    tk_q8_amx_cfg_fn *amx_cfg;
    tk_q8_tile_f16_fn *tile_f16;
    tk_q8_gemv_f16_fn *gemv_f16;
    int32_t mr;      /* rows a group, 1 to TK_Q8_MR_MAX */
    int32_t tokstep; /* tokens a tile call covers at most, 1 to TK_Q8_TOKSTEP_MAX */
    int32_t groups;  /* groups that it takes at once, 1 to TK_Q8_GROUPS_MAX */
    tk_q8_mx4_gemv_fn *mx4_gemv; /* this and the next ones: NULL in a row without MXFP4 */
    tk_q8_mx4_room_fn *mx4_room;
    tk_q8_mx4_expand_fn *mx4_expand;
    tk_q8_mx4_tile_fn *mx4_tile;
} tk_q8_row;

enum { TK_Q8_MR_MAX = 64, TK_Q8_TOKSTEP_MAX = 64, TK_Q8_GROUPS_MAX = 16 };

/* One matrix of a product; one without MXFP4's functions has no region with nibbles. */
typedef tunekit_q8_region tk_q8_region;

/*
 * What this box's profile says of products (docs/team.md has each one's meaning). Plain numbers, set while nothing
 * runs; a product copies them when it begins.
 */
typedef struct {
    int64_t target_chunk_work, wake_work, q8_l2_budget, act_threshold;
    int32_t q8_token_block, matmul_min_chunk_rows, matmul_min_chunk_rows_gemv;
    int32_t q8_batch_chunks_per_job, q8_gemv_chunks_per_job;
    int32_t gemv_lane_cap, batch_lane_cap, batch_grid_2d, gemv_wave_fill;
} tk_q8_profile;

extern tk_q8_profile tk_q8_box;

/*
 * Several matrices of one K times one set of activations, in one dispatch: x (T, K) float32, quantised on the way;
 * or x is NULL and q (T, K), s (T, K / 32) are the activations. K is a multiple of 32; with K = 0 products are 0.
 * Outputs overlap nothing else, and each other nowhere.
 *
 * As many lanes of the team as the work is worth; the bits depend on neither their number nor the chunks.
 * A token block is outermost, then groups of rows that stay in the second cache, then tiles.
 * Runs in the floating-point environment of fpenv.h and restores the caller's.
 * Returns 0, or -1 where memory ran out (outputs are then unspecified).
 */
int tk_q8_regions(const tk_q8_row *row, const tk_q8_region *regions, int32_t count, const float *x, const int8_t *q,
    const float *s, int64_t T, int64_t K);

/*
 * One matrix: y (T, N) = x (T, K) times the packed matrix (N, K); of `planes` the planes alone are read.
 * MXFP4 weights whose nibbles the row's tile does not look up: a few tokens meet them one by one, and for more some
 * groups at a time are expanded into the lane's scratch.
 */
int tk_q8_matmul(const tk_q8_row *row, const tk_q8_region *planes, float *y, const float *x, const int8_t *q,
    const float *s, int64_t T, int64_t N, int64_t K);

/* q (T, K), s (T, K / 32) = the quantised x (T, K). Environment and lanes as above. */
void tk_q8_quantize(const tk_q8_row *row, int8_t *q, float *s, const float *x, int64_t T, int64_t K);

/*
 * One lane's part of a product, in the caller's floating-point environment: tokens [t0, t1) of T prepared ones times
 * the units [u0, u1) of a region, a unit being row->groups groups. 0, or -1 where memory ran out.
 */
int tk_q8_piece(const tk_q8_row *row, const tk_q8_region *region, const uint8_t *xa, int64_t T, int64_t t0,
    int64_t t1, int64_t u0, int64_t u1, int32_t nb);

/* Called once, when the core is loaded. */
void tk_q8_load(void);

/*
 * For the module's method table, all METH_FASTCALL:
 *   q8_row(tile, gemv, acts_bytes, prepare, quantize, amx_cfg, tile_f16, gemv_f16, mr, tokstep, groups
 *          [, mx4_gemv, mx4_room, mx4_expand, mx4_tile]) -> capsule     (addresses as int)
 *   q8_matmul(row, y, x, w, ws, T, N, K) -> None
 *   q8_matmul_acts(row, y, q, s, w, ws, T, N, K) -> None
 *   q8_mx4_matmul(row, y, x, nib, e, T, N, K) -> None
 *   q8_mx4_matmul_acts(row, y, q, s, nib, e, T, N, K) -> None
 *   q8_quantize(row, q, s, x, T, K) -> None
 *   q8_prepared(row, first plane, second plane, N, K, mx4: bool) -> capsule, which keeps row and planes
 *   q8_product(prepared, x, y) -> True; or False, and nothing done, where x and y are not what a product takes as
 *                    they are: float32 (T, K) and (T, N), or (K,) and (N,), apart, and none of T, N, K is 0
 *   q8_regions(row, x | None, q | None, s | None, T, K, regions) -> None
 *                    regions: a tuple of (y, first plane, second plane, bias | None, N, t0, t1, mx4: bool); y is
 *                    (T, N), and one buffer may be the y of several regions whose tokens are apart
 * The scales ws are float32 or float16. Buffers are C-contiguous, of the exact size; ValueError, TypeError or
 * BufferError otherwise.
 */
PyObject *tk_q8_py_row(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_matmul_acts(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_mx4_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_mx4_matmul_acts(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_prepared(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_product(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_quantize(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *tk_q8_py_regions(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#define TK_Q8_ROW_CAPSULE "tunekit._core.q8_row"

/* q8_api.c: q8_api(row, kgroup, nibble_kgroup, bias, maker, row's name, source) -> capsule of the table in tunekit_q8.h */
PyObject *tk_q8_py_api(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
