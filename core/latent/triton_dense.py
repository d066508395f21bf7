"""Attention over expanded keys and values in Triton: tiles of queries of one head, merged with earlier rounds."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.latent.dense import Dense
from engine.latent.rounds import Piece
from engine.latent.up import Expanded

LOG2E: Final = 1.4426950408889634

FIELDS: Final = 6
"""Integers of a tile: first query, queries, position of the first, first key, keys, position of the first."""


@triton.jit
def _fold(
    fixed,
    turned,
    keys,
    shared,
    values,
    sees,
    best,
    total,
    acc,
    scale,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block into a running softmax. fixed [M, P], turned [M, R], keys [P, N], shared [R, N], values [N, V]."""
    scores = tl.dot(fixed, keys, input_precision=PRECISION)
    scores = tl.dot(turned, shared, scores, input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(sees, scores, float("-inf"))
    peak = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def _attend(
    q,
    keys,
    rotary,
    values,
    tiles,
    out,
    stats,
    q_token,
    q_head,
    k_token,
    k_head,
    r_token,
    v_token,
    v_head,
    scale,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of queries for one head: program (head, tile). `scale` is in units of log2, stats in natural ones."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 6
    first_query = tl.load(tile)
    queries = tl.load(tile + 1)
    position = tl.load(tile + 2)
    first_key = tl.load(tile + 3)
    count = tl.load(tile + 4)
    key_position = tl.load(tile + 5)
    i = tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, NOPE_PAD)
    e = tl.arange(0, ROPE_PAD)
    f = tl.arange(0, VALUE_PAD)
    is_row = i < queries
    where = (first_query + i).to(tl.int64)
    query = q + where[:, None] * q_token + head * q_head
    fixed = tl.load(query + d[None, :], mask=is_row[:, None] & (d < NOPE)[None, :], other=0.0)
    turned = tl.load(query + NOPE + e[None, :], mask=is_row[:, None] & (e < ROPE)[None, :], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    keys += head * k_head
    values += head * v_head
    every = tl.minimum(tl.maximum(position - key_position + 1, 0), count) // BLOCK * BLOCK  # seen by every query
    some = tl.minimum(position + queries - key_position, count)  # by any
    for start in tl.range(0, every, BLOCK, num_stages=STAGES):
        source = (first_key + start + n).to(tl.int64)
        best, total, acc = _fold(
            fixed,
            turned,
            tl.load(keys + source[None, :] * k_token + d[:, None], mask=(d < NOPE)[:, None], other=0.0),
            tl.load(rotary + source[None, :] * r_token + e[:, None], mask=(e < ROPE)[:, None], other=0.0),
            tl.load(values + source[:, None] * v_token + f[None, :], mask=(f < VALUE)[None, :], other=0.0),
            is_row[:, None],
            best,
            total,
            acc,
            scale,
            False,
            PRECISION,
        )
    for start in tl.range(every, some, BLOCK, num_stages=1):
        source = (first_key + start + n).to(tl.int64)
        exists = start + n < count
        sees = exists[None, :] & (key_position + start + n[None, :] <= position + i[:, None])
        best, total, acc = _fold(
            fixed,
            turned,
            tl.load(
                keys + source[None, :] * k_token + d[:, None], mask=exists[None, :] & (d < NOPE)[:, None], other=0.0
            ),
            tl.load(
                rotary + source[None, :] * r_token + e[:, None], mask=exists[None, :] & (e < ROPE)[:, None], other=0.0
            ),
            tl.load(
                values + source[:, None] * v_token + f[None, :], mask=exists[:, None] & (f < VALUE)[None, :], other=0.0
            ),
            sees,
            best,
            total,
            acc,
            scale,
            True,
            PRECISION,
        )
    place = where * HEADS + head
    to = out + place[:, None] * VALUE + f[None, :]
    is_out = is_row[:, None] & (f < VALUE)[None, :]
    if key_position > 0:  # an earlier round left its result
        before = tl.load(stats + place, mask=is_row, other=0.0) * 1.4426950408889634
        peak = tl.maximum(best, before)
        mine = tl.exp2(best - peak)
        theirs = tl.exp2(before - peak)
        acc = acc * mine[:, None] + tl.load(to, mask=is_out, other=0.0).to(tl.float32) * theirs[:, None]
        total = total * mine + theirs
        best = peak
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_out)
    tl.store(stats + place, (best + tl.log2(total)) * 0.6931471805599453, mask=is_row)


class TritonDense(Dense):
    """Widths may be of any size. `dtype` is that of queries."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._exact = dtype == torch.float32
        self._rows, self._block, self._warps, self._stages = (32, 16, 4, 1) if self._exact else (128, 64, 8, 3)

    def plan(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        """int32 [tiles, FIELDS]; the last tiles of a piece, which see most keys, come first."""
        tiles = [
            (piece.query + at, min(self._rows, piece.queries - at), piece.position + at, *piece[3:])
            for piece in pieces
            for at in range(0, piece.queries, self._rows)
        ]
        return torch.tensor(tiles[::-1], dtype=torch.int32).to(device, non_blocking=True)

    def attend(self, q: Tensor, expanded: Expanded, plan: Tensor, scale: float, out: Tensor, stats: Tensor) -> None:
        nope, value = expanded.keys.shape[-1], expanded.values.shape[-1]
        rope = q.shape[-1] - nope
        _attend[(q.shape[1], len(plan))](
            q,
            *expanded,
            plan,
            out,
            stats,
            *q.stride()[:2],
            *expanded.keys.stride()[:2],
            expanded.rotary.stride(0),
            *expanded.values.stride()[:2],
            scale * LOG2E,
            HEADS=q.shape[1],
            NOPE=nope,
            NOPE_PAD=_padded(nope),
            ROPE=rope,
            ROPE_PAD=_padded(rope),
            VALUE=value,
            VALUE_PAD=_padded(value),
            ROWS=self._rows,
            BLOCK=self._block,
            PRECISION="ieee" if self._exact else "tf32",
            STAGES=self._stages,
            num_warps=self._warps,
        )


def _padded(width: int) -> int:
    found: int = max(16, triton.next_power_of_2(width))
    return found


__all__ = ["FIELDS", "TritonDense"]
