/* Attention over paged KV, for any number of new tokens per request.
 *
 * A page holds, per KV head, K in blocks of 16 tokens with the tokens across the lanes ([head_dim / 2][16][2] bfloat16
 * or [head_dim][16] float32) and V with its width across the lanes ([tokens / 2][v_head_dim][2] or
 * [tokens][v_head_dim]), so that both products run on the register tile.
 *
 * Work is cut into items: some queries of one request, all heads of one KV head, some segments of the keys. Keys are
 * visited in chunks and segments whose borders are fixed multiples of their positions; each segment is reduced by
 * itself and then merged into the total in order. A query's result therefore depends neither on how many queries came
 * with it, nor on its neighbours, nor on how segments were dealt out to threads. Softmax is kept in float32 and to
 * base 2. */
#include "native_tile.h"

#ifdef ENGINE_AVX512
#include <math.h>
#include <omp.h>

#include "native_kernels.h"
#include "native_pages.h"
#include "native_scores.h"

enum { ITEM_COLUMNS = 7, MERGE_COLUMNS = 5 };
enum { MANY = 4 }; /* decodes per thread from which on a thread takes all KV heads of one, and fetches ahead */
enum { SEGMENT = ATTENTION_SEGMENT, BLOCKS = CHUNK / LANES };
_Static_assert(FETCHES == 2 * BLOCKS, "K and V of a chunk");

/* One request's part of an item, with what the loops over keys need. */
typedef struct {
    const attention_plan *plan;
    const attention_args *args;
    int64_t request, kv_head, first_query, rows, group; /* group: query heads per KV head */
    int64_t past, length;                               /* keys before this step's, and with them */
    int64_t first_token;                                /* of the request, in the batch */
    const uint8_t *tree;                                /* [queries, length - drawn], or null */
    int64_t drawn;                                      /* the first key that a tree's mask is about */
    fetches *ahead;                                     /* null where nothing is fetched */
    const int32_t *next_item;                           /* what is done next, or null, and for which KV head */
    int64_t next_head;
} work;

/* Running softmax of some rows: maximum, sum, and unnormalised output. */
typedef struct {
    float *max, *sum, *out;
} state;

INLINE int64_t query_of(const work *w, int64_t row) {
    return w->first_query + (uint32_t)row / (uint32_t)w->group;
}

INLINE int64_t position_of(const work *w, int64_t query) {
    return w->tree ? w->plan->positions[w->first_token + query] : w->past + query;
}

INLINE int64_t first_visible(const work *w, int64_t query) {
    const int64_t first = w->args->window ? position_of(w, query) + 1 - w->args->window : 0;
    return first > 0 ? first : 0;
}

INLINE int64_t end_visible(const work *w, int64_t query) {
    return w->tree ? w->length : w->past + query + 1;
}

/* Which of the 16 keys from `key` on, the first of which is not before `drawn - 15`, a query of a tree sees. */
static __mmask16 visible_in_tree(const work *w, int64_t query, int64_t key, __mmask16 lanes) {
    const uint8_t *sees = w->tree + query * (w->length - w->drawn);
    const int64_t *positions = w->plan->positions + w->first_token;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t other = key + lane - w->drawn, own = key + lane - w->past;
        if (other < 0) continue;
        const int inside = key + lane < w->length && sees[other] &&
                           (!w->args->window || own < 0 || positions[own] > position_of(w, query) - w->args->window);
        lanes = (__mmask16)((lanes & ~(1u << lane)) | ((unsigned)inside << lane));
    }
    return lanes;
}

/* Addresses of the blocks of a chunk. */
INLINE void find_blocks(const int is_bf16, const work *w, int64_t chunk, int64_t count, const char **k,
                        const char **v) {
    const attention_plan *p = w->plan;
    const int64_t size = is_bf16 ? 2 : 4;
    const int32_t *table = p->block_tables + w->request * p->block_table_stride;
    for (int64_t block = 0; block < count; block++) {
        const int64_t token = chunk + block * LANES, page = table[token / p->page_size];
        const int64_t within = w->kv_head * p->page_size + token % p->page_size;
        k[block] = (const char *)w->args->k_pages + (page * w->args->k_page + within * p->head_dim) * size;
        v[block] = (const char *)w->args->v_pages + (page * w->args->v_page + within * p->v_head_dim) * size;
    }
}

INLINE __m512 scaled(const attention_plan *p, __m512 scores) {
    const float log2e = 1.44269504f;
    if (p->softcap == 0) return _mm512_mul_ps(scores, _mm512_set1_ps((float)p->scale * log2e));
    /* tanh(x) = 1 - 2 / (e^2x + 1) */
    const __m512 twice = _mm512_mul_ps(scores, _mm512_set1_ps((float)(2 * p->scale / p->softcap)));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 down = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(exp_of(twice), one));
    return _mm512_mul_ps(_mm512_sub_ps(one, down), _mm512_set1_ps((float)p->softcap * log2e));
}

/* Scores of one row over one chunk -> weights, in place (float32) or into `weights` (bfloat16); updates the maximum and
 * the sum and returns the factor on what was summed before. */
INLINE float soften(const int is_bf16, const work *w, int64_t query, int64_t chunk, int64_t count, float *scores,
                    bf16 *weights, float *max, float *sum) {
    const int64_t first = first_visible(w, query), end = end_visible(w, query);
    const int whole = chunk >= first && chunk + count * LANES <= (w->tree ? w->drawn : end);
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 top = nothing, total = _mm512_setzero_ps(), value[BLOCKS];
    for (int64_t b = 0; b < count; b++) {
        value[b] = scaled(w->plan, _mm512_load_ps(scores + b * LANES));
        if (!whole) {
            const int64_t key = chunk + b * LANES;
            __mmask16 lanes = first_lanes(end - key) & (__mmask16)~first_lanes(first - key);
            if (w->tree && key + LANES > w->drawn) lanes = visible_in_tree(w, query, key, lanes);
            value[b] = _mm512_mask_mov_ps(nothing, lanes, value[b]);
        }
        top = _mm512_max_ps(top, value[b]);
    }
    const float before = *max, now = fmaxf(before, _mm512_reduce_max_ps(top));
    const float safe = now == -INFINITY ? 0.0f : now;
    for (int64_t b = 0; b < count; b++) {
        const __m512 weight = exp2_of(_mm512_sub_ps(value[b], _mm512_set1_ps(safe)));
        total = _mm512_add_ps(total, weight);
        if (is_bf16)
            _mm256_storeu_si256((__m256i *)(weights + b * LANES), narrow(weight));
        else
            _mm512_store_ps(scores + b * LANES, weight);
    }
    const float keep = _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(before - safe)));
    *max = now;
    *sum = *sum * keep + _mm512_reduce_add_ps(total);
    return keep;
}

/* One tile of rows against one chunk of keys. */
INLINE void visit(const int is_bf16, const work *w, int64_t row, int64_t rows, int64_t chunk, const char *const *k,
                  const char *const *v, state s) {
    const attention_plan *p = w->plan;
    const int64_t size = is_bf16 ? 2 : 4;
    int64_t end = end_visible(w, query_of(w, row + rows - 1)) - chunk;
    if (end <= 0) return;
    if (end > CHUNK) end = CHUNK;
    const int64_t count = (end + LANES - 1) / LANES;
    float scores[TILE_ROWS][CHUNK] __attribute__((aligned(64)));
    bf16 narrowed[TILE_ROWS][CHUNK] __attribute__((aligned(64)));
    float keep[TILE_ROWS];
    const char *q[TILE_ROWS], *weights[TILE_ROWS];
    int64_t query[TILE_ROWS];
    for (int64_t i = 0; i < rows; i++) {
        query[i] = query_of(w, row + i);
        const int64_t head = w->kv_head * w->group + row + i - (query[i] - w->first_query) * w->group;
        q[i] =
            (const char *)w->args->q + ((w->first_token + query[i]) * w->args->q_token + head * w->args->q_head) * size;
        weights[i] = is_bf16 ? (const char *)narrowed[i] : (const char *)scores[i];
    }
    score_kernels[is_bf16][rows - 1](q, k, count, p->head_dim * size / 4, w->ahead, scores[0]);
    for (int64_t i = 0; i < rows; i++)
        keep[i] = soften(is_bf16, w, query[i], chunk, count, scores[i], narrowed[i], s.max + row + i, s.sum + row + i);
    weigh_kernels[is_bf16][rows - 1](weights, v, end, p->v_head_dim, keep, w->ahead,
                                     s.out + row * p->v_head_dim);
}

static void clear(state s, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        s.max[i] = -INFINITY;
        s.sum[i] = 0;
    }
    for (int64_t i = 0; i < rows * width; i += LANES) _mm512_storeu_ps(s.out + i, _mm512_setzero_ps());
}

/* What is read after the chunk that ends at `stop`: the keys from there on, or the first of the next item. */
INLINE void look_ahead(const int is_bf16, const work *w, int64_t stop, int64_t last) {
    work next = *w;
    int64_t keys = last - stop;
    if (keys <= 0) {
        if (!w->next_item) return;
        next.request = w->next_item[0];
        next.kv_head = w->next_head;
        stop = 0;
        keys = w->plan->seq_lens[next.request];
    }
    const int64_t count = ((keys < CHUNK ? keys : CHUNK) + LANES - 1) / LANES, size = is_bf16 ? 2 : 4;
    const char *k[BLOCKS], *v[BLOCKS];
    find_blocks(is_bf16, &next, stop, count, k, v);
    fetches *const f = w->ahead;
    f->next = 0;
    f->count = 2 * count;
    for (int64_t block = 0; block < count; block++) {
        f->block[block].at = k[block];
        f->block[block].lines = LANES * w->plan->head_dim * size / 64;
        f->block[count + block].at = v[block];
        f->block[count + block].lines = LANES * w->plan->v_head_dim * size / 64;
    }
}

INLINE void segment(const int is_bf16, const work *w, int64_t index, state s) {
    clear(s, w->rows, w->plan->v_head_dim);
    const int64_t earliest = w->past + (w->tree ? 0 : w->first_query) + 1 - w->args->window;
    const int64_t first = w->args->window && earliest > 0 ? earliest : 0,
                  last = end_visible(w, query_of(w, w->rows - 1));
    const int64_t start = index * SEGMENT > first ? index * SEGMENT : first / CHUNK * CHUNK;
    const int64_t stop = (index + 1) * SEGMENT < last ? (index + 1) * SEGMENT : last;
    for (int64_t chunk = start; chunk < stop; chunk += CHUNK) {
        const char *k[BLOCKS], *v[BLOCKS];
        const int64_t keys = stop - chunk < CHUNK ? stop - chunk : CHUNK;
        find_blocks(is_bf16, w, chunk, (keys + LANES - 1) / LANES, k, v);
        if (w->ahead) look_ahead(is_bf16, w, chunk + keys, last);
        for (int64_t row = 0; row < w->rows; row += TILE_ROWS)
            visit(is_bf16, w, row, w->rows - row < TILE_ROWS ? w->rows - row : TILE_ROWS, chunk, k, v, s);
        while (w->ahead && w->ahead->next < w->ahead->count) fetch(w->ahead);
    }
}

/* Adds one segment's row to the total. Merged into an empty total it is taken over unchanged, to the bit. */
static void merge_row(state total, state part, int64_t row, int64_t width) {
    const float top = fmaxf(total.max[row], part.max[row]), safe = top == -INFINITY ? 0.0f : top;
    const __m512 a = exp2_of(_mm512_set1_ps(total.max[row] - safe)), b = exp2_of(_mm512_set1_ps(part.max[row] - safe));
    total.max[row] = top;
    total.sum[row] = total.sum[row] * _mm512_cvtss_f32(a) + part.sum[row] * _mm512_cvtss_f32(b);
    for (int64_t i = row * width; i < (row + 1) * width; i += LANES) {
        const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(total.out + i), a);
        _mm512_storeu_ps(total.out + i, _mm512_fmadd_ps(_mm512_loadu_ps(part.out + i), b, old));
    }
}

INLINE void finish(const int is_bf16, const work *w, state s) {
    const int64_t width = w->plan->v_head_dim;
    for (int64_t row = 0; row < w->rows; row++) {
        const int64_t token = w->first_token + query_of(w, row), head = w->kv_head * w->group + row % w->group;
        const __m512 scale = _mm512_set1_ps(1.0f / s.sum[row]);
        for (int64_t i = 0; i < width; i += LANES)
            store(is_bf16, w->args->out, (token * w->plan->heads + head) * width + i, 0xFFFF,
                  _mm512_mul_ps(_mm512_loadu_ps(s.out + row * width + i), scale));
    }
}

INLINE state state_at(float *base, int64_t rows) {
    return (state){base, base + rows, base + 2 * rows};
}

INLINE work work_of(const attention_plan *p, const attention_args *a, const int32_t *item, int64_t kv_head) {
    work w = {.plan = p, .args = a, .request = item[0], .kv_head = kv_head, .first_query = item[1]};
    w.group = p->heads / p->kv_heads;
    w.rows = item[2] * w.group;
    w.length = p->seq_lens[w.request];
    w.first_token = p->query_start[w.request];
    w.past = w.length - (p->query_start[w.request + 1] - w.first_token);
    w.tree = p->trees ? (const uint8_t *)p->trees[2 * w.request] : 0;
    w.drawn = w.tree ? w.length - p->trees[2 * w.request + 1] : w.length;
    return w;
}

static state partial_state(const attention_plan *p, int64_t partial, int64_t kv_head, int64_t rows) {
    return state_at(p->partials + (partial * p->kv_heads + kv_head) * p->partial_floats, rows);
}

/* `next`, unless null, is the item that follows, for the head `next_head`. */
INLINE void run_item(const int is_bf16, const attention_plan *p, const attention_args *a, const int32_t *item,
                     int64_t kv_head, float *scratch, fetches *ahead, const int32_t *next, int64_t next_head) {
    work w = work_of(p, a, item, kv_head);
    w.ahead = ahead;
    w.next_item = next;
    w.next_head = next_head;
    if (next) claim(is_bf16, p, a, p->query_start[next[0]], next_head);
    if (item[6])
        for (int64_t i = 0; i < item[2]; i++) put(is_bf16, p, a, w.first_token + item[1] + i, w.kv_head);
    if (item[5] >= 0) {
        segment(is_bf16, &w, item[3], partial_state(p, item[5], w.kv_head, w.rows));
        return;
    }
    const state part = state_at(scratch, w.rows), total = state_at(scratch + p->scratch_floats / 2, w.rows);
    segment(is_bf16, &w, item[3], part);
    if (item[4] == 1) {
        finish(is_bf16, &w, part);
        return;
    }
    clear(total, w.rows, p->v_head_dim);
    for (int64_t s = item[3];;) {
        for (int64_t row = 0; row < w.rows; row++) merge_row(total, part, row, p->v_head_dim);
        if (++s == item[3] + item[4]) break;
        segment(is_bf16, &w, s, part);
    }
    finish(is_bf16, &w, total);
}

INLINE void run_merge(const int is_bf16, const attention_plan *p, const attention_args *a, int64_t index,
                      float *scratch) {
    const int32_t *merge = p->merges + index / p->kv_heads * MERGE_COLUMNS;
    const work w = work_of(p, a, merge, index % p->kv_heads);
    const state total = state_at(scratch, w.rows);
    clear(total, w.rows, p->v_head_dim);
    for (int64_t s = 0; s < merge[4]; s++) {
        const state part = partial_state(p, merge[3] + s, w.kv_head, w.rows);
        for (int64_t row = 0; row < w.rows; row++) merge_row(total, part, row, p->v_head_dim);
    }
    finish(is_bf16, &w, total);
}

INLINE const int32_t *item_at(const attention_plan *p, int64_t index) {
    return index < p->num_items ? p->items + index * ITEM_COLUMNS : 0;
}

/* All KV heads of one decode after the other, for they lie side by side. */
INLINE void run_decode(const int is_bf16, const attention_plan *p, const attention_args *a, int64_t index,
                       float *scratch, fetches *ahead) {
    const int32_t *const item = item_at(p, index), *const after = item_at(p, index + omp_get_num_threads());
    for (int64_t head = 0; head + 1 < p->kv_heads; head++)
        run_item(is_bf16, p, a, item, head, scratch, ahead, item, head + 1);
    run_item(is_bf16, p, a, item, p->kv_heads - 1, scratch, ahead, after, 0);
}

INLINE void attend(const int is_bf16, const attention_plan *p, const attention_args *a, float *scratch) {
    const int64_t heads = p->kv_heads;
    const int decodes = p->tokens == p->requests;
    fetches ahead = {.count = 0};
    if (p->num_stores) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->num_stores * heads; i++) put(is_bf16, p, a, p->stores[i / heads], i % heads);
    }
    if (decodes && p->num_items == p->requests && p->num_items >= MANY * p->threads) {
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < p->num_items; i++) run_decode(is_bf16, p, a, i, scratch, &ahead);
    } else {
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < p->num_items * heads; i++)
            run_item(is_bf16, p, a, item_at(p, i % p->num_items), i / p->num_items, scratch, decodes ? &ahead : 0, 0,
                     0);
    }
    if (p->num_merges) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < p->num_merges * heads; i++) run_merge(is_bf16, p, a, i, scratch);
    }
}

void engine_attention_team(const attention_plan *p, const attention_args *a) {
    float *scratch = p->scratch + omp_get_thread_num() * p->scratch_floats;
    if (p->is_bf16)
        attend(1, p, a, scratch);
    else
        attend(0, p, a, scratch);
}

void engine_attention(const attention_plan *p, const attention_args *a) {
#pragma omp parallel num_threads((int)p->threads)
    engine_attention_team(p, a);
}
#endif
