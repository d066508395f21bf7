"""Decode attention: one query token per request against its pages, the keys split over many programs.

A work list made on the device once a step says which program does what, so that nothing here depends on lengths that
only the host knows: a captured CUDA graph stays right while the requests grow. The program that finishes a request's
last part merges the parts, in order, so the result does not depend on which one that was.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.dependent import begin, wait
from engine.plugins.attention.triton.packed import scale_of, store_one, widen
from engine.plugins.attention.triton.rotate import angles, load_rotated

ITEM = 5
"""Integers per item of the work list: request (-1: none), first key, end of keys, first item of the request, items."""


@triton.jit(do_not_specialize=["requests", "capacity", "window", "wanted"])
def list_work(
    seq_lens,
    own_start,
    items,
    requests,
    capacity,
    window,
    wanted,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Cut every request into equal parts, about `wanted` parts in all; one program.

    seq_lens int32 [requests]; items int32 [capacity, ITEM]; window 0 for none. `capacity` must be at least
    `requests + wanted`. Parts are multiples of BLOCK keys long, but for the last. With SHARED, the keys before
    own_start int32 [requests] are read elsewhere.
    """
    r = tl.arange(0, REQUESTS)
    lens = tl.load(seq_lens + r, mask=r < requests, other=0)
    start = tl.where(window > 0, tl.maximum(lens - window, 0), 0) // BLOCK * BLOCK
    if SHARED:
        start = tl.load(own_start + r, mask=r < requests, other=0)
    keys = lens - start
    share = tl.cdiv(tl.sum(keys), wanted)
    share += tl.where(2 * requests > wanted, share // 4, 0)  # a little more rather than two parts of most requests
    part = tl.maximum(tl.cdiv(share, BLOCK), 1) * BLOCK
    count = tl.cdiv(keys, part)
    part = tl.cdiv(tl.cdiv(keys, tl.maximum(count, 1)), BLOCK) * BLOCK  # of equal length within a request
    count = tl.cdiv(keys, tl.maximum(part, 1))
    ends = tl.cumsum(count, 0)
    for done in range(0, capacity, REQUESTS):
        tl.store(items + (done + r) * 5, -1, mask=done + r < capacity)
    tl.debug_barrier()
    first = ends - count
    for s in range(tl.max(count)):
        here = s < count
        at = items + (first + s) * 5
        tl.store(at, r, mask=here)
        tl.store(at + 1, start + s * part, mask=here)
        tl.store(at + 2, tl.minimum(start + (s + 1) * part, lens), mask=here)
        tl.store(at + 3, first, mask=here)
        tl.store(at + 4, count, mask=here)


@triton.jit
def nothing(ROWS: tl.constexpr, V_PAD: tl.constexpr):
    """A running softmax that has seen no key: maximum, total and weighted sum."""
    best = tl.full([ROWS], float("-inf"), tl.float32)
    return best, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, V_PAD], tl.float32)


@triton.jit
def merge(
    best,
    total,
    acc,
    partial_out,
    partial_stats,
    first,
    count,
    heads,
    is_row,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
):
    """Add the parts `first` to `first + count` to a running softmax: best, total [ROWS], acc [ROWS, V_PAD]."""
    dv = tl.arange(0, V_PAD)
    is_out = is_row[:, None] & (dv[None, :] < V_DIM)
    for i in range(first, first + count):
        place = (i * HEADS + heads).to(tl.int64)
        other = tl.load(partial_stats + place * 2, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(partial_stats + place * 2 + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        outs = tl.load(partial_out + place[:, None] * V_DIM + dv[None, :], mask=is_out, other=0.0, cache_modifier=".cg")
        peak = tl.maximum(best, other)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        mine = tl.exp2(best - safe)
        theirs = tl.exp2(other - safe)
        total = total * mine + sums * theirs
        acc = acc * mine[:, None] + outs * theirs[:, None]
        best = peak
    return best, total, acc


@triton.jit(do_not_specialize=["table_row", "window"])
def decode(
    q,
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    out,
    partial_out,
    partial_stats,
    counters,
    shared_out,
    shared_stats,
    shared_parts,
    items,
    seq_lens,
    block_tables,
    slot_mapping,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    v_page,
    table_row,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    STORE: tl.constexpr,
    ROTATE: tl.constexpr,
    SHARED: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One item of the work list for one KV head: program (item, KV head).

    With PACKED, pages are dense, hold 8 bits and have scales beside them.
    With ROTATE, queries and new keys are rotated by `cos_sin` as they are read.
    With STORE, the new token's k and v are stored by the item with the request's last key. `scale` and `softcap` are
    in units of log2 (see `TritonAttention`). partial_out float32 [items, heads, V_DIM], partial_stats float32
    [items, heads, 2] (maximum and sum), counters int32 [requests, KV heads], zero before and after. With SHARED, the
    parts that `engine.plugins.attention.triton.cascade` left of a request are added by its first item.
    """
    begin(EARLY)
    item = tl.program_id(0)
    head = tl.program_id(1)
    at = items + item * 5
    request = tl.load(at)
    if request < 0:
        wait(EARLY)
        return
    start_at, end = tl.load(at + 1), tl.load(at + 2)
    first, count = tl.load(at + 3), tl.load(at + 4)
    length = tl.load(seq_lens + request)
    row, d, dv = tl.arange(0, ROWS), tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
    is_row = row < GROUP
    heads = head * GROUP + row
    is_query = is_row[:, None] & (d[None, :] < DIM)
    q_at = q + request.to(tl.int64) * q_token + heads[:, None] * q_head
    if ROTATE:
        cos, sin = angles(cos_sin, tl.load(positions + request), d, DIM)
        wait(EARLY)
        queries = load_rotated(q_at, d[None, :], is_query, cos[None, :], sin[None, :], DIM)
    else:
        wait(EARLY)
        queries = tl.load(q_at + d[None, :], mask=is_query, other=0.0)
    if STORE and end == length:
        slot = tl.load(slot_mapping + request)
        page, inside = slot // PAGE, head * PAGE + slot % PAGE
        k_at = k + request.to(tl.int64) * k_token + head * k_head
        new_k = load_rotated(k_at, d, d < DIM, cos, sin, DIM) if ROTATE else tl.load(k_at + d, mask=d < DIM)
        new_v = tl.load(v + request.to(tl.int64) * v_token + head * v_head + dv, mask=dv < V_DIM)
        store_one(new_k, k_pages, k_scales, page, k_page, inside, d, KV_HEADS * PAGE, DIM, PACKED)
        store_one(new_v, v_pages, v_scales, page, v_page, inside, dv, KV_HEADS * PAGE, V_DIM, PACKED)
        tl.debug_barrier()  # the loop below reads them back
    best, total, acc = nothing(ROWS, V_PAD)
    table = block_tables + request.to(tl.int64) * table_row
    for start in tl.range(start_at, end, BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        exists = n < end
        page = tl.load(table + n // PAGE, mask=exists, other=0).to(tl.int64)
        inside = head * PAGE + n % PAGE
        keys = tl.load(
            k_pages + (page * k_page + inside * DIM)[None, :] + d[:, None],
            mask=exists[None, :] & (d[:, None] < DIM),
            other=0.0,
        )
        if PACKED:
            stored = page * (KV_HEADS * PAGE) + inside
            keys = widen(keys, queries.dtype)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if PACKED:
            scores *= scale_of(tl.load(k_scales + stored, mask=exists, other=0))[None, :]
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        sees = exists
        if WINDOW:
            sees = sees & (n >= length - window)
        scores = tl.where(sees[None, :], scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            v_pages + (page * v_page + inside * V_DIM)[:, None] + dv[None, :],
            mask=exists[:, None] & (dv[None, :] < V_DIM),
            other=0.0,
        )
        if PACKED:
            values = widen(values, queries.dtype)
            weights *= scale_of(tl.load(v_scales + stored, mask=exists, other=0))[None, :]
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        best = peak
    if SHARED and item == first:
        best, total, acc = merge(
            best,
            total,
            acc,
            shared_out,
            shared_stats,
            request * SPLITS,
            tl.load(shared_parts + request),
            heads,
            is_row,
            KV_HEADS * GROUP,
            V_DIM,
            V_PAD,
        )
    is_out = is_row[:, None] & (dv[None, :] < V_DIM)
    to = out + (request.to(tl.int64) * KV_HEADS * GROUP + heads)[:, None] * V_DIM + dv[None, :]
    if count == 1:
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_out)
    else:
        part = (item * KV_HEADS * GROUP + heads).to(tl.int64)
        tl.store(partial_out + part[:, None] * V_DIM + dv[None, :], acc, mask=is_out)
        tl.store(partial_stats + part * 2, best, mask=is_row)
        tl.store(partial_stats + part * 2 + 1, total, mask=is_row)
        tl.debug_barrier()  # all of this program's stores before its tick
        done = tl.atomic_add(counters + request * KV_HEADS + head, 1, sem="acq_rel")
        if done == count - 1:
            tl.store(counters + request * KV_HEADS + head, 0)
            best, total, acc = nothing(ROWS, V_PAD)
            best, total, acc = merge(
                best,
                total,
                acc,
                partial_out,
                partial_stats,
                first,
                count,
                heads,
                is_row,
                KV_HEADS * GROUP,
                V_DIM,
                V_PAD,
            )
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_out)


__all__ = ["ITEM", "decode", "list_work"]
