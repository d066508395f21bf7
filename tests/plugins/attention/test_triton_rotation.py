"""Queries and keys that are rotated as they are read: the rows and the pages are those of rotating them before."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.ops.reference import TorchOps
from engine.plugins.attention.triton.backend import TritonAttention
from engine.specs.attention import AttentionBatch, AttentionShape, Rotation
from engine.testing.attention import gqa

DEVICE = detect()
KIND, PAGE = torch.device(DEVICE.kind), 16


def requests(counts: list[int], lengths: list[int], *, repeat: bool = False, shared: int = 0) -> AttentionBatch:
    """Requests over pages of their own but for the first `shared`; with `repeat` all are tokens of one request."""
    width = -(-max(lengths) // PAGE)
    tables = torch.arange(len(counts) * width, dtype=torch.int32).view(len(counts), width) + 1
    tables[:, : width if repeat else shared] = tables[0, : width if repeat else shared]
    positions = torch.cat([torch.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return AttentionBatch(
        query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(KIND),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(KIND),
        block_tables=tables.to(KIND),
        slot_mapping=(tables[owner, positions // PAGE].long() * PAGE + positions % PAGE).to(KIND),
        positions=positions.to(KIND),
        num_decodes=sum(count == 1 for count in counts),
        query_lens_host=torch.tensor(counts, dtype=torch.int32).numpy(),
        seq_lens_host=torch.tensor(lengths, dtype=torch.int32).numpy(),
        requests_repeat=repeat,
    )


BATCHES = {
    "decodes": requests([1, 1, 1], [20, 1, 70]),
    "tokens of one request": requests([1, 1, 1], [20, 21, 22], repeat=True),
    "a shared prefix": requests([1] * 4, [270, 290, 260, 261], shared=16),
    "a prompt among decodes": requests([1, 9], [20, 30]),
}


@pytest.mark.parametrize("rotary", [32, 16], ids=["whole heads", "a part of each head"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_as_if_rotated_before(batch: AttentionBatch, rotary: int) -> None:
    shape: AttentionShape = gqa(6, 2, 32)
    draw = torch.Generator().manual_seed(4)
    tokens = len(batch.positions)
    qkv = torch.randn(tokens, 10, 32, generator=draw).to(KIND)
    angles = torch.rand(300, rotary // 2, generator=draw) * 6
    rotation = Rotation(TorchOps(), batch.positions, torch.cat((angles.cos(), angles.sin()), 1).to(KIND))
    outcomes = []
    for ahead in (True, False):
        backend = TritonAttention(shape, PAGE, DEVICE, fused_rotation=True)
        kv = tuple(
            torch.randn(int(batch.block_tables.max()) + 1, *part, generator=torch.Generator().manual_seed(1)).to(KIND)
            for _, part in backend.kv_layout().parts
        )
        q, k, v = qkv.clone().split_with_sizes((6, 2, 2), dim=1)
        if ahead:
            rotation.turn(q, k)
            out = backend.forward(0, q, k, v, kv, backend.plan(batch))
        else:
            out = backend.forward_rotated(0, q, k, v, kv, backend.plan(batch), rotation)
        outcomes.append((out, *kv))
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
