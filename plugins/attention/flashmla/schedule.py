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
def line(seq_lens, starts, firsts, items, requests, parts, REQUESTS: tl.constexpr):
    """Lay the line; one program.

    seq_lens int32 [requests]. starts int32 [requests + 2]: where each request begins, the length of the line, and the
    places per part. firsts int32 [parts + 1]: the request at each part's first place; `requests` past the end.
    items int32 [parts, 8]: that request, one past the part's last, then what `span` says of the former.

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
    tl.debug_barrier()
    for done in range(0, parts, REQUESTS):
        p = done + r
        is_part = p < parts
        first = tl.load(firsts + p, mask=is_part, other=0)
        has = is_part & (first < requests)
        last = tl.minimum(tl.load(firsts + p + 1, mask=is_part, other=0) + 1, requests)
        at = tl.load(starts + first, mask=has, other=0) + OVERHEAD
        keys = tl.load(seq_lens + first, mask=has, other=0)
        end = tl.minimum((p + 1) * payload - at, tl.cdiv(keys, PAGE))
        tl.store(items + p * 8, first, mask=is_part)
        tl.store(items + p * 8 + 1, last, mask=is_part)
        tl.store(items + p * 8 + 2, tl.maximum(p * payload - at, 0), mask=is_part)
        tl.store(items + p * 8 + 3, tl.where(has, end, 0), mask=is_part)
        tl.store(items + p * 8 + 4, tl.cdiv(keys, PAGE), mask=is_part)
        tl.store(items + p * 8 + 5, keys - (end - 1) * PAGE, mask=is_part)


@gluon.jit
def span(r, low, high, starts, seq_lens):
    """The blocks of request r in places [low, high): the first, one past the last (not more than the first: none).

    And how many blocks the request has, and how many tokens are left at the last of these (64 or more: a full one).
    """
    at = gl.load(starts + r) + 4
    length = gl.load(seq_lens + r)
    blocks = (length + 63) // 64
    end = gl.minimum(high - at, blocks)
    return gl.maximum(low - at, 0), end, blocks, length - (end - 1) * 64


@gluon.jit
def block_of(i, begin, end):
    """The i-th to be worked on of blocks [begin, end): the last, which alone may be half full, is the first."""
    return gl.where(i == begin, end - 1, i - 1)


__all__ = ["OVERHEAD", "PAGE", "block_of", "line", "span"]
