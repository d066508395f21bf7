"""The kernels around latent attention against plain torch: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.reference import TorchOps

pytest.importorskip("triton")

from engine.ops.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, NOPE, LATENT, ROPE, VALUE = 3, 24, 48, 8, 20


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half().to(DEVICE)


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_to_be_stored(tokens: int) -> None:
    angles = torch.rand(50, ROPE // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    positions = torch.tensor([0, 49, 7, 30, 2], device=DEVICE)[:tokens]
    found = []
    for ops in (TritonOps(), TorchOps()):
        made = draw(tokens, HEADS * (NOPE + ROPE) + LATENT + ROPE)
        first, row = made.split_with_sizes((HEADS * (NOPE + ROPE), LATENT + ROPE), -1)
        queries = first.view(tokens, HEADS, NOPE + ROPE)
        found.append((ops.latent_rows(queries, row, draw(LATENT), 1e-6, positions, cos_sin), queries))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_queries_into_the_latent_space_and_outputs_back(tokens: int) -> None:
    queries, key = draw(tokens, HEADS + 1, NOPE + ROPE)[:, 1:], draw(HEADS, NOPE, LATENT)
    latents, value = draw(tokens, HEADS, LATENT), draw(HEADS, VALUE, LATENT)
    ours, theirs = TritonOps(), TorchOps()
    absorbed, lifted = ours.absorb(queries, key), ours.lift(latents, value)
    assert absorbed.is_contiguous()
    assert lifted.is_contiguous()
    torch.testing.assert_close(absorbed, theirs.absorb(queries, key), atol=2e-2, rtol=2e-3)
    torch.testing.assert_close(lifted, theirs.lift(latents, value), atol=2e-2, rtol=2e-3)
