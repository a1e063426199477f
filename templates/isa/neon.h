//# SPDX-License-Identifier: Apache-2.0
/* isa/neon.h: what the AArch64 legs share: types, the compiler barrier, the float fold. */
#include <arm_neon.h>

#if defined(__ARM_BIG_ENDIAN)
#error "the planes and the lanes of these legs are little-endian"
#endif

typedef int32x4_t tk_i;   /* ${ lanes } int32 sums, one per row of a row vector */
typedef float32x4_t tk_f; /* ${ lanes } float32, likewise */
typedef int8_t tk_code;   /* a code in the prepared activations */

/*
 * An empty statement that pretends to rewrite v in its register: program order is the schedule
 * there, and nothing is reloaded or deferred. No instruction.
 */
#define TK_PIN(v) __asm__ volatile("" : "+w"(v))

/* Likewise for a pointer: what it points to is not known to be what it was a moment ago. */
#define TK_PIN_POINTER(p) __asm__ volatile("" : "+r"(p) : : "memory")

/* No hint: whether one pays was never measured on such a CPU, and it would cost a load's place. */
static inline void tk_prefetch(const int8_t *p)
{
    (void)p;
}

static inline tk_f tk_zero_f(void)
{
    return vdupq_n_f32(0.0f);
}

static inline tk_f tk_load_f(const float *p)
{
    return vld1q_f32(p);
}

/* Four float16 as float32: exact, subnormal ones too, as long as FPCR.AHP is clear (tunekit/csrc/fpenv.h). */
static inline tk_f tk_load_half(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

static inline void tk_store_f(float *p, tk_f v)
{
    vst1q_f32(p, v);
}

/* The float32 at p, a byte address inside the prepared activations, in every lane. */
static inline tk_f tk_splat_f(const uint8_t *p)
{
    float s;
    memcpy(&s, p, sizeof s);
    return vdupq_n_f32(s);
}

/* Sixteen codes of one token. */
typedef int8x16_t tk_x;

static inline tk_x tk_load_x(const uint8_t *p)
{
    return vreinterpretq_s8_u8(vld1q_u8(p));
}

/*
 * The canonical fold f = fma(float(acc), ws * xs, f): one product rounded to float32, then one
 * fused multiply-add, written out.
 */
static inline tk_f tk_fold(tk_f f, tk_i acc, tk_f ws, tk_f xs)
{
    f = vfmaq_f32(f, vcvtq_f32_s32(acc), vmulq_f32(ws, xs));
    TK_PIN(f);
    return f;
}
