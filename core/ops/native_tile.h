/* The register tile that every product is made of.
 *
 * `rows` rows of A times `columns` vectors of 16 columns of B, in float32 accumulators that stay in registers. One step
 * takes 4 bytes of each row of A (two bfloat16 or one float32) and one vector of each column group of B, in which every
 * lane holds the 4 bytes of its column. An accumulator is one chain over k in order, so that a result does not depend
 * on how many rows or columns were computed beside it. */
#ifndef ENGINE_NATIVE_TILE_H
#define ENGINE_NATIVE_TILE_H

#include "native_simd.h"

#ifdef ENGINE_AVX512

enum { TILE_ROWS = 6, TILE_COLUMNS = 4 };

INLINE __m512 dot_step(const int is_bf16, __m512 sum, uint32_t a, __m512i b) {
    const __m512i x = _mm512_set1_epi32((int)a);
    if (is_bf16) return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)b);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(b), sum);
}

/* a[i]: row i of A. b[v]: column group v of B, `stride` bytes from step to step. `ahead`, unless null, is memory of
 * which `lines` cache lines are fetched per step. */
INLINE void tile(const int is_bf16, const int rows, const int columns, const char *const *a, const char *const *b,
                 int64_t stride, int64_t steps, const char *ahead, const int lines, __m512 (*sum)[TILE_COLUMNS]) {
    int64_t at = 0;
    for (int64_t k = 0; k < steps; k++, at += stride) {
        __m512i w[TILE_COLUMNS];
#pragma GCC unroll 4
        for (int v = 0; v < columns; v++) w[v] = _mm512_loadu_si512(b[v] + at);
#pragma GCC unroll 4
        for (int line = 0; line < lines; line++) _mm_prefetch(ahead + (k * lines + line) * 64, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const uint32_t x = *(const uint32_t *)(a[i] + 4 * k);
#pragma GCC unroll 4
            for (int v = 0; v < columns; v++) sum[i][v] = dot_step(is_bf16, sum[i][v], x, w[v]);
        }
    }
}

/* Makes a table indexed by rows - 1 out of six functions made by DEFINE(rows). */
#define FOR_EACH_ROW_COUNT(DEFINE) DEFINE(1) DEFINE(2) DEFINE(3) DEFINE(4) DEFINE(5) DEFINE(6)

#endif
#endif
