//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/avx2.h"

/*
 * isa/maddubs.h: int8 x int8 through vpmaddubsw, which wants unsigned times signed: |w| times
 * sign(w) * x. Exact for every w (|-128| is 128 as unsigned) and for x in [-127, 127]: a pair sum
 * is at most 2 * 128 * 127 = 32512, so the 16-bit saturation never acts. A k-group is 4 codes.
 */
typedef int8_t tk_code; /* a code in the prepared activations */

enum { TK_WVEC = 32 }; /* bytes of weights behind one row vector and one k-group */

typedef struct {
    __m256i raw, mag;
} tk_w;

/* The magnitude is taken here, once for all the tokens that this weight vector meets. */
static inline tk_w tk_load_w(const int8_t *p)
{
    tk_w w;
    w.raw = _mm256_loadu_si256((const __m256i *)(const void *)p);
    TK_PIN(w.raw);
    w.mag = _mm256_abs_epi8(w.raw);
    return w;
}

static inline tk_i tk_dot_first(tk_w w, tk_i x)
{
    const __m256i pairs = _mm256_maddubs_epi16(w.mag, _mm256_sign_epi8(x, w.raw));
    tk_i acc = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    TK_PIN(acc);
    return acc;
}

static inline tk_i tk_dot(tk_i acc, tk_w w, tk_i x)
{
    const __m256i pairs = _mm256_maddubs_epi16(w.mag, _mm256_sign_epi8(x, w.raw));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    TK_PIN(acc);
    return acc;
}
