/* Vector primitives for AVX-512 with BF16. Include this first: it sets the target for what follows in the file. */
#ifndef ENGINE_NATIVE_SIMD_H
#define ENGINE_NATIVE_SIMD_H

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ENGINE_AVX512 1
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef uint16_t bf16;

/* Work that threads take from a common heap as they get to it, so that one that is kept from its core delays nobody:
 * `next` is the first unit that nobody has taken. Pieces get smaller towards the end, and even while they can be. */
INLINE int take_units(int64_t *next, int64_t units, int64_t threads, int64_t *from, int64_t *to) {
    int64_t first = __atomic_load_n(next, __ATOMIC_RELAXED), count;
    do {
        if (first >= units) return 0;
        count = (units - first) / (2 * threads);
        count = count < 2 ? 1 : count & ~(int64_t)1;
    } while (!__atomic_compare_exchange_n(next, &first, first + count, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    *from = first;
    *to = first + count;
    return 1;
}

/* The first n lanes, n clipped to 0..16. */
INLINE __mmask16 first_lanes(int64_t n) {
    return n >= LANES ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

INLINE __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE __m256i narrow(__m512 x) {
    return (__m256i)_mm512_cvtneps_pbh(x);
}

/* x as a value of its storage type: the rounding points of the models are made with this. */
INLINE __m512 rounded(const int is_bf16, __m512 x) {
    return is_bf16 ? widen(narrow(x)) : x;
}

INLINE __m512 load(const int is_bf16, const void *base, int64_t index, __mmask16 lanes) {
    if (is_bf16) return widen(_mm256_maskz_loadu_epi16(lanes, (const bf16 *)base + index));
    return _mm512_maskz_loadu_ps(lanes, (const float *)base + index);
}

INLINE void store(const int is_bf16, void *base, int64_t index, __mmask16 lanes, __m512 x) {
    if (is_bf16)
        _mm256_mask_storeu_epi16((bf16 *)base + index, lanes, narrow(x));
    else
        _mm512_mask_storeu_ps((float *)base + index, lanes, x);
}

/* 2^(whole + part) where whole is integral and |part| <= 1/2; a polynomial fitted at Chebyshev points, error 1 ulp. */
INLINE __m512 scaled_power(__m512 whole, __m512 part) {
    __m512 p = _mm512_set1_ps(0.000154614478f);
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.00133908668f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.00961805694f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.0555035695f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.240226507f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.693147182f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* 2^x for x <= 127, 0 for -inf. A NaN stays one: max returns its second operand then. */
INLINE __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return scaled_power(whole, _mm512_sub_ps(x, whole));
}

/* e^x, with log2(e) in two parts so that large arguments keep their relative accuracy. */
INLINE __m512 exp_of(__m512 x) {
    const __m512 log2e = _mm512_set1_ps(1.44269502f), rest = _mm512_set1_ps(1.92596299e-8f);
    x = _mm512_min_ps(_mm512_set1_ps(90.0f), _mm512_max_ps(_mm512_set1_ps(-140.0f), x));
    const __m512 high = _mm512_mul_ps(x, log2e);
    const __m512 low = _mm512_fmadd_ps(x, rest, _mm512_fmsub_ps(x, log2e, high));
    const __m512 whole = _mm512_roundscale_ps(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return scaled_power(whole, _mm512_add_ps(_mm512_sub_ps(high, whole), low));
}

/* silu(gate) * up, rounded where the models round. */
INLINE __m512 gated(const int is_bf16, __m512 gate, __m512 up) {
    const __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    return _mm512_mul_ps(rounded(is_bf16, _mm512_div_ps(gate, denominator)), up);
}

enum { GATED_COLUMNS = 32 };

/* What a tile of a gated product is put into before it is gated: columns of the gate, then those of the other half. */
typedef struct {
    bf16 both[6][2 * GATED_COLUMNS];
} gated_tile;

/* Gates a tile into y [.., width] from row `row` and column `column` on. */
INLINE void gate_tile(const gated_tile *tile, int64_t rows, void *y, int64_t width, int64_t row, int64_t column) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < GATED_COLUMNS; c += LANES)
            store(1, y, (row + i) * width + column + c, 0xFFFF,
                  gated(1, load(1, tile->both[i], c, 0xFFFF), load(1, tile->both[i], GATED_COLUMNS + c, 0xFFFF)));
}

#endif
#endif
