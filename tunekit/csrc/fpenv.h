/* SPDX-License-Identifier: Apache-2.0 */
/* The floating-point environment is ours while a kernel runs: round to nearest, denormals kept, exceptions masked.
 *
 * A caller's start-up code (-Ofast links one that sets flush-to-zero) or an fesetround() would otherwise change
 * bits. Every lane enters and leaves, the inline one too; about 10 ns. Sticky exception flags are saved with the
 * control word and come back on leave, so a kernel raises no floating-point warning in the caller.
 *
 * The kernels are called through pointers between enter and leave; the compiler cannot move their arithmetic
 * across, and the memory clobber holds loads and stores in place. */
#ifndef TK_FPENV_H
#define TK_FPENV_H

#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64) || (defined(__i386__) && defined(__SSE__))

#include <xmmintrin.h>

#define TK_MXCSR_OURS 0x1F80u /* all exceptions masked, nearest, no FTZ, no DAZ, no flags */

typedef struct {
    uint32_t mxcsr;
} tk_fpenv;

static inline tk_fpenv tk_fpenv_enter(void)
{
    tk_fpenv saved;
#if defined(__GNUC__) || defined(__clang__)
    const uint32_t ours = TK_MXCSR_OURS;
    __asm__ volatile("stmxcsr %0" : "=m"(saved.mxcsr) : : "memory");
    __asm__ volatile("ldmxcsr %0" : : "m"(ours) : "memory");
#else
    saved.mxcsr = _mm_getcsr();
    _mm_setcsr(TK_MXCSR_OURS);
#endif
    return saved;
}

static inline void tk_fpenv_leave(tk_fpenv saved)
{
#if defined(__GNUC__) || defined(__clang__)
    __asm__ volatile("ldmxcsr %0" : : "m"(saved.mxcsr) : "memory");
#else
    _mm_setcsr(saved.mxcsr);
#endif
}

#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))

typedef struct {
    uint64_t fpcr, fpsr;
} tk_fpenv;

static inline tk_fpenv tk_fpenv_enter(void)
{
    tk_fpenv saved;
    const uint64_t ours = 0; /* nearest; FZ, FZ16, DN, AH, FIZ, NEP and all traps off */
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved.fpcr) : : "memory");
    __asm__ volatile("mrs %0, fpsr" : "=r"(saved.fpsr) : : "memory");
    __asm__ volatile("msr fpcr, %0" : : "r"(ours) : "memory");
    return saved;
}

static inline void tk_fpenv_leave(tk_fpenv saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved.fpcr) : "memory");
    __asm__ volatile("msr fpsr, %0" : : "r"(saved.fpsr) : "memory");
}

#else /* no control word that we know: the reference runs in the caller's environment */

typedef struct {
    int unused;
} tk_fpenv;

static inline tk_fpenv tk_fpenv_enter(void)
{
    tk_fpenv saved = {0};
    return saved;
}

static inline void tk_fpenv_leave(tk_fpenv saved)
{
    (void)saved;
}

#endif

#endif
