//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/x86.h"

/*
 * isa/vpdpbssd.h: four products of signed bytes, summed in 32 bits with no saturation: the one x86
 * instruction that is the dot product of the format itself. Exact for every w and x. A k-group is 4 codes.
 */
typedef int8_t tk_code; /* a code in the prepared activations */

enum { TK_WVEC = 32 }; /* bytes of weights behind one row vector and one k-group */

typedef __m256i tk_w;

static inline tk_w tk_make_w(tk_i raw)
{
    TK_PIN(raw);
    return raw;
}

static inline tk_w tk_load_w(const int8_t *p)
{
    return tk_make_w(_mm${ width }_loadu_si${ width }((const void *)p));
}

/*
 * gcc has the intrinsic from 13 on and clang from 16. An older gcc knows neither flag nor intrinsic, yet
 * passes assembly text on to an assembler that may know the instruction (binutils 2.40); where that one
 * does not, the row is dropped for its reason. Where there is the intrinsic it is used: text hides from
 * the scheduler what it does and how long it takes.
 * tunekit-optional-flag: -mavxvnniint8
 */
static inline tk_i tk_dot(tk_i acc, tk_w w, tk_i x)
{
#if defined(__AVXVNNIINT8__)
    acc = _mm256_dpbssd_epi32(acc, w, x);
    TK_PIN(acc);
#elif defined(__GNUC__) && !defined(__clang__)
    __asm__ volatile("vpdpbssd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
#else
#error "${ row }: this object is compiled for avxvnniint8, and the compiler's flags lack it"
#endif
    return acc;
}

static inline tk_i tk_dot_first(tk_w w, tk_i x)
{
    return tk_dot(_mm256_setzero_si256(), w, x);
}
