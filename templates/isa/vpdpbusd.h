//# SPDX-License-Identifier: Apache-2.0
//#
//# One instruction, three encodings: 512 bits (AVX512-VNNI), 256 bits in EVEX (with AVX512VL) and in
//# VEX (AVX-VNNI); a CPU may have either of the 256-bit ones without the other.
//% set dpbusd = "_mm512_dpbusd_epi32" if width == 512 else "_mm256_dpbusd_avx_epi32" if "avxvnni" in alternative else "_mm256_dpbusd_epi32"
//% if bias
//% include "tunekit/isa/x86.h"

/*
 * isa/vpdpbusd.h, biased plane: four products of an unsigned and a signed byte, summed in 32 bits with
 * no saturation. The plane holds w ^ 0x80 = w + 128, which is the unsigned byte, so that there is no
 * sign work at all; each sum begins at -128 times the block's sum of codes (tk_splat_i), prepared once
 * a token. Exact for every w and every x, -128 included. A k-group is 4 codes.
 */
typedef int8_t tk_code; /* a code in the prepared activations */

enum { TK_WVEC = ${ width // 8 } }; /* bytes of weights behind one row vector and one k-group */

typedef tk_i tk_w;

static inline tk_w tk_make_w(tk_i raw)
{
    TK_PIN(raw);
    return raw;
}

static inline tk_w tk_load_w(const int8_t *p)
{
    return tk_make_w(_mm${ width }_loadu_si${ width }((const void *)p));
}

static inline tk_i tk_dot(tk_i acc, tk_w w, tk_i x)
{
    acc = ${ dpbusd }(acc, w, x);
    TK_PIN(acc);
    return acc;
}
//% else
//% include "tunekit/isa/sign.h"

/*
 * isa/vpdpbusd.h, signed plane: four products of an unsigned and a signed byte, |w| times sign(w) * x,
 * summed in 32 bits with no saturation. A k-group is 4 codes.
 */
static inline tk_i tk_dot(tk_i acc, tk_w w, tk_i x)
{
    acc = ${ dpbusd }(acc, w.mag, tk_signed(w, x));
    TK_PIN(acc);
    return acc;
}

static inline tk_i tk_dot_first(tk_w w, tk_i x)
{
    return tk_dot(_mm${ width }_setzero_si${ width }(), w, x);
}
//% endif
