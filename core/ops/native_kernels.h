/* What the kernels take. Pointers are to dense data unless a stride (in elements) stands beside them; `is_bf16` chooses
 * between bfloat16 and float32. Every function splits its work over at most `threads` threads of the OpenMP runtime.
 *
 * What ends in `_part` does the share of one thread of a team, for who has a team already; shares may run at the same
 * time and in any order. `next`, 0 before the first begins, is how threads share out what is long. A result does not
 * depend on how the work is shared. What ends in `_is_wide` tells whether it is worth waking threads for. */
#ifndef ENGINE_NATIVE_KERNELS_H
#define ENGINE_NATIVE_KERNELS_H

#include <stdint.h>

/* Panels of 32 rows of W; within one, step after step, 32 rows x two neighbouring k, 128 bytes. */
void engine_pack_rows(const void *weight, int64_t rows, int64_t k, void *packed, int64_t first_row, int threads);

/* y [m, n] = x [m, k] W^T + bias. */
typedef struct {
    const char *x;
    int64_t x_stride;
    const char *packed;
    const float *bias; /* or null */
    void *y;
    int64_t m, n, k;
    int y_is_float;
    int gated; /* y [m, n / 2] in bfloat16: silu of the first half of what would be y, rounded, times the second; n is a
                  multiple of 64 */
    int threads;
} linear_args;
void engine_linear(const linear_args *args);
void engine_linear_part(const linear_args *args, int64_t thread, int64_t threads, int64_t *next);
int engine_linear_is_wide(const linear_args *args);

/* y [m, n] = x [m, k] W^T + bias, with inputs rounded to 8 bits in blocks of 32 along k, one scale each.
 *
 * W lies in panels of 32 rows; within one, block after block of 32 along k:
 *   8 bits: 8 words x 32 rows x 4 codes along k, a byte each (128 added); 4 bits: 4 words, of which byte i holds the
 *   code of k = i in its low half and of k = i + 16 in its high half;
 *   32 scales and, with `offsets`, 32 offsets, float16. A weight is scale x code + offset. */
typedef struct {
    const void *x;
    int64_t x_stride;
    const char *packed;
    const float *bias; /* or null */
    void *y;
    void *inputs; /* scratch: m x k / 32 x QUANT_INPUT_BYTES */
    int64_t m, n, k;
    int bits, offsets;
    int x_is_bf16, y_is_bf16;
    int gated; /* as in `linear_args` */
    int threads;
} quant_args;
enum { QUANT_INPUT_BYTES = 48 };
void engine_quant_linear(const quant_args *args);
/* Its two halves: rounding the inputs, and the product when all of them are rounded. */
void engine_quantize_part(const quant_args *args, int64_t thread, int64_t threads);
void engine_quant_product_part(const quant_args *args, int64_t thread, int64_t threads, int64_t *next);
int engine_quant_linear_is_wide(const quant_args *args);

/* Rows are indexed by (outer, inner). `residual`, unless null, is dense: x is added to it and the sum normalised. */
typedef struct {
    const void *x;
    int64_t outer, inner, outer_stride, inner_stride, width;
    const void *weight;
    void *residual, *y;
    float eps;
    int is_bf16, threads;
} norm_args;
void engine_rms_norm(const norm_args *args);
void engine_rms_norm_part(const norm_args *args, int64_t thread, int64_t threads);

typedef struct {
    void *x;
    int64_t heads, token_stride, head_stride;
} rope_side;
typedef struct {
    rope_side side[2];
    const int64_t *positions;
    const float *cos_sin;
    int64_t tokens, rotary;
    int is_bf16, threads;
} rope_args;
void engine_rope(const rope_args *args);
void engine_rope_part(const rope_args *args, int64_t thread, int64_t threads);

typedef struct {
    const void *x;
    int64_t stride;
    void *y;
    int64_t tokens, width; /* of y */
    int is_bf16, threads;
} gate_args;
void engine_silu_mul(const gate_args *args);
void engine_silu_mul_part(const gate_args *args, int64_t thread, int64_t threads);

/* Per row of x [rows, width]: the first place of its largest number, and whether all its numbers are finite. */
typedef struct {
    const float *x;
    int64_t rows, width;
    int64_t *places;
    uint8_t *finite;
    int threads;
} peak_args;
void engine_peaks(const peak_args *args);

/* Keys per segment: the grain at which one query's keys may be spread over threads. */
enum { ATTENTION_SEGMENT = 512 };

/* What all layers of one step share. Filled by the planner, all members 64 bits wide. */
typedef struct {
    int64_t tokens, requests, heads, kv_heads, head_dim, v_head_dim, page_size, is_bf16, threads;
    const int32_t *query_start, *seq_lens, *block_tables;
    int64_t block_table_stride;
    const int64_t *slots, *positions;
    const int64_t *trees;  /* [R, 2]: address of a dense bool [q, m], or 0, and m; null when there is no tree */
    const int32_t *stores; /* [num_stores]: tokens whose KV must be stored before any item runs */
    const int32_t *items;  /* [num_items, 7]: request, first query, queries, first segment, segments, partial or -1,
                              whether the item stores the KV of its queries itself */
    const int32_t *merges; /* [num_merges, 5]: request, first query, queries, first partial, partials */
    int64_t num_stores, num_items, num_merges;
    float *scratch; /* threads x scratch_floats */
    int64_t scratch_floats;
    float *partials; /* per (partial, KV head): rows x (v_head_dim + 2) floats */
    int64_t partial_floats;
    double scale, softcap; /* softcap 0: none */
} attention_plan;

typedef struct {
    const void *q, *k, *v;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head; /* strides */
    void *k_pages, *v_pages;
    int64_t k_page, v_page; /* strides */
    void *out;
    int64_t window; /* 0: none */
} attention_args;
void engine_attention(const attention_plan *plan, const attention_args *args);
/* Called by every thread of a team of at most `plan->threads`, which must meet before the result is read. */
void engine_attention_team(const attention_plan *plan, const attention_args *args);

/* Rows of a table by their numbers; `row_bytes` each. */
typedef struct {
    const char *table;
    const int64_t *ids;
    char *y;
    int64_t rows, row_bytes;
} gather_args;

/* One call of a kernel, to be repeated with the same addresses. */
typedef struct {
    enum { OP_LINEAR, OP_QUANTIZE, OP_QUANT_PRODUCT, OP_NORM, OP_ROPE, OP_GATE, OP_ATTENTION, OP_GATHER } kind;
    union {
        linear_args linear;
        quant_args quant;
        norm_args norm;
        rope_args rope;
        gate_args gate;
        attention_args attention;
        gather_args gather;
    };
} tape_op;
/* Repeats calls in their order by one team; attention follows `plan` instead of the one that it was recorded with. */
void engine_replay(const tape_op *ops, int64_t count, const attention_plan *plan, int threads);
void engine_gather(const gather_args *args);

#endif
