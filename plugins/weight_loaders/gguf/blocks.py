"""Block formats of GGUF tensors, decoded with torch, a whole tensor at a time.

Each decoder takes uint8 [blocks, bytes of a block] and returns float32 [blocks, elements of a block]. Layouts and the
order of float32 operations follow ggml (github.com/ggml-org/ggml, ggml-quants.c), so results agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[…, n] bytes -> […, 2 n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def bits_of(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes -> [blocks, 32] single bits, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = nibbles(blocks[:, 6:]) | (bits_of(blocks[:, 2:6]) << 4)
    return values.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = nibbles(blocks[:, 8:]) | (bits_of(blocks[:, 4:8]) << 4)
    return values.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the 8 sub-blocks of a Q4_K or Q5_K block, float32 [blocks, 8, 1] each.

    12 bytes hold sixteen 6-bit numbers: bytes 0 to 3 and 4 to 7 the first four scales and offsets, with two high bits
    of the last four on top; bytes 8 to 11 the low four bits of the last four, scale below offset.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return (_half(blocks, 0) * scales.float()).unsqueeze(-1), (_half(blocks, 2) * offsets.float()).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, offsets = k_scales(blocks)
    values = nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return values.float().mul_(scales).sub_(offsets).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, offsets = k_scales(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    values = nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | high
    return values.float().mul_(scales).sub_(offsets).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (low | high).float().sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1)).flatten(1)


DECODERS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""One decoder for each `BlockFormat`, by its name."""

__all__ = ["DECODERS", "bits_of", "k_scales", "nibbles"]
