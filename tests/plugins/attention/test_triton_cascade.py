"""A prefix that several decodes share is read once: the same rows as without, whoever shares what."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.plugins.attention.triton.backend import TritonAttention
from engine.specs.attention import AttentionBatch, AttentionShape
from engine.testing.attention import gqa

DEVICE = detect()
KIND, PAGE = torch.device(DEVICE.kind), 16

SHAPES = {
    "grouped": gqa(6, 2, 16),
    "narrow values, softcap": gqa(2, 1, 32, v_head_dim=16, softcap=2.0, scale=1.0),
    "8 bits": gqa(2, 1, 16, packed=True),
}


def tables(lengths: list[int], shares: list[tuple[int, ...]]) -> torch.Tensor:
    """A page of its own for every 16 tokens, but the pages that `shares` (pages, request, request, …) makes common."""
    width = -(-max(lengths) // PAGE)
    found = torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width) + 1
    for pages, first, *rest in shares:
        for other in rest:
            found[other, :pages] = found[first, :pages]
    return found


def batch(lengths: list[int], table: torch.Tensor, *, may_share: bool) -> AttentionBatch:
    count, ends = len(lengths), torch.tensor(lengths)
    slots = table[torch.arange(count), (ends - 1) // PAGE].long() * PAGE + (ends - 1) % PAGE
    return AttentionBatch(
        query_start=torch.arange(count + 1, dtype=torch.int32).to(KIND),
        seq_lens=ends.int().to(KIND),
        block_tables=table.to(KIND),
        slot_mapping=slots.to(KIND),
        positions=(ends - 1).to(KIND),
        num_decodes=count,
        query_lens_host=torch.ones(count, dtype=torch.int32).numpy(),
        seq_lens_host=ends.int().numpy(),
        may_share=may_share,
    )


def outcome(shape: AttentionShape, lengths: list[int], table: torch.Tensor, *, may_share: bool) -> torch.Tensor:
    """The rows of two steps of one backend, so that the second finds what the first left behind."""
    backend = TritonAttention(shape, PAGE, DEVICE)
    draw = torch.Generator().manual_seed(3)
    parts = backend.kv_layout().parts
    pages = int(table.max()) + 1
    if shape.packed:  # elements up to 240, scales of 1 / 128
        kv = tuple(torch.randint(0, 120, (pages, *part), generator=draw).to(KIND, torch.uint8) for _, part in parts)
        for scales in kv[2:]:
            scales.fill_(120)
    else:
        kv = tuple(torch.randn(pages, *part, generator=draw).to(KIND) for _, part in parts)
    outs = []
    for _ in range(2):
        plan = backend.plan(batch(lengths, table, may_share=may_share))
        sizes = ((shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim))
        q, k, v = (torch.randn(len(lengths), *size, generator=draw).to(KIND) for size in sizes)
        outs.append(backend.forward(0, q, k, v, kv, plan))
        assert (plan.work[0].shared is not None) == may_share
    return torch.stack(outs)


def found(shape: AttentionShape, lengths: list[int], table: torch.Tensor) -> list[int]:
    """How many keys are read for each request together with others."""
    shared = TritonAttention(shape, PAGE, DEVICE).plan(batch(lengths, table, may_share=True)).work[0].shared
    keys: list[int] = shared.own_start.tolist()
    return keys


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_rows_as_without(shape: AttentionShape) -> None:
    """Five share 18 pages; the sixth shares too few; the last ends where a page does, one key behind the prefix."""
    lengths = [300, 290, 310, 40, 301, 289]
    table = tables(lengths, [(18, 0, 1, 2, 4, 5), (2, 0, 3)])
    want = outcome(shape, lengths, table, may_share=False)
    torch.testing.assert_close(outcome(shape, lengths, table, may_share=True), want, atol=2e-5, rtol=2e-5)
    assert found(shape, lengths, table) == [288, 288, 288, 0, 288, 288]


def test_two_groups_and_a_larger_tile_than_members() -> None:
    lengths = [280, 281, 282, 283, 500, 284, 285, 286, 287, 9]
    table = tables(lengths, [(16, 0, 2, 5, 7), (17, 1, 3, 6, 8)])
    shape = gqa(2, 1, 16)
    assert found(shape, lengths, table) == [256, 272, 256, 272, 0, 256, 272, 256, 272, 0]
    want = outcome(shape, lengths, table, may_share=False)
    torch.testing.assert_close(outcome(shape, lengths, table, may_share=True), want, atol=2e-5, rtol=2e-5)


def test_a_group_needs_as_many_keys_and_members() -> None:
    lengths = [300, 300, 300, 300]
    assert found(gqa(2, 1, 16), lengths, tables(lengths, [(15, 0, 1, 2, 3)])) == [0] * 4
    assert found(gqa(2, 1, 16), lengths, tables(lengths, [(16, 0, 1, 2)])) == [0] * 4
    assert found(gqa(2, 1, 16), lengths, tables(lengths, [(18, 0, 1, 2), (16, 0, 3)])) == [256] * 4


def test_the_last_key_is_always_its_own() -> None:
    """Tokens of one request as decodes of their own may end in a page that is shared and full."""
    lengths = [269, 270, 271, 272]
    table = tables(lengths, [(17, 0, 1, 2, 3)])
    assert found(gqa(2, 1, 16), lengths, table) == [256] * 4
