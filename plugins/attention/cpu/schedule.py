"""How one step's attention is cut into pieces of work for the threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BUSY = 8
"""Pieces per thread below which long requests are split along their keys."""


class Schedule(NamedTuple):
    """Pieces of work in the order in which they are handed out, longest first."""

    items: np.ndarray  # int32 [n, 6]: request, first query, queries, first segment, segments, partial or -1
    merges: np.ndarray  # int32 [m, 5]: request, first query, queries, first partial, partials
    partials: int


def schedule(queries: np.ndarray, ends: np.ndarray, *, tile: int, segment: int, kv_heads: int, threads: int) -> Schedule:
    """Cut requests into tiles of at most `tile` queries, and these along their keys when there are too few.

    Args:
        queries: new tokens of each request, int [R].
        ends: keys of each request once they are stored, int [R].
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
    segments = -(-keys // segment)
    none = np.zeros((0, 5), np.int32)
    if len(request) * kv_heads >= BUSY * threads or segments.max() == 1:
        columns = (request, first, count, np.zeros_like(first), segments, np.full_like(first, -1))
        items = np.stack(columns, axis=1, dtype=np.int32)
        return Schedule(items[np.argsort(-count * keys, kind="stable")], none, 0)
    whole = np.repeat(np.arange(len(request)), segments)
    partial = np.arange(len(whole))
    offset = np.cumsum(segments) - segments
    columns = (request[whole], first[whole], count[whole], partial - offset[whole], np.ones_like(whole), partial)
    merges = np.stack((request, first, count, offset, segments), axis=1, dtype=np.int32)
    return Schedule(np.stack(columns, axis=1, dtype=np.int32), merges, len(whole))


__all__ = ["Schedule", "schedule"]
