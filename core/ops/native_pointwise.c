/* Norms, rotary embedding and the gated activation: one pass over memory each, rounded where the models round. */
#include "native_simd.h"

#ifdef ENGINE_AVX512
#include <math.h>

#include "native_kernels.h"

enum { WORTH_THREADS = 32768 }; /* elements below which waking the threads costs more than the work */

INLINE void norm_row(const int is_bf16, const norm_args *p, const void *x, int64_t x_at, int64_t y_at) {
    const int64_t width = p->width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 lanes = first_lanes(width - i);
        __m512 value = load(is_bf16, x, x_at + i, lanes);
        if (p->residual) {
            value = rounded(is_bf16, _mm512_add_ps(load(is_bf16, p->residual, y_at + i, lanes), value));
            store(is_bf16, p->residual, y_at + i, lanes, value);
        }
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + p->eps));
    const void *source = p->residual ? p->residual : x;
    const int64_t at = p->residual ? y_at : x_at;
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 lanes = first_lanes(width - i);
        const __m512 normal = rounded(is_bf16, _mm512_mul_ps(load(is_bf16, source, at + i, lanes), scale));
        store(is_bf16, p->y, y_at + i, lanes, _mm512_mul_ps(normal, load(is_bf16, p->weight, i, lanes)));
    }
}

void engine_rms_norm(const norm_args *p) {
    const int64_t rows = p->outer * p->inner;
#pragma omp parallel for num_threads(p->threads) if (rows * p->width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = row / p->inner * p->outer_stride + row % p->inner * p->inner_stride;
        if (p->is_bf16)
            norm_row(1, p, p->x, at, row * p->width);
        else
            norm_row(0, p, p->x, at, row * p->width);
    }
}

INLINE void rotate_token(const int is_bf16, const rope_args *p, int64_t token) {
    const int64_t half = p->rotary / 2;
    const float *cosines = p->cos_sin + p->positions[token] * p->rotary, *sines = cosines + half;
    for (int64_t i = 0; i < half; i += LANES) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 cosine = _mm512_maskz_loadu_ps(lanes, cosines + i), sine = _mm512_maskz_loadu_ps(lanes, sines + i);
        for (int s = 0; s < 2; s++) {
            const rope_side *side = &p->side[s];
            for (int64_t head = 0; head < side->heads; head++) {
                const int64_t at = token * side->token_stride + head * side->head_stride + i;
                const __m512 a = load(is_bf16, side->x, at, lanes), b = load(is_bf16, side->x, at + half, lanes);
                const __m512 first = _mm512_sub_ps(_mm512_mul_ps(a, cosine), _mm512_mul_ps(b, sine));
                const __m512 second = _mm512_add_ps(_mm512_mul_ps(b, cosine), _mm512_mul_ps(a, sine));
                store(is_bf16, side->x, at, lanes, first);
                store(is_bf16, side->x, at + half, lanes, second);
            }
        }
    }
}

void engine_rope(const rope_args *p) {
    const int64_t elements = p->tokens * (p->side[0].heads + p->side[1].heads) * p->rotary;
#pragma omp parallel for num_threads(p->threads) if (elements > WORTH_THREADS)
    for (int64_t token = 0; token < p->tokens; token++) {
        if (p->is_bf16)
            rotate_token(1, p, token);
        else
            rotate_token(0, p, token);
    }
}

INLINE void gate_row(const int is_bf16, const void *x, int64_t at, void *y, int64_t y_at, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 lanes = first_lanes(width - i);
        const __m512 gate = load(is_bf16, x, at + i, lanes), up = load(is_bf16, x, at + width + i, lanes);
        const __m512 denominator =
            _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
        store(is_bf16, y, y_at + i, lanes, _mm512_mul_ps(rounded(is_bf16, _mm512_div_ps(gate, denominator)), up));
    }
}

void engine_silu_mul(const void *x, int64_t stride, void *y, int64_t tokens, int64_t width, int is_bf16, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > WORTH_THREADS / 4)
    for (int64_t token = 0; token < tokens; token++) {
        if (is_bf16)
            gate_row(1, x, token * stride, y, token * width, width);
        else
            gate_row(0, x, token * stride, y, token * width, width);
    }
}
#endif
