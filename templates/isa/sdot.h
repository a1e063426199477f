//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/neon.h"

/*
 * isa/sdot.h: int8 x int8 through sdot by element: four codes of four rows against one 32-bit lane
 * of a token's sixteen codes, so that one load of codes serves four k-groups and nothing is splatted.
 * Signed by signed, summed in 32 bits: exact for every byte. A k-group is 4 codes.
 */
enum { TK_WVEC = 16 }; /* bytes of weights behind one row vector and one k-group */

typedef int8x16_t tk_w;

static inline tk_w tk_make_w(int8x16_t raw)
{
    TK_PIN(raw);
    return raw;
}

static inline tk_w tk_load_w(const int8_t *p)
{
    return tk_make_w(vld1q_s8(p));
}

static inline tk_i tk_pinned(tk_i acc)
{
    TK_PIN(acc);
    return acc;
}

/* The k-group of the codes in x is a literal. */
#define tk_dot_lane(acc, w, x, lane) tk_pinned(vdotq_laneq_s32(acc, w, x, lane))

static inline tk_i tk_dot_first(tk_w w, tk_x x)
{
    return tk_dot_lane(vdupq_n_s32(0), w, x, 0);
}
