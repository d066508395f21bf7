"""GGUF blocks taken apart into codes, scales and offsets, for who multiplies them without decoding.

Each splitter takes uint8 [rows, blocks, bytes of a block]. Layouts are those of `blocks`. Exact, except that scale and
offset of a Q4_K or Q5_K sub-block, products of two numbers, are rounded to float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from engine.plugins.weight_loaders.gguf.blocks import bits_of, k_scales, nibbles
from engine.specs.weight_loader import Blocks


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [rows, blocks]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _q4_0(raw: Tensor) -> Blocks:
    scale = _half(raw, 0)
    return Blocks(bits=4, codes=raw[..., 2:], scale=scale, offset=scale * -8)


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks(bits=4, codes=raw[..., 4:], scale=_half(raw, 0), offset=_half(raw, 2))


def _five_bits(raw: Tensor, at: int) -> Tensor:
    """Codes 0 to 31 whose high bits lie at byte `at`, int8 [rows, blocks, 32]."""
    high = bits_of(raw[..., at : at + 4].reshape(-1, 4)).view(*raw.shape[:2], 32)
    return (nibbles(raw[..., at + 4 :]) | (high << 4)).view(torch.int8)


def _q5_0(raw: Tensor) -> Blocks:
    return Blocks(bits=8, codes=_five_bits(raw, 2) - 16, scale=_half(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    return Blocks(bits=8, codes=_five_bits(raw, 4), scale=_half(raw, 0), offset=_half(raw, 2))


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks(bits=8, codes=raw[..., 2:].view(torch.int8), scale=_half(raw, 0))


def _k_parts(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of all sub-blocks, float16 [rows, 8 x blocks]."""
    scales, offsets = k_scales(raw.reshape(-1, raw.shape[-1]))
    return scales.half().view(raw.shape[0], -1), offsets.neg().half().view(raw.shape[0], -1)


def _q4_k(raw: Tensor) -> Blocks:
    """Each 32 bytes hold two sub-blocks, one in the low halves and one in the high ones."""
    pairs = raw[..., 16:].reshape(raw.shape[0], -1, 2, 16)  # [rows, pairs of sub-blocks, first or second 16 bytes, 16]
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    low, high = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
    scale, offset = _k_parts(raw)
    return Blocks(bits=4, codes=torch.stack((low, high), 2).flatten(1, 2), scale=scale, offset=offset)


def _q5_k(raw: Tensor) -> Blocks:
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 1, 8, 1)
    high = ((raw[:, :, None, 16:48] >> shifts) & 1) << 4
    low = nibbles(raw[..., 48:].reshape(*raw.shape[:2], 4, 32)).view(*raw.shape[:2], 8, 32)
    scale, offset = _k_parts(raw)
    return Blocks(bits=8, codes=(low | high).view(torch.int8).flatten(1, 2), scale=scale, offset=offset)


SPLITTERS: Final[Mapping[str, Callable[[Tensor], Blocks]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
"""Formats whose blocks have one scale for 32 weights; Q6_K has one for 16."""

__all__ = ["SPLITTERS"]
