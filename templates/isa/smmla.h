//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/neon.h"

/*
 * isa/smmla.h: int8 x int8 through smmla, eight codes of two tokens by eight codes of two rows into
 * a 2 x 2 patch of 32-bit sums: twice the products of an sdot. Signed by signed, exact for every
 * byte. A k-group is 8 codes, and 16 bytes of the plane are one k-group of two rows.
 */
typedef struct {
    int8x16_t kg[2]; /* for each k-group: 8 codes of token t, then 8 codes of token u */
} tk_pair;

/* Sixteen codes of two tokens. A last token without a neighbour is its own; nobody reads the copy. */
static inline tk_pair tk_load_pair(const uint8_t *t, const uint8_t *u)
{
    const int64x2_t ct = vreinterpretq_s64_s8(tk_load_x(t)), cu = vreinterpretq_s64_s8(tk_load_x(u));
    tk_pair x;
    x.kg[0] = vreinterpretq_s8_s64(vzip1q_s64(ct, cu));
    x.kg[1] = vreinterpretq_s8_s64(vzip2q_s64(ct, cu));
    return x;
}

/* One k-group of two rows. */
static inline int8x16_t tk_load_rows(const int8_t *p)
{
    int8x16_t w = vld1q_s8(p);
    TK_PIN(w);
    return w;
}

/* acc holds [t r, t r+1, u r, u r+1]. */
static inline tk_i tk_patch(tk_i acc, int8x16_t w, int8x16_t x)
{
    acc = vmmlaq_s32(acc, x, w);
    TK_PIN(acc);
    return acc;
}

/* From the patches of rows r, r+1 and of rows r+2, r+3: the four sums of token t, and those of token u. */
static inline tk_i tk_sums_t(tk_i low, tk_i high)
{
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(low), vreinterpretq_s64_s32(high)));
}

static inline tk_i tk_sums_u(tk_i low, tk_i high)
{
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(low), vreinterpretq_s64_s32(high)));
}

/*
 * One token alone goes through sdot, which wants four codes of four rows where this plane holds eight
 * codes of two: the even 32-bit words of two vectors are codes 0 to 3 of four rows, the odd ones 4 to 7.
 */
enum { TK_WVEC = 32 }; /* bytes of weights behind one row vector and one k-group */

typedef struct {
    int8x16_t even, odd;
} tk_w;

static inline tk_w tk_make_w(int8x16_t rows01, int8x16_t rows23)
{
    const int32x4_t low = vreinterpretq_s32_s8(rows01), high = vreinterpretq_s32_s8(rows23);
    tk_w w;
    w.even = vreinterpretq_s8_s32(vuzp1q_s32(low, high));
    w.odd = vreinterpretq_s8_s32(vuzp2q_s32(low, high));
    return w;
}

static inline tk_w tk_load_w(const int8_t *p)
{
    return tk_make_w(vld1q_s8(p), vld1q_s8(p + 16));
}

static inline tk_i tk_pinned(tk_i acc)
{
    TK_PIN(acc);
    return acc;
}

/* The k-group of the codes in x is a literal. */
#define tk_dot_lane(acc, w, x, lane) \
    tk_pinned(vdotq_laneq_s32(vdotq_laneq_s32(acc, (w).even, x, 2 * (lane)), (w).odd, x, 2 * (lane) + 1))

static inline tk_i tk_dot_first(tk_w w, tk_x x)
{
    return tk_dot_lane(vdupq_n_s32(0), w, x, 0);
}
