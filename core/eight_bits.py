"""Keys and values in 8 bits: each head's row in float8_e4m3fn, with a scale of its own.

The scale is the least power of two that brings the row's largest element to 448 or below, so taking it out again rounds
nothing, and packing what was unpacked gives the same bytes. It is kept as one byte, the biased exponent of a float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

LEAST: Final = 2.0**-40
"""Rows whose largest element is below count as if it were this."""


def packed_heads_bytes(kv_heads: int, head_dim: int, v_head_dim: int) -> int:
    """Bytes of one token's keys and values in one layer."""
    return kv_heads * (head_dim + 1 + v_head_dim + 1)


def rounded(rows: Tensor) -> Tensor:
    """What a cache in 8 bits keeps of rows [..., width]; in their dtype."""
    import torch

    most = rows.float().abs().amax(-1, keepdim=True).clamp_min(LEAST)
    bits = most.contiguous().view(torch.int32)
    scale = (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).view(torch.float32)  # 448 is 1.75 * 2 ** 8
    return ((rows.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


__all__ = ["LEAST", "packed_heads_bytes", "rounded"]
