"""The decode kernel for groups of 16 heads: tokens are the rows, so that no tensor core works on rows that are none.

Scores are computed as K Q^T [64 tokens, 16 heads] and outputs as V^T P^T [512 columns, 16 heads]: with so few heads the
kernel is bound by reading the cache, and all that counts is how much is on its way. Four warps compute and one copies,
several blocks ahead. The softmax weights of a block go into the place of its rope columns.

Packed rows (8 bits, see `engine.latent.rows`) are copied as they are; four more warps turn them into bfloat16 tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from engine.plugins.attention.flashmla.schedule import block_of, span
from engine.plugins.attention.flashmla.tiles import clear_rows, copy_tile


@gluon.jit
def _queries(q_left_from, q_rope_from, q_left, q_right, q_rope, q_full, row):
    mbarrier.expect(q_full, 16 * 576 * 2)
    copy_tile(q_left_from, [row, 0], q_full, q_left)
    copy_tile(q_left_from, [row, 256], q_full, q_right)
    copy_tile(q_rope_from, [row, 512], q_full, q_rope)


@gluon.jit
def _copy(
    q_left_from, q_rope_from, left_from, rope_from, q_left, q_right, q_rope, left, right, rope,
    q_full, q_free, full, free, rope_full, rope_free,
    block_tables, table_row, starts, seq_lens, first, last, low, high, row0,
    HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    n = 0
    turn = 0
    for r in range(first, last):
        begin, end, _ = span(r, low, high, starts, seq_lens)
        if begin < end:
            mbarrier.wait(q_free, (turn & 1) ^ 1)
            _queries(q_left_from, q_rope_from, q_left, q_right, q_rope, q_full, r * HEADS + row0)
            turn += 1
            for i in range(begin, end):
                page = gl.load(block_tables + r.to(gl.int64) * table_row + block_of(i, begin, end)) * 64
                s = n % STAGES
                mbarrier.wait(free.index(s), ((n // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(s), 64 * 512 * 2)
                copy_tile(left_from, [page, 0], full.index(s), left.index(s))
                copy_tile(left_from, [page, 256], full.index(s), right.index(s))
                mbarrier.wait(rope_free.index(n & 1), ((n >> 1) & 1) ^ 1)
                mbarrier.expect(rope_full.index(n & 1), 64 * 64 * 2)
                copy_tile(rope_from, [page, 512], rope_full.index(n & 1), rope.index(n & 1))
                n += 1


@gluon.jit
def _copy_packed(
    q_left_from, q_rope_from, raw_from, rope_from, q_left, q_right, q_rope, raw, rope,
    q_full, q_free, raw_full, raw_free, rope_full, rope_free,
    block_tables, table_row, starts, seq_lens, first, last, low, high, row0, HEADS: gl.constexpr,
):  # fmt: skip
    n = 0
    turn = 0
    for r in range(first, last):
        begin, end, _ = span(r, low, high, starts, seq_lens)
        if begin < end:
            mbarrier.wait(q_free, (turn & 1) ^ 1)
            _queries(q_left_from, q_rope_from, q_left, q_right, q_rope, q_full, r * HEADS + row0)
            turn += 1
            for i in range(begin, end):
                page = gl.load(block_tables + r.to(gl.int64) * table_row + block_of(i, begin, end)) * 64
                s = n & 1
                phase = ((n >> 1) & 1) ^ 1
                mbarrier.wait(raw_free.index(s), phase)
                mbarrier.expect(raw_full.index(s), 64 * 512)
                copy_tile(raw_from, [page, 0], raw_full.index(s), raw.index(s))
                mbarrier.wait(rope_free.index(s), phase)
                mbarrier.expect(rope_full.index(s), 64 * 64 * 2)
                copy_tile(rope_from, [page, 264], rope_full.index(s), rope.index(s))
                n += 1


@gluon.jit
def _unpack(
    scales, raw, left, right, raw_full, raw_free, full, free,
    block_tables, table_row, starts, seq_lens, first, last, low, high,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = 0
    for r in range(first, last):
        begin, end, _ = span(r, low, high, starts, seq_lens)
        if begin < end:
            filled = gl.load(seq_lens + r) - (end - 1) * 64
            for i in range(begin, end):
                page = gl.load(block_tables + r.to(gl.int64) * table_row + block_of(i, begin, end))
                exists = row < gl.where(i == begin, filled, 64)
                at = scales + (page.to(gl.int64) * 64 + row) * 164 + 128
                scale0 = gl.load(at, mask=exists, other=0.0)
                scale1 = gl.load(at + 1, mask=exists, other=0.0)
                scale2 = gl.load(at + 2, mask=exists, other=0.0)
                scale3 = gl.load(at + 3, mask=exists, other=0.0)
                s = n & 1
                mbarrier.wait(raw_full.index(s), (n >> 1) & 1)
                mbarrier.wait(free.index(s), ((n >> 1) & 1) ^ 1)
                for part in gl.static_range(8):
                    if part < 2:
                        scale = scale0
                    elif part < 4:
                        scale = scale1
                    elif part < 6:
                        scale = scale2
                    else:
                        scale = scale3
                    small = raw.index(s).slice(part * 64, 64, dim=1).load(layout).to(gl.float32)
                    wide = gl.where(exists[:, None], small * scale[:, None], 0.0).to(gl.bfloat16)
                    half = left if part < 4 else right
                    half.index(s).slice(part % 4 * 64, 64, dim=1).store(wide)
                fence_async_shared()
                mbarrier.arrive(raw_free.index(s))
                mbarrier.arrive(full.index(s))
                n += 1


@gluon.jit
def _put(acc, inverse, out, partial, r, slot, whole, row0, COLUMN: gl.constexpr, HEADS: gl.constexpr):
    OUT: gl.constexpr = acc.type.layout
    head = row0 + gl.arange(0, 16, gl.SliceLayout(0, OUT))[None, :]
    at = head * 512 + COLUMN + gl.arange(0, 256, gl.SliceLayout(1, OUT))[:, None]
    value = acc * inverse[None, :]
    if whole:
        gl.store(out + r.to(gl.int64) * (HEADS * 512) + at, value.to(gl.bfloat16), mask=head < HEADS)
    else:
        gl.store(partial + slot.to(gl.int64) * (HEADS * 512) + at, value, mask=head < HEADS)


@gluon.jit
def _compute(
    q_left, q_right, q_rope, left, right, rope, q_full, q_free, full, free, rope_full, rope_free,
    out, partial, partial_lse, starts, seq_lens, first, last, low, high, slot0, row0, scale,
    HEADS: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    token = gl.arange(0, 64, gl.SliceLayout(1, S))
    n = 0
    turn = 0
    for r in range(first, last):
        begin, end, blocks = span(r, low, high, starts, seq_lens)
        if begin < end:
            filled = gl.load(seq_lens + r) - (end - 1) * 64
            best = gl.full((16,), float("-inf"), gl.float32, gl.SliceLayout(0, S))
            total = gl.zeros((16,), gl.float32, gl.SliceLayout(0, S))
            acc_left = gl.zeros((256, 16), gl.float32, S)
            acc_right = gl.zeros((256, 16), gl.float32, S)
            mbarrier.wait(q_full, turn & 1)
            for i in range(begin, end):
                s = n % STAGES
                two = n & 1
                x = gl.zeros((64, 16), gl.float32, S)
                mbarrier.wait(full.index(s), (n // STAGES) & 1)
                x = warpgroup_mma(left.index(s), q_left.permute((1, 0)), x, use_acc=False, is_async=True)
                x = warpgroup_mma(right.index(s), q_right.permute((1, 0)), x, is_async=True)
                mbarrier.wait(rope_full.index(two), (n >> 1) & 1)
                x = warpgroup_mma(rope.index(two), q_rope.permute((1, 0)), x, is_async=True)
                x = warpgroup_mma_wait(0, deps=[x]) * scale
                if i == begin:
                    x = gl.where((token < filled)[:, None], x, float("-inf"))
                    if not PACKED and filled < 64:
                        clear_rows(left.index(s), filled, 256)
                        clear_rows(right.index(s), filled, 256)
                higher = gl.maximum(best, gl.max(x, 0))
                fade = gl.exp2(best - higher)
                weights = gl.exp2(x - higher[None, :])
                total = total * fade + gl.sum(weights, 0)
                best = higher
                place = rope.index(two).slice(0, 16, dim=0).permute((1, 0))
                place.store(weights.to(gl.bfloat16))
                acc_left = acc_left * fade[None, :]
                acc_right = acc_right * fade[None, :]
                fence_async_shared()
                acc_left = warpgroup_mma(left.index(s).permute((1, 0)), place, acc_left, is_async=True)
                acc_right = warpgroup_mma(right.index(s).permute((1, 0)), place, acc_right, is_async=True)
                acc_left, acc_right = warpgroup_mma_wait(0, deps=[acc_left, acc_right])
                mbarrier.arrive(free.index(s))
                mbarrier.arrive(rope_free.index(two))
                n += 1
            mbarrier.arrive(q_free)
            turn += 1
            whole = end - begin == blocks
            slot = slot0 + gl.where(r == first, 0, 1)
            _put(acc_left, 1.0 / total, out, partial, r, slot, whole, row0, 0, HEADS)
            _put(acc_right, 1.0 / total, out, partial, r, slot, whole, row0, 256, HEADS)
            if whole == 0:
                head = row0 + gl.arange(0, 16, gl.SliceLayout(0, S))
                gl.store(partial_lse + slot * HEADS + head, best + gl.log2(total), mask=head < HEADS)


@gluon.jit(do_not_specialize=["table_row", "requests", "scale"])
def narrow(
    q_left_from, q_rope_from, left_from, rope_from, scales, out, partial, partial_lse,
    starts, firsts, seq_lens, block_tables, table_row, requests, scale,
    HEADS: gl.constexpr, ROW_BLOCKS: gl.constexpr, PACKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (part of the line, group of 16 heads). As `wide.wide`, but for tiles of 16 query rows.

    PACKED: `left_from` describes float8 elements [pages * 64, 656] in tiles of [64, 512], `rope_from` the same bytes
    as bfloat16 [pages * 64, 328], and `scales` as float32.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    STAGES: gl.constexpr = 2 if PACKED else 3
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [16, 256], tile)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [16, 256], tile)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [16, 64], tile)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], tile)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], tile)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    pairs = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    rope_full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    rope_free = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(rope_full.index(i), 1)
        mbarrier.init(rope_free.index(i), 1)
        mbarrier.init(pairs.index(i), 1)
    q_full, q_free = pairs.index(0), pairs.index(1)
    if PACKED:
        raw = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 512], gl.NVMMASharedLayout(128, 8, 2))
        raw_full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
        raw_free = gl.allocate_shared_memory(gl.int64, [2, 1], one)
        for i in gl.static_range(2):
            mbarrier.init(raw_full.index(i), 1)
            mbarrier.init(raw_free.index(i), 1)
    fence_async_shared()
    if PDL:
        cuda.gdc_wait()
    part = gl.program_id(0) // ROW_BLOCKS
    row0 = gl.program_id(0) % ROW_BLOCKS * 16
    payload = gl.load(starts + requests + 1)
    low = part * payload
    high = low + payload
    first = gl.load(firsts + part)
    last = gl.minimum(gl.load(firsts + part + 1) + 1, requests)
    slot0 = part * 2
    if PACKED:
        gl.warp_specialize(
            [
                (_compute, (
                    q_left, q_right, q_rope, left, right, rope, q_full, q_free, full, free, rope_full, rope_free,
                    out, partial, partial_lse, starts, seq_lens, first, last, low, high, slot0, row0, scale,
                    HEADS, STAGES, PACKED,
                )),
                (_unpack, (
                    scales, raw, left, right, raw_full, raw_free, full, free,
                    block_tables, table_row, starts, seq_lens, first, last, low, high,
                )),
                (_copy_packed, (
                    q_left_from, q_rope_from, left_from, rope_from, q_left, q_right, q_rope, raw, rope,
                    q_full, q_free, raw_full, raw_free, rope_full, rope_free,
                    block_tables, table_row, starts, seq_lens, first, last, low, high, row0, HEADS,
                )),
            ],
            [4, 1],
            [168, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    q_left, q_right, q_rope, left, right, rope, q_full, q_free, full, free, rope_full, rope_free,
                    out, partial, partial_lse, starts, seq_lens, first, last, low, high, slot0, row0, scale,
                    HEADS, STAGES, PACKED,
                )),
                (_copy, (
                    q_left_from, q_rope_from, left_from, rope_from, q_left, q_right, q_rope, left, right, rope,
                    q_full, q_free, full, free, rope_full, rope_free,
                    block_tables, table_row, starts, seq_lens, first, last, low, high, row0, HEADS, STAGES,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip


__all__ = ["narrow"]
