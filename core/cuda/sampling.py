"""From logits to tokens without a word to the host: greedy, temperature, min-p, top-k and top-p.

Follows `engine.sampler` step for step, draw by inversion included, so that a seeded request reads the same whichever
of the two sampled it, up to rounding where two cumulative sums meet. Instead of sorting, the limits of top-k and top-p
are found by bisection over the bits of the logits; ties at a limit are kept in order of token id.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK: Final = 8192
"""Logits that one program of the first pass looks at."""

BAD: Final = -1
"""Stands for a token where the logits are not finite."""

UNSAMPLED: Final = -2


@triton.jit(do_not_specialize=["chunks"])
def _peaks(logits, vocab, peaks, places, chunks, CHUNK: tl.constexpr):
    """Maximum and first place of it in one chunk; program (row, chunk). The maximum is NaN if anything isn't finite."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    unsound = tl.sum(tl.where((i < vocab) & ((x - x) != 0.0), 1, 0), 0)
    peak = tl.max(x, 0)
    place = tl.min(tl.where(x == peak, i, 2147483647), 0)
    tl.store(peaks + row * chunks + chunk, tl.where(unsound > 0, float("nan"), peak))
    tl.store(places + row * chunks + chunk, place)


@triton.jit
def _key(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _measure(at, vocab, peak, temperature, least, WIDTH: tl.constexpr):
    """How many logits have a key of at least `least`, and the sum of their weights."""
    count = 0
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, WIDTH):
        i = start + tl.arange(0, WIDTH)
        x = tl.load(at + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        kept = (i < vocab) & (_key(x) >= least)
        count += tl.sum(tl.where(kept, 1, 0), 0)
        mass += tl.sum(tl.where(kept, tl.exp((x - peak) / temperature), 0.0), 0).to(tl.float64)
    return count, mass


@triton.jit(do_not_specialize=["chunks"])
def _choose(
    logits,
    vocab,
    packed,
    peaks,
    places,
    chunks,
    last_tokens,
    sampled,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One token for one row; program (row). `packed` is the record of `engine.cuda.prepare`."""
    r = tl.program_id(0)
    row = packed + r * 16
    slot = tl.load(row)
    samples = tl.load(row + 8)
    if (slot < 0) | (samples == 0):
        tl.store(sampled + r, -2)
    else:
        c = tl.arange(0, CHUNKS)
        tops = tl.load(peaks + r * chunks + c, mask=c < chunks, other=float("-inf"))
        where = tl.load(places + r * chunks + c, mask=c < chunks, other=2147483647)
        unsound = tl.sum(tl.where((tops != tops), 1, 0), 0)
        peak = tl.max(tops, 0)
        token = tl.min(tl.where(tops == peak, where, 2147483647), 0)
        temperature = tl.load(row + 9).to(tl.float32, bitcast=True)
        if unsound > 0:
            tl.store(sampled + r, -1)
        else:
            if temperature > 0.0:
                token = _draw(logits + r.to(tl.int64) * vocab, vocab, row, peak, temperature, WIDTH)
            tl.store(sampled + r, token)
            tl.store(last_tokens + slot, token)


@triton.jit
def _draw(at, vocab, row, peak, temperature, WIDTH: tl.constexpr):
    """Narrow the distribution, then invert its cumulative sum at the row's uniform number."""
    temperature = tl.maximum(temperature, 1.1754943508222875e-38)
    top_k = tl.load(row + 10)
    top_p = tl.load(row + 11).to(tl.float32, bitcast=True)
    min_p = tl.load(row + 12).to(tl.float32, bitcast=True)
    low = tl.load(row + 13).to(tl.float32, bitcast=True).to(tl.float64)
    uniform = low + tl.load(row + 14).to(tl.float32, bitcast=True).to(tl.float64)
    limit = tl.full([], -2147483648, tl.int64)  # keys above it are kept, and `quota` of those that equal it
    quota = 0
    if min_p > 0.0:
        limit = _key(peak + tl.log(min_p) * temperature) - 1
    if top_k > 0:
        under = tl.full([], -2147483648, tl.int64)
        over = _key(peak) + 1
        while over - under > 1:  # the largest key that at least top_k logits reach
            middle = (under + over) >> 1
            count, _ = _measure(at, vocab, peak, temperature, middle, WIDTH)
            if count >= top_k:
                under = middle
            else:
                over = middle
        if under > limit:
            limit = under
            above, _ = _measure(at, vocab, peak, temperature, limit + 1, WIDTH)
            quota = top_k - above
    _, mass = _measure(at, vocab, peak, temperature, limit + 1, WIDTH)
    mass += quota * _weight(limit, peak, temperature)
    if top_p < 1.0:
        wanted = top_p.to(tl.float64) * mass
        under = limit
        over = _key(peak) + 1
        while over - under > 1:  # the largest key such that the logits from it on hold the wanted mass
            middle = (under + over) >> 1
            _, held = _measure(at, vocab, peak, temperature, middle, WIDTH)
            if held >= wanted:
                under = middle
            else:
                over = middle
        _, above = _measure(at, vocab, peak, temperature, under + 1, WIDTH)
        each = _weight(under, peak, temperature)
        lacking = tl.ceil((wanted - above) / tl.maximum(each, 1e-300)).to(tl.int32)
        quota = tl.where(under == limit, tl.minimum(quota, lacking), lacking)
        limit = under
        mass = above + quota * each
    target = uniform * mass
    done = tl.zeros([], tl.float64)
    ties = 0
    token = -1
    last = 0
    start = 0
    while (token < 0) & (start < vocab):
        i = start + tl.arange(0, WIDTH)
        x = tl.load(at + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        key = _key(x)
        tie = tl.where((i < vocab) & (key == limit), 1, 0)
        kept = (i < vocab) & ((key > limit) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= quota)))
        weights = tl.where(kept, tl.exp((x - peak) / temperature), 0.0).to(tl.float64)
        reached = done + tl.cumsum(weights, 0)
        hit = tl.min(tl.where(kept & (reached > target), i, 2147483647), 0)
        token = tl.where(hit < 2147483647, hit, -1)
        last = tl.maximum(last, tl.max(tl.where(kept, i, 0), 0))
        done += tl.sum(weights, 0)
        ties += tl.sum(tie, 0)
        start += WIDTH
    return tl.where(token < 0, last, token)


@triton.jit
def _weight(key, peak, temperature):
    """The weight of the logit with a key, 0 for the key below all."""
    bits = key.to(tl.int32)
    x = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return tl.where(key > -2147483648, tl.exp((x - peak) / temperature), 0.0).to(tl.float64)


def sample(logits: Tensor, packed: Tensor, last_tokens: Tensor, sampled: Tensor) -> None:
    """One token per row.

    Args:
        logits: [N, vocab], dense, of any floating dtype; converted to float32 as they are read.
        packed: int32, the record whose first N rows say how to sample.
        last_tokens: int32 [slots]; gets the token of every row that samples.
        sampled: int32 [N]; gets the token, or `BAD`, or `UNSAMPLED`.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _peaks[(rows, chunks)](logits, vocab, peaks, places, chunks, CHUNK=CHUNK, num_warps=8)
    _choose[(rows,)](
        logits,
        vocab,
        packed,
        peaks,
        places,
        chunks,
        last_tokens,
        sampled,
        CHUNKS=max(16, triton.next_power_of_2(chunks)),
        WIDTH=min(8192, triton.next_power_of_2(vocab)),
        num_warps=16,
    )


__all__ = ["BAD", "UNSAMPLED", "sample"]
