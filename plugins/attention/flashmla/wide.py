"""The decode kernel for many heads: 64 query rows against one request's latent pages, on Hopper's tensor cores.

A program holds 64 heads and walks through its part of the line of all blocks (see `schedule`). Its warps have roles:

- four *score* warps: scores, softmax, and the left 256 columns of the output;
- four *value* warps: the right 256 columns;
- one *copy* warp: asks for pages by TMA, two blocks of 64 tokens ahead.

The softmax weights of a block go into the place of its rope columns, which nobody needs after the scores. While the
score warps are busy with one, the value warps' product is on the tensor cores.
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
    q_left_from, q_rope_from, left_from, rope_from, q_left, q_right, q_rope, left, right, rope,
    q_full, q_free, left_full, left_free, right_full, right_free,
    block_tables, table_row, starts, seq_lens, first, last, low, high, row0, HEADS: gl.constexpr,
):  # fmt: skip
    n = 0
    turn = 0
    for r in range(first, last):
        begin, end, _ = span(r, low, high, starts, seq_lens)
        if begin < end:
            mbarrier.wait(q_free, (turn & 1) ^ 1)
            mbarrier.expect(q_full, 64 * 576 * 2)
            copy_tile(q_left_from, [r * HEADS + row0, 0], q_full, q_left)
            copy_tile(q_left_from, [r * HEADS + row0, 256], q_full, q_right)
            copy_tile(q_rope_from, [r * HEADS + row0, 512], q_full, q_rope)
            turn += 1
            for i in range(begin, end):
                page = gl.load(block_tables + r.to(gl.int64) * table_row + block_of(i, begin, end)) * 64
                s = n & 1
                phase = ((n >> 1) & 1) ^ 1
                mbarrier.wait(left_free.index(s), phase)
                mbarrier.expect(left_full.index(s), 64 * 256 * 2)
                copy_tile(left_from, [page, 0], left_full.index(s), left.index(s))
                mbarrier.wait(right_free.index(s), phase)
                mbarrier.expect(right_full.index(s), 64 * 320 * 2)
                copy_tile(left_from, [page, 256], right_full.index(s), right.index(s))
                copy_tile(rope_from, [page, 512], right_full.index(s), rope.index(s))
                n += 1


@gluon.jit
def _write(acc, inverse, out, partial, r, slot, whole, row0, COLUMN: gl.constexpr, HEADS: gl.constexpr):
    """Divide by the sums and put 256 columns where they belong: the result, or a part of it to be merged."""
    OUT: gl.constexpr = acc.type.layout
    heads = row0 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    at = (heads * 512)[:, None] + COLUMN + gl.arange(0, 256, gl.SliceLayout(0, OUT))[None, :]
    value = acc * inverse[:, None]
    if whole:
        gl.store(out + r.to(gl.int64) * (HEADS * 512) + at, value.to(gl.bfloat16), mask=(heads < HEADS)[:, None])
    else:
        gl.store(partial + slot.to(gl.int64) * (HEADS * 512) + at, value, mask=(heads < HEADS)[:, None])


@gluon.jit
def _scores(q_left, q_right, q_rope, left, right, rope, left_full, right_full, s, phase):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = gl.zeros((64, 64), gl.float32, S)
    mbarrier.wait(left_full.index(s), phase)
    x = warpgroup_mma(q_left, left.index(s).permute((1, 0)), x, use_acc=False, is_async=True)
    mbarrier.wait(right_full.index(s), phase)
    x = warpgroup_mma(q_right, right.index(s).permute((1, 0)), x, is_async=True)
    return warpgroup_mma(q_rope, rope.index(s).permute((1, 0)), x, is_async=True)


@gluon.jit
def _score_side(
    q_left, q_right, q_rope, left, right, rope, shrink, sums,
    q_full, q_free, left_full, left_free, right_full, weights_full, sums_full, sums_free,
    out, partial, partial_lse, starts, seq_lens, first, last, low, high, slot0, row0, scale,
    HEADS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    column = gl.arange(0, 64, gl.SliceLayout(0, S))
    n = 0
    turn = 0
    for r in range(first, last):
        begin, end, blocks = span(r, low, high, starts, seq_lens)
        if begin < end:
            filled = gl.load(seq_lens + r) - (end - 1) * 64
            s = n & 1
            mbarrier.wait(q_full, turn & 1)
            x = _scores(q_left, q_right, q_rope, left, right, rope, left_full, right_full, s, (n >> 1) & 1)
            x = warpgroup_mma_wait(0, deps=[x])
            x = gl.where((column < filled)[None, :], x * scale, float("-inf"))
            best = gl.max(x, 1)
            weights = gl.exp2(x - best[:, None])
            total = gl.sum(weights, 1)
            rope.index(s).store(weights.to(gl.bfloat16))
            shrink.index(s).store(gl.full((64,), 1.0, gl.float32, gl.SliceLayout(1, S)))
            if filled < 64:
                clear_rows(left.index(s), filled, 256)
            fence_async_shared()
            mbarrier.arrive(weights_full.index(s))
            acc = gl.zeros((64, 256), gl.float32, OUT)
            for _ in range(1, end - begin):
                n += 1
                t = n & 1
                acc = warpgroup_mma(rope.index(s), left.index(s), acc, is_async=True)
                y = _scores(q_left, q_right, q_rope, left, right, rope, left_full, right_full, t, (n >> 1) & 1)
                acc = warpgroup_mma_wait(3, deps=[acc])
                mbarrier.arrive(left_free.index(s))
                x = warpgroup_mma_wait(0, deps=[y])
                higher = gl.maximum(best, gl.max(x, 1) * scale)
                fade = gl.exp2(best - higher)
                weights = gl.exp2(x * scale - higher[:, None])
                total = total * fade + gl.sum(weights, 1)
                best = higher
                rope.index(t).store(weights.to(gl.bfloat16))
                shrink.index(t).store(fade)
                fence_async_shared()
                mbarrier.arrive(weights_full.index(t))
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
                s = t
            mbarrier.arrive(q_free)
            acc = warpgroup_mma(rope.index(s), left.index(s), acc, is_async=True)
            inverse = 1.0 / total
            mbarrier.wait(sums_free, (turn & 1) ^ 1)
            sums.store(inverse)
            mbarrier.arrive(sums_full)
            whole = end - begin == blocks
            slot = slot0 + gl.where(r == first, 0, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(left_free.index(s))
            _write(
                acc, gl.convert_layout(inverse, gl.SliceLayout(1, OUT)), out, partial, r, slot, whole, row0, 0, HEADS
            )
            if whole == 0:
                heads = row0 + gl.arange(0, 64, gl.SliceLayout(1, S))
                gl.store(partial_lse + slot * HEADS + heads, best + gl.log2(total), mask=heads < HEADS)
            n += 1
            turn += 1


@gluon.jit
def _value_side(
    right, rope, shrink, sums, right_free, weights_full, sums_full, sums_free,
    out, partial, starts, seq_lens, first, last, low, high, slot0, row0,
    HEADS: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    n = 0
    turn = 0
    for r in range(first, last):
        begin, end, blocks = span(r, low, high, starts, seq_lens)
        if begin < end:
            filled = gl.load(seq_lens + r) - (end - 1) * 64
            mbarrier.wait(weights_full.index(n & 1), (n >> 1) & 1)
            if filled < 64:
                clear_rows(right.index(n & 1), filled, 256)
                fence_async_shared()
            acc = gl.zeros((64, 256), gl.float32, OUT)
            for _ in range(begin, end):
                s = n & 1
                mbarrier.wait(weights_full.index(s), (n >> 1) & 1)
                acc = acc * shrink.index(s).load(gl.SliceLayout(1, OUT))[:, None]
                acc = warpgroup_mma(rope.index(s), right.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(right_free.index(s))
                n += 1
            mbarrier.wait(sums_full, turn & 1)
            inverse = sums.load(gl.SliceLayout(1, OUT))
            mbarrier.arrive(sums_free)
            slot = slot0 + gl.where(r == first, 0, 1)
            _write(acc, inverse, out, partial, r, slot, end - begin == blocks, row0, 256, HEADS)
            turn += 1


@gluon.jit(do_not_specialize=["table_row", "requests", "scale"])
def wide(
    q_left_from, q_rope_from, left_from, rope_from, out, partial, partial_lse,
    starts, firsts, seq_lens, block_tables, table_row, requests, scale,
    HEADS: gl.constexpr, ROW_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (part of the line, block of 64 heads); see `schedule.line` for `starts` and `firsts`.

    Descriptors: queries [requests * HEADS, 576] in tiles of [64, 256] and [64, 64], latent rows [pages * 64, 576] in
    the same. out bfloat16 [requests, HEADS, 512]; partial float32 [2 * parts, HEADS, 512], partial_lse float32
    [2 * parts, HEADS], in units of log2. `scale` carries log2(e).
    """
    if PDL:
        cuda.gdc_launch_dependents()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], tile)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], tile)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], tile)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], tile)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    shrink = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    sums = gl.allocate_shared_memory(gl.float32, [64], plain)
    pair: gl.constexpr = mbarrier.MBarrierLayout()
    left_full = gl.allocate_shared_memory(gl.int64, [2, 1], pair)
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], pair)
    right_full = gl.allocate_shared_memory(gl.int64, [2, 1], pair)
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], pair)
    weights_full = gl.allocate_shared_memory(gl.int64, [2, 1], pair)
    others = gl.allocate_shared_memory(gl.int64, [4, 1], pair)
    for i in gl.static_range(2):
        mbarrier.init(left_full.index(i), 1)
        mbarrier.init(left_free.index(i), 1)
        mbarrier.init(right_full.index(i), 1)
        mbarrier.init(right_free.index(i), 1)
        mbarrier.init(weights_full.index(i), 1)
    for i in gl.static_range(4):
        mbarrier.init(others.index(i), 1)
    q_full, q_free = others.index(0), others.index(1)
    sums_full, sums_free = others.index(2), others.index(3)
    fence_async_shared()
    if PDL:
        cuda.gdc_wait()
    part = gl.program_id(0) // ROW_BLOCKS
    row0 = gl.program_id(0) % ROW_BLOCKS * 64
    payload = gl.load(starts + requests + 1)
    low = part * payload
    high = low + payload
    first = gl.load(firsts + part)
    last = gl.minimum(gl.load(firsts + part + 1) + 1, requests)
    slot0 = part * 2
    gl.warp_specialize(
        [
            (_score_side, (
                q_left, q_right, q_rope, left, right, rope, shrink, sums,
                q_full, q_free, left_full, left_free, right_full, weights_full, sums_full, sums_free,
                out, partial, partial_lse, starts, seq_lens, first, last, low, high, slot0, row0, scale,
                HEADS,
            )),
            (_value_side, (
                right, rope, shrink, sums, right_free, weights_full, sums_full, sums_free,
                out, partial, starts, seq_lens, first, last, low, high, slot0, row0, HEADS,
            )),
            (_copy, (
                q_left_from, q_rope_from, left_from, rope_from, q_left, q_right, q_rope, left, right, rope,
                q_full, q_free, left_full, left_free, right_full, right_free,
                block_tables, table_row, starts, seq_lens, first, last, low, high, row0, HEADS,
            )),
        ],
        [4, 1],
        [216, 32],
    )  # fmt: skip


__all__ = ["wide"]
