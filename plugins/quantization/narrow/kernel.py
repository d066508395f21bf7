"""y = x W^T + b for few rows of x: the weight is read once, as fast as memory gives it.

The weight's rows are the tall side of the tensor cores' product. Where there are too few rows to fill the chip, the sum
over k is split, and the program that ends last adds the parts in order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.ops.dependent import begin, fetch, wait

LINE = tl.constexpr(64)
"""Elements of 16 bits in a cache line."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one product is cut."""

    rows: int  # of the weight, a program
    depth: int  # of k, a round; divides k
    split: int  # parts of k
    warps: int
    stages: int
    ahead: int = 0  # of k, fetched into the L2 before the kernels ahead have ended; 0 for that of all stages


@triton.jit(do_not_specialize=["m"])
def narrow(
    x,
    weight,
    bias,
    y,
    partials,
    counters,
    m,
    n,
    k,
    x_row,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (tile of weight rows, part of k).

    x [m, k] with rows x_row apart, weight [n, k] dense, bias [n], y [m, n] dense, M >= m a power of two;
    partials float32 [tiles * SPLIT, ROWS, M], counters int32 [tiles], zero before and after. With GATED, the weight is
    n / 2 rows of gates above as many others, y [m, n / 2] is silu(gate) times other, and SPLIT is 1.
    """
    begin(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    if GATED:
        local = tl.arange(0, ROWS)
        half = tile * (ROWS // 2) + local % (ROWS // 2)
        is_row = half < n // 2
        row = half + local // (ROWS // 2) * (n // 2)
    else:
        row = tile * ROWS + tl.arange(0, ROWS)
        is_row = row < n
    token = tl.arange(0, M)
    rounds = k // DEPTH
    share = tl.cdiv(rounds, SPLIT)
    begin_at = part * share * DEPTH
    end = tl.minimum(begin_at + share * DEPTH, k)
    at = tl.arange(0, DEPTH)
    weights = weight + row.to(tl.int64)[:, None] * k + at[None, :]
    inputs = x + token[None, :] * x_row + at[:, None]
    is_token = token < m
    if EARLY:  # the weight's first rounds, while the kernels ahead end
        ahead = tl.minimum(begin_at + tl.arange(0, AHEAD // LINE) * LINE, k - 1)
        fetch(weight + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k + ahead[None, :])
    wait(EARLY)
    acc = tl.zeros([ROWS, M], tl.float32)
    for start in tl.range(begin_at, end, DEPTH, num_stages=STAGES):
        w = tl.load(weights + start, mask=is_row[:, None], other=0.0, eviction_policy="evict_first")
        columns = tl.load(inputs + start, mask=is_token[None, :], other=0.0)
        acc = tl.dot(w, columns, acc)
    to = y + token[None, :] * n + row[:, None]
    here = is_row[:, None] & is_token[None, :]
    if SPLIT > 1:
        inside = tl.arange(0, ROWS)[:, None] * M + token[None, :]
        tl.store(partials + (tile * SPLIT + part) * ROWS * M + inside, acc)
        tl.debug_barrier()  # all of this program's stores before its tick
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if done == SPLIT - 1:
            tl.store(counters + tile, 0)
            acc = tl.zeros([ROWS, M], tl.float32)
            for other in range(SPLIT):
                acc += tl.load(partials + (tile * SPLIT + other) * ROWS * M + inside, cache_modifier=".cg")
            if BIAS:
                acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
            tl.store(to, acc.to(y.dtype.element_ty), mask=here)
    else:
        if BIAS:
            acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if GATED:
            rounded = acc.to(y.dtype.element_ty).to(tl.float32)
            gate, other = tl.split(tl.permute(tl.reshape(rounded, (2, ROWS // 2, M)), (1, 2, 0)))
            active = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
            column = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
            to = y + token[None, :] * (n // 2) + column[:, None]
            here = (column < n // 2)[:, None] & is_token[None, :]
            tl.store(to, (active * other).to(y.dtype.element_ty), mask=here)
        else:
            tl.store(to, acc.to(y.dtype.element_ty), mask=here)


__all__ = ["Tiling", "narrow"]
