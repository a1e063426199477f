//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/x86.h"

/*
 * isa/sign.h: signed weights for instructions that want unsigned times signed: |w| times sign(w) * x.
 * Exact for every w (|-128| is 128 as unsigned) and for x in [-127, 127]; -x of -128 has no byte.
 */
typedef int8_t tk_code; /* a code in the prepared activations */

enum { TK_WVEC = ${ width // 8 } }; /* bytes of weights behind one row vector and one k-group */

//% if width == 256
typedef struct {
    __m256i raw, mag;
} tk_w;

/* The magnitude is taken here, once for all the tokens that this weight vector meets. */
static inline tk_w tk_make_w(__m256i raw)
{
    tk_w w;
    TK_PIN(raw);
    w.raw = raw;
    w.mag = _mm256_abs_epi8(raw);
    return w;
}

static inline tk_i tk_signed(tk_w w, tk_i x)
{
    return _mm256_sign_epi8(x, w.raw);
}
//% else
typedef struct {
    __m512i mag;
    __mmask64 negative;
} tk_w;

/* 512 bits have no vpsignb. The signs become a mask here, once for all the tokens that this vector meets. */
static inline tk_w tk_make_w(__m512i raw)
{
    tk_w w;
    TK_PIN(raw);
    w.negative = _mm512_movepi8_mask(raw);
    w.mag = _mm512_abs_epi8(raw);
    return w;
}

static inline tk_i tk_signed(tk_w w, tk_i x)
{
    return _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
}
//% endif

static inline tk_w tk_load_w(const int8_t *p)
{
    return tk_make_w(_mm${ width }_loadu_si${ width }((const void *)p));
}
