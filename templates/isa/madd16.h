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

static inline tk_i tk_dot_first(tk_w w, tk_i x)
{
    tk_i acc = _mm256_madd_epi16(w, x);
    TK_PIN(acc);
    return acc;
}

static inline tk_i tk_dot(tk_i acc, tk_w w, tk_i x)
{
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(w, x));
    TK_PIN(acc);
    return acc;
}
