/* How tokens get into pages of KV, and KV into the caches; the layout is told in native_attention.c. */
#ifndef ENGINE_NATIVE_PAGES_H
#define ENGINE_NATIVE_PAGES_H

#include "native_simd.h"

#ifdef ENGINE_AVX512
#include "native_kernels.h"

enum { FETCHES = 16 }; /* blocks of K and V in a chunk of keys */

/* Blocks of K and V that will be read next, to be fetched while others are being computed with: the KV of many requests
 * lies in pieces too short for the processor to see where they lead. On its way into the second-level cache can be
 * more at a time than on its way into the first: 29 GB/s were measured for the one, 18 for the other. */
typedef struct {
    struct {
        const char *at;
        int64_t lines;
    } block[FETCHES];
    int64_t next, count;
} fetches;

INLINE void fetch(fetches *f) {
    if (!f || f->next >= f->count) return;
    const char *const at = f->block[f->next].at;
    const int64_t lines = f->block[f->next++].lines;
    for (int64_t line = 0; line < lines; line++) _mm_prefetch(at + line * 64, _MM_HINT_T1);
}

/* Where one token's K and V of one head go. */
typedef struct {
    char *k, *v;
} place;

INLINE place place_of(const int is_bf16, const attention_plan *p, const attention_args *a, int64_t token,
                      int64_t head) {
    const int64_t per_step = is_bf16 ? 2 : 1, size = is_bf16 ? 2 : 4;
    const int64_t page = p->slots[token] / p->page_size, offset = p->slots[token] % p->page_size;
    const int64_t block = offset / LANES * LANES, lane = offset % LANES, row = offset / per_step * per_step;
    const int64_t k = page * a->k_page + (head * p->page_size + block) * p->head_dim;
    const int64_t v = page * a->v_page + (head * p->page_size + row) * p->v_head_dim + offset % per_step;
    return (place){(char *)a->k_pages + k * size + lane * 4, (char *)a->v_pages + v * size};
}

/* Takes over the cache lines that `put` will write to: K lies across as many as it has steps. */
INLINE void claim(const int is_bf16, const attention_plan *p, const attention_args *a, int64_t token, int64_t head) {
    const place to = place_of(is_bf16, p, a, token, head);
    const int64_t size = is_bf16 ? 2 : 4;
    for (int64_t at = 0; at < p->head_dim * size * LANES; at += 64) __builtin_prefetch(to.k + at, 1);
    for (int64_t at = 0; at < p->v_head_dim * 4; at += 64) __builtin_prefetch(to.v + at, 1);
}

INLINE void put(const int is_bf16, const attention_plan *p, const attention_args *a, int64_t token, int64_t head) {
    const int64_t per_step = is_bf16 ? 2 : 1, size = is_bf16 ? 2 : 4;
    const place to = place_of(is_bf16, p, a, token, head);
    const char *k = (const char *)a->k + (token * a->k_token + head * a->k_head) * size;
    for (int64_t step = 0; step < p->head_dim / per_step; step++)
        ((uint32_t *)to.k)[step * LANES] = ((const uint32_t *)k)[step];
    const char *v = (const char *)a->v + (token * a->v_token + head * a->v_head) * size;
    for (int64_t i = 0; i < p->v_head_dim; i++) {
        if (is_bf16)
            ((bf16 *)to.v)[2 * i] = ((const bf16 *)v)[i];
        else
            ((float *)to.v)[i] = ((const float *)v)[i];
    }
}

#endif
#endif
