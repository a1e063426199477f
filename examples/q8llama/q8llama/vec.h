//# SPDX-License-Identifier: Apache-2.0
//# What the operations are written in: a vector of ${ isa }, 16 / WIDTH of which are the 16 lanes of every reduction.
//# Each operation rounds as IEEE 754 says, muladd once: so all of these give the same bits.
//% if isa == "avx512"
#include <immintrin.h>
enum { WIDTH = 16 };
typedef __m512 vec;
static inline vec load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec splat(float a) { return _mm512_set1_ps(a); }
static inline vec muladd(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec quotient(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec zero_below(vec x, vec low, vec v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), v); }
static inline vec two_to(vec t)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(127 << 23)));
}
//% elif isa == "avx2"
#include <immintrin.h>
enum { WIDTH = 8 };
typedef __m256 vec;
static inline vec load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec splat(float a) { return _mm256_set1_ps(a); }
static inline vec muladd(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec quotient(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec zero_below(vec x, vec low, vec v) { return _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_NLT_UQ), v); }
static inline vec two_to(vec t)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(127 << 23)));
}
//% elif isa == "neon"
#include <arm_neon.h>
enum { WIDTH = 4 };
typedef float32x4_t vec;
static inline vec load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, vec v) { vst1q_f32(p, v); }
static inline vec splat(float a) { return vdupq_n_f32(a); }
static inline vec muladd(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec quotient(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec larger(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vec smaller(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vec zero_below(vec x, vec low, vec v)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, low)));
}
static inline vec two_to(vec t)
{
    return vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23), vdupq_n_u32(127u << 23)));
}
//% else
#include <math.h>
#include <string.h>
enum { WIDTH = 16 };
typedef struct {
    float f[WIDTH];
} vec;
#define EACH for (int i = 0; i < WIDTH; i++)
static inline vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec splat(float a) { vec v; EACH v.f[i] = a; return v; }
static inline vec muladd(vec a, vec b, vec c) { EACH c.f[i] = fmaf(a.f[i], b.f[i], c.f[i]); return c; }
static inline vec mul(vec a, vec b) { EACH a.f[i] = a.f[i] * b.f[i]; return a; }
static inline vec add(vec a, vec b) { EACH a.f[i] = a.f[i] + b.f[i]; return a; }
static inline vec sub(vec a, vec b) { EACH a.f[i] = a.f[i] - b.f[i]; return a; }
static inline vec quotient(vec a, vec b) { EACH a.f[i] = a.f[i] / b.f[i]; return a; }
static inline vec larger(vec a, vec b) { EACH a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]; return a; }
static inline vec smaller(vec a, vec b) { EACH a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i]; return a; }
static inline vec zero_below(vec x, vec low, vec v) { EACH v.f[i] = x.f[i] < low.f[i] ? 0.0f : v.f[i]; return v; }
static inline vec two_to(vec t)
{
    EACH
    {
        uint32_t bits;
        memcpy(&bits, &t.f[i], sizeof bits);
        bits = (bits << 23) + (127u << 23);
        memcpy(&t.f[i], &bits, sizeof bits);
    }
    return t;
}
//% endif

enum { LANES = 16, PER = LANES / WIDTH };

/* The 16 lanes of a reduction, always in this order. */
static inline float sum16(const vec *part)
{
    float a[LANES];
    for (int i = 0; i < PER; i++)
        store(a + i * WIDTH, part[i]);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int l = 0; l < step; l++)
            a[l] = a[l] + a[l + step];
    return a[0];
}

/*
 * e to the x: 0 below -87, e to the 88 above 88; NaN stays. A whole number n of halvings is taken out, and the rest is
 * the polynomial of Cephes' expf; half a unit in the last place at best, two at worst, the same bits everywhere.
 */
static inline vec exponential(vec x)
{
    const vec low = splat(-87.0f), magic = splat(12582912.0f);
    const vec c = smaller(splat(88.0f), larger(low, x));
    const vec t = muladd(c, splat(1.44269504f), magic), n = sub(t, magic);
    const vec r = muladd(n, splat(2.12194440e-4f), muladd(n, splat(-0.693359375f), c));
    vec p = splat(1.9875691500e-4f);
    p = muladd(p, r, splat(1.3981999507e-3f));
    p = muladd(p, r, splat(8.3334519073e-3f));
    p = muladd(p, r, splat(4.1665795894e-2f));
    p = muladd(p, r, splat(1.6666665459e-1f));
    p = muladd(p, r, splat(5.0000001201e-1f));
    p = add(muladd(p, mul(r, r), r), splat(1.0f));
    return zero_below(x, low, mul(p, two_to(t)));
}
