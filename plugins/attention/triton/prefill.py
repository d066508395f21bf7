"""Prefill attention: tiles of new tokens against what lies in pages and against the new tokens themselves.

The past is read through the block table; keys and values of this step are read from the projection, where they lie in
one piece. A tile finds its request from `query_start` on the device.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.plugins.attention.triton.packed import scale_of, widen
from engine.plugins.attention.triton.rotate import angles, load_rotated


@triton.jit(do_not_specialize=["first"])
def store(
    k,
    v,
    k_pages,
    v_pages,
    slot_mapping,
    positions,
    cos_sin,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    v_page,
    first,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Put k and v of one token, all heads, where its slot says, unless that is -1; program (token after `first`)."""
    token = (first + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    page = slot // PAGE
    offset = slot % PAGE
    i = tl.arange(0, WIDTH)
    head = i // DIM
    d = i % DIM
    here = head < HEADS
    k_at = k + token * k_token + head * k_head
    if ROTATE:
        cos, sin = angles(cos_sin, tl.load(positions + token), d, DIM)
        row = load_rotated(k_at, d, here, cos, sin, DIM)
    else:
        row = tl.load(k_at + d, mask=here)
    tl.store(k_pages + page * k_page + (head * PAGE + offset) * DIM + d, row, mask=here)
    head = i // V_DIM
    d = i % V_DIM
    here = head < HEADS
    row = tl.load(v + token * v_token + head * v_head + d, mask=here)
    tl.store(v_pages + page * v_page + (head * PAGE + offset) * V_DIM + d, row, mask=here)


@triton.jit
def _request_of(tile, query_start, first_request, requests, TOKENS: tl.constexpr):
    """The last request whose first tile is not beyond this one, and the tile's number within it."""
    base = tl.load(query_start + first_request)
    low = first_request
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        before = (tl.load(query_start + middle) - base) // TOKENS + middle - first_request
        if before <= tile:
            low = middle
        else:
            high = middle
    return low, tile - ((tl.load(query_start + low) - base) // TOKENS + low - first_request)


@triton.jit
def _fold(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    sees,
    best,
    total,
    acc,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One block of keys into a running softmax. queries [M, D], keys [D, N], values [N, V], sees [M, N].

    With PACKED, keys and values lack their scales [N].
    """
    scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
    if PACKED:
        scores *= key_scales[None, :]
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    if MASKED:
        scores = tl.where(sees, scores, float("-inf"))
    peak = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if PACKED:
        weights *= value_scales[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return peak, total, acc


@triton.jit(do_not_specialize=["table_row", "first_request", "requests", "window"])
def prefill(
    q,
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    out,
    query_start,
    seq_lens,
    block_tables,
    positions,
    trees,
    tree_at,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    v_page,
    table_row,
    first_request,
    requests,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile: ROWS / PACK tokens of one request with PACK of the query heads of one KV head.

    Program (tile, KV head * packs of its group); requests `first_request, …` of `requests` in all are cut into tiles,
    of which at most `tokens // (ROWS / PACK) + requests` exist. trees uint8 holds the masks end to end and
    tree_at int64 [requests] where each begins, -1 for causal requests. Scales as in `decode`.
    """
    TOKENS: tl.constexpr = ROWS // PACK
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    tile = tl.program_id(0)
    head = tl.program_id(1) // PACKS
    request, tile = _request_of(tile, query_start, first_request, requests, TOKENS)
    begin = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - begin
    if tile * TOKENS >= count:
        return
    past = tl.load(seq_lens + request) - count
    row = tl.arange(0, ROWS)
    token = tile * TOKENS + row // PACK
    member = tl.program_id(1) % PACKS * PACK + row % PACK
    is_row = (token < count) & (member < GROUP)
    heads = head * GROUP + member
    d = tl.arange(0, DIM_PAD)
    dv = tl.arange(0, V_PAD)
    where = (begin + token).to(tl.int64)
    queries = tl.load(
        q + where[:, None] * q_token + heads[:, None] * q_head + d[None, :],
        mask=is_row[:, None] & (d[None, :] < DIM),
        other=0.0,
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    position = past + token
    mask_at = tl.cast(-1, tl.int64)
    if TREE:
        mask_at = tl.load(tree_at + request)
        drawn_keys = tl.where(mask_at >= 0, count, 0)  # a request without a tree reads no mask
        position = tl.load(positions + where, mask=is_row, other=0).to(tl.int32)

    # The past, from pages.
    table = block_tables + request.to(tl.int64) * table_row
    start = 0
    if WINDOW:
        start = tl.maximum(past + tile * TOKENS + 1 - window, 0) // BLOCK * BLOCK
        if TREE:
            start = 0
    n = tl.arange(0, BLOCK)
    for at in tl.range(start, past, BLOCK, num_stages=STAGES):
        exists = at + n < past
        page = tl.load(table + (at + n) // PAGE, mask=exists, other=0).to(tl.int64)
        inside = head * PAGE + (at + n) % PAGE
        keys = tl.load(
            k_pages + (page * k_page + inside * DIM)[None, :] + d[:, None],
            mask=exists[None, :] & (d[:, None] < DIM),
            other=0.0,
        )
        values = tl.load(
            v_pages + (page * v_page + inside * V_DIM)[:, None] + dv[None, :],
            mask=exists[:, None] & (dv[None, :] < V_DIM),
            other=0.0,
        )
        sees = exists[None, :] & is_row[:, None]
        if WINDOW:
            sees = sees & ((at + n)[None, :] > position[:, None] - window)
        k_by = 1.0
        v_by = 1.0
        if PACKED:
            stored = page * (KV_HEADS * PAGE) + inside
            k_by = scale_of(tl.load(k_scales + stored, mask=exists, other=0))
            v_by = scale_of(tl.load(v_scales + stored, mask=exists, other=0))
            keys = widen(keys, queries.dtype)
            values = widen(values, queries.dtype)
        best, total, acc = _fold(
            queries, keys, values, k_by, v_by, sees, best, total, acc, scale, softcap, SOFTCAP, True, PRECISION, PACKED
        )

    # The new tokens, from the projection: blocks that every row sees whole, then those on the diagonal.
    end = tl.minimum((tile + 1) * TOKENS, count)
    whole = tile * TOKENS // BLOCK * BLOCK
    start = 0
    if WINDOW:
        start = tl.maximum(tile * TOKENS + 1 - window, 0) // BLOCK * BLOCK
        whole = start
    if TREE:
        start = 0
        whole = 0
        end = tl.maximum(end, drawn_keys)
    new_k = k + head * k_head
    new_v = v + head * v_head
    rows = is_row[:, None]
    for at in tl.range(start, whole, BLOCK, num_stages=STAGES):
        source = (begin + at + n).to(tl.int64)
        if DIM == DIM_PAD:
            keys = tl.load(new_k + source[None, :] * k_token + d[:, None])
        else:
            keys = tl.load(new_k + source[None, :] * k_token + d[:, None], mask=d[:, None] < DIM, other=0.0)
        if V_DIM == V_PAD:
            values = tl.load(new_v + source[:, None] * v_token + dv[None, :])
        else:
            values = tl.load(new_v + source[:, None] * v_token + dv[None, :], mask=dv[None, :] < V_DIM, other=0.0)
        best, total, acc = _fold(
            queries, keys, values, 1.0, 1.0, rows, best, total, acc, scale, softcap, SOFTCAP, False, PRECISION, False
        )
    for at in tl.range(whole, end, BLOCK, num_stages=1):
        j = at + n
        source = (begin + j).to(tl.int64)
        exists = j < count
        keys = tl.load(
            new_k + source[None, :] * k_token + d[:, None],
            mask=exists[None, :] & (d[:, None] < DIM),
            other=0.0,
        )
        values = tl.load(
            new_v + source[:, None] * v_token + dv[None, :],
            mask=exists[:, None] & (dv[None, :] < V_DIM),
            other=0.0,
        )
        sees = is_row[:, None] & (j[None, :] <= token[:, None])
        reached = past + j
        if TREE:
            drawn = tl.load(
                trees + mask_at + token[:, None].to(tl.int64) * count + j[None, :],
                mask=is_row[:, None] & (j[None, :] < drawn_keys),
                other=0,
            )
            sees = (drawn != 0) | (sees & (j[None, :] >= drawn_keys))
            reached = tl.load(positions + source, mask=exists, other=0).to(tl.int32)
        if WINDOW:
            sees = sees & (reached[None, :] > position[:, None] - window)
        best, total, acc = _fold(
            queries, keys, values, 1.0, 1.0, sees, best, total, acc, scale, softcap, SOFTCAP, True, PRECISION, False
        )
    to = out + (where * KV_HEADS * GROUP + heads)[:, None] * V_DIM + dv[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None] & (dv[None, :] < V_DIM))


__all__ = ["prefill", "store"]
