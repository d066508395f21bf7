/* Products of 8-bit inputs with weights of 4 or 8 bits in blocks of 32 along k; see native_kernels.h for the layout.
 *
 * A code of a weight is unsigned in the instruction's eyes, one of an input signed. The integers of one block are
 * summed exactly; then the block's scales are applied and blocks are added up in float32, in the order of k. */
#include "native_simd.h"

#ifdef ENGINE_AVX512
#pragma GCC target("avx512vnni")
#include "native_kernels.h"

enum { PANEL_ROWS = 32, WORD_BYTES = 4 * PANEL_ROWS, HALF_LINE = 2 * PANEL_ROWS, QUANT_ROWS = 6, COLUMNS = 2 };
enum { AHEAD_BYTES = 6144, CACHED_X_BYTES = 192 * 1024, WORTH_THREADS = 65536 };

/* One block of a row of inputs. */
typedef struct {
    int8_t codes[32];
    float scale;
    float scaled_sum; /* scale x the sum of the codes: what an offset of the weights is multiplied with */
    int32_t centre;   /* -128 x the sum: undoes the shift that makes 8-bit weights unsigned */
    int32_t padding;
} input_block;
_Static_assert(sizeof(input_block) == QUANT_INPUT_BYTES, "what callers reserve");

static const float LEAST = 1e-30f; /* blocks with nothing larger are taken as zero, for the inverse would overflow */

INLINE int64_t block_bytes(const int bits, const int offsets) {
    return 8 * WORD_BYTES * bits / 8 + HALF_LINE * (1 + offsets);
}

/* Scale by the largest magnitude, to the nearest of -127..127. A block with a NaN or an infinity has no finite scale,
 * so that its whole row comes out as NaN. */
static void quantize_block(const int is_bf16, const void *x, int64_t at, input_block *out) {
    const __m512 a = load(is_bf16, x, at, 0xFFFF), b = load(is_bf16, x, at + LANES, 0xFFFF);
    const __m512 sum = _mm512_mul_ps(_mm512_add_ps(a, b), _mm512_setzero_ps()); /* 0, or NaN */
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float odd = _mm512_reduce_add_ps(sum), scale = most / 127 + odd;
    const __m512 inverse = _mm512_set1_ps(most > LEAST ? 127 / most : 0);
    const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), q = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    _mm_storeu_si128((__m128i *)out->codes, _mm512_cvtsepi32_epi8(p));
    _mm_storeu_si128((__m128i *)(out->codes + LANES), _mm512_cvtsepi32_epi8(q));
    const int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(p, q));
    out->scale = scale;
    out->scaled_sum = scale * (float)total;
    out->centre = -128 * total;
}

/* Rows of the quantized inputs times one panel, into y, or into half of a tile that is still to be gated. */
typedef void panel_kernel(const quant_args *p, int64_t row, int64_t panel, const char *ahead, bf16 *made);

/* Adds the products of the codes of one block. */
INLINE void block_dots(const int bits, const int rows, const char *codes, const input_block *const *x,
                  __m512i (*sum)[COLUMNS]) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int word = 0; word < bits; word++) {
        __m512i w[2][COLUMNS]; /* the word, and for 4 bits the one that shares its bytes */
#pragma GCC unroll 2
        for (int v = 0; v < COLUMNS; v++) {
            w[0][v] = _mm512_loadu_si512(codes + word * WORD_BYTES + v * 64);
            if (bits == 4) {
                w[1][v] = _mm512_and_si512(_mm512_srli_epi16(w[0][v], 4), low);
                w[0][v] = _mm512_and_si512(w[0][v], low);
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 8 / bits; half++)
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                const __m512i a = _mm512_set1_epi32(*(const int32_t *)(x[i]->codes + 4 * (word + 4 * half)));
#pragma GCC unroll 2
                for (int v = 0; v < COLUMNS; v++) sum[i][v] = _mm512_dpbusd_epi32(sum[i][v], w[half][v], a);
            }
    }
}

INLINE void quant_tile(const int bits, const int offsets, const int rows, const quant_args *p, int64_t row,
                       int64_t panel, const char *ahead, bf16 *const made) {
    const int64_t blocks = p->k / 32, stride = block_bytes(bits, offsets);
    const char *at = p->packed + panel * blocks * stride;
    const input_block *x[QUANT_ROWS];
    __m512 total[QUANT_ROWS][COLUMNS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        x[i] = (const input_block *)p->inputs + (row + i) * blocks;
#pragma GCC unroll 2
        for (int v = 0; v < COLUMNS; v++) total[i][v] = _mm512_setzero_ps();
    }
    for (int64_t block = 0; block < blocks; block++, at += stride) {
        __m512i sum[QUANT_ROWS][COLUMNS];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < COLUMNS; v++)
                sum[i][v] = bits == 8 ? _mm512_set1_epi32(x[i]->centre) : _mm512_setzero_si512();
        if (ahead)
            for (int line = 0; line < stride / 64; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
        block_dots(bits, rows, at, x, sum);
        const char *const scales = at + 8 * WORD_BYTES * bits / 8;
#pragma GCC unroll 2
        for (int v = 0; v < COLUMNS; v++) {
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + v * 32)));
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
                total[i][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][v]),
                                              _mm512_mul_ps(scale, _mm512_set1_ps(x[i]->scale)), total[i][v]);
            if (!offsets) continue;
            const __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + HALF_LINE + v * 32)));
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
                total[i][v] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x[i]->scaled_sum), total[i][v]);
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) x[i]++;
    }
#pragma GCC unroll 2
    for (int v = 0; v < COLUMNS; v++) {
        const int64_t column = panel * PANEL_ROWS + v * LANES;
        const __mmask16 lanes = first_lanes(p->n - column);
        const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(lanes, p->bias + column) : _mm512_setzero_ps();
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
            if (made)
                store(1, made, i * 2 * GATED_COLUMNS + v * LANES, 0xFFFF, _mm512_add_ps(total[i][v], bias));
            else
                store(p->y_is_bf16, p->y, (row + i) * p->n + column, lanes, _mm512_add_ps(total[i][v], bias));
    }
}

#define DEFINE(B, O, R)                                                                                    \
    static void tile_##B##_##O##_##R(const quant_args *p, int64_t row, int64_t panel, const char *ahead,   \
                                     bf16 *made) {                                                         \
        quant_tile(B, O, R, p, row, panel, ahead, made);                                                   \
    }
#define DEFINE_ALL(B, O) \
    DEFINE(B, O, 1) DEFINE(B, O, 2) DEFINE(B, O, 3) DEFINE(B, O, 4) DEFINE(B, O, 5) DEFINE(B, O, 6)
DEFINE_ALL(4, 1)
DEFINE_ALL(8, 0)
DEFINE_ALL(8, 1)
#define KERNELS(B, O)                                                                                      \
    {tile_##B##_##O##_1, tile_##B##_##O##_2, tile_##B##_##O##_3, tile_##B##_##O##_4, tile_##B##_##O##_5, \
     tile_##B##_##O##_6}
static panel_kernel *const kernels[3][QUANT_ROWS] = {KERNELS(4, 1), KERNELS(8, 0), KERNELS(8, 1)};

void engine_quantize_part(const quant_args *p, int64_t thread, int64_t threads) {
    const int64_t blocks = p->k / 32, end = p->m * blocks * (thread + 1) / threads;
    for (int64_t at = p->m * blocks * thread / threads; at < end; at++) {
        input_block *const out = (input_block *)p->inputs + at;
        const int64_t x = at / blocks * p->x_stride + at % blocks * 32;
        if (p->x_is_bf16)
            quantize_block(1, p->x, x, out);
        else
            quantize_block(0, p->x, x, out);
    }
}

/* A panel stays in the first-level cache while the rows of a block pass; the first of them fetch the next panel. */
static void pass_panels(const quant_args *p, int64_t first_row, int64_t last_row, int64_t from, int64_t to) {
    const int64_t panel_bytes = p->k / 32 * block_bytes(p->bits, p->offsets);
    panel_kernel *const *tile = kernels[p->bits == 4 ? 0 : 1 + p->offsets];
    const int64_t ahead = last_row - first_row <= QUANT_ROWS ? AHEAD_BYTES : panel_bytes;
    for (int64_t panel = from; panel < to; panel++)
        for (int64_t row = first_row; row < last_row; row += QUANT_ROWS) {
            const int64_t rows = last_row - row < QUANT_ROWS ? last_row - row : QUANT_ROWS;
            const char *const next = p->packed + panel * panel_bytes + ahead;
            tile[rows - 1](p, row, panel, row == first_row ? next : 0, 0);
        }
}

/* The same with one panel of either half at a time. */
static void gate_panels(const quant_args *p, int64_t first_row, int64_t last_row, int64_t from, int64_t to) {
    const int64_t panel_bytes = p->k / 32 * block_bytes(p->bits, p->offsets), half = p->n / 2 / PANEL_ROWS;
    panel_kernel *const *tile = kernels[p->bits == 4 ? 0 : 1 + p->offsets];
    for (int64_t panel = from; panel < to; panel++)
        for (int64_t row = first_row; row < last_row; row += QUANT_ROWS) {
            const int64_t rows = last_row - row < QUANT_ROWS ? last_row - row : QUANT_ROWS;
            const char *const next = row == first_row ? p->packed + (panel + 1) * panel_bytes : 0;
            gated_tile made;
            tile[rows - 1](p, row, panel, next, made.both[0]);
            tile[rows - 1](p, row, panel + half, next ? next + half * panel_bytes : 0, made.both[0] + GATED_COLUMNS);
            gate_tile(&made, rows, p->y, p->n / 2, row, panel * PANEL_ROWS);
        }
}

void engine_quant_product_part(const quant_args *p, int64_t thread, int64_t threads, int64_t *next) {
    const int64_t columns = p->gated ? p->n / 2 : p->n, panels = (columns + PANEL_ROWS - 1) / PANEL_ROWS;
    const int64_t row_bytes = p->k / 32 * (int64_t)sizeof(input_block);
    if (p->m <= QUANT_ROWS && !p->gated) {
        pass_panels(p, 0, p->m, panels * thread / threads, panels * (thread + 1) / threads);
        return;
    }
    int64_t most = CACHED_X_BYTES / row_bytes;
    if (most < 8 * QUANT_ROWS) most = 8 * QUANT_ROWS;
    const int64_t groups = (p->m + most - 1) / most, tiles = (p->m + QUANT_ROWS - 1) / QUANT_ROWS;
    int64_t unit, end;
    while (take_units(next, groups * panels, threads, &unit, &end))
        while (unit < end) {
            const int64_t index = unit / panels, panel = unit % panels;
            const int64_t row = tiles * index / groups * QUANT_ROWS, stop = tiles * (index + 1) / groups * QUANT_ROWS;
            const int64_t last = panel + end - unit < panels ? panel + end - unit : panels;
            (p->gated ? gate_panels : pass_panels)(p, row, stop < p->m ? stop : p->m, panel, last);
            unit += last - panel;
        }
}

int engine_quant_linear_is_wide(const quant_args *p) {
    return p->m * p->n * p->k > WORTH_THREADS;
}

void engine_quant_linear(const quant_args *p) {
    int64_t next = 0;
#pragma omp parallel num_threads(p->threads) if (engine_quant_linear_is_wide(p))
    {
#pragma omp for schedule(static)
        for (int thread = 0; thread < p->threads; thread++) engine_quantize_part(p, thread, p->threads);
#pragma omp for schedule(static)
        for (int thread = 0; thread < p->threads; thread++) engine_quant_product_part(p, thread, p->threads, &next);
    }
}
#endif
