/* Products with a bfloat16 weight that is packed in panels; see native_kernels.h for the layout. */
#include "native_tile.h"

#ifdef ENGINE_AVX512
#include "native_kernels.h"

enum { PANEL_ROWS = 32, STEP_BYTES = 128, AHEAD_BYTES = 4096, CACHED_X_BYTES = 256 * 1024 };

enum { WORTH_THREADS = 65536 }; /* multiplications below which waking the threads costs more than the work */

void engine_pack_rows(const void *weight, int64_t rows, int64_t k, void *packed, int64_t first_row, int threads) {
    const int64_t last_row = first_row + rows, pairs = k / 2;
    const int64_t from = first_row / PANEL_ROWS, to = (last_row + PANEL_ROWS - 1) / PANEL_ROWS;
#pragma omp parallel for num_threads(threads) if (rows * k > WORTH_THREADS)
    for (int64_t panel = from; panel < to; panel++) {
        const int64_t start = panel * PANEL_ROWS > first_row ? panel * PANEL_ROWS : first_row;
        const int64_t stop = (panel + 1) * PANEL_ROWS < last_row ? (panel + 1) * PANEL_ROWS : last_row;
        uint32_t *out = (uint32_t *)packed + panel * pairs * PANEL_ROWS;
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t row = start; row < stop; row++)
                out[pair * PANEL_ROWS + row % PANEL_ROWS] =
                    ((const uint32_t *)weight)[(row - first_row) * pairs + pair];
    }
}

/* Rows of x times one panel, or two that follow each other, into y; gated, times one panel of either half. */
typedef void panel_kernel(const linear_args *p, int64_t row, int64_t panel, const char *ahead);

INLINE void panel_tile(const int rows, const int columns, const int lines, const int is_gated, const linear_args *p,
                       int64_t row, int64_t panel, const char *ahead) {
    const int64_t apart = is_gated ? p->n / 2 / PANEL_ROWS : 1; /* panels from the first to the second */
    gated_tile made;
    const int64_t steps = p->k / 2;
    const char *a[TILE_ROWS], *b[TILE_COLUMNS];
    __m512 sum[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        a[i] = p->x + (row + i) * p->x_stride * 2;
#pragma GCC unroll 4
        for (int v = 0; v < columns; v++) sum[i][v] = _mm512_setzero_ps();
    }
#pragma GCC unroll 4
    for (int v = 0; v < columns; v++) b[v] = p->packed + (panel + v / 2 * apart) * steps * STEP_BYTES + v % 2 * 64;
    tile(1, rows, columns, a, b, STEP_BYTES, steps, ahead, lines, sum);
#pragma GCC unroll 4
    for (int v = 0; v < columns; v++) {
        const int64_t column = (panel + v / 2 * apart) * PANEL_ROWS + v % 2 * LANES;
        const __mmask16 lanes = first_lanes(p->n - column);
        const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(lanes, p->bias + column) : _mm512_setzero_ps();
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
            if (is_gated)
                store(1, made.both[i], v * LANES, 0xFFFF, _mm512_add_ps(sum[i][v], bias));
            else
                store(!p->y_is_float, p->y, (row + i) * p->n + column, lanes, _mm512_add_ps(sum[i][v], bias));
    }
    if (is_gated) gate_tile(&made, rows, p->y, p->n / 2, row, panel * PANEL_ROWS);
}

#define DEFINE(R)                                                                                 \
    static void single_##R(const linear_args *p, int64_t row, int64_t panel, const char *ahead) { \
        panel_tile(R, 2, 2, 0, p, row, panel, ahead);                                             \
    }                                                                                             \
    static void pair_##R(const linear_args *p, int64_t row, int64_t panel, const char *ahead) {   \
        panel_tile(R, 4, 1, 0, p, row, panel, ahead);                                             \
    }                                                                                             \
    static void gated_##R(const linear_args *p, int64_t row, int64_t panel, const char *ahead) {  \
        panel_tile(R, 4, 1, 1, p, row, panel, ahead);                                             \
    }
FOR_EACH_ROW_COUNT(DEFINE)
#undef DEFINE

static panel_kernel *const singles[] = {single_1, single_2, single_3, single_4, single_5, single_6};
static panel_kernel *const pairs[] = {pair_1, pair_2, pair_3, pair_4, pair_5, pair_6};
static panel_kernel *const gates[] = {gated_1, gated_2, gated_3, gated_4, gated_5, gated_6};

/* Few rows: the weight streams from memory once, panel by panel, fetched a fixed distance ahead. */
static void stream_panels(const linear_args *p, int64_t from, int64_t to) {
    const int64_t panel_bytes = p->k / 2 * STEP_BYTES;
    for (int64_t panel = from; panel < to; panel++)
        singles[p->m - 1](p, 0, panel, p->packed + panel * panel_bytes + AHEAD_BYTES);
}

/* Many rows: two panels stay in the second-level cache while all rows of a block pass, which fetch the next two. */
static void block_panels(const linear_args *p, int64_t first_row, int64_t last_row, int64_t from, int64_t to) {
    const int64_t panel_bytes = p->k / 2 * STEP_BYTES, tile_bytes = panel_bytes / 2;
    for (int64_t panel = from; panel < to;) {
        const int width = to - panel > 1 ? 2 : 1;
        const char *here = p->packed + panel * panel_bytes, *next = here + width * panel_bytes;
        const char *const end = next + 2 * panel_bytes;
        for (int64_t row = first_row; row < last_row; row += TILE_ROWS) {
            const int64_t rows = last_row - row < TILE_ROWS ? last_row - row : TILE_ROWS;
            (width == 2 ? pairs : singles)[rows - 1](p, row, panel, next < end ? next : here);
            next += tile_bytes * (3 - width);
        }
        panel += width;
    }
}

/* The same with one panel of either half at a time; both of the next are fetched, one after the other. */
static void gate_panels(const linear_args *p, int64_t first_row, int64_t last_row, int64_t from, int64_t to) {
    const int64_t panel_bytes = p->k / 2 * STEP_BYTES, half = p->n / 2 / PANEL_ROWS, tile_bytes = panel_bytes / 2;
    for (int64_t panel = from; panel < to; panel++) {
        int64_t fetched = 0;
        for (int64_t row = first_row; row < last_row; row += TILE_ROWS, fetched += tile_bytes) {
            const int64_t rows = last_row - row < TILE_ROWS ? last_row - row : TILE_ROWS;
            const int64_t which = fetched / panel_bytes % 2 * half;
            const char *const next = p->packed + (panel + 1 + which) * panel_bytes + fetched % panel_bytes;
            gates[rows - 1](p, row, panel, fetched < 2 * panel_bytes ? next : p->packed + panel * panel_bytes);
        }
    }
}

void engine_linear_part(const linear_args *p, int64_t thread, int64_t threads, int64_t *next) {
    const int64_t columns = p->gated ? p->n / 2 : p->n, panels = (columns + PANEL_ROWS - 1) / PANEL_ROWS;
    if (p->m == 0) return;
    if (p->m <= TILE_ROWS && !p->gated) {
        stream_panels(p, panels * thread / threads, panels * (thread + 1) / threads);
        return;
    }
    int64_t most = CACHED_X_BYTES / (2 * p->k);
    if (most < 8 * TILE_ROWS) most = 8 * TILE_ROWS;
    const int64_t blocks = (p->m + most - 1) / most, tiles = (p->m + TILE_ROWS - 1) / TILE_ROWS;
    int64_t unit, end;
    while (take_units(next, blocks * panels, threads, &unit, &end))
        while (unit < end) {
            const int64_t index = unit / panels, panel = unit % panels;
            const int64_t row = tiles * index / blocks * TILE_ROWS, stop = tiles * (index + 1) / blocks * TILE_ROWS;
            const int64_t last = panel + end - unit < panels ? panel + end - unit : panels;
            (p->gated ? gate_panels : block_panels)(p, row, stop < p->m ? stop : p->m, panel, last);
            unit += last - panel;
        }
}

int engine_linear_is_wide(const linear_args *p) {
    return p->m * p->n * p->k > WORTH_THREADS;
}

void engine_linear(const linear_args *p) {
    int64_t next = 0;
#pragma omp parallel for num_threads(p->threads) schedule(static) if (engine_linear_is_wide(p))
    for (int thread = 0; thread < p->threads; thread++) engine_linear_part(p, thread, p->threads, &next);
}
#endif
