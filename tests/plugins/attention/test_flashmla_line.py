"""The line of all blocks: every block in one part, and partial results merged as softmax over all keys would be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.plugins.attention.flashmla.merge import merge
from engine.plugins.attention.flashmla.schedule import OVERHEAD, line

Slot = tuple[int, int, int]  # slot, first block, end of blocks


def lay(lengths: list[int], parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.full((len(lengths) + 2,), -7, dtype=torch.int32)
    firsts = torch.full((parts + 1,), -7, dtype=torch.int32)
    line[(1,)](torch.tensor(lengths, dtype=torch.int32), starts, firsts, len(lengths), parts, REQUESTS=64)
    return starts, firsts


def walk(lengths: list[int], parts: int, starts: torch.Tensor, firsts: torch.Tensor) -> dict[int, list[Slot]]:
    """What the programs of the decode kernel do: request -> its pieces, in the order of parts."""
    done: dict[int, list[Slot]] = {r: [] for r in range(len(lengths))}
    payload = int(starts[-1])
    for part in range(parts):
        first, last = int(firsts[part]), min(int(firsts[part + 1]) + 1, len(lengths))
        for r in range(first, last):
            at = int(starts[r]) + OVERHEAD.value
            begin = max(part * payload - at, 0)
            end = min((part + 1) * payload - at, -(-lengths[r] // 64))
            if begin < end:
                done[r].append((part * 2 + (r != first), begin, end))
    return done


def covered(pieces: list[Slot]) -> list[int]:
    return [block for _, begin, end in pieces for block in range(begin, end)]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 40))
def test_every_block_lies_in_one_part(lengths: list[int], parts: int) -> None:
    done = walk(lengths, parts, *lay(lengths, parts))
    assert all(covered(done[r]) == list(range(-(-length // 64))) for r, length in enumerate(lengths))
    cut = [slot for pieces in done.values() if len(pieces) > 1 for slot, *_ in pieces]
    assert len(cut) == len(set(cut))


@pytest.mark.parametrize(("requests", "parts", "pieces"), [(32, 66, 2), (64, 66, 1), (128, 66, 1), (1, 66, 65)])
def test_equal_requests_are_cut_into_equal_pieces(requests: int, parts: int, pieces: int) -> None:
    lengths = [4096 if requests > 1 else 32768] * requests
    starts, firsts = torch.empty(requests + 2, dtype=torch.int32), torch.empty(parts + 1, dtype=torch.int32)
    line[(1,)](torch.tensor(lengths, dtype=torch.int32), starts, firsts, requests, parts, REQUESTS=128)
    assert {len(p) for p in walk(lengths, parts, starts, firsts).values()} == {pieces}


@pytest.mark.parametrize("lengths", [[700], [64, 1, 500, 900], [200] * 12])
@pytest.mark.parametrize("columns", [128, 512])
def test_merged_parts_equal_the_whole(lengths: list[int], columns: int) -> None:
    parts, heads = 7, 3
    starts, firsts = lay(lengths, parts)
    generator = torch.Generator().manual_seed(len(lengths))
    partial = torch.full((2 * parts, heads, 512), float("nan"))
    lse = torch.full((2 * parts, heads), float("nan"))
    out = torch.full((len(lengths), heads, 512), 5.0)
    wanted = out.clone()
    for r, pieces in walk(lengths, parts, starts, firsts).items():
        if len(pieces) == 1:
            continue
        scores = torch.randn(heads, -(-lengths[r] // 64), generator=generator) * 4
        values = torch.randn(heads, scores.shape[1], 512, generator=generator)
        wanted[r] = (torch.softmax(scores, -1)[..., None] * values).sum(1)
        for slot, begin, end in pieces:
            here = scores[:, begin:end]
            partial[slot] = (torch.softmax(here, -1)[..., None] * values[:, begin:end]).sum(1)
            lse[slot] = torch.logsumexp(here, -1) * 1.4426950408889634
    by_part = len(lengths) > parts
    merge[(parts if by_part else len(lengths), 2, 512 // columns)](
        partial, lse, out, starts, firsts, torch.tensor(lengths, dtype=torch.int32), len(lengths),
        HEADS=heads, EACH=2, COLUMNS=columns, TILE=2, MOST=8, BY_PART=by_part, PDL=False,
    )  # fmt: skip
    assert torch.allclose(out, wanted, atol=1e-5)
