"""Pages as bytes: one numpy view [num_pages, bytes] per part and layer, digested and copied without looking inside."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mmap

    from torch import Tensor

Part = NDArray[np.uint8]


class Grid:
    """The pool of one engine."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """`parts`: uint8 [num_pages, bytes] each, layer by layer; rows are dense, but may be apart."""
        self._parts = tuple(parts)

    @classmethod
    def of_pool(cls, pool: Sequence[tuple[Tensor, ...]]) -> Grid:
        """The grid over tensors `[num_pages, …]`, whose pages must each be one run of bytes in host memory.

        Raises:
            ValueError: a page isn't.
        """
        parts = []
        for layer, tensors in enumerate(pool):
            for tensor in tensors:
                if tensor.device.type != "cpu" or not tensor[:1].is_contiguous():
                    raise ValueError(f"the pages of layer {layer} are not runs of bytes in host memory")
                parts.append(tensor.view(torch.uint8).view(tensor.shape[0], -1).numpy())
        return cls(parts)

    @classmethod
    def of_mapping(cls, mapping: mmap.mmap, layout: Sequence[tuple[int, int]], like: Grid, num_pages: int) -> Grid:
        """The grid over a peer's memory, with pages as large as those of `like`."""
        parts = [
            np.ndarray((num_pages, width), np.uint8, mapping, offset, (stride, 1))
            for (offset, stride), width in zip(layout, like.widths, strict=True)
        ]
        return cls(parts)

    @property
    def widths(self) -> list[int]:
        """Bytes of one page in each part."""
        return [part.shape[1] for part in self._parts]

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return len(self._parts[0])

    def check(self, pages: Sequence[int]) -> None:
        """Refuse page ids that the pool doesn't have.

        Raises:
            ValueError: with the first of them.
        """
        if (stray := next((page for page in pages if not 0 <= page < self.num_pages), None)) is not None:
            raise ValueError(f"the KV pool has no page {stray}, it has {self.num_pages}")

    def layout(self, base: int, size: int) -> list[tuple[int, int]]:
        """Offset and page stride of each part within the `size` bytes of memory at address `base`.

        Raises:
            ValueError: a part lies elsewhere.
        """
        spans = [(part.ctypes.data - base, part.strides[0]) for part in self._parts]
        if any(offset < 0 for offset, _ in spans) or needed_bytes(spans, self.widths, self.num_pages) > size:
            raise ValueError("the KV pool lies outside the memory that the connector allocated for it")
        return spans

    def digests(self, pages: Sequence[int]) -> list[int]:
        """CRC-32 of each page over all layers: it guards against mix-ups and early reuse, not against an attacker."""
        sums = []
        for page in pages:
            checksum = 0
            for part in self._parts:
                checksum = zlib.crc32(part[page], checksum)
            sums.append(checksum)
        return sums

    def copy(self, pages: Sequence[int], source: Grid, source_pages: Sequence[int]) -> None:
        """Fill `pages` with `source_pages` of another grid, a run of neighbours at a time."""
        runs = list(_runs(pages, source_pages))
        for mine, theirs in zip(self._parts, source._parts, strict=True):
            for to, start, length in runs:
                mine[to : to + length] = theirs[start : start + length]


def needed_bytes(layout: Sequence[tuple[int, int]], widths: Sequence[int], num_pages: int) -> int:
    """How far a layout reaches.

    Raises:
        ValueError: it has another number of parts, or its pages overlap or lie before the start.
    """
    if len(layout) != len(widths) or num_pages <= 0:
        raise ValueError(
            f"the producer's layout has {len(layout)} parts and {num_pages} pages, {len(widths)} parts are here"
        )
    if any(offset < 0 or stride < width for (offset, stride), width in zip(layout, widths, strict=True)):
        raise ValueError("the producer's layout makes no sense: its pages overlap")
    return max(
        offset + (num_pages - 1) * stride + width for (offset, stride), width in zip(layout, widths, strict=True)
    )


def _runs(pages: Sequence[int], source_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(page, source page, length) of each stretch in which both sides are consecutive."""
    start = 0
    for end in range(1, len(pages) + 1):
        if end < len(pages) and pages[end] == pages[end - 1] + 1 and source_pages[end] == source_pages[end - 1] + 1:
            continue
        yield pages[start], source_pages[start], end - start
        start = end


__all__ = ["Grid", "needed_bytes"]
