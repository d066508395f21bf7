"""Any tensor-parallel degree reads from any other: each rank ends with exactly its heads, each read once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.transport.heads import cut_heads, head_slices, heads_of

DEGREES = [(8, 1, 1), (8, 1, 4), (8, 4, 1), (8, 2, 8), (8, 8, 2), (2, 1, 8), (2, 8, 1), (2, 8, 4), (6, 3, 2), (1, 4, 2)]


@pytest.mark.parametrize(("heads", "producers", "consumers"), DEGREES)
@pytest.mark.parametrize("axes", [("token", "head", "width"), ("head", "token", "width")])
def test_pages_of_one_degree_become_pages_of_the_other(
    heads: int, producers: int, consumers: int, axes: tuple[str, ...]
) -> None:
    shape = (5, 4, heads, 3) if axes[0] == "token" else (5, heads, 4, 3)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def rank(index: int, ranks: int) -> torch.Tensor:
        kept = heads_of(index, ranks, heads)
        return cut_heads(whole, axes, slice(kept.start, kept.stop))

    there = [rank(p, producers).clone() for p in range(producers)]
    here = [torch.full_like(rank(c, consumers), -1) for c in range(consumers)]
    for piece in head_slices(heads, producers, consumers):
        target = cut_heads(here[piece.consumer], axes, piece.target)
        assert (target == -1).all(), "read twice"
        target.copy_(cut_heads(there[piece.producer], axes, piece.source))
    for consumer in range(consumers):
        assert torch.equal(here[consumer], rank(consumer, consumers))


def test_ranks_that_keep_the_same_head_share_the_work() -> None:
    readers = Counter(piece.producer for piece in head_slices(heads=2, producers=8, consumers=8))
    assert readers == dict.fromkeys(range(8), 1)


def test_a_latent_is_the_same_on_every_rank() -> None:
    page = torch.zeros(3, 4, 9)
    assert cut_heads(page, ("token", "width"), slice(1, 2)) is page


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="6 KV heads can't be shared out evenly among 4 ranks"):
        head_slices(6, 4, 2)
