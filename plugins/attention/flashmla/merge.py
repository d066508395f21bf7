"""Merge the partial results of requests that a cut went through (see `schedule`)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit(do_not_specialize=["requests"])
def merge(
    partial, partial_lse, out, firsts, cuts, requests,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, BY_PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, or with BY_PART the part that a cut request begins in; COLUMNS of its HEADS * 512 results,
    which must divide them).

    partial float32 [2 * parts, HEADS, 512], partial_lse float32 [2 * parts, HEADS] in units of log2; out [requests,
    HEADS, 512]. TILE parts are merged at a time, in the order of their keys.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    r = tl.program_id(0)
    if BY_PART:
        r = tl.load(firsts + r + 1)
    here = r < requests
    begin = tl.load(cuts + r * 3, mask=here, other=0)
    end = tl.load(cuts + r * 3 + 1, mask=here, other=0)
    slot0 = tl.load(cuts + r * 3 + 2, mask=here, other=0)
    if PDL:
        cuda.gdc_wait()
    if BY_PART and begin != tl.program_id(0):
        return
    if end - begin < 2:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = column // 512
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for p in range(begin, end, TILE):
        part = p + tl.arange(0, TILE)
        slot = tl.where(part == begin, slot0, part * 2)
        is_part = (part < end)[:, None]
        lse = tl.load(partial_lse + slot[:, None] * HEADS + head[None, :], mask=is_part, other=float("-inf"))
        at = slot.to(tl.int64)[:, None] * (HEADS * 512) + column[None, :]
        values = tl.load(partial + at, mask=is_part, other=0.0)
        peak = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - peak[None, :])
        fade = tl.exp2(best - peak)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(values * weights, 0)
        best = peak
    tl.store(out + r.to(tl.int64) * (HEADS * 512) + column, (acc / total).to(out.dtype.element_ty))


__all__ = ["merge"]
