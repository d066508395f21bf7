"""KV between tensor-parallel degrees: which rank reads which heads of whom, as slices of a logical layout.

Heads are numbered over the whole model. Of R ranks, rank r keeps an equal share of them in order; where there are fewer
heads than ranks, neighbouring ranks keep the same head (as the ranks of grouped-query models do), and a part without a
head axis (a latent) is the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

HEADS: Final = "head"
"""The name, among the axes of a page, of the one that counts KV heads."""


class HeadSlice(NamedTuple):
    """What one consumer rank reads of one producer rank: a run of heads, by their numbers on either side."""

    producer: int  # rank
    consumer: int  # rank
    source: slice  # of the producer's heads
    target: slice  # of the consumer's


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """The heads that a rank keeps.

    Raises:
        ValueError: they can't be shared out evenly.
    """
    if heads % ranks and ranks % heads:
        raise ValueError(f"{heads} KV heads can't be shared out evenly among {ranks} ranks")
    if ranks >= heads:
        head = rank * heads // ranks
        return range(head, head + 1)
    share = heads // ranks
    return range(rank * share, (rank + 1) * share)


def head_slices(heads: int, producers: int, consumers: int) -> list[HeadSlice]:
    """A cover of every consumer rank's heads, each read once; copies of a head are read from different ranks in turn.

    Raises:
        ValueError: the heads can't be shared out evenly on one of the sides.
    """
    slices = []
    for consumer in range(consumers):
        wanted = heads_of(consumer, consumers, heads)
        for producer in _readable(consumer, heads, producers):
            kept = heads_of(producer, producers, heads)
            first, last = max(wanted.start, kept.start), min(wanted.stop, kept.stop)
            if first < last:
                source = slice(first - kept.start, last - kept.start)
                slices.append(HeadSlice(producer, consumer, source, slice(first - wanted.start, last - wanted.start)))
    return slices


def _readable(consumer: int, heads: int, producers: int) -> list[int]:
    """One producer rank for each share of the heads, so that the ranks with copies serve different consumers."""
    copies = max(1, producers // heads)
    return [group * copies + consumer % copies for group in range(producers // copies)]


def cut_heads(page: Tensor, axes: tuple[str, ...], heads: slice) -> Tensor:
    """A view of some heads of pages [num_pages, *axes]; a part without a head axis is given whole."""
    if HEADS not in axes:
        return page
    at = 1 + axes.index(HEADS)
    return page.narrow(at, heads.start, heads.stop - heads.start)


__all__ = ["HEADS", "HeadSlice", "cut_heads", "head_slices", "heads_of"]
