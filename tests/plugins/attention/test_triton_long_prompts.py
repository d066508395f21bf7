"""Long prompts, by the kernel of compute capability 9.0 against the portable one, and what is laid out for it."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.long_prompts import ROWS, LongPrompts, lay_out
from engine.specs.attention import AttentionBatch, AttentionShape
from engine.testing.attention import gqa

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HERE, reason="needs a device of compute capability 9.0")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16

SHAPES = {
    "seven share one": gqa(14, 2, 128, dtype="bfloat16"),
    "small heads": gqa(3, 3, 64, dtype="float16"),
    "narrow values": gqa(4, 2, 128, v_head_dim=64, dtype="bfloat16"),
}


def prompts(lengths: list[int], decodes: int, past: int = 0) -> AttentionBatch:
    """Prompts behind decodes of 20 tokens, each but the first behind `past` tokens; all have pages of their own."""
    pasts = [0, *[past + 7 * i if past else 0 for i in range(len(lengths) - 1)]]
    counts, ends = [1] * decodes + lengths, [20] * decodes + [p + n for p, n in zip(pasts, lengths, strict=True)]
    pages = [-(-end // PAGE) for end in ends]
    tables = torch.zeros(len(ends), max(pages), dtype=torch.int32)
    for row, (at, used) in enumerate(zip(accumulate([1, *pages]), pages, strict=False)):
        tables[row, :used] = torch.arange(at, at + used)
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return AttentionBatch(
        query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(DEVICE),
        seq_lens=torch.tensor(ends, dtype=torch.int32).to(DEVICE),
        block_tables=tables.to(DEVICE),
        slot_mapping=(tables[owner, positions // PAGE].long() * PAGE + positions % PAGE).to(DEVICE),
        positions=positions.to(DEVICE),
        num_decodes=decodes,
        query_lens_host=torch.tensor(counts, dtype=torch.int32).numpy(),
        seq_lens_host=torch.tensor(ends, dtype=torch.int32).numpy(),
    )


@hopper
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("lengths", "decodes", "past"),
    [
        ([700], 0, 0),
        ([128], 0, 0),
        ([129, 64, 300, 40], 3, 0),
        ([2048, 127], 1, 0),
        ([129, 400, 150], 2, 1),
        ([200, 200, 300], 0, 1024),
        ([130, 1000], 1, 1999),
    ],
)
def test_the_same_rows_as_the_portable_kernel(
    shape: AttentionShape, lengths: list[int], decodes: int, past: int
) -> None:
    backend, draw = TritonAttention(shape, PAGE, detect("cuda")), torch.Generator().manual_seed(5)
    batch, dtype = prompts(lengths, decodes, past), getattr(torch, shape.dtype)
    parts = backend.kv_layout().parts
    kv = tuple(torch.randn(600, *part, generator=draw).to("cuda", dtype) for _, part in parts)
    kv[1][0] = kv[0][0] = torch.nan  # no request has this page
    tokens, heads = int(batch.query_start[-1]), shape.heads + shape.kv_heads
    qk = torch.randn(tokens, heads, shape.head_dim, generator=draw).to("cuda", dtype)
    v = torch.randn(tokens, shape.kv_heads, shape.v_head_dim, generator=draw).to("cuda", dtype)
    q, k = qk.split_with_sizes((shape.heads, shape.kv_heads), dim=1)
    plan = backend.plan(batch)
    assert plan.tiled
    assert (plan.pasts is not None) == (past > 0)
    assert isinstance(backend._long_prompts, LongPrompts)
    got = backend.forward(0, q, k, v, kv, plan)
    assert backend._long_prompts._works
    backend._long_prompts = None
    torch.testing.assert_close(got, backend.forward(0, q, k, v, kv, plan), atol=1e-2, rtol=2e-2)


def test_new_tokens_begin_a_block() -> None:
    counts, ends = np.array([1, 200, 128, 1]), np.array([9, 200, 430, 129])
    blocks, requests = lay_out(1, counts, ends)
    assert blocks.tolist() == [[1, 0], [1, 128], [2, -82], [2, 46], [2, 174], [2, 302], [3, 0], [3, 128]]
    assert requests.tolist() == [[0, 0, 0], [0, 0, 0], [2, 3, 82], [6, 1, 0]]


def test_keys_are_gathered_and_what_is_none_is_zero() -> None:
    shape = gqa(4, 2, 64, v_head_dim=32, dtype="float16")
    batch = prompts([140, 150], 1, past=77)
    kv = tuple(torch.randn(40, 2, PAGE, width).half().to(DEVICE) for width in (64, 32))
    kv[0][0] = kv[1][0] = torch.nan  # no request has this page
    pasts = LongPrompts(shape, PAGE, 1.0).pasts(batch)
    assert pasts is not None
    gathered = LongPrompts(shape, PAGE, 1.0)._gather(kv, batch, pasts)
    ends = batch.seq_lens.tolist()
    for part, pages in zip(gathered, kv, strict=True):
        for block, (request, first) in enumerate(pasts.blocks.tolist()):
            for row in range(ROWS):
                n, found = first + row, part[block * ROWS + row]
                page = int(batch.block_tables[request, max(n, 0) // PAGE]) if n < ends[request] else 0
                want = pages[page, :, n % PAGE] if 0 <= n < ends[request] else torch.zeros_like(found)
                assert torch.equal(found, want)


def test_too_many_or_too_short_prompts_are_read_from_their_pages() -> None:
    made = LongPrompts(gqa(4, 2, 64, dtype="float16"), PAGE, 1.0)
    assert made.pasts(prompts([100, 100], 0, past=10)) is None
    many = prompts([128, 128], 0, past=10)
    many.seq_lens_host = many.seq_lens_host * 10_000
    assert made.pasts(many) is None
