"""Sizes of latent rows, for who counts bytes without a device. Imports no torch."""

from __future__ import annotations

from typing import Final

SCALED: Final = 128
"""Elements of the latent that share a scale in an 8-bit row."""


def packed_bytes(row: int, latent: int, itemsize: int) -> int:
    """Bytes of an 8-bit row: `latent` of its `row` elements in 8 bits with float32 scales, the others as they are.

    Raises:
        ValueError: the latent's width is no multiple of 4, so that scales would not be aligned.
    """
    if latent % 4:
        raise ValueError(f"8-bit rows need a latent whose width is a multiple of 4, not {latent}")
    return latent + 4 * -(-latent // SCALED) + (row - latent) * itemsize


__all__ = ["SCALED", "packed_bytes"]
