"""The products of routed experts as Triton kernels: blocks of tokens that share an expert, its weight read once.

Imported only where a CUDA device was chosen.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.dependent import LINE, begin, fetch, wait

EACH = tl.constexpr(0)
"""Each slot is a block of its own, the last ALWAYS first."""
SORTED = tl.constexpr(1)
"""Blocks are those of `arrange`."""
WHOLE = tl.constexpr(2)
"""All slots are the first expert's, in order."""


@triton.jit
def _part(acc, weight, columns, scale, start, SCALED: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """acc plus one round's product; `scale` points at the factors of each row's block, SIDE columns wide."""
    if SCALED:
        made = tl.dot(weight.to(columns.dtype), columns, input_precision=PRECISION)
        acc += made * tl.load(scale + start // SIDE)[:, None]
    else:
        acc = tl.dot(weight, columns, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["slots"])
def grouped(
    x,
    weight,
    scales,
    y,
    factors,
    ids,
    rows,
    owners,
    slots,
    n,
    k,
    x_row,
    per,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALWAYS: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    ORDER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    SIDE: tl.constexpr,
    ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y[slot] = W[expert of slot] x[slot // SHARE] for a tile of weight rows; program (tile, block of slots).

    x [., k] with rows x_row apart, weight [experts, n, k] dense, k a multiple of DEPTH. With GATED, W is n / 2 rows of
    gates above as many others, and y [slots, n / 2] is silu(gate) times other, else y is [slots, n]; with WEIGHTED it
    is multiplied by factors float32 [slots]. What a block is says ORDER, and ids int32 [slots] the expert of a slot
    for EACH. With SCALED, each SIDE x SIDE block of the weight has a factor in scales
    float32 [experts, ceil(n / SIDE), ceil(k / SIDE)], and DEPTH divides SIDE. ONCE: the weight isn't read again soon.

    The first blocks are those of the last ALWAYS of EXPERTS, `per` of each: their weights, AHEAD columns of them (0:
    none), can be asked for while the router still works.
    """
    begin(EARLY)
    tile = tl.program_id(0)
    block = tl.program_id(1)
    local = tl.arange(0, ROWS)
    if GATED:
        half = tile * (ROWS // 2) + local % (ROWS // 2)
        is_row = half < n // 2
        row = half + local // (ROWS // 2) * (n // 2)
    else:
        row = tile * ROWS + local
        is_row = row < n
    row = tl.minimum(row, n - 1)
    t = tl.arange(0, BLOCK)
    at = tl.arange(0, DEPTH)
    if EARLY and AHEAD > 0 and ALWAYS > 0:  # noqa: SIM102 (known when it is compiled)
        if block < ALWAYS * per and block % per == 0:
            known = weight + tl.cast(EXPERTS - ALWAYS + block // per, tl.int64) * n * k
            line = tl.minimum(tl.arange(0, AHEAD // LINE) * LINE, k - 1)
            fetch(known + row.to(tl.int64)[:, None] * k + line[None, :])
    wait(EARLY)
    if ORDER == SORTED:
        expert = tl.load(owners + block)
        if expert < 0:
            return
        slot = tl.load(rows + block * BLOCK + t)
        is_slot = slot >= 0
    elif ORDER == EACH:
        slot = (block + slots - ALWAYS) % slots + t * 0
        expert = tl.load(ids + (block + slots - ALWAYS) % slots)
        is_slot = t == 0
    else:
        expert = tl.cast(0, tl.int32)
        slot = block * BLOCK + t
        is_slot = slot < slots
    inputs = x + (slot // SHARE).to(tl.int64)[None, :] * x_row + at[:, None]
    weights = weight + expert.to(tl.int64) * n * k + row.to(tl.int64)[:, None] * k + at[None, :]
    across = tl.cdiv(k, SIDE)
    scale = scales + expert * tl.cdiv(n, SIDE) * across + row // SIDE * across
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, k, DEPTH, num_stages=STAGES):
        w = tl.load(weights + start, eviction_policy="evict_first") if ONCE else tl.load(weights + start)
        columns = tl.load(inputs + start, mask=is_slot[None, :], other=0.0)
        acc = _part(acc, w, columns, scale, start, SCALED, SIDE, PRECISION)
    if GATED:
        rounded = acc.to(y.dtype.element_ty).to(tl.float32)
        gate, other = tl.split(tl.permute(tl.reshape(rounded, (2, ROWS // 2, BLOCK)), (1, 2, 0)))
        active = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
        column = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        here = (column < n // 2)[:, None] & is_slot[None, :]
        to = y + slot.to(tl.int64)[None, :] * (n // 2) + column[:, None]
        tl.store(to, (active * other).to(y.dtype.element_ty), mask=here)
    else:
        if WEIGHTED:
            acc = acc * tl.load(factors + slot, mask=is_slot, other=0.0)[None, :]
        to = y + slot.to(tl.int64)[None, :] * n + (tile * ROWS + local)[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=is_row[:, None] & is_slot[None, :])


__all__ = ["EACH", "SORTED", "WHOLE", "grouped"]
