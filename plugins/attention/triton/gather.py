"""Keys and values out of their pages into one piece, as the copy engine reads them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather(
    k_pages,
    v_pages,
    k,
    v,
    blocks,
    seq_lens,
    block_tables,
    k_page,
    v_page,
    table_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy the keys of one block for one KV head, zeros where there are none; program (block, KV head).

    k [blocks * ROWS, HEADS, DIM] and v alike, dense; blocks int32 [blocks, 2]: request, and position of the first key.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(blocks + block * 2)
    n = tl.load(blocks + block * 2 + 1) + tl.arange(0, ROWS)
    there = (n >= 0) & (n < tl.load(seq_lens + request))
    n = tl.where(there, n, 0)
    page = tl.load(block_tables + request.to(tl.int64) * table_row + n // PAGE, mask=there, other=0).to(tl.int64)
    inside = head * PAGE + n % PAGE
    row = (block.to(tl.int64) * ROWS + tl.arange(0, ROWS)) * HEADS + head
    d, dv = tl.arange(0, DIM), tl.arange(0, V_DIM)
    keys = tl.load(k_pages + (page * k_page + inside * DIM)[:, None] + d[None, :], mask=there[:, None], other=0.0)
    tl.store(k + (row * DIM)[:, None] + d[None, :], keys)
    values = tl.load(v_pages + (page * v_page + inside * V_DIM)[:, None] + dv[None, :], mask=there[:, None], other=0.0)
    tl.store(v + (row * V_DIM)[:, None] + dv[None, :], values)


__all__ = ["gather"]
