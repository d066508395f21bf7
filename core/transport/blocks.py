"""The pool of one engine, cut into blocks, wherever its memory is.

The digest of a block is multilinear (Carter and Wegman, 1981): the sum of its words, each times an odd weight of its
own, modulo 2^64. It sees any change of one word and, with near certainty, any mix-up, early reuse or missing piece; it
is no guard against somebody who forges. The weights are the same in every process and on every device.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from engine.transport.schema import Cut

if TYPE_CHECKING:
    from torch import Tensor

Blocks = NDArray[np.intp]
"""Block ids, int [n]: page id times blocks a page, plus the place in the page."""

Ready = Any
"""What `BlockPool.ready` returned, or a slice of it."""

Digests = Callable[[], list[int]]
"""What was digested; waits until the device has done what it was told."""


class BlockPool(ABC):
    """Blocks are pages unless `cut` says otherwise."""

    per_page: int
    """Blocks in a page."""

    swiftness: int = 1
    """How many times as fast as a core of a CPU digests are made."""

    @property
    @abstractmethod
    def widths(self) -> list[int]:
        """Bytes of one block in each part, layer by layer."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Pages in the pool."""

    @abstractmethod
    def cut(self, cuts: Sequence[Cut]) -> Self:
        """The same pool in other blocks; `cuts` are those of the parts of one layer."""

    @abstractmethod
    def addresses(self) -> list[tuple[int, int]]:
        """Of each part: the address of page 0 and the bytes from page to page."""

    @abstractmethod
    def digests(self, blocks: Sequence[int] | Blocks) -> list[int]:
        """A 64-bit digest of each block over all layers."""

    def ready(self, blocks: Blocks) -> Ready:
        """Block ids as `gather` and `scatter` want them, for use on the stream that is current now."""
        return blocks

    @abstractmethod
    def gather(self, blocks: Ready, into: Tensor) -> None:
        """Write blocks part by part, block after block, to the start of uint8 [bytes] on the pool's device."""

    @abstractmethod
    def scatter(self, blocks: Ready, source: Tensor, chosen: NDArray[np.bool_]) -> Digests:
        """Fill blocks with what `gather` wrote; the digests are those of what was written to the chosen."""

    def check(self, pages: Sequence[int]) -> None:
        """Refuse page ids that the pool doesn't have.

        Raises:
            ValueError: with the first of them.
        """
        if pages and not 0 <= min(pages) <= max(pages) < self.num_pages:
            stray = next(page for page in pages if not 0 <= page < self.num_pages)
            raise ValueError(f"the KV pool has no page {stray}, it has {self.num_pages}")

    def blocks(self, pages: Sequence[int]) -> Blocks:
        """The ids of the blocks of these pages, in their order."""
        starts = np.array(pages, np.intp) * self.per_page
        blocks: Blocks = (starts[:, None] + np.arange(self.per_page)).ravel()
        return blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all parts."""
        return sum(self.widths)


def word_bytes(page_width: int, cut: Cut) -> int:
    """Bytes of the words that the blocks of a part are digested in: at most 8, and no run is cut."""
    return math.gcd(page_width // (cut.outer * cut.per_page), 8)


def word_weights(counts: Sequence[int]) -> list[NDArray[np.uint64]]:
    """The weights of parts of so many words a block."""
    stream = hashlib.shake_128(b"engine KV page digest").digest(8 * sum(counts))
    weights = np.frombuffer(stream, np.dtype("<u8")) | np.uint64(1)
    return np.split(weights, np.cumsum(counts)[:-1])


__all__ = ["BlockPool", "Blocks", "Digests", "Ready", "word_bytes", "word_weights"]
