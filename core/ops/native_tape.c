/* Many calls of kernels by one team of threads that stays awake between them. */
#include "native_simd.h"

#ifdef ENGINE_AVX512
#include <omp.h>
#include <string.h>

#include "native_kernels.h"

enum { WORTH_SHARING = 2048 }; /* elements below which one thread is done before the others have heard of it */

static void gather_part(const gather_args *p, int64_t thread, int64_t threads) {
    const int64_t end = p->rows * (thread + 1) / threads;
    for (int64_t row = p->rows * thread / threads; row < end; row++)
        memcpy(p->y + row * p->row_bytes, p->table + p->ids[row] * p->row_bytes, (size_t)p->row_bytes);
}

void engine_gather(const gather_args *p) {
    gather_part(p, 0, 1);
}

/* Whether the first thread does it alone. Attention is always shared: it brings its own plan. */
static int is_lone(const tape_op *op) {
    switch (op->kind) {
    case OP_LINEAR: return !engine_linear_is_wide(&op->linear);
    case OP_QUANTIZE: return op->quant.m * op->quant.k <= WORTH_SHARING / 2;
    case OP_QUANT_PRODUCT: return !engine_quant_linear_is_wide(&op->quant);
    case OP_NORM: return op->norm.outer * op->norm.inner * op->norm.width <= WORTH_SHARING;
    case OP_ROPE: return op->rope.tokens < 4;
    case OP_GATE: return op->gate.tokens * op->gate.width <= WORTH_SHARING / 2;
    case OP_GATHER: return op->gather.rows * op->gather.row_bytes <= 2 * WORTH_SHARING;
    case OP_ATTENTION: return 0;
    }
    return 0;
}

/* Whether an op needs only what the same thread made in the op before: it rounds what was gated, shared out alike. */
static int follows(const tape_op *before, const tape_op *op) {
    if (before->kind != OP_GATE || op->kind != OP_QUANTIZE || is_lone(before) != is_lone(op)) return 0;
    return before->gate.y == op->quant.x && before->gate.tokens == op->quant.m && before->gate.width == op->quant.k &&
           op->quant.x_stride == op->quant.k;
}

static void run_part(const tape_op *op, const attention_plan *plan, int64_t thread, int64_t threads, int64_t *next) {
    switch (op->kind) {
    case OP_LINEAR: engine_linear_part(&op->linear, thread, threads, next); break;
    case OP_QUANTIZE: engine_quantize_part(&op->quant, thread, threads); break;
    case OP_QUANT_PRODUCT: engine_quant_product_part(&op->quant, thread, threads, next); break;
    case OP_NORM: engine_rms_norm_part(&op->norm, thread, threads); break;
    case OP_ROPE: engine_rope_part(&op->rope, thread, threads); break;
    case OP_GATE: engine_silu_mul_part(&op->gate, thread, threads); break;
    case OP_GATHER: gather_part(&op->gather, thread, threads); break;
    case OP_ATTENTION: engine_attention_team(plan, &op->attention); break;
    }
}

void engine_replay(const tape_op *ops, int64_t count, const attention_plan *plan, int threads) {
    int64_t next[count];
    memset(next, 0, sizeof next);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        int were_lone = 1;
        for (int64_t i = 0; i < count; i++) {
            const int lone = is_lone(&ops[i]);
            if (!(lone && were_lone) && !(i && follows(&ops[i - 1], &ops[i]))) {
#pragma omp barrier
            }
            if (!lone)
                run_part(&ops[i], plan, thread, team, next + i);
            else if (thread == 0)
                run_part(&ops[i], plan, 0, 1, next + i);
            were_lone = lone;
        }
    }
}
#endif
