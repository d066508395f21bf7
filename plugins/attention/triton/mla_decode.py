"""Absorbed attention over latent rows: every row of queries (a head of a token) meets the same keys, which are values.

The blocks of keys of all requests are laid end to end and cut into equal runs, one for each program and block of query
rows. A run that holds a whole request writes its result; of a request that runs share each leaves a part, and `combine`
merges the parts in order, so two runs of a step give the same bits. `schedule` finds the cuts on the device once a
step: a captured CUDA graph stays right while requests grow.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.dependent import begin, wait


@triton.jit(do_not_specialize=["requests", "programs"])
def schedule(
    seq_lens,
    starts,
    cuts,
    requests,
    programs,
    REQUESTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEWEST: tl.constexpr,
):
    """Lay the requests' blocks end to end; one program.

    seq_lens int32 [requests]; starts int32 [requests + 1], the first block of each; cuts int32 [programs + 1], the
    request in which each run begins, then the blocks of a run, at least FEWEST.
    """
    r = tl.arange(0, REQUESTS)
    blocks = tl.cdiv(tl.load(seq_lens + r, mask=r < requests, other=0), BLOCK)
    tl.store(starts + r, tl.cumsum(blocks, 0) - blocks, mask=r <= requests)
    run = tl.maximum(tl.cdiv(tl.sum(blocks), programs), FEWEST)
    tl.store(cuts + programs, run)
    tl.debug_barrier()  # the search below reads them back
    p = tl.arange(0, PROGRAMS)
    low = tl.zeros([PROGRAMS], tl.int32)
    high = tl.zeros([PROGRAMS], tl.int32) + requests
    while tl.max(high - low) > 1:  # the last request that begins at the run's first block or before
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= p * run
        low = tl.where((high - low > 1) & before, middle, low)
        high = tl.where((high - low > 1) & ~before, middle, high)
    tl.store(cuts + p, low, mask=p < programs)


@triton.jit
def _from_8_bits(small, scales, NATIVE: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr, SCALED: tl.constexpr):
    """float8_e4m3fn as uint8 [BLOCK, LATENT] times float32 scales [BLOCK, LATENT // SCALED], in float32."""
    if NATIVE:
        values = small.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # the exponent's bias is 7, not 127; bits of a small number stay those of a small number
        wide = small.to(tl.int32)
        values = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    blocks = tl.reshape(values, (BLOCK, LATENT // SCALED, SCALED)) * scales[:, :, None]
    return tl.reshape(blocks, (BLOCK, LATENT))


@triton.jit
def _rotary_at(
    slot, LATENT: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr
):
    """Where a row's rotary part begins, in elements of SIZE bytes; ROW is in them as well, or in bytes if PACKED."""
    return slot * (ROW // SIZE) + (LATENT + 4 * (LATENT // SCALED)) // SIZE if PACKED else slot * ROW + LATENT


@triton.jit
def _store(
    row,
    latents,
    scales,
    rotary,
    slot,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Put one row where its slot says, as `engine.latent.rows` lays it out."""
    e = tl.arange(0, ROPE)
    tl.store(rotary + _rotary_at(slot, LATENT, SCALED, ROW, SIZE, PACKED) + e, tl.load(row + LATENT + e))
    if PACKED:
        g = tl.arange(0, LATENT // SCALED)
        d = g[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
        values = tl.load(row + d).to(tl.float32)
        least = tl.maximum(tl.max(tl.abs(values), 1) / 448.0, 1e-4)
        scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        unsound = tl.sum(tl.where(values - values == 0.0, 0, 1), 1) > 0
        tl.store(scales + slot * (ROW // 4) + LATENT // 4 + g, tl.where(unsound, float("nan"), scale))
        tl.store(latents + slot * ROW + d, _to_8_bits(values / scale[:, None], NATIVE))
    else:
        d = tl.arange(0, LATENT)
        tl.store(latents + slot * ROW + d, tl.load(row + d))
    tl.debug_barrier()  # this program reads it back


@triton.jit
def _to_8_bits(values, NATIVE: tl.constexpr):
    """float32 within 448 -> float8_e4m3fn as uint8, ties to even."""
    if NATIVE:
        small = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = (tl.abs(values) * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # times 2^-120
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        small = (rounded | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return small


@triton.jit
def _page(table, block, length, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page in which a block of keys lies, or that of each of its keys."""
    n = block * BLOCK
    if PAGE % BLOCK:
        n = n + tl.arange(0, BLOCK)
    return tl.load(table + n // PAGE, mask=n < length, other=0)


@triton.jit
def _leave(out, to, partial_out, partial_stats, place, best, total, acc, is_row, whole, LATENT: tl.constexpr):
    """Write results to rows `to`, or what they will be merged from to rows `place`."""
    d = tl.arange(0, LATENT)
    if whole:
        at = out + to[:, None] * LATENT + d[None, :]
        tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        tl.store(partial_out + place[:, None] * LATENT + d[None, :], acc, mask=is_row[:, None])
        tl.store(partial_stats + place * 2, best, mask=is_row)
        tl.store(partial_stats + place * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["table_row", "first_request", "requests", "programs"])
def attend(
    q,
    rows,
    latents,
    scales,
    rotary,
    out,
    partial_out,
    partial_stats,
    starts,
    cuts,
    query_start,
    seq_lens,
    block_tables,
    slot_mapping,
    trees,
    tree_at,
    q_token,
    q_head,
    k_token,
    table_row,
    first_request,
    requests,
    programs,
    scale,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    STORE: tl.constexpr,
    TREE: tl.constexpr,
    PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One run of blocks for one block of query rows: program (rows, run).

    Row i of a request is head i % HEADS of its token i // HEADS. Requests are `first_request, …`, `requests` of them;
    with DECODE each has one token. With STORE, whoever reads a request's last block stores its new row first.
    partial_out float32 [2 * runs, rows, LATENT] and partial_stats float32 [2 * runs, rows, 2] (maximum and sum) take
    what a run has of a request that began before it, then of one that goes on behind it. `scale` is in units of log2.
    """
    begin(EARLY)
    run = tl.program_id(1)
    length_of_run = tl.load(cuts + programs)
    first_block = run * length_of_run
    end = tl.minimum(first_block + length_of_run, tl.load(starts + requests))
    if first_block >= end:
        wait(EARLY)
        return
    r = tl.load(cuts + run)
    wait(EARLY)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = i // HEADS
    head = i % HEADS
    d = tl.arange(0, LATENT)
    e = tl.arange(0, ROPE)
    b = tl.arange(0, BLOCK)
    g = tl.arange(0, LATENT // SCALED)
    at = first_block
    while at < end:
        begins = tl.load(starts + r)
        ends = tl.load(starts + r + 1)
        stop = tl.minimum(ends, end)
        request = first_request + r
        length = tl.load(seq_lens + request)
        if DECODE:
            where = tl.zeros([ROWS], tl.int64) + request
            count = 1
        else:
            base = tl.load(query_start + request)
            count = tl.load(query_start + request + 1) - base
            where = (base + token).to(tl.int64)
        if (stop > at) & (tl.program_id(0) * ROWS < count * HEADS):
            is_row = token < count
            position = length - count + token
            query = q + where[:, None] * q_token + head[:, None] * q_head
            fixed = tl.load(query + d[None, :], mask=is_row[:, None], other=0.0)
            turned = tl.load(query + LATENT + e[None, :], mask=is_row[:, None], other=0.0)
            if STORE and stop == ends:
                slot = tl.load(slot_mapping + request)
                row = rows + request.to(tl.int64) * k_token
                _store(row, latents, scales, rotary, slot, LATENT, ROPE, SCALED, ROW, SIZE, PACKED, NATIVE)
            if TREE:
                mask_at = tl.load(tree_at + request)
                drawn = tl.where(mask_at >= 0, count, 0)  # a request without a tree reads no mask
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, LATENT], tl.float32)
            table = block_tables + request.to(tl.int64) * table_row
            ahead = _page(table, at - begins, length, PAGE, BLOCK)
            for block in tl.range(at - begins, stop - begins, num_stages=STAGES):
                n = block * BLOCK + b
                exists = n < length
                slot = ahead.to(tl.int64) * PAGE + (block * BLOCK % PAGE + b if PAGE % BLOCK == 0 else n % PAGE)
                ahead = _page(table, block + 1, length, PAGE, BLOCK)  # early, or loads of rows would wait for it
                keys = tl.load(latents + slot[:, None] * ROW + d[None, :], mask=exists[:, None], other=0)
                turn = rotary + _rotary_at(slot, LATENT, SCALED, ROW, SIZE, PACKED)[:, None] + e[None, :]
                shared = tl.load(turn, mask=exists[:, None], other=0.0)
                if PACKED:
                    factor = scales + (slot * (ROW // 4) + LATENT // 4)[:, None] + g[None, :]
                    factors = tl.load(factor, mask=exists[:, None], other=0.0)
                    keys = _from_8_bits(keys, factors, NATIVE, BLOCK, LATENT, SCALED).to(shared.dtype)
                scores = tl.dot(fixed, tl.trans(keys), input_precision=PRECISION)
                scores = tl.dot(turned, tl.trans(shared), scores, input_precision=PRECISION) * scale
                sees = exists[None, :]
                if not DECODE:
                    sees = sees & (n[None, :] <= position[:, None])
                    if TREE:
                        j = n - (length - count)
                        marked = tl.load(
                            trees + mask_at + token[:, None].to(tl.int64) * count + j[None, :],
                            mask=is_row[:, None] & (j[None, :] >= 0) & (j[None, :] < drawn),
                            other=0,
                        )
                        sees = tl.where((drawn > 0) & (j >= 0)[None, :], marked != 0, sees)
                scores = tl.where(sees, scores, float("-inf"))
                peak = tl.maximum(best, tl.max(scores, 1))
                safe = tl.where(peak == float("-inf"), 0.0, peak)
                weights = tl.exp2(scores - safe[:, None])
                shrink = tl.exp2(best - safe)
                total = total * shrink + tl.sum(weights, 1)
                acc = tl.dot(weights.to(keys.dtype), keys, acc * shrink[:, None], input_precision=PRECISION)
                best = peak
            whole = (begins >= first_block) & (stop == ends)
            slice_of = 2 * run + tl.where(begins >= first_block, 1, 0)
            place = (slice_of * tl.num_programs(0) * ROWS + i).to(tl.int64)
            _leave(
                out, where * HEADS + head, partial_out, partial_stats, place, best, total, acc, is_row, whole, LATENT
            )
        at = stop
        r += 1


@triton.jit(do_not_specialize=["first_request", "programs", "places"])
def combine(
    out,
    partial_out,
    partial_stats,
    starts,
    cuts,
    query_start,
    first_request,
    programs,
    places,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DECODE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the parts of a request that several runs share: program (request, rows, columns).

    `places` is the number of rows that the parts have memory for.
    """
    begin(EARLY)
    r = tl.program_id(0)
    run = tl.load(cuts + programs)
    begins = tl.load(starts + r)
    ends = tl.load(starts + r + 1)
    first = begins // run
    parts = (ends - 1) // run - first + 1
    wait(EARLY)
    if (ends > begins) & (parts > 1):
        request = first_request + r
        if DECODE:
            base = request
            count = 1
        else:
            base = tl.load(query_start + request)
            count = tl.load(query_start + request + 1) - base
        i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_row = i < count * HEADS
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        s = tl.arange(0, AT_ONCE)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for done in range(0, parts, AT_ONCE):
            part = done + s
            slice_of = 2 * (first + part) + tl.where(part == 0, 1, 0)
            there = (part < parts)[:, None] & is_row[None, :]
            place = (slice_of[:, None] * places + i[None, :]).to(tl.int64)
            peaks = tl.load(partial_stats + place * 2, mask=there, other=float("-inf"))
            sums = tl.load(partial_stats + place * 2 + 1, mask=there, other=0.0)
            outs = tl.load(
                partial_out + place[:, :, None] * LATENT + d[None, None, :], mask=there[:, :, None], other=0.0
            )
            peak = tl.maximum(best, tl.max(peaks, 0))
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            mine = tl.exp2(best - safe)
            theirs = tl.exp2(peaks - safe[None, :])
            total = total * mine + tl.sum(sums * theirs, 0)
            acc = acc * mine[:, None] + tl.sum(outs * theirs[:, :, None], 0)
            best = peak
        to = out + (base.to(tl.int64) * HEADS + i)[:, None] * LATENT + d[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])


__all__ = ["attend", "combine", "schedule"]
