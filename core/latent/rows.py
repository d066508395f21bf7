"""How a latent row lies in a page: as it is, or in 8 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.latent.widths import SCALED, packed_bytes
from engine.specs.attention import AttentionShape, KVLayout

_AXES: Final = (("token", "head", "width"),)

_LARGEST: Final = 448.0
"""Of float8_e4m3fn."""

_LEAST_SCALE: Final = 1e-4


class Rows(ABC):
    """Writes rows into a part of shape [pages, page size, 1, …] and reads them back, by page and offset."""

    @abstractmethod
    def layout(self, page_size: int) -> KVLayout:
        """One part with an entry per token."""

    @abstractmethod
    def store(self, part: Tensor, at: tuple[Tensor, ...], rows: Tensor) -> None:
        """Put rows [n, 1, latent + rope] at `at`, an index of pages and one of offsets [n]."""

    @abstractmethod
    def load(self, part: Tensor, at: tuple[Tensor, ...]) -> Tensor:
        """The rows at an index of pages […], or of pages and offsets […], in the dtype of queries."""


@dataclass(frozen=True, slots=True)
class PlainRows(Rows):
    """Elements in the dtype of queries."""

    shape: AttentionShape

    def layout(self, page_size: int) -> KVLayout:
        parts = (("latent", (page_size, 1, self.shape.head_dim)),)
        return KVLayout(parts=parts, dtype=self.shape.dtype, axes=_AXES)

    def store(self, part: Tensor, at: tuple[Tensor, ...], rows: Tensor) -> None:
        part[at] = rows

    def load(self, part: Tensor, at: tuple[Tensor, ...]) -> Tensor:
        return part[at]


@dataclass(frozen=True, slots=True)
class PackedRows(Rows):
    """The latent in float8_e4m3fn with a float32 scale for each 128 elements, the rotary part as it is.

    Bytes of a row: the latent's elements, the scales, the rotary part; 656 for DeepSeek's 512 + 64 in 16 bits, which
    is FlashMLA's row. A scale is the least power of two that brings its elements to 448 or below, so that taking it
    out again rounds nothing.
    """

    shape: AttentionShape

    def layout(self, page_size: int) -> KVLayout:
        width = packed_bytes(self.shape.head_dim, self.shape.v_head_dim, self._dtype.itemsize)
        return KVLayout(parts=(("packed", (page_size, 1, width)),), dtype="uint8", axes=_AXES)

    @property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.shape.dtype)
        return found

    def store(self, part: Tensor, at: tuple[Tensor, ...], rows: Tensor) -> None:
        part[at] = self.pack(rows)

    def load(self, part: Tensor, at: tuple[Tensor, ...]) -> Tensor:
        return self.unpack(part[at])

    def pack(self, rows: Tensor) -> Tensor:
        """[…, latent + rope] -> uint8 […, bytes]."""
        latent, rotary = rows.split_with_sizes((self.shape.v_head_dim, rows.shape[-1] - self.shape.v_head_dim), -1)
        blocks = self._blocks(latent.float())
        scales = power_above((blocks.abs().amax(-1) / _LARGEST).clamp_min(_LEAST_SCALE))
        small = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)[..., : self.shape.v_head_dim]
        return torch.cat([x.contiguous().view(torch.uint8) for x in (small, scales, rotary)], -1)

    def unpack(self, packed: Tensor) -> Tensor:
        """uint8 […, bytes] -> […, latent + rope]."""
        latent, scales = self.shape.v_head_dim, 4 * -(-self.shape.v_head_dim // SCALED)
        sizes = latent, scales, packed.shape[-1] - latent - scales
        small, factors, rotary = (x.contiguous() for x in packed.split_with_sizes(sizes, -1))
        blocks = self._blocks(small.view(torch.float8_e4m3fn).float()) * factors.view(torch.float32)[..., None]
        dtype = self._dtype
        return torch.cat((blocks.flatten(-2)[..., :latent].to(dtype), rotary.view(dtype)), -1)

    def _blocks(self, latent: Tensor) -> Tensor:
        """[…, latent] -> […, blocks, 128], the last one filled up with zeros."""
        padded = torch.nn.functional.pad(latent, (0, -latent.shape[-1] % SCALED))
        return padded.view(*padded.shape[:-1], -1, SCALED)


def power_above(values: Tensor) -> Tensor:
    """The least power of two that is not below each positive float32."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def rows_of(shape: AttentionShape) -> Rows:
    """The form that the shape asks for."""
    return PackedRows(shape) if shape.packed else PlainRows(shape)


__all__ = ["PackedRows", "PlainRows", "Rows", "power_above", "rows_of"]
