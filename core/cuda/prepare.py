"""One packed record of integers a step, and the kernel that turns it into the tensors of a ragged batch.

The record holds a row per request, then the pages that the device doesn't know yet, then the token ids that only the
host knows. Tokens sampled in the step before are read from where the sampler left them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

ROW: Final = 16
"""Integers per request; their order is that of the names below. Floats are stored as their bits."""

SLOT, START, COUNT, FIRST_TOKEN, PAGES_AT, FIRST_PAGE, PAGES, IDS_AT = range(8)
"""`SLOT` -1 is padding; `IDS_AT` -1 takes the slot's last sampled token, -2 - n number n of the drafts."""
SAMPLES, TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM, UNIFORM_REST = range(8, 15)
"""`UNIFORM` + `UNIFORM_REST` in [0, 1) are two floats, for more bits than one has; temperature 0 is greedy."""


@triton.jit(do_not_specialize=["table_row", "block_row"])
def prepare(
    packed,
    last_tokens,
    drafts,
    tables,
    tokens,
    positions,
    slot_mapping,
    query_start,
    seq_lens,
    last_index,
    block_tables,
    table_row,
    block_row,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill in one request; program (request).

    packed int32 (see `ROW`); last_tokens int32 [slots]; drafts int64; tables int32 [slots, table_row]; tokens,
    positions, slot_mapping int64 [T]; query_start int32 [R + 1]; seq_lens int32 [R]; last_index int64 [R], the token
    after which a request samples; block_tables int32 [R, block_row].
    """
    r = tl.program_id(0)
    row = packed + r * 16
    slot = tl.load(row)
    start = tl.load(row + 1)
    count = tl.load(row + 2)
    first = tl.load(row + 3)
    end = start + count
    if r == 0:
        tl.store(query_start, 0)
    tl.store(query_start + r + 1, first + count)
    tl.store(last_index + r, first + count - 1)
    i = tl.arange(0, BLOCK)
    if slot < 0:
        tl.store(seq_lens + r, 0)
        tl.store(tokens + first + i, 0, mask=i < count)
        tl.store(positions + first + i, 0, mask=i < count)
        tl.store(slot_mapping + first + i, -1, mask=i < count)
    else:
        tl.store(seq_lens + r, end)
        table = tables + slot.to(tl.int64) * table_row
        pages_at = tl.load(row + 4)
        first_page = tl.load(row + 5)
        pages = tl.load(row + 6)
        for at in range(0, pages, BLOCK):
            new = tl.load(packed + pages_at + at + i, mask=at + i < pages)
            tl.store(table + first_page + at + i, new, mask=at + i < pages)
        tl.debug_barrier()  # what was stored is read below
        block_table = block_tables + r.to(tl.int64) * block_row
        used = tl.cdiv(end, PAGE)
        for at in range(0, used, BLOCK):
            known = tl.load(table + at + i, mask=at + i < used)
            tl.store(block_table + at + i, known, mask=at + i < used)
        ids_at = tl.load(row + 7)
        for at in range(0, count, BLOCK):
            here = at + i < count
            position = start + at + i
            page = tl.load(table + position // PAGE, mask=here, other=0).to(tl.int64)
            if ids_at >= 0:
                token = tl.load(packed + ids_at + at + i, mask=here, other=0)
            elif ids_at == -1:
                token = tl.load(last_tokens + slot + i * 0, mask=here, other=0)
            else:
                token = tl.load(drafts - 2 - ids_at + i * 0, mask=here, other=0).to(tl.int32)
            tl.store(tokens + first + at + i, token.to(tl.int64), mask=here)
            tl.store(positions + first + at + i, position.to(tl.int64), mask=here)
            tl.store(slot_mapping + first + at + i, page * PAGE + position % PAGE, mask=here)


__all__ = [
    "COUNT",
    "FIRST_PAGE",
    "FIRST_TOKEN",
    "IDS_AT",
    "MIN_P",
    "PAGES",
    "PAGES_AT",
    "ROW",
    "SAMPLES",
    "SLOT",
    "START",
    "TEMPERATURE",
    "TOP_K",
    "TOP_P",
    "UNIFORM",
    "UNIFORM_REST",
    "prepare",
]
