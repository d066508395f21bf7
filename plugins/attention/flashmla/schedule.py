"""Who does what: all blocks of all requests laid end to end on one line, cut into equal parts.

A block is a page of 64 tokens. On the line each request takes OVERHEAD places, for what it costs to begin and to end
one, and then a place per block. Part p is the places from `p * payload` on; a request that a cut goes through leaves
partial results to be merged. Everything is computed on the device, so a captured graph stays right as requests grow.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAGE = tl.constexpr(64)
OVERHEAD = tl.constexpr(4)


@triton.jit(do_not_specialize=["requests", "parts"])
def line(seq_lens, starts, firsts, requests, parts, REQUESTS: tl.constexpr):
    """Lay the line; one program.

    seq_lens int32 [requests]. starts int32 [requests + 2]: where each request begins, the length of the line, and the
    places per part. firsts int32 [parts + 1]: the request at each part's first place; `requests` past the end.

    Parts may be up to an eighth longer than they must be if then no part holds a cut request besides another one:
    every request begins a part, or, when all are equally long, a part holds a whole number of them.
    """
    r = tl.arange(0, REQUESTS)
    exists = r < requests
    lens = tl.load(seq_lens + r, mask=exists, other=0)
    cost = tl.where(exists, tl.cdiv(lens, PAGE) + OVERHEAD, 0)
    least = tl.maximum(tl.cdiv(tl.sum(cost), parts), 1)
    payload = least
    aligned = 0
    for eighth in tl.static_range(5):
        tried = least + (least * eighth + 31) // 32
        fits = (tl.sum(tl.cdiv(cost, tried)) <= parts) & (aligned == 0)
        payload = tl.where(fits, tried, payload)
        aligned = tl.where(fits, 1, aligned)
    longest = tl.maximum(tl.max(cost), 1)
    whole = tl.cdiv(least, longest) * longest
    even = (aligned == 0) & (tl.min(tl.where(exists, cost, longest)) == longest) & (whole <= least + least // 8)
    payload = tl.where(even, whole, payload)
    cost = tl.where(aligned == 1, tl.cdiv(cost, payload) * payload, cost)
    ends = tl.cumsum(cost, 0)
    begins = ends - cost
    tl.store(starts + r, begins, mask=exists)
    tl.store(starts + requests, tl.sum(cost))
    tl.store(starts + requests + 1, payload)
    for done in range(0, parts + 1, REQUESTS):
        tl.store(firsts + done + r, requests, mask=done + r <= parts)
    tl.debug_barrier()
    part = tl.cdiv(begins, payload)
    most = tl.max(tl.where(exists, tl.cdiv(ends, payload) - part, 0))
    for i in range(most):
        tl.store(firsts + part + i, r, mask=exists & ((part + i) * payload < ends) & (part + i < parts))


@gluon.jit
def span(r, low, high, starts, seq_lens):
    """The blocks [begin, end) of request r in places [low, high), none if begin >= end, and how many it has."""
    at = gl.load(starts + r) + 4
    blocks = (gl.load(seq_lens + r) + 63) // 64
    return gl.maximum(low - at, 0), gl.minimum(high - at, blocks), blocks


@gluon.jit
def block_of(i, begin, end):
    """The i-th to be worked on of blocks [begin, end): the last, which alone may be half full, is the first."""
    return gl.where(i == begin, end - 1, i - 1)


__all__ = ["OVERHEAD", "PAGE", "block_of", "line", "span"]
