"""Which requests of a step are computed in expanded form, and in which rounds, so that little is expanded at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.specs.attention import AttentionBatch, AttentionShape

WORKSPACE: Final = 128 * 2**20
"""Bytes that expanded keys and values may take at a time."""


class Piece(NamedTuple):
    """A run of one request's keys that is expanded in one round, and the queries that see any of it."""

    query: int  # first row of the step's queries
    queries: int
    position: int  # of the first query in its request
    key: int  # first row of the round's keys
    keys: int
    key_position: int  # of the first key in its request


@dataclass(frozen=True, slots=True)
class Round:
    """Rows that are expanded at once."""

    at: tuple[Tensor, Tensor]  # int64 [n] each: page and offset of every row
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Divided:
    """A step cut in two."""

    short: AttentionBatch | None  # the requests with absorbed queries; None if there are none
    short_rows: Tensor | None  # int64, their rows of the step; None: all
    long_rows: Tensor | None  # int64, rows of the expanded requests
    long_at: tuple[Tensor, Tensor] | None  # page and offset of each of these rows
    rounds: tuple[Round, ...]


def expansion_pays(shape: AttentionShape, queries: int, length: int, speed: float = 1.0) -> bool:
    """Whether it takes less time with the request's `length` rows expanded.

    A pair of query and key costs each head a product as wide as the key and one as wide as the value, both wider where
    queries are absorbed; expanding costs latent * (nope + value) for each row, at `speed` times the rate of attention.
    At its rate the past alone would need more than 170 queries with DeepSeek's widths, and queries that only see each
    other 341.
    """
    if shape.expanded is None:
        return False
    key, value = shape.expanded
    pairs = queries * (length - queries) + queries * (queries + 1) // 2
    nope = key - (shape.head_dim - shape.v_head_dim)
    spared = shape.head_dim + shape.v_head_dim - key - value
    return pairs * spared * speed > length * shape.v_head_dim * (nope + value)


def rows_at_once(shape: AttentionShape, itemsize: int, workspace: int = WORKSPACE) -> int:
    """How many rows may be expanded in one round."""
    if shape.expanded is None:
        return 1
    return max(1, workspace // (shape.heads * sum(shape.expanded) * itemsize))


def divide(batch: AttentionBatch, shape: AttentionShape, page_size: int, most: int, speed: float = 1.0) -> Divided:
    """Cut a step; `most` is the number of rows of a round, `speed` as above. Draft trees stay absorbed."""
    queries, lengths = batch.query_lens_host.tolist(), batch.seq_lens_host.tolist()
    trees = batch.tree_masks or {}
    long = [
        r
        for r in range(batch.num_decodes, len(queries))
        if r not in trees and expansion_pays(shape, queries[r], lengths[r], speed)
    ]
    if not long:
        return Divided(batch, None, None, None, ())
    starts = [0, *accumulate(queries)]
    long_rows = _rows(starts, long, batch)
    short = sorted(set(range(len(queries))) - set(long))
    return Divided(
        _subset(batch, short, starts) if short else None,
        _rows(starts, short, batch) if short else None,
        long_rows,
        _at(batch.slot_mapping[long_rows], page_size),
        tuple(_rounds(batch, [(r, starts[r], queries[r], lengths[r]) for r in long], page_size, most)),
    )


def _rows(starts: Sequence[int], requests: Sequence[int], batch: AttentionBatch) -> Tensor:
    parts = [torch.arange(starts[r], starts[r + 1]) for r in requests]
    return torch.cat(parts).to(batch.slot_mapping.device)


def _subset(batch: AttentionBatch, requests: list[int], starts: Sequence[int]) -> AttentionBatch:
    """The batch of some of the requests; the decodes are among them."""
    chosen = torch.tensor(requests).to(batch.seq_lens.device)
    rows = _rows(starts, requests, batch)
    queries = batch.query_lens_host[requests]
    ends = torch.tensor([0, *accumulate(queries.tolist())], dtype=torch.int32)
    trees = {requests.index(r): mask for r, mask in (batch.tree_masks or {}).items()}
    return replace(
        batch,
        query_start=ends.to(batch.query_start.device),
        seq_lens=batch.seq_lens[chosen],
        block_tables=batch.block_tables[chosen],
        slot_mapping=batch.slot_mapping[rows],
        positions=batch.positions[rows],
        query_lens_host=queries,
        seq_lens_host=batch.seq_lens_host[requests],
        tree_masks=trees or None,
    )


def _rounds(
    batch: AttentionBatch, requests: list[tuple[int, int, int, int]], page_size: int, most: int
) -> Iterator[Round]:
    """Fill rounds with the keys of requests (index, first row, queries, length), one after the other."""
    at: list[tuple[Tensor, Tensor]] = []
    pieces: list[Piece] = []
    used = 0
    for request, row, count, length in requests:
        past, done = length - count, 0
        while done < length:
            keys = min(most - used, length - done)
            unseeing = max(0, done - past)  # queries before the first of these keys
            pieces.append(Piece(row + unseeing, count - unseeing, past + unseeing, used, keys, done))
            index = torch.arange(done, done + keys, device=batch.block_tables.device)
            at.append((batch.block_tables[request, index // page_size].long(), index % page_size))
            used, done = used + keys, done + keys
            if used == most:
                yield _round(at, pieces)
                at, pieces, used = [], [], 0
    if pieces:
        yield _round(at, pieces)


def _round(at: list[tuple[Tensor, Tensor]], pieces: list[Piece]) -> Round:
    pages, offsets = (torch.cat(parts) for parts in zip(*at, strict=True))
    return Round((pages, offsets), tuple(pieces))


def _at(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    pages = slots.div(page_size, rounding_mode="floor")
    return pages, slots - pages * page_size


__all__ = ["WORKSPACE", "Divided", "Piece", "Round", "divide", "expansion_pays", "rows_at_once"]
