"""Long prompts on compute capability 9.0: tiles whose products run while the softmax is taken.

The same mathematics as `prefill` for causal batches, written in Gluon, Triton's lower language: keys and values come by
TMA, and the product of one block's scores is under way with that of the weights and values of the block before (the
schedule of FlashAttention-3, Shah et al., 2024). Reads keys that lie in one piece: from the projection where nothing
precedes them, else from where `gather` has put them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, attr-defined"

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Triton 3.6's name is the longer one."""


@gluon.jit
def _send(desc, row, column, bars, buffers, slot, pred):
    """Ask for a block of rows to come into a slot; its barrier tells."""
    mbarrier.expect(bars.index(slot), desc.block_type.nbytes, pred=pred)
    _copy(desc, [row, column], bars.index(slot), buffers.index(slot), pred=pred)


@gluon.jit
def _soften(scores, best, total, scale):
    """Weights of one block, and the running maximum and sum; also by how much what was summed before shrinks."""
    peak = gl.maximum(best, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - peak[:, None])
    shrink = gl.exp2(best - peak)
    return weights, peak, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit(do_not_specialize=["first_request", "requests"])
def prefill_tiles(
    q_desc,
    k_desc,
    v_desc,
    out,
    query_start,
    pasts,
    first_request,
    requests,
    scale,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    PAST: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One tile of ROWS tokens for one query head; program (head, tile from the last on, for those take longest).

    The descriptors are of q, k, v as [T, heads * width] in blocks of [ROWS, DIM], [BLOCK, DIM] and [BLOCK, V_DIM];
    ROWS is BLOCK. out [T, HEADS, V_DIM] dense; `first_request`, `requests` and tiles as for `prefill`; `scale` in
    units of log2. With PAST, k and v are those of `gather`, and pasts int32 [R, 3] says of each request which block is
    its first, how many precede its new tokens, and how many rows of the first block are none.
    """
    gl.static_assert(ROWS == BLOCK)
    head = gl.program_id(0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    base = gl.load(query_start + first_request)
    low = first_request
    high = requests
    while high - low > 1:  # the last request whose first tile is not beyond this one
        middle = (low + high) // 2
        if (gl.load(query_start + middle) - base) // ROWS + middle - first_request <= tile:
            low = middle
        else:
            high = middle
    start = gl.load(query_start + low)
    count = gl.load(query_start + low + 1) - start
    tile -= (start - base) // ROWS + low - first_request
    if tile * ROWS >= count:
        return

    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V_DIM, 16])
    weighing: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    line: gl.constexpr = gl.SliceLayout(1, mma)
    queries = gl.allocate_shared_memory(q_desc.dtype, [1, ROWS, DIM], q_desc.layout)
    keys = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK, DIM], k_desc.layout)
    values = gl.allocate_shared_memory(v_desc.dtype, [2, BLOCK, V_DIM], v_desc.layout)
    q_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar.index(0), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(k_bars.index(slot), count=1)
        mbarrier.init(v_bars.index(slot), count=1)

    # Blocks are taken from the diagonal towards the first token: block i begins at row top - i * BLOCK.
    k_at = head // GROUP * DIM
    v_at = head // GROUP * V_DIM
    last = tile
    top = start + tile * BLOCK
    pad = 0
    if PAST:
        last += gl.load(pasts + low * 3 + 1)
        top = (gl.load(pasts + low * 3) + last) * BLOCK
        pad = gl.load(pasts + low * 3 + 2)
    _send(q_desc, start + tile * ROWS, head * DIM, q_bar, queries, 0, True)
    _send(k_desc, top, k_at, k_bars, keys, 0, True)
    _send(v_desc, top, v_at, v_bars, values, 0, True)
    _send(k_desc, top - BLOCK, k_at, k_bars, keys, 1, last > 0)
    _send(v_desc, top - BLOCK, v_at, v_bars, values, 1, last > 0)
    query = queries.index(0)
    mbarrier.wait(q_bar.index(0), 0)
    mbarrier.wait(k_bars.index(0), 0)
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, mma)
    scores = warpgroup_mma(query, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _send(k_desc, top - 2 * BLOCK, k_at, k_bars, keys, 0, last > 1)
    row = gl.arange(0, ROWS, line)
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, mma))
    scores = gl.where(column[None, :] <= row[:, None], scores, float("-inf"))
    best = gl.full([ROWS], float("-inf"), gl.float32, line)
    total = gl.zeros([ROWS], gl.float32, line)
    weights, best, total, _shrink = _soften(scores, best, total, scale)
    weights = gl.convert_layout(weights.to(v_desc.dtype), weighing)
    acc = gl.zeros([ROWS, V_DIM], gl.float32, summed)
    for i in range(1, last + 1):
        mbarrier.wait(k_bars.index(i % 2), i // 2 & 1)
        coming = warpgroup_mma(query, keys.index(i % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_bars.index((i - 1) % 2), (i - 1) // 2 & 1)
        adding = warpgroup_mma(weights, values.index((i - 1) % 2), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[coming])
        _send(k_desc, top - (i + 2) * BLOCK, k_at, k_bars, keys, i % 2, i + 2 <= last)
        if PAST:
            scores = gl.where(column[None, :] >= gl.where(i == last, pad, 0), scores, float("-inf"))
        fresh, best, total, shrink = _soften(scores, best, total, scale)
        acc, weights = warpgroup_mma_wait(0, deps=[adding, weights])
        _send(v_desc, top - (i + 1) * BLOCK, v_at, v_bars, values, (i - 1) % 2, i + 1 <= last)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, summed))[:, None]
        weights = gl.convert_layout(fresh.to(v_desc.dtype), weighing)
    mbarrier.wait(v_bars.index(last % 2), last // 2 & 1)
    adding = warpgroup_mma(weights, values.index(last % 2), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[adding, weights])
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, summed))[:, None]

    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_DIM, V_DIM // 8], [num_warps, 1], [1, 0])
    rows = gl.convert_layout(acc.to(out.dtype.element_ty), lanes)
    token = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, lanes))
    d = gl.arange(0, V_DIM, gl.SliceLayout(0, lanes))
    to = out + ((start + token).to(gl.int64) * (HEADS * V_DIM) + head * V_DIM)[:, None] + d[None, :]
    gl.store(to, rows, mask=(token < count)[:, None])


def descriptor(x: Tensor, rows: int) -> Any:
    """x [T, heads, width] for the copy engine, in blocks of `rows` tokens of one head; heads lie side by side."""
    tokens, heads, width = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], getattr(gl, str(x.dtype).removeprefix("torch.")))
    return TensorDescriptor(x, [tokens, heads * width], [x.stride(0), 1], [rows, width], layout)


__all__ = ["descriptor", "prefill_tiles"]
