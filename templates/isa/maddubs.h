//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/sign.h"

/*
 * isa/maddubs.h: int8 x int8 through vpmaddubsw. A sum of two products |w| * (sign(w) * x) is at most
 * 2 * 128 * 127 = 32512, so the 16-bit saturation never acts. A k-group is 4 codes.
 */
static inline tk_i tk_product(tk_w w, tk_i x)
{
    const tk_i pairs = _mm${ width }_maddubs_epi16(w.mag, tk_signed(w, x));
    tk_i p = _mm${ width }_madd_epi16(pairs, _mm${ width }_set1_epi16(1));
    TK_PIN(p);
    return p;
}

static inline tk_i tk_add(tk_i acc, tk_i p)
{
    acc = _mm${ width }_add_epi32(acc, p);
    TK_PIN(acc);
    return acc;
}

#define tk_dot_first tk_product
#define tk_dot(acc, w, x) tk_add(acc, tk_product(w, x))
