"""The pool as bytes: copied, digested, cut into blocks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from engine.transport.grid import Grid, needed_bytes


def pools() -> dict[str, list[tuple[torch.Tensor, ...]]]:
    """Pools of 12 pages that lie differently: apart, K and V of a page side by side, odd widths, one part, scalars."""
    both = torch.randint(0, 100, (12, 2, 3, 5), dtype=torch.int16)
    return {
        "apart": [(torch.randn(12, 4, 2), torch.randn(12, 4, 3)), (torch.randn(12, 4, 2), torch.randn(12, 4, 3))],
        "interleaved": [(both[:, 0], both[:, 1])],
        "odd": [(torch.randint(0, 255, (12, 7), dtype=torch.uint8),)],
        "bfloat16": [(torch.randn(12, 3).bfloat16(),)],
        "scalars": [(torch.randn(12),)],
    }


@pytest.mark.parametrize("name", sorted(pools()))
def test_copy_moves_exactly_the_pages(name: str) -> None:
    pool = pools()[name]
    source = Grid.of_pool(pool)
    target_pool = [tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in layer) for layer in pool]
    target = Grid.of_pool(target_pool)
    mine, theirs = [0, 1, 2, 9, 8, 5], [3, 4, 5, 7, 8, 11]
    assert target.copy(mine, source, theirs) == source.digests(theirs)
    for layer, target_layer in zip(pool, target_pool, strict=True):
        for tensor, copied in zip(layer, target_layer, strict=True):
            assert torch.equal(copied[mine], tensor[theirs])
            assert not copied[[3, 4, 6, 7, 10, 11]].any()
    assert target.digests(mine) == source.digests(theirs)
    assert target.copy([], source, []) == []


def test_digest_sees_every_bit() -> None:
    pool = pools()["apart"]
    grid = Grid.of_pool(pool)
    before = grid.digests(range(12))
    for tensor in (tensor for layer in pool for tensor in layer):
        raw = tensor.view(torch.uint8)[5].view(-1)
        for byte in range(raw.numel()):
            raw[byte] ^= 1 << byte % 8
            after = grid.digests(range(12))
            raw[byte] ^= 1 << byte % 8
            assert [a == b for a, b in zip(before, after, strict=True)] == [page != 5 for page in range(12)]


def test_digest_is_the_weighted_sum_and_the_same_in_every_process() -> None:
    page = np.arange(24, dtype=np.uint8).reshape(1, 24)
    grid = Grid([page[:, :16], page[:, 16:]])
    stream = hashlib.shake_128(b"engine KV page digest").digest(24)
    weights = [int.from_bytes(stream[at : at + 8], "little") | 1 for at in (0, 8, 16)]
    words = [int.from_bytes(page[0, at : at + 8].tobytes(), "little") for at in (0, 8, 16)]
    assert grid.digests([0]) == [sum(w * x for w, x in zip(weights, words, strict=True)) % 2**64]


def test_digest_sees_exchanged_words_parts_and_pages() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 255, (2, 2, 64), np.uint8)
    (before, other) = Grid([first, second]).digests([0, 1])
    assert before != other
    assert Grid([second, first]).digests([0]) != [before]
    exchanged = first.copy()
    exchanged[0, :8], exchanged[0, 8:16] = first[0, 8:16], first[0, :8]
    assert Grid([exchanged, second]).digests([0]) != [before]


def test_pages_that_are_no_run_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1 are not runs of bytes"):
        Grid.of_pool([(torch.zeros(4, 2, 3),), (torch.zeros(4, 3, 2).transpose(1, 2),)])


@pytest.mark.parametrize("layout", [[(0, 8)], [(0, 8), (-8, 8)], [(0, 8), (32, 7)], [(0, 8), (32, -8)], []])
def test_layouts_without_sense_are_refused(layout: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="the producer's layout"):
        needed_bytes(layout, [8, 8], 4)


def test_page_ids_are_checked() -> None:
    grid = Grid([np.zeros((4, 8), np.uint8)])
    grid.check([0, 3])
    for stray in (4, -1):
        with pytest.raises(ValueError, match=f"no page {stray}, it has 4"):
            grid.check([0, stray])
