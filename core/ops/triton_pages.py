"""Blocks of scattered pages to and from one run of memory on the device, digested on the way.

One launch serves every part of every layer: a table says where each part's pages lie and how a block is cut out of one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LOOK: Final = 0
GATHER: Final = 1
SCATTER: Final = 2
"""What `move` does beside weighing."""


POINTERS: Final = ("table", "blocks", "buffer", "weights", "sums")


# One compiled kernel serves whatever numbers and addresses, so that it may be kept and called again.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=POINTERS)
def move(
    table,
    blocks,
    count,
    buffer,
    weights,
    sums,
    MODE: tl.constexpr,
    WEIGH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move or look at one block of one part; program (block, part). `WHOLE` says that all blocks are pages.

    table int64 [parts, 7], in words of 8 bytes but for the first: address of page 0 in bytes, words from page to page,
    words of a block, words of a run, blocks a page, words of the parts before, place among the weights. blocks int64
    [count]; buffer int64, part by part and block after block; weights int64; sums int64 [count, parts]: the weighed
    words of this block and part, modulo 2^64.
    """
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = table + part * 7
    words = tl.load(row + 2)
    run = tl.load(row + 3)
    per_page = tl.load(row + 4)
    block = tl.load(blocks + i)
    first = tl.load(row).to(tl.pointer_type(tl.int64)) + (block // per_page) * tl.load(row + 1)
    first += (block % per_page) * run
    flat = buffer + tl.load(row + 5) * count + i.to(tl.int64) * words
    own = weights + tl.load(row + 6)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    lane = tl.arange(0, BLOCK)
    for at in range(0, words, BLOCK):
        w = at + lane
        here = w < words
        place = first + w if WHOLE else first + (w // run) * run * per_page + w % run
        if MODE == 2:
            value = tl.load(flat + w, mask=here, other=0)
            tl.store(place, value, mask=here)
        else:
            value = tl.load(place, mask=here, other=0)
            if MODE == 1:
                tl.store(flat + w, value, mask=here)
        if WEIGH:
            total += value * tl.load(own + w, mask=here, other=0)
    if WEIGH:
        tl.store(sums + i * tl.num_programs(1) + part, tl.sum(total))


__all__ = ["GATHER", "LOOK", "SCATTER", "move"]
