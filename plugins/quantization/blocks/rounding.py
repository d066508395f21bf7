"""Dense matrices to blocks and back, and blocks of several matrices to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.specs.weight_loader import Blocks

BLOCK: Final = 32
HALF_MOST: Final = 65504.0
"""The largest float16."""


def rounded(weight: Tensor, bits: int) -> Blocks:
    """float32 [rows, k] in blocks along k: of 8 bits by the largest magnitude, of 4 from the least to the largest."""
    values = weight.view(weight.shape[0], -1, BLOCK)
    if bits == 8:
        scale = (values.abs().amax(-1) / 127).clamp(max=HALF_MOST).half()
        return Blocks(bits=8, codes=_steps(values, scale, -127, 127).to(torch.int8), scale=scale)
    low = values.amin(-1).clamp(-HALF_MOST, HALF_MOST).half()
    scale = ((values.amax(-1) - low.float()) / 15).clamp(max=HALF_MOST).half()
    codes = _steps(values - low.float().unsqueeze(-1), scale, 0, 15).to(torch.uint8)
    return Blocks(bits=4, codes=codes[..., :16] | (codes[..., 16:] << 4), scale=scale, offset=low)


def _steps(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Whole multiples of the scale; zero where the scale is."""
    step = scale.float().unsqueeze(-1)
    return (values / step).nan_to_num_(0.0).round_().clamp_(least, most)


def dense(blocks: Blocks) -> Tensor:
    """The weights, float32 [rows, k]."""
    codes = widened(blocks).codes.float() * blocks.scale.float().unsqueeze(-1)
    if blocks.offset is not None:
        codes += blocks.offset.float().unsqueeze(-1)
    return codes.flatten(1)


def widened(blocks: Blocks) -> Blocks:
    """The same weights with codes of 8 bits."""
    if blocks.bits == 8:
        return blocks
    codes = torch.cat((blocks.codes & 15, blocks.codes >> 4), dim=-1).view(torch.int8)
    return Blocks(bits=8, codes=codes, scale=blocks.scale, offset=blocks.offset)


def stacked(parts: Sequence[Blocks]) -> Blocks:
    """One matrix below the other; all in 8 bits if one is, and with offsets if one has them."""
    if len({part.bits for part in parts}) > 1:
        parts = [widened(part) for part in parts]
    offsets = [torch.zeros_like(part.scale) if part.offset is None else part.offset for part in parts]
    return Blocks(
        bits=parts[0].bits,
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        offset=None if all(part.offset is None for part in parts) else torch.cat(offsets),
    )


__all__ = ["BLOCK", "dense", "rounded", "stacked", "widened"]
