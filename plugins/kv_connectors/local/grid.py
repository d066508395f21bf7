"""Pages as bytes: one numpy view [num_pages, bytes] per part and layer, digested and copied without looking inside.

The digest of a page is multilinear (Carter and Wegman, 1981): the sum of its 64-bit words, each times an odd weight of
its own, modulo 2^64. It sees any change of one word and, with near certainty, any mix-up, early reuse or missing piece;
it is no guard against somebody who forges. It was chosen by speed, in GB/s over 35 MB on one core: this 19 where pages
are neighbours and 6 where they are scattered, CRC-32 2.8, SHA-256 1.4, BLAKE2b 0.9.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mmap

    from torch import Tensor

Part = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]


class Grid:
    """The pool of one engine."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """`parts`: uint8 [num_pages, bytes] each, layer by layer; rows are dense, but may be apart."""
        self._parts = tuple(parts)
        self._words: list[Words] = [part.view(f"u{math.gcd(part.shape[1], 8)}") for part in parts]

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

    @cached_property
    def _weights(self) -> list[NDArray[np.uint64]]:
        """Of the words of a page, part by part: the same in every process."""
        counts = [words.shape[1] for words in self._words]
        stream = hashlib.shake_128(b"engine KV page digest").digest(8 * sum(counts))
        weights = np.frombuffer(stream, np.dtype("<u8")) | np.uint64(1)
        return np.split(weights, np.cumsum(counts)[:-1])

    def digests(self, pages: Sequence[int]) -> list[int]:
        """A 64-bit digest of each page over all layers."""
        rows, total = np.array(pages, np.intp), np.zeros(len(pages), np.uint64)
        for words, weights in zip(self._words, self._weights, strict=True):
            total += _weigh(words[rows], weights)
        return [int(digest) for digest in total]

    def copy(self, pages: Sequence[int], source: Grid, source_pages: Sequence[int]) -> list[int]:
        """Fill `pages` with `source_pages` of another grid, and return the digests of what was written.

        Both the pages and the digests come from one private copy, so that they agree even while the source changes.
        """
        to, start, total = np.array(pages, np.intp), np.array(source_pages, np.intp), np.zeros(len(pages), np.uint64)
        for mine, theirs, weights in zip(self._words, source._words, self._weights, strict=True):
            copied = theirs[start]
            mine[to] = copied
            total += _weigh(copied, weights)
        return [int(digest) for digest in total]


def _weigh(words: Words, weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[pages, words] -> [pages]; sums wrap around."""
    sums: NDArray[np.uint64] = np.einsum("ij,j->i", words, weights, dtype=np.uint64)
    return sums


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


__all__ = ["Grid", "needed_bytes"]
