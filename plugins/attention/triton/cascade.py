"""A prefix that several decodes share is read once for all of them: their queries meet its keys as one tile.

Requests whose block tables begin with the same pages make a group; the device finds the groups itself, once a step, so
that a captured graph stays right while requests come and go. What a tile found is left as parts, which `decode` adds to
a request's own: the merge is exact, as that of split keys is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from engine.ops.dependent import begin, wait
from engine.plugins.attention.triton.packed import scale_of, widen
from engine.plugins.attention.triton.rotate import angles, load_rotated

LEAST_KEYS: Final = 256
"""Keys that a group must share at least, in whole pages."""

LEAST_MEMBERS: Final = 4
"""Requests that make a group."""

SPLITS: Final = 16
"""Parts that a shared prefix is cut into at most."""


@triton.jit(do_not_specialize=["requests", "table_row"])
def find_groups(
    seq_lens,
    block_tables,
    groups,
    members,
    requests,
    table_row,
    REQUESTS: tl.constexpr,
    KEY: tl.constexpr,
    LEAST: tl.constexpr,
    PAGE: tl.constexpr,
    CLEAR: tl.constexpr,
    CLEAR_PAD: tl.constexpr,
):
    """The group of one request; program (request).

    Requests belong together if page KEY of their tables is the same and full. groups int32 [3, requests]: the first
    of the group (-1: none), the rank within it, and how many leading pages are those of the first. Clears CLEAR
    entries of `members`.
    """
    r = tl.program_id(0)
    clear = tl.arange(0, CLEAR_PAD)
    tl.store(members + r * CLEAR + clear, -1, mask=clear < CLEAR)
    other = tl.arange(0, REQUESTS)
    lens = tl.load(seq_lens + other, mask=other < requests, other=0)
    can = lens > (KEY + 1) * PAGE
    keys = tl.load(block_tables + other.to(tl.int64) * table_row + KEY, mask=can, other=-1)
    length = tl.load(seq_lens + r)
    table = block_tables + r.to(tl.int64) * table_row
    mine = -2
    if length > (KEY + 1) * PAGE:
        mine = tl.load(table + KEY)
    alike = keys == mine
    first = tl.min(tl.where(alike, other, REQUESTS), 0)
    if tl.sum(alike.to(tl.int32), 0) < LEAST:
        tl.store(groups + r, -1)
        tl.store(groups + requests + r, 0)
        tl.store(groups + 2 * requests + r, 0)
    else:
        of_first = block_tables + first.to(tl.int64) * table_row
        pages = (tl.minimum(length, tl.load(seq_lens + first)) - 1) // PAGE
        i = tl.arange(0, 256)
        for at in range(0, pages, 256):
            here = at + i < pages
            ours = tl.load(table + at + i, mask=here, other=0)
            theirs = tl.load(of_first + at + i, mask=here, other=0)
            pages = tl.minimum(pages, tl.min(tl.where(ours != theirs, at + i, 2147483647), 0))
        tl.store(groups + r, first)
        tl.store(groups + requests + r, tl.sum((alike & (other < r)).to(tl.int32), 0))
        tl.store(groups + 2 * requests + r, pages)


@triton.jit(do_not_specialize=["requests", "wanted"])
def list_groups(
    groups,
    members,
    tiles,
    own_start,
    shared_parts,
    requests,
    wanted,
    REQUESTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Give one request its place in a tile; program (request).

    members int32 [tiles, MEMBERS]: requests, -1 for none. tiles int32 [2 + tiles]: how many tiles and parts of each
    there are, then the keys of each tile. own_start, shared_parts int32 [requests]: keys that the tile reads for the
    request, and the parts that it leaves.
    """
    r = tl.program_id(0)
    other = tl.arange(0, REQUESTS)
    firsts = tl.load(groups + other, mask=other < requests, other=-1)
    ranks = tl.load(groups + requests + other, mask=other < requests, other=0)
    begins = (firsts >= 0) & (ranks % MEMBERS == 0)
    count = tl.sum(begins.to(tl.int32), 0)
    parts = tl.minimum(tl.maximum(wanted // tl.maximum(count, 1), 1), SPLITS)
    if r == 0:
        tl.store(tiles, count)
        tl.store(tiles + 1, parts)
    first = tl.load(groups + r)
    rank = tl.load(groups + requests + r)
    if first < 0:
        tl.store(own_start + r, 0)
        tl.store(shared_parts + r, 0)
    else:
        pages = tl.load(groups + 2 * requests + other, mask=other < requests, other=0)
        ours = firsts == first
        keys = tl.min(tl.where(ours, pages, 2147483647), 0) * PAGE
        before = begins & ((firsts < first) | (ours & (ranks < rank // MEMBERS * MEMBERS)))
        tile = tl.sum(before.to(tl.int32), 0)
        tl.store(members + tile * MEMBERS + rank % MEMBERS, r)
        tl.store(tiles + 2 + tile, keys)
        tl.store(own_start + r, keys)
        tl.store(shared_parts + r, parts)


@triton.jit(do_not_specialize=["table_row"])
def attend_shared(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    shared_out,
    shared_stats,
    members,
    tiles,
    block_tables,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_page,
    v_page,
    table_row,
    scale,
    softcap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    ROTATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Parts of tiles, one after the other: program (start, KV head).

    A tile has ROWS / PACK requests with PACK >= GROUP rows each. shared_out float32 [requests * SPLITS, heads, V_DIM]
    and shared_stats float32 [requests * SPLITS, heads, 2] get sums and (maximum, total) as in `decode`.
    """
    begin(EARLY)
    head = tl.program_id(1)
    count = tl.load(tiles)
    parts = tl.load(tiles + 1)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    dv = tl.arange(0, V_PAD)
    n = tl.arange(0, BLOCK)
    heads = head * GROUP + row % PACK
    wait(EARLY)
    for unit in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        tile = unit // parts
        here = members + tile * (ROWS // PACK)
        request = tl.load(here + row // PACK).to(tl.int64)
        is_row = (request >= 0) & (row % PACK < GROUP)
        table = block_tables + tl.load(here).to(tl.int64) * table_row
        keys_in_all = tl.load(tiles + 2 + tile)
        part = tl.cdiv(tl.cdiv(keys_in_all, parts), BLOCK) * BLOCK
        first = unit % parts * part
        end = tl.minimum(first + part, keys_in_all)
        is_query = is_row[:, None] & (d[None, :] < DIM)
        q_at = q + request[:, None] * q_token + heads[:, None] * q_head
        if ROTATE:
            position = tl.load(positions + request, mask=is_row, other=0)
            cos, sin = angles(cos_sin, position[:, None], d[None, :], DIM)
            queries = load_rotated(q_at, d[None, :], is_query, cos, sin, DIM)
        else:
            queries = tl.load(q_at + d[None, :], mask=is_query, other=0.0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_PAD], tl.float32)
        for at in tl.range(first, end, BLOCK, num_stages=STAGES):
            exists = at + n < end
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
            if PACKED:
                stored = page * (KV_HEADS * PAGE) + inside
                keys = widen(keys, queries.dtype)
                values = widen(values, queries.dtype)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            if PACKED:
                scores *= scale_of(tl.load(k_scales + stored, mask=exists, other=0))[None, :]
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
            scores = tl.where(exists[None, :], scores, float("-inf"))
            peak = tl.maximum(best, tl.max(scores, 1))  # every block has a key: never -inf
            weights = tl.exp2(scores - peak[:, None])
            shrink = tl.exp2(best - peak)
            total = total * shrink + tl.sum(weights, 1)
            if PACKED:
                weights *= scale_of(tl.load(v_scales + stored, mask=exists, other=0))[None, :]
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
            best = peak
        place = (request * SPLITS + unit % parts) * (KV_HEADS * GROUP) + heads
        to = shared_out + place[:, None] * V_DIM + dv[None, :]
        tl.store(to, acc, mask=is_row[:, None] & (dv[None, :] < V_DIM))
        tl.store(shared_stats + place * 2, best, mask=is_row)
        tl.store(shared_stats + place * 2 + 1, total, mask=is_row)


__all__ = ["LEAST_KEYS", "LEAST_MEMBERS", "SPLITS", "attend_shared", "find_groups", "list_groups"]
