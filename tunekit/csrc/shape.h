/* SPDX-License-Identifier: Apache-2.0 */
/* How much work gets how many lanes, and how a product is cut into chunks. Pure functions of numbers: the team,
 * the tests on paper and the simulator of larger machines all call these. */
#ifndef TK_SHAPE_H
#define TK_SHAPE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* clamp(work / target, 1, min(live, cap)): the lanes that some work is worth. work and target in
 * multiply-accumulates, or whatever unit both share; cap 0 is none; target 0 asks for all lanes. */
int32_t tk_lanes(int64_t work, int64_t target, int32_t live, int32_t cap);

/*
 * Into how many chunks `units` rows (or groups of rows) are cut for `lanes` lanes.
 *
 * At most lanes * oversplit, and none smaller than `grain` units (0: no grain) unless there are fewer in all.
 * With a chunk for every lane or more, whole waves of them. With `fill`, a wave that the grain would leave partly
 * empty is filled up while its chunks keep half the grain. 0 units give 0 chunks.
 */
int32_t tk_chunks(int64_t units, int64_t grain, int32_t lanes, int32_t oversplit, int fill);

typedef struct {
    int32_t rows, tokens; /* cells: their product is the number of chunks */
} tk_grid;

/*
 * Cells in two dimensions, for a product whose rows alone starve the lanes: `chunks` (of tk_chunks) is below
 * `lanes`, and there are two tiles of tokens at least. `mode` 0: never; 1: fine, a cell for every 16 tokens; 2: as
 * many token cells as make whole waves, or where there is no room for one, a part of a wave. Never more than `most`
 * cells in all (lanes that come for them too often wait for the claim word). {chunks, 1} otherwise.
 */
tk_grid tk_cells(
    int32_t chunks, int64_t tokens, int64_t tiles, int32_t lanes, int32_t oversplit, int mode, int64_t most);

/* Where part i of `parts` near-equal parts of `total` begins; part i ends where i + 1 begins. The larger ones come
 * first: a large part that is claimed last is waited for. */
int64_t tk_part(int64_t total, int64_t parts, int64_t i);

/* a * b for sizes; -1 where it does not fit or a factor is negative, so that a mistake runs through a chain. */
int64_t tk_times(int64_t a, int64_t b);

/* Tokens a block: at most `block`, fewer where `budget` bytes hold fewer of `each` bytes, and one at least. */
int64_t tk_token_block(int64_t block, int64_t budget, int64_t each);

/* Ranks of workers that an op admits, of `workers` there are: with the gate, no more than have a chunk to get. */
int32_t tk_admitted(int32_t workers, int32_t lanes, int32_t widest, int gate);

#ifdef __cplusplus
}
#endif

#endif
