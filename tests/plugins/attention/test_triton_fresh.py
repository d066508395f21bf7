"""Long prompts without a past, by the kernel of compute capability 9.0 against the portable one."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.fresh import Fresh
from engine.specs.attention import AttentionBatch, AttentionShape
from engine.testing.attention import gqa

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HERE, reason="needs a device of compute capability 9.0")
PAGE = 16

SHAPES = {
    "seven share one": gqa(14, 2, 128, dtype="bfloat16"),
    "small heads": gqa(3, 3, 64, dtype="float16"),
    "narrow values": gqa(4, 2, 128, v_head_dim=64, dtype="bfloat16"),
}


def prompts(lengths: list[int], decodes: int) -> AttentionBatch:
    """Fresh prompts behind decodes of 20 tokens; every request has pages of its own."""
    counts, ends = [1] * decodes + lengths, [20] * decodes + lengths
    pages = [-(-end // PAGE) for end in ends]
    tables = torch.zeros(len(ends), max(pages), dtype=torch.int32)
    for row, (at, used) in enumerate(zip(accumulate([1, *pages]), pages, strict=False)):
        tables[row, :used] = torch.arange(at, at + used)
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return AttentionBatch(
        query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32).cuda(),
        seq_lens=torch.tensor(ends, dtype=torch.int32).cuda(),
        block_tables=tables.cuda(),
        slot_mapping=(tables[owner, positions // PAGE].long() * PAGE + positions % PAGE).cuda(),
        positions=positions.cuda(),
        num_decodes=decodes,
        query_lens_host=torch.tensor(counts, dtype=torch.int32).numpy(),
        seq_lens_host=torch.tensor(ends, dtype=torch.int32).numpy(),
    )


@hopper
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("lengths", "decodes"), [([700], 0), ([128], 0), ([129, 64, 300, 1], 3), ([2048, 127], 1)])
def test_the_same_rows_as_the_portable_kernel(shape: AttentionShape, lengths: list[int], decodes: int) -> None:
    backend, draw = TritonAttention(shape, PAGE, detect("cuda")), torch.Generator().manual_seed(5)
    batch, dtype = prompts(lengths, decodes), getattr(torch, shape.dtype)
    parts = backend.kv_layout().parts
    kv = tuple(torch.randn(400, *part, generator=draw).to("cuda", dtype) for _, part in parts)
    tokens, heads = int(batch.query_start[-1]), shape.heads + shape.kv_heads
    qk = torch.randn(tokens, heads, shape.head_dim, generator=draw).to("cuda", dtype)
    v = torch.randn(tokens, shape.kv_heads, shape.v_head_dim, generator=draw).to("cuda", dtype)
    q, k = qk.split_with_sizes((shape.heads, shape.kv_heads), dim=1)
    plan = backend.plan(batch)
    assert plan.fresh
    assert isinstance(backend._fresh, Fresh)
    got = backend.forward(0, q, k, v, kv, plan)
    assert backend._fresh._works
    backend._fresh = None
    torch.testing.assert_close(got, backend.forward(0, q, k, v, kv, plan), atol=1e-2, rtol=2e-2)
