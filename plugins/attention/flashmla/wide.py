"""The decode kernel for many heads: 64 query rows against one request's latent pages, on Hopper's tensor cores.

A program holds 64 heads and walks through its part of the line of all blocks (see `schedule`). Its warps have roles:

- four *score* warps: scores, softmax, and the left 256 columns of the output;
- four *value* warps: the right 256 columns;
- one *copy* warp: asks for pages by TMA, two blocks of 64 tokens ahead, in four tiles of 128 columns, each of which can
  be overwritten as soon as its own product is done.

The softmax weights of a block go into the place of its rope columns, which nobody needs after the scores. The value
warps hold the second of their two products back until the scores of the next block are through, so that it fills the
tensor cores while the score warps are busy with the next softmax.
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
def _copy(
    q_wide_from, q_rope_from, wide_from, rope_from, q_wide, q_rope, tiles, rope, q_full, q_free, full, free,
    block_tables, table_row, starts, seq_lens, first, last, begin, end, low, high, row0, HEADS: gl.constexpr,
):  # fmt: skip
    n = 0
    turn = 0
    for r in range(first, last):
        if r > first:
            begin, end, _blocks, _filled = span(r, low, high, starts, seq_lens)
        if begin < end:
            mbarrier.wait(q_free, (turn & 1) ^ 1)
            mbarrier.expect(q_full, 64 * 576 * 2)
            for part in gl.static_range(4):
                copy_tile(q_wide_from, [r * HEADS + row0, part * 128], q_full, q_wide.index(part))
            copy_tile(q_rope_from, [r * HEADS + row0, 512], q_full, q_rope)
            turn += 1
            for i in range(begin, end):
                page = gl.load(block_tables + r.to(gl.int64) * table_row + block_of(i, begin, end)) * 64
                s = n & 1
                phase = ((n >> 1) & 1) ^ 1
                for part in gl.static_range(4):
                    at = s * 4 + part
                    mbarrier.wait(free.index(at), phase)
                    mbarrier.expect(full.index(at), 64 * 128 * 2 if part < 3 else 64 * 192 * 2)
                    copy_tile(wide_from, [page, part * 128], full.index(at), tiles.index(at))
                copy_tile(rope_from, [page, 512], full.index(s * 4 + 3), rope.index(s))
                n += 1


@gluon.jit
def _write(acc, inverse, out, partial, r, slot, whole, row0, COLUMN: gl.constexpr, HEADS: gl.constexpr):
    """Divide by the sums and put 128 columns where they belong: the result, or a part of it to be merged."""
    OUT: gl.constexpr = acc.type.layout
    heads = row0 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    at = (heads * 512)[:, None] + COLUMN + gl.arange(0, 128, gl.SliceLayout(0, OUT))[None, :]
    value = acc * inverse[:, None]
    if whole:
        gl.store(out + r.to(gl.int64) * (HEADS * 512) + at, value.to(gl.bfloat16), mask=(heads < HEADS)[:, None])
    else:
        gl.store(partial + slot.to(gl.int64) * (HEADS * 512) + at, value, mask=(heads < HEADS)[:, None])


@gluon.jit
def _score(q_wide, tiles, full, x, s, phase, PART: gl.constexpr):
    """Add the products of 128 columns, when they have come."""
    mbarrier.wait(full.index(s * 4 + PART), phase)
    keys = tiles.index(s * 4 + PART).permute((1, 0))
    return warpgroup_mma(q_wide.index(PART), keys, x, use_acc=PART > 0, is_async=True)


@gluon.jit
def _score_side(
    q_wide, q_rope, tiles, rope, shrink, sums, q_full, q_free, full, free, weights_full, scores_done,
    sums_full, sums_free, out, partial, partial_lse, starts, seq_lens, first, last, begin, end, blocks, filled, low,
    high, slot0, row0, scale,
    HEADS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    column = gl.arange(0, 64, gl.SliceLayout(0, S))
    n = 0
    turn = 0
    for r in range(first, last):
        if r > first:
            begin, end, blocks, filled = span(r, low, high, starts, seq_lens)
        if begin < end:
            s = n & 1
            phase = (n >> 1) & 1
            mbarrier.wait(q_full, turn & 1)
            x = gl.zeros((64, 64), gl.float32, S)
            x = _score(q_wide, tiles, full, x, s, phase, 0)
            x = _score(q_wide, tiles, full, x, s, phase, 1)
            x = _score(q_wide, tiles, full, x, s, phase, 2)
            x = _score(q_wide, tiles, full, x, s, phase, 3)
            x = warpgroup_mma(q_rope, rope.index(s).permute((1, 0)), x, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            x = gl.where((column < filled)[None, :], x * scale, float("-inf"))
            best = gl.max(x, 1)
            weights = gl.exp2(x - best[:, None])
            total = gl.sum(weights, 1)
            rope.index(s).store(weights.to(gl.bfloat16))
            shrink.index(s).store(gl.full((64,), 1.0, gl.float32, gl.SliceLayout(1, S)))
            if filled < 64:
                clear_rows(tiles.index(s * 4), filled, 128)
                clear_rows(tiles.index(s * 4 + 1), filled, 128)
            fence_async_shared()
            mbarrier.arrive(weights_full.index(s))
            acc0 = gl.zeros((64, 128), gl.float32, OUT)
            acc1 = gl.zeros((64, 128), gl.float32, OUT)
            by = gl.full((64,), 1.0, gl.float32, gl.SliceLayout(1, OUT))
            for _ in range(1, end - begin):
                n += 1
                t = n & 1
                phase = (n >> 1) & 1
                acc0 = warpgroup_mma(rope.index(s), tiles.index(s * 4), acc0 * by[:, None], is_async=True)
                acc1 = warpgroup_mma(rope.index(s), tiles.index(s * 4 + 1), acc1 * by[:, None], is_async=True)
                y = gl.zeros((64, 64), gl.float32, S)
                y = _score(q_wide, tiles, full, y, t, phase, 0)
                y = _score(q_wide, tiles, full, y, t, phase, 1)
                acc0 = warpgroup_mma_wait(3, deps=[acc0])
                mbarrier.arrive(free.index(s * 4))
                y = _score(q_wide, tiles, full, y, t, phase, 2)
                acc1 = warpgroup_mma_wait(3, deps=[acc1])
                mbarrier.arrive(free.index(s * 4 + 1))
                y = _score(q_wide, tiles, full, y, t, phase, 3)
                y = warpgroup_mma(q_rope, rope.index(t).permute((1, 0)), y, is_async=True)
                x = warpgroup_mma_wait(0, deps=[y])
                mbarrier.arrive(scores_done)
                higher = gl.maximum(best, gl.max(x, 1) * scale)
                fade = gl.exp2(best - higher)
                weights = gl.exp2(x * scale - higher[:, None])
                total = total * fade + gl.sum(weights, 1)
                best = higher
                rope.index(t).store(weights.to(gl.bfloat16))
                shrink.index(t).store(fade)
                fence_async_shared()
                mbarrier.arrive(weights_full.index(t))
                by = gl.convert_layout(fade, gl.SliceLayout(1, OUT))
                s = t
            mbarrier.arrive(q_free)
            acc0 = warpgroup_mma(rope.index(s), tiles.index(s * 4), acc0 * by[:, None], is_async=True)
            acc1 = warpgroup_mma(rope.index(s), tiles.index(s * 4 + 1), acc1 * by[:, None], is_async=True)
            inverse = 1.0 / total
            mbarrier.wait(sums_free, (turn & 1) ^ 1)
            sums.store(inverse)
            mbarrier.arrive(sums_full)
            whole = end - begin == blocks
            slot = slot0 + gl.where(r == first, 0, 1)
            if whole == 0:
                heads = row0 + gl.arange(0, 64, gl.SliceLayout(1, S))
                gl.store(partial_lse + slot * HEADS + heads, best + gl.log2(total), mask=heads < HEADS)
            by = gl.convert_layout(inverse, gl.SliceLayout(1, OUT))
            acc0 = warpgroup_mma_wait(1, deps=[acc0])
            mbarrier.arrive(free.index(s * 4))
            _write(acc0, by, out, partial, r, slot, whole, row0, 0, HEADS)
            acc1 = warpgroup_mma_wait(0, deps=[acc1])
            mbarrier.arrive(free.index(s * 4 + 1))
            _write(acc1, by, out, partial, r, slot, whole, row0, 128, HEADS)
            n += 1
            turn += 1


@gluon.jit
def _value_side(
    tiles, rope, shrink, sums, free, weights_full, scores_done, sums_full, sums_free,
    out, partial, starts, seq_lens, first, last, begin, end, blocks, filled, low, high, slot0, row0,
    HEADS: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    n = 0
    turn = 0
    held = 0
    for r in range(first, last):
        if r > first:
            begin, end, blocks, filled = span(r, low, high, starts, seq_lens)
        if begin < end:
            mbarrier.wait(weights_full.index(n & 1), (n >> 1) & 1)
            if filled < 64:
                clear_rows(tiles.index((n & 1) * 4 + 2), filled, 128)
                clear_rows(tiles.index((n & 1) * 4 + 3), filled, 128)
                fence_async_shared()
            acc2 = gl.zeros((64, 128), gl.float32, OUT)
            acc3 = gl.zeros((64, 128), gl.float32, OUT)
            for i in range(begin, end):
                s = n & 1
                mbarrier.wait(weights_full.index(s), (n >> 1) & 1)
                by = shrink.index(s).load(gl.SliceLayout(1, OUT))[:, None]
                acc2 = warpgroup_mma(rope.index(s), tiles.index(s * 4 + 2), acc2 * by, is_async=True)
                acc3 = acc3 * by
                acc2 = warpgroup_mma_wait(0, deps=[acc2])
                mbarrier.arrive(free.index(s * 4 + 2))
                if i + 1 < end:
                    mbarrier.wait(scores_done, held & 1)
                    held += 1
                acc3 = warpgroup_mma(rope.index(s), tiles.index(s * 4 + 3), acc3, is_async=True)
                acc3 = warpgroup_mma_wait(0, deps=[acc3])
                mbarrier.arrive(free.index(s * 4 + 3))
                n += 1
            mbarrier.wait(sums_full, turn & 1)
            inverse = sums.load(gl.SliceLayout(1, OUT))
            mbarrier.arrive(sums_free)
            slot = slot0 + gl.where(r == first, 0, 1)
            _write(acc2, inverse, out, partial, r, slot, end - begin == blocks, row0, 256, HEADS)
            _write(acc3, inverse, out, partial, r, slot, end - begin == blocks, row0, 384, HEADS)
            turn += 1


@gluon.jit(do_not_specialize=["table_row", "requests", "scale"])
def wide(
    q_wide_from, q_rope_from, wide_from, rope_from, out, partial, partial_lse,
    starts, items, seq_lens, block_tables, table_row, requests, scale,
    HEADS: gl.constexpr, ROW_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (part of the line, block of 64 heads); see `schedule.line` for `starts` and `items`.

    Descriptors: queries [requests * HEADS, 576] in tiles of [64, 128] and [64, 64], latent rows [pages * 64, 576] in
    the same. out bfloat16 [requests, HEADS, 512]; partial float32 [2 * parts, HEADS, 512], partial_lse float32
    [2 * parts, HEADS], in units of log2. `scale` carries log2(e).
    """
    if PDL:
        cuda.gdc_launch_dependents()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_wide = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], tile)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [8, 64, 128], tile)  # stage * 4 + which 128 columns
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    shrink = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    sums = gl.allocate_shared_memory(gl.float32, [64], plain)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [8, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [8, 1], one)
    weights_full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    others = gl.allocate_shared_memory(gl.int64, [5, 1], one)
    for i in gl.static_range(8):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(weights_full.index(i), 1)
    for i in gl.static_range(5):
        mbarrier.init(others.index(i), 1)
    q_full, q_free = others.index(0), others.index(1)
    scores_done, sums_full, sums_free = others.index(2), others.index(3), others.index(4)
    fence_async_shared()
    part = gl.program_id(0) // ROW_BLOCKS
    row0 = gl.program_id(0) % ROW_BLOCKS * 64
    payload = gl.load(starts + requests + 1)
    low = part * payload
    high = low + payload
    first = gl.load(items + part * 8)
    last = gl.load(items + part * 8 + 1)
    begin = gl.load(items + part * 8 + 2)
    end = gl.load(items + part * 8 + 3)
    blocks = gl.load(items + part * 8 + 4)
    filled = gl.load(items + part * 8 + 5)
    slot0 = part * 2
    if PDL:
        cuda.gdc_wait()
    gl.warp_specialize(
        [
            (_score_side, (
                q_wide, q_rope, tiles, rope, shrink, sums, q_full, q_free, full, free, weights_full, scores_done,
                sums_full, sums_free, out, partial, partial_lse, starts, seq_lens, first, last, begin, end, blocks,
                filled, low, high, slot0, row0,
                scale, HEADS,
            )),
            (_value_side, (
                tiles, rope, shrink, sums, free, weights_full, scores_done, sums_full, sums_free,
                out, partial, starts, seq_lens, first, last, begin, end, blocks, filled, low, high, slot0, row0,
                HEADS,
            )),
            (_copy, (
                q_wide_from, q_rope_from, wide_from, rope_from, q_wide, q_rope, tiles, rope, q_full, q_free, full, free,
                block_tables, table_row, starts, seq_lens, first, last, begin, end, low, high, row0, HEADS,
            )),
        ],
        [4, 1],
        [216, 32],
    )  # fmt: skip


__all__ = ["wide"]
