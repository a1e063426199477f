// SPDX-License-Identifier: Apache-2.0
/*
 * What one core of this box can do at most: multiply-accumulates of bytes a second, by instruction, and bytes read a
 * second, by the size of what is read. A program of its own, compiled once for each TK_LEG with that leg's flags, and
 * started only where the CPU has the features; it prints one number a line.
 *
 *     ceiling MILLISECONDS            billions of multiply-accumulates a second (arithmetic legs)
 *     ceiling MILLISECONDS BYTES ...  billions of bytes a second, for each size (TK_READ)
 *
 * The best of several windows: a ceiling that a neighbour lowered is none.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TK_READ 0
#define TK_MADD16 1
#define TK_MADDUBS 2
#define TK_VNNI256 3
#define TK_VNNI512 4
#define TK_VNNI_INT8 5
#define TK_AMX 6
#define TK_SDOT 7
#define TK_SMMLA 8

#if TK_LEG == TK_SDOT || TK_LEG == TK_SMMLA
#include <arm_neon.h>
#elif TK_LEG != TK_READ
#include <immintrin.h>
#endif

/* Short windows and many: on a busy machine one of them is likely to fall between two interruptions. */
enum { WINDOWS = 50 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The compiler must take the operand for a new one each time (else it multiplies once, outside the loop), and keep
 * each sum in its register, in this order. No instruction comes of it. */
#if defined(__AVX512F__)
#define OPAQUE(a, s) __asm__ volatile("" : "+v"(a), "+v"(s))
#elif defined(__x86_64__)
#define OPAQUE(a, s) __asm__ volatile("" : "+x"(a), "+x"(s))
#else
#define OPAQUE(a, s) __asm__ volatile("" : "+w"(a), "+w"(s))
#endif

/* Sums enough for the longest latency times the most units: 5 x 2 on x86-64, 4 x 4 on AArch64. */
#define TEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9)
#define SIXTEEN(DO) TEN(DO) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)

/* Each leg: STEP_MACS of one turn of its loop, and turns(n), which makes n of them with independent sums. */

#if TK_LEG == TK_MADD16 || TK_LEG == TK_MADDUBS || TK_LEG == TK_VNNI256 || TK_LEG == TK_VNNI_INT8

#if TK_LEG == TK_MADD16
#define STEP_MACS (10.0 * 16)
#define PRODUCT _mm256_madd_epi16(a, b)
#elif TK_LEG == TK_MADDUBS
#define STEP_MACS (10.0 * 32)
#define PRODUCT _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones)
#elif TK_LEG == TK_VNNI256
#define STEP_MACS (10.0 * 32)
#define DOT _mm256_dpbusd_avx_epi32
#else
#define STEP_MACS (10.0 * 32)
#define DOT _mm256_dpbssd_epi32
#endif

/* Two products before their two sums: cores that deal instructions out to their units in turn would send every product
 * of a strict product, sum, product, sum ... to the same one. */
#ifdef PRODUCT
#define TWO(i, j) t = PRODUCT; OPAQUE(a, t); u = PRODUCT; OPAQUE(a, u); \
    s##i = _mm256_add_epi32(s##i, t); OPAQUE(a, s##i); s##j = _mm256_add_epi32(s##j, u); OPAQUE(a, s##j);
#else
#define TWO(i, j) s##i = DOT(s##i, a, b); OPAQUE(a, s##i); s##j = DOT(s##j, a, b); OPAQUE(a, s##j);
#endif

static int32_t turns(long n)
{
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1), t = b, u = b;
#define ZERO(i) __m256i s##i = _mm256_setzero_si256();
    TEN(ZERO)
    (void)ones, (void)t, (void)u;
    while (n-- > 0) {
        TWO(0, 1) TWO(2, 3) TWO(4, 5) TWO(6, 7) TWO(8, 9)
    }
    __m256i all = _mm256_setzero_si256();
#define JOIN(i) all = _mm256_xor_si256(all, s##i);
    TEN(JOIN)
    return _mm256_extract_epi32(all, 0);
}

#elif TK_LEG == TK_VNNI512

#define STEP_MACS (10.0 * 64)
#define ONE(i) s##i = _mm512_dpbusd_epi32(s##i, a, b); OPAQUE(a, s##i);

static int32_t turns(long n)
{
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
#define ZERO(i) __m512i s##i = _mm512_setzero_si512();
    TEN(ZERO)
    while (n-- > 0) {
        TEN(ONE)
    }
    __m512i all = _mm512_setzero_si512();
#define JOIN(i) all = _mm512_xor_si512(all, s##i);
    TEN(JOIN)
    return _mm512_reduce_add_epi32(all);
}

#elif TK_LEG == TK_AMX

#include <sys/syscall.h>
#include <unistd.h>

#define STEP_MACS (4.0 * 16 * 16 * 64)

static int32_t turns(long n)
{
    static int asked;
    if (!asked) {
        asked = 1;
        if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) != 0) {
            fputs("the kernel refused the AMX tile permission\n", stderr);
            exit(2);
        }
    }
    struct __attribute__((packed)) {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles;
    static int8_t data[1024], sums[1024];
    memset(&tiles, 0, sizeof tiles);
    memset(data, 3, sizeof data);
    tiles.palette = 1;
    for (int i = 0; i < 8; i++)
        tiles.bytes[i] = 64, tiles.rows[i] = 16;
    _tile_loadconfig(&tiles);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, data, 64);
    _tile_loadd(5, data, 64);
    _tile_loadd(6, data, 64);
    _tile_loadd(7, data, 64);
    while (n-- > 0) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    return sums[0];
}

#elif TK_LEG == TK_SDOT || TK_LEG == TK_SMMLA

#if TK_LEG == TK_SDOT
#define STEP_MACS (16.0 * 16)
#define ONE(i) s##i = vdotq_s32(s##i, a, b); OPAQUE(a, s##i);
#else
#define STEP_MACS (16.0 * 32)
#define ONE(i) s##i = vmmlaq_s32(s##i, a, b); OPAQUE(a, s##i);
#endif

static int32_t turns(long n)
{
    int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
#define ZERO(i) int32x4_t s##i = vdupq_n_s32(0);
    SIXTEEN(ZERO)
    while (n-- > 0) {
        SIXTEEN(ONE)
    }
    int32x4_t all = vdupq_n_s32(0);
#define JOIN(i) all = veorq_s32(all, s##i);
    SIXTEEN(JOIN)
    return vaddvq_s32(all);
}

#else

/* GNU C vectors: as wide as the flags allow, and the same lines on every architecture. */
typedef uint64_t vector __attribute__((vector_size(32)));

static vector read_all(const vector *p, size_t count)
{
    vector a = p[0], b = p[1], c = p[2], d = p[3], e = p[4], f = p[5], g = p[6], h = p[7];
    for (size_t i = 8; i < count; i += 8) {
        a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], d ^= p[i + 3];
        e ^= p[i + 4], f ^= p[i + 5], g ^= p[i + 6], h ^= p[i + 7];
    }
    return a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;
}

static double read_rate(size_t bytes, double window)
{
    bytes &= ~(size_t)255;
    vector *p = bytes ? aligned_alloc(256, bytes) : NULL;
    if (!p)
        return -1;
    memset(p, 1, bytes); /* pages that nobody wrote are one and the same page of zeros */
    volatile uint64_t sink = 0;
    double best = 0;
    /* In parts, round and round: what is read again has always been a whole round away. */
    size_t part = bytes < 1 << 18 ? bytes : 1 << 18, at = 0;
    for (int w = 0; w < WINDOWS; w++) {
        double start = now(), end;
        size_t done = 0;
        do {
            if (at + part > bytes)
                at = 0;
            sink = sink + read_all(p + at / sizeof *p, part / sizeof *p)[0];
            at += part;
            done += part;
            end = now();
        } while (end - start < window);
        double rate = (double)done / (end - start) / 1e9;
        if (w && rate > best) /* the first one warms up */
            best = rate;
    }
    free(p);
    return best;
}

int main(int argc, char **argv)
{
    double window = argc > 1 ? atof(argv[1]) / 1e3 : 0.002;
    for (int i = 2; i < argc; i++)
        printf("%.6g\n", read_rate(strtoull(argv[i], NULL, 10), window));
    return 0;
}

#endif

#if TK_LEG != TK_READ

int main(int argc, char **argv)
{
    double window = argc > 1 ? atof(argv[1]) / 1e3 : 0.002;
    volatile int32_t sink = 0;
    double best = 0;
    for (int w = 0; w < WINDOWS; w++) {
        double start = now(), end;
        long done = 0;
        do {
            sink = sink ^ turns(500);
            done += 500;
            end = now();
        } while (end - start < window);
        double rate = (double)done * STEP_MACS / (end - start) / 1e9;
        if (w && rate > best)
            best = rate;
    }
    printf("%.6g\n", best);
    return 0;
}

#endif
