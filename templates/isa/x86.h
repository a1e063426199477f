//# SPDX-License-Identifier: Apache-2.0
/* isa/x86.h: what the x86 legs of 256 and of 512 bits share: types, the compiler barrier, the float fold. */
//% include "tunekit/isa/intrinsics.h"

typedef __m${ width }i tk_i; /* ${ lanes } int32 sums, one per row of a row vector */
typedef __m${ width } tk_f;  /* ${ lanes } float32, likewise */

/*
 * An empty statement that pretends to rewrite v in its register. Left alone, gcc and clang hoist
 * all the multiplies of a block above its adds and spill a hundred vectors; a value that "changes"
 * here can be neither hoisted nor reloaded, so program order is the schedule. No instruction.
 * (The constraint "v" is "x" plus, where AVX512VL is on, the sixteen registers that only EVEX reaches.)
 */
#define TK_PIN(v) __asm__ volatile("" : "+v"(v))

/* Likewise for a pointer: what it points to is not known to be what it was a moment ago. */
#define TK_PIN_POINTER(p) __asm__ volatile("" : "+r"(p) : : "memory")

/* Beyond the plane's end the hint is dropped; it never faults. */
static inline void tk_prefetch(const int8_t *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T0);
}

static inline tk_f tk_zero_f(void)
{
    return _mm${ width }_setzero_ps();
}

static inline tk_f tk_load_f(const float *p)
{
    return _mm${ width }_loadu_ps(p);
}

/* So many float16 as float32: exact, subnormal ones too, whatever the floating-point environment. */
static inline tk_f tk_load_half(const uint16_t *p)
{
//% if width == 512
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
//% else
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
//% endif
}

static inline void tk_store_f(float *p, tk_f v)
{
    _mm${ width }_storeu_ps(p, v);
}

/* The float32 at p, in every lane. p is a byte address inside the prepared activations. */
static inline tk_f tk_splat_f(const uint8_t *p)
{
    float s;
    memcpy(&s, p, sizeof s);
    return _mm${ width }_set1_ps(s);
}

/* Four bytes of codes (one k-group of one token), in every lane. */
static inline tk_i tk_splat_x(const uint8_t *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return _mm${ width }_set1_epi32(x);
}

//% if xscale == 8
/* The int32 at p, in every lane. */
#define tk_splat_i tk_splat_x

//% endif
/*
 * The canonical fold f = fma(float(acc), ws * xs, f): one product rounded to float32, then one
 * fused multiply-add. Written out: clang contracts no intrinsics, and bits must not hang on a flag.
 * Left to gcc's -ffp-contract=fast it is no faster (72.9 and 72.9 GMAC/s for 16 rows by 5 tokens, 73.8
 * and 73.8 by 6) as long as the result is pinned; without the pin clang defers the folds of a block
 * into the next one and spills its sums.
 */
static inline tk_f tk_fold(tk_f f, tk_i acc, tk_f ws, tk_f xs)
{
    f = _mm${ width }_fmadd_ps(_mm${ width }_cvtepi32_ps(acc), _mm${ width }_mul_ps(ws, xs), f);
    TK_PIN(f);
    return f;
}
