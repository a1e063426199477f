//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/x86.h"

/*
 * isa/madd16.h: int16 x int16 through vpmaddwd. Weights stay int8 in memory and are widened by the
 * load itself (vpmovsxbw from memory is one micro-operation and not on the multipliers' ports);
 * activations are widened once, when they are prepared. No sign operation competes with the
 * multiplies, and nothing can saturate. A k-group is 2 codes.
 */
typedef int16_t tk_code; /* a code in the prepared activations */

enum { TK_WVEC = 16 }; /* bytes of weights behind one row vector and one k-group */

typedef __m256i tk_w;

static inline tk_w tk_load_w(const int8_t *p)
{
    tk_w w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
    TK_PIN(w);
    return w;
}

static inline tk_i tk_product(tk_w w, tk_i x)
{
    tk_i p = _mm256_madd_epi16(w, x);
    TK_PIN(p);
    return p;
}

static inline tk_i tk_add(tk_i acc, tk_i p)
{
    acc = _mm256_add_epi32(acc, p);
    TK_PIN(acc);
    return acc;
}

#define tk_dot_first tk_product
#define tk_dot(acc, w, x) tk_add(acc, tk_product(w, x))
