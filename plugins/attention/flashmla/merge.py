"""Merge the partial results of requests that a cut went through (see `schedule`)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from engine.plugins.attention.flashmla.schedule import OVERHEAD, PAGE


@triton.jit(do_not_specialize=["requests"])
def merge(
    partial, partial_lse, out, starts, firsts, seq_lens, requests,
    HEADS: tl.constexpr, EACH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
    BY_PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, or part that a cut request begins in; EACH heads; COLUMNS columns).

    partial float32 [2 * parts, HEADS, 512], partial_lse float32 [2 * parts, HEADS] in units of log2, MOST >= parts;
    out [requests, HEADS, 512]. Parts are merged in the order of their keys.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    r = tl.program_id(0)
    if BY_PART:
        r = tl.load(firsts + tl.program_id(0) + 1)
        if r >= requests:
            return
    payload = tl.load(starts + requests + 1)
    first = tl.load(starts + r) + OVERHEAD
    blocks = tl.cdiv(tl.load(seq_lens + r), PAGE)
    begin = first // payload
    end = (first + blocks - 1) // payload + 1
    if BY_PART and begin != tl.program_id(0):
        return
    if end - begin < 2:
        return
    second = tl.where(tl.load(firsts + begin) == r, 0, 1)  # the first partial result is the part's second
    every = tl.arange(0, MOST)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.arange(0, TILE)
    for h in range(tl.program_id(1) * EACH, tl.minimum(tl.program_id(1) * EACH + EACH, HEADS)):
        slots = (begin + every) * 2 + tl.where(every == 0, second, 0)
        lse = tl.load(partial_lse + slots * HEADS + h, mask=begin + every < end, other=float("-inf"))
        best = tl.max(lse, 0)
        total = tl.sum(tl.exp2(lse - best), 0)
        acc = tl.zeros([COLUMNS], tl.float32)
        for p in range(begin, end, TILE):
            is_part = p + tile < end
            slot = (p + tile) * 2 + tl.where(p + tile == begin, second, 0)
            weight = tl.exp2(tl.load(partial_lse + slot * HEADS + h, mask=is_part, other=float("-inf")) - best)
            at = (slot * HEADS + h).to(tl.int64) * 512
            values = tl.load(partial + at[:, None] + column[None, :], mask=is_part[:, None], other=0.0)
            acc += tl.sum(values * weight[:, None], 0)
        tl.store(out + (r * HEADS + h).to(tl.int64) * 512 + column, (acc / total).to(out.dtype.element_ty))


__all__ = ["merge"]
