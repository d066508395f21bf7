"""Memory for weights in huge pages: a step reads all of them once, which costs a page walk per 4 KiB otherwise."""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2 * 2**20
CACHE_LINE: Final = 64
BLOCK: Final = 64 * 2**20
"""Address space taken at a time; memory is only used where it is written."""


class Arena:
    """Hands out zeroed memory, one piece after the other, so that weights lie in the order in which they were made."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] that begins at a cache line. The memory lives as long as any tensor of its block."""
        padded = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        if len(self._free) < padded:
            self._free = _block(max(padded, BLOCK))
        taken, self._free = self._free[:num_bytes], self._free[padded:]
        return taken


def _block(num_bytes: int) -> Tensor:
    """Zeroed memory that begins at a huge page."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -raw.data_ptr() % HUGE_PAGE
    return raw[skipped : skipped + num_bytes]


__all__ = ["Arena"]
