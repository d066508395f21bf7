"""The masks of draft trees as kernels read them: all in one run of bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.specs.attention import AttentionBatch


def joined(batch: AttentionBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a batch with tree masks: uint8, one mask behind the other, row by row; int64 [requests], where each begins, or
    -1 for a request without one."""
    starts, at = [-1] * len(batch.query_lens_host), 0
    masks = batch.tree_masks or {}
    for request, mask in masks.items():
        starts[request], at = at, at + mask.numel()
    flat = torch.cat([mask.flatten() for mask in masks.values()]).to(torch.uint8)
    return flat, torch.tensor(starts, dtype=torch.int64).to(device, non_blocking=True)


__all__ = ["joined"]
