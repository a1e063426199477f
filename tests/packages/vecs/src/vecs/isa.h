//# SPDX-License-Identifier: Apache-2.0
//# Five operations of a vector of ${ width } bits: what the loops below are written in.
//% if width == 512
#include <immintrin.h>
typedef __m512 vec;
static inline vec load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec splat(float a) { return _mm512_set1_ps(a); }
static inline vec muladd(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
//% elif width == 256
#include <immintrin.h>
typedef __m256 vec;
static inline vec load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec splat(float a) { return _mm256_set1_ps(a); }
static inline vec muladd(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
//% else
#include <arm_neon.h>
typedef float32x4_t vec;
static inline vec load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, vec v) { vst1q_f32(p, v); }
static inline vec splat(float a) { return vdupq_n_f32(a); }
static inline vec muladd(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
//% endif
