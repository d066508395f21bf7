"""Choosing experts and sorting tokens by expert, as Triton kernels: nothing waits for the device.

Imported only where a CUDA device was chosen.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.dependent import LINE, begin, fetch, wait


@triton.jit
def _best_groups(
    ranked,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """ranked [TOKENS, GROUPS * SIZE] with all but the experts of the best groups at minus infinity."""
    parts = tl.reshape(ranked, (TOKENS, GROUPS, SIZE))
    strength = tl.max(parts, 2)
    if PAIRS:
        member = tl.arange(0, SIZE)[None, None, :]
        rest = tl.where(member == tl.argmax(parts, 2)[:, :, None], float("-inf"), parts)
        strength += tl.max(rest, 2)
    group = tl.arange(0, GROUPS)[None, :]
    kept = group < 0
    for _ in tl.static_range(CHOSEN_GROUPS):
        best = group == tl.argmax(strength, 1)[:, None]
        kept = kept | best
        strength = tl.where(best, float("-inf"), strength)
    return tl.reshape(tl.where(kept[:, :, None], parts, float("-inf")), (TOKENS, GROUPS * SIZE))


@triton.jit(do_not_specialize=["tokens", "scale"])
def choose(
    x,
    router,
    correction,
    ids,
    weights,
    partials,
    counters,
    tokens,
    x_row,
    hidden,
    scale,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    ALWAYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`engine.ops.experts.route` for a tile of tokens; program (tile, part of hidden), the last part chooses.

    x [tokens, hidden] with rows x_row apart, router [GROUPS * SIZE, hidden] dense, correction float32; ids int32 and
    weights float32 [tokens, CHOSEN + ALWAYS], COLUMNS a power of two that holds them. Equal scores: the first expert.
    A score that is no number ranks last, so that every id names an expert. partials float32
    [tiles * SPLIT, TOKENS, padded experts], counters int32 [tiles], zero before and after. AHEAD: a power
    of two, no less than the columns of a part.
    """
    PADDED: tl.constexpr = GROUPS_PAD * SIZE_PAD
    begin(EARLY)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    place = tl.arange(0, PADDED)
    is_expert = (place // SIZE_PAD < GROUPS) & (place % SIZE_PAD < SIZE)
    expert = tl.minimum(place // SIZE_PAD * SIZE + place % SIZE_PAD, GROUPS * SIZE - 1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    at = tl.arange(0, DEPTH)
    share = tl.cdiv(tl.cdiv(hidden, DEPTH), SPLIT) * DEPTH
    inputs = x + token.to(tl.int64)[:, None] * x_row + at[None, :]
    rows = router + expert[None, :] * hidden + at[:, None]
    if EARLY and SPLIT > 1:  # this part of the router, while the kernels ahead end
        line = tl.minimum(part * share + tl.arange(0, AHEAD // LINE) * LINE, hidden - 1)
        fetch(router + expert[:, None] * hidden + line[None, :])
    wait(EARLY)
    scores = tl.zeros([TOKENS, PADDED], tl.float32)
    for start in tl.range(part * share, tl.minimum((part + 1) * share, hidden), DEPTH):
        inside = start + at < hidden
        states = tl.load(inputs + start, mask=is_token[:, None] & inside[None, :], other=0.0)
        columns = tl.load(rows + start, mask=inside[:, None], other=0.0)
        scores = tl.dot(states, columns.to(states.dtype), scores, input_precision=PRECISION)
    if SPLIT > 1:
        local = tl.arange(0, TOKENS)[:, None] * PADDED + place[None, :]
        tl.store(partials + (tile * SPLIT + part) * TOKENS * PADDED + local, scores)
        tl.debug_barrier()  # all of this program's stores before its tick
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if done < SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        scores = tl.zeros([TOKENS, PADDED], tl.float32)
        for other in range(SPLIT):
            scores += tl.load(partials + (tile * SPLIT + other) * TOKENS * PADDED + local, cache_modifier=".cg")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        scores = tl.where(is_expert[None, :], scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + expert)[None, :]
    ranked = tl.where(ranked == ranked, ranked, -1e30)
    ranked = tl.where(is_expert[None, :], ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _best_groups(ranked, TOKENS, GROUPS_PAD, SIZE_PAD, CHOSEN_GROUPS, CORRECTED and SIZE > 1)
    column = tl.arange(0, COLUMNS)[None, :]
    chosen = GROUPS * SIZE + column + tl.zeros([TOKENS, COLUMNS], tl.int32) - CHOSEN
    taken = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for turn in tl.static_range(CHOSEN):
        is_best = place[None, :] == tl.argmax(ranked, 1)[:, None]
        taken = tl.where(column == turn, tl.sum(tl.where(is_best, scores, 0.0), 1)[:, None], taken)
        chosen = tl.where(column == turn, tl.sum(tl.where(is_best, expert[None, :], 0), 1)[:, None], chosen)
        ranked = tl.where(is_best, float("-inf"), ranked)
    if NORMALIZE:
        taken = taken / (tl.sum(taken, 1)[:, None] + 1e-20)
    taken = tl.where(column < CHOSEN, taken * scale, 1.0)
    to = token.to(tl.int64)[:, None] * (CHOSEN + ALWAYS) + column
    here = is_token[:, None] & (column < CHOSEN + ALWAYS)
    tl.store(ids + to, chosen, mask=here)
    tl.store(weights + to, taken, mask=here)


@triton.jit(do_not_specialize=["slots", "capacity"])
def arrange(
    ids,
    rows,
    owners,
    slots,
    capacity,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ALWAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sort slots (a token's choices, all tokens in order) into blocks of one expert each; program (expert).

    ids int32 [slots]; rows int32 [capacity, BLOCK], the slots of a block, -1 where it has fewer; owners int32
    [capacity], each block's expert, -1 behind the last block. The last ALWAYS of the EXPERTS come first. In a block,
    and from one of an expert's blocks to its next, slots ascend. PADDED is a power of two above EXPERTS.
    """
    begin(EARLY)
    wait(EARLY)
    turn = tl.program_id(0)
    expert = (turn + EXPERTS - ALWAYS) % EXPERTS
    i = tl.arange(0, CHUNK)
    each = tl.arange(0, PADDED)
    counts = tl.zeros([PADDED], tl.int32)
    for at in range(0, slots, CHUNK):
        is_slot = at + i < slots
        found = (tl.load(ids + at + i, mask=is_slot, other=0) + ALWAYS) % EXPERTS
        missing = tl.maximum(at + CHUNK - slots, 0)
        counts += tl.histogram(tl.where(is_slot, found, PADDED - 1), PADDED)
        counts -= tl.where(each == PADDED - 1, missing, 0)
    blocks = tl.cdiv(counts, BLOCK)
    ends = tl.cumsum(blocks, 0)
    mine = each == turn
    own = tl.sum(tl.where(mine, blocks, 0))
    first = tl.sum(tl.where(mine, ends, 0)) - own
    for at in range(0, own, CHUNK):
        tl.store(owners + first + at + i, expert, mask=at + i < own)
    if turn == 0:
        for at in range(tl.max(ends), capacity, CHUNK):
            tl.store(owners + at + i, -1, mask=at + i < capacity)
    to = rows + first * BLOCK
    seen = tl.cast(0, tl.int32)
    for at in range(0, slots, CHUNK):
        found = tl.load(ids + at + i, mask=at + i < slots, other=-1)
        hit = (found == expert).to(tl.int32)
        tl.store(to + seen + tl.cumsum(hit, 0) - 1, at + i, mask=hit == 1)
        seen += tl.sum(hit)
    for at in range(seen, own * BLOCK, CHUNK):
        tl.store(to + at + i, -1, mask=at + i < own * BLOCK)


__all__ = ["arrange", "choose"]
