// SPDX-License-Identifier: Apache-2.0
// What is too short to be called from Python one by one: another library's dot product, a tile, and this CPU's limits.
#include <stddef.h>
#include <stdint.h>

typedef void (*vec_dot)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);

// y[t*n + r] for all rows of all tokens.
void loop_vec_dot(vec_dot f, int k, int64_t n, int64_t t, float *y, const char *w, size_t w_row, const char *x, size_t x_row) {
    for (int64_t j = 0; j < t; j++)
        for (int64_t r = 0; r < n; r++)
            f(k, &y[j * n + r], 0, w + (size_t)r * w_row, 0, x + (size_t)j * x_row, 0, 1);
}

typedef void (*tile)(float *y, int64_t ldy, const int8_t *w, const float *ws, const uint8_t *xa, int64_t tokens, int64_t t0,
                     int32_t nt, int32_t nb, int32_t ng);

void loop_tile(tile f, long times, float *y, int64_t ldy, const int8_t *w, const float *ws, const uint8_t *xa, int64_t tokens,
               int32_t nt, int32_t nb) {
    while (times--) f(y, ldy, w, ws, xa, tokens, 0, nt, nb, 1);
}

#if defined __x86_64__
#include <immintrin.h>

// vpmaddwd alone, 12 a turn, each of 16 multiply-accumulates: every exact int8 product on AVX2 needs one for 16 of its own.
__attribute__((target("avx2"))) long loop_multiplies(long turns) {
    __m256i v[12], one = _mm256_set1_epi16(1);
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) v[i] = _mm256_set1_epi16((short)i);
    for (long t = 0; t < turns; t++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) __asm__ volatile("vpmaddwd %1, %0, %0" : "+x"(v[i]) : "x"(one));
    __m256i s = v[0];
#pragma GCC unroll 12
    for (int i = 1; i < 12; i++) s = _mm256_add_epi32(s, v[i]);
    return _mm256_extract_epi32(s, 0);
}

// Reads bytes in so many streams, each line asked for so many bytes ahead.
__attribute__((target("avx2"))) long loop_read(const char *p, size_t bytes, int streams, size_t ahead) {
    size_t part = bytes / (size_t)streams / 256 * 256;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t at = 0; at < part; at += 256)
        for (int s = 0; s < streams; s++) {
            const char *q = p + (size_t)s * part + at;
            if (ahead)
                for (int line = 0; line < 256; line += 64) _mm_prefetch(q + ahead + line, _MM_HINT_T0);
            for (int line = 0; line < 256; line += 128) {
                a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(q + line)));
                b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(q + line + 32)));
                c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *)(q + line + 64)));
                d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)(q + line + 96)));
            }
        }
    return _mm256_extract_epi32(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)), 0);
}
#endif
