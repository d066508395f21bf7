/* Norms, rotary embedding and the gated activation: one pass over memory each, rounded where the models round. */
#include "native_simd.h"

#ifdef ENGINE_AVX512
#include <math.h>

#include "native_kernels.h"

enum { GATE_COLUMNS = 32 }; /* as many as a block of rounded inputs, so that both may be shared out alike */
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

void engine_rms_norm_part(const norm_args *p, int64_t thread, int64_t threads) {
    const int64_t rows = p->outer * p->inner, end = rows * (thread + 1) / threads;
    for (int64_t row = rows * thread / threads; row < end; row++) {
        const int64_t at = row / p->inner * p->outer_stride + row % p->inner * p->inner_stride;
        if (p->is_bf16)
            norm_row(1, p, p->x, at, row * p->width);
        else
            norm_row(0, p, p->x, at, row * p->width);
    }
}

void engine_rms_norm(const norm_args *p) {
#pragma omp parallel for num_threads(p->threads) if (p->outer * p->inner * p->width > WORTH_THREADS)
    for (int thread = 0; thread < p->threads; thread++) engine_rms_norm_part(p, thread, p->threads);
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

void engine_rope_part(const rope_args *p, int64_t thread, int64_t threads) {
    const int64_t end = p->tokens * (thread + 1) / threads;
    for (int64_t token = p->tokens * thread / threads; token < end; token++) {
        if (p->is_bf16)
            rotate_token(1, p, token);
        else
            rotate_token(0, p, token);
    }
}

void engine_rope(const rope_args *p) {
    const int64_t elements = p->tokens * (p->side[0].heads + p->side[1].heads) * p->rotary;
#pragma omp parallel for num_threads(p->threads) if (elements > WORTH_THREADS)
    for (int thread = 0; thread < p->threads; thread++) engine_rope_part(p, thread, p->threads);
}

/* Columns from..to of one token. */
INLINE void gate_row(const int is_bf16, const gate_args *p, int64_t token, int64_t from, int64_t to) {
    const int64_t at = token * p->stride, y_at = token * p->width;
    for (int64_t i = from; i < to; i += LANES) {
        const __mmask16 lanes = first_lanes(to - i);
        const __m512 gate = load(is_bf16, p->x, at + i, lanes), up = load(is_bf16, p->x, at + p->width + i, lanes);
        store(is_bf16, p->y, y_at + i, lanes, gated(is_bf16, gate, up));
    }
}

void engine_silu_mul_part(const gate_args *p, int64_t thread, int64_t threads) {
    const int64_t groups = (p->width + GATE_COLUMNS - 1) / GATE_COLUMNS, units = p->tokens * groups;
    int64_t unit = units * thread / threads;
    const int64_t end = units * (thread + 1) / threads;
    while (unit < end) {
        const int64_t token = unit / groups, first = unit % groups;
        const int64_t last = first + end - unit < groups ? first + end - unit : groups;
        const int64_t to = last * GATE_COLUMNS < p->width ? last * GATE_COLUMNS : p->width;
        if (p->is_bf16)
            gate_row(1, p, token, first * GATE_COLUMNS, to);
        else
            gate_row(0, p, token, first * GATE_COLUMNS, to);
        unit += last - first;
    }
}

void engine_silu_mul(const gate_args *p) {
#pragma omp parallel for num_threads(p->threads) if (p->tokens * p->width > WORTH_THREADS / 4)
    for (int thread = 0; thread < p->threads; thread++) engine_silu_mul_part(p, thread, p->threads);
}

INLINE int64_t peak_of(const float *x, int64_t width, uint8_t *finite) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    __mmask16 odd = 0;
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 lanes = first_lanes(width - i);
        const __m512 value = _mm512_mask_loadu_ps(_mm512_set1_ps(x[0]), lanes, x + i);
        odd |= _mm512_fpclass_ps_mask(value, 0x99); /* NaN of either kind, infinity of either sign */
        top = _mm512_max_ps(top, value);
    }
    *finite = !odd;
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 lanes = first_lanes(width - i);
        const __mmask16 same = _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, x + i), most, _CMP_EQ_OQ);
        if (same) return i + __builtin_ctz(same);
    }
    return 0; /* there is a NaN */
}

void engine_peaks(const peak_args *p) {
#pragma omp parallel for num_threads(p->threads) if (p->rows > 1)
    for (int64_t row = 0; row < p->rows; row++)
        p->places[row] = peak_of(p->x + row * p->width, p->width, p->finite + row);
}
#endif
