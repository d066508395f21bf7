/* The two products of attention for a chunk of keys: queries with keys, and weights with values. */
#ifndef ENGINE_NATIVE_SCORES_H
#define ENGINE_NATIVE_SCORES_H

#include "native_tile.h"

#ifdef ENGINE_AVX512
#include "native_pages.h"

enum { CHUNK = 128 }; /* keys */

INLINE void score_tile(const int is_bf16, const int rows, const int columns, const char *const *q, const char *const *k,
                       int64_t steps, fetches *ahead, float *scores) {
    __m512 sum[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < columns; v++) sum[i][v] = _mm512_setzero_ps();
    const int64_t part = steps / columns; /* between fetches; head sizes are multiples of 16 */
    for (int64_t step = 0; step < steps; step += part) {
        const char *a[TILE_ROWS], *b[TILE_COLUMNS];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) a[i] = q[i] + step * 4;
#pragma GCC unroll 4
        for (int v = 0; v < columns; v++) b[v] = k[v] + step * 64;
        fetch(ahead);
        tile(is_bf16, rows, columns, a, b, 64, part, 0, 0, sum);
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < columns; v++) _mm512_store_ps(scores + i * CHUNK + v * LANES, sum[i][v]);
}

/* scores [rows][CHUNK] = q k^T for `count` blocks. */
INLINE void score(const int is_bf16, const int rows, const char *const *q, const char *const *k, int64_t count,
                  int64_t steps, fetches *ahead, float *scores) {
    int64_t block = 0;
    for (; block + TILE_COLUMNS <= count; block += TILE_COLUMNS)
        score_tile(is_bf16, rows, TILE_COLUMNS, q, k + block, steps, ahead, scores + block * LANES);
    for (; block < count; block++) score_tile(is_bf16, rows, 1, q, k + block, steps, ahead, scores + block * LANES);
}

INLINE void value_tile(const int is_bf16, const int rows, const int columns, const char *const *weights,
                       const char *const *v, int64_t keys, int64_t width, int64_t column, const float *keep,
                       fetches *ahead, float *out) {
    const int64_t stride = width * 4, per_step = is_bf16 ? 2 : 1;
    __m512 sum[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            sum[i][c] = _mm512_mul_ps(_mm512_loadu_ps(out + i * width + column + c * LANES), _mm512_set1_ps(keep[i]));
    for (int64_t key = 0; key < keys; key += LANES) {
        const int64_t here = keys - key < LANES ? keys - key : LANES, steps = here / per_step;
        const char *a[TILE_ROWS], *b[TILE_COLUMNS];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) a[i] = weights[i] + key * (4 / per_step);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) b[c] = v[key / LANES] + (column + c * LANES) * 4;
        if (column == 0) fetch(ahead);
        tile(is_bf16, rows, columns, a, b, stride, steps, 0, 0, sum);
        if (here % per_step) { /* the last key has no partner: what lies there may be anything, even NaN */
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                const __m512i lone =
                    _mm512_and_si512(_mm512_loadu_si512(b[c] + steps * stride), _mm512_set1_epi32(0xFFFF));
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++)
                    sum[i][c] = dot_step(is_bf16, sum[i][c], *(const uint32_t *)(a[i] + 4 * steps), lone);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) _mm512_storeu_ps(out + i * width + column + c * LANES, sum[i][c]);
}

/* out [rows][width] = out * keep + weights v over `keys` keys. */
INLINE void weigh(const int is_bf16, const int rows, const char *const *weights, const char *const *v, int64_t keys,
                  int64_t width, const float *keep, fetches *ahead, float *out) {
    int64_t column = 0;
    for (; column + TILE_COLUMNS * LANES <= width; column += TILE_COLUMNS * LANES)
        value_tile(is_bf16, rows, TILE_COLUMNS, weights, v, keys, width, column, keep, ahead, out);
    for (; column < width; column += LANES)
        value_tile(is_bf16, rows, 1, weights, v, keys, width, column, keep, ahead, out);
}

typedef void score_kernel(const char *const *, const char *const *, int64_t, int64_t, fetches *, float *);
typedef void weigh_kernel(const char *const *, const char *const *, int64_t, int64_t, const float *, fetches *,
                          float *);
#define DEFINE_FOR(TYPE, IS_BF16, R)                                                                         \
    static void score_##TYPE##_##R(const char *const *q, const char *const *k, int64_t count, int64_t steps, \
                                   fetches *ahead, float *s) {                                               \
        score(IS_BF16, R, q, k, count, steps, ahead, s);                                                     \
    }                                                                                                        \
    static void weigh_##TYPE##_##R(const char *const *w, const char *const *v, int64_t keys, int64_t width,  \
                                   const float *keep, fetches *ahead, float *out) {                          \
        weigh(IS_BF16, R, w, v, keys, width, keep, ahead, out);                                              \
    }
#define DEFINE(R) DEFINE_FOR(f32, 0, R) DEFINE_FOR(bf16, 1, R)
FOR_EACH_ROW_COUNT(DEFINE)
#undef DEFINE
#define TABLE(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6}
static score_kernel *const score_kernels[2][TILE_ROWS] = {TABLE(score_f32), TABLE(score_bf16)};
static weigh_kernel *const weigh_kernels[2][TILE_ROWS] = {TABLE(weigh_f32), TABLE(weigh_bf16)};

#endif
#endif
