"""How one step's attention is cut into pieces of work for the threads."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

BUSY = 8
"""Pieces per thread below which long requests are split along their keys."""

NOTHING = np.zeros((0, 5), np.int32)


class Schedule(NamedTuple):
    """Pieces of work in the order in which they are handed out, longest first."""

    stores: np.ndarray  # int32 [s]: tokens whose KV must be stored before any item runs
    items: np.ndarray  # int32 [n, 7]: request, first query, queries, first segment, segments, partial or -1, own KV
    merges: np.ndarray  # int32 [m, 5]: request, first query, queries, first partial, partials
    partials: int


def schedule(
    queries: np.ndarray,
    ends: np.ndarray,
    trees: Collection[int] = (),
    *,
    tile: int,
    segment: int,
    kv_heads: int,
    threads: int,
) -> Schedule:
    """Cut requests into tiles of at most `tile` queries, and these along their keys when there are too few.

    An item that is all of its request stores the request's new KV itself ("own KV"), which saves the threads a meeting.

    Args:
        queries: new tokens of each request, int [R].
        ends: keys of each request once they are stored, int [R].
        trees: requests whose queries may see any of their new tokens, not only those before them.
        tile: most queries of an item.
        segment: keys of one segment.
        kv_heads: every item is done once per KV head.
        threads: that share the work.
    """
    tiles = -(-queries // tile)
    request = np.repeat(np.arange(len(queries)), tiles)
    first = (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
    count = np.minimum(queries[request] - first, tile)
    keys = ends[request] - queries[request] + first + count
    if trees:
        keys = np.where(np.isin(request, list(trees)), ends[request], keys)
    segments = -(-keys // segment)
    if len(request) * kv_heads < BUSY * threads and segments.max(initial=0) > 1:
        return _split(request, first, count, segments, int(queries.sum()))
    own = tiles == 1
    items = _table(request, first, count, 0, segments, -1, own[request])
    stores = np.flatnonzero(np.repeat(~own, queries)).astype(np.int32)
    return Schedule(stores, items[np.argsort(-count * keys, kind="stable")], NOTHING, 0)


def _split(request: np.ndarray, first: np.ndarray, count: np.ndarray, segments: np.ndarray, tokens: int) -> Schedule:
    """One item per tile and segment, and one merge per tile."""
    tile = np.repeat(np.arange(len(request)), segments)
    partial = np.arange(len(tile))
    start = np.cumsum(segments) - segments
    items = _table(request[tile], first[tile], count[tile], partial - start[tile], 1, partial, 0)
    return Schedule(np.arange(tokens, dtype=np.int32), items, _table(request, first, count, start, segments), len(tile))


def _table(first: np.ndarray, *others: np.ndarray | int) -> np.ndarray:
    """Columns side by side, int32."""
    table = np.empty((len(first), 1 + len(others)), np.int32)
    for number, column in enumerate((first, *others)):
        table[:, number] = column
    return table


__all__ = ["Schedule", "schedule"]
