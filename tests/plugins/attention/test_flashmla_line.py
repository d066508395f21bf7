"""The line of all blocks: every block lies in one part, and no two pieces of cut requests share a place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.plugins.attention.flashmla.schedule import OVERHEAD, line

Slot = tuple[int, int, int]  # slot, first block, end of blocks


def lay(lengths: list[int], parts: int) -> tuple[torch.Tensor, ...]:
    starts = torch.full((len(lengths) + 2,), -7, dtype=torch.int32)
    firsts = torch.full((parts + 1,), -7, dtype=torch.int32)
    items = torch.full((parts, 8), -7, dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    line[(1,)](lens, starts, firsts, items, len(lengths), parts, REQUESTS=128)
    return starts, firsts, items


def walk(lengths: list[int], starts: torch.Tensor, items: torch.Tensor) -> dict[int, list[Slot]]:
    """What the programs of the decode kernel do: request -> its pieces, in the order of parts."""
    done: dict[int, list[Slot]] = {r: [] for r in range(len(lengths))}
    payload = int(starts[-1])
    for part, (first, last, begin, end, blocks, filled, *_) in enumerate(items.tolist()):
        for r in range(first, last):
            if r > first:
                at = int(starts[r]) + OVERHEAD.value
                begin, end = max(part * payload - at, 0), min((part + 1) * payload - at, -(-lengths[r] // 64))
            elif begin < end:
                assert (blocks, filled) == (-(-lengths[r] // 64), lengths[r] - (end - 1) * 64)
            if begin < end:
                done[r].append((part * 2 + (r != first), begin, end))
    return done


def covered(pieces: list[Slot]) -> list[int]:
    return [block for _, begin, end in pieces for block in range(begin, end)]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 40))
def test_every_block_lies_in_one_part(lengths: list[int], parts: int) -> None:
    starts, _, items = lay(lengths, parts)
    done = walk(lengths, starts, items)
    assert all(covered(done[r]) == list(range(-(-length // 64))) for r, length in enumerate(lengths))
    cut = [slot for pieces in done.values() if len(pieces) > 1 for slot, *_ in pieces]
    assert len(cut) == len(set(cut))


@pytest.mark.parametrize(("requests", "parts", "pieces"), [(32, 66, 2), (64, 66, 1), (128, 66, 1), (1, 66, 65)])
def test_equal_requests_are_cut_into_equal_pieces(requests: int, parts: int, pieces: int) -> None:
    lengths = [4096 if requests > 1 else 32768] * requests
    starts, _, items = lay(lengths, parts)
    assert {len(p) for p in walk(lengths, starts, items).values()} == {pieces}
