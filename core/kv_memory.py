"""The KV pool: how many pages, and the tensors that hold them.

One run of bytes, cut into `[num_pages, *part]` per layer and part, so that a connector may hand in the memory (shared,
say) and address any page in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from engine.config.model import KVCacheSection
from engine.device import DeviceProfile
from engine.errors import ResourceError
from engine.specs.attention import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

_ALIGN: Final = 64
"""Bytes at which each part begins: a cache line, and enough for any vector load."""

_CPU_DEFAULT: Final = 2 * 2**30
"""Most bytes that a CPU pool takes when the YAML names none; memory is only touched as pages are used."""


def part_bytes(layout: KVLayout, num_pages: int) -> list[int]:
    """Bytes of each part of one layer, padded to the alignment."""
    itemsize = getattr(torch, layout.dtype).itemsize
    return [-(-num_pages * math.prod(shape) * itemsize // _ALIGN) * _ALIGN for _, shape in layout.parts]


def pool_bytes(layout: KVLayout, layers: int, num_pages: int) -> int:
    """Bytes of the whole pool."""
    return layers * sum(part_bytes(layout, num_pages))


def count_pages(
    section: KVCacheSection,
    layout: KVLayout,
    layers: int,
    device: DeviceProfile,
    *,
    max_running: int,
    max_context: int,
    page_size: int,
    beside: float = 0.0,
) -> int:
    """Pages of the pool: as the YAML says, or else for `max_running` full contexts within a quarter of the memory.

    A page is of `page_size` tokens; `beside` are bytes that it takes elsewhere, for the KV of a speculator.

    Raises:
        ResourceError: the pool would not fit, or would hold no page.
    """
    page = pool_bytes(layout, layers, 1024) / 1024 + beside
    if section.pages is not None:
        pages = section.pages
    elif section.memory is not None:
        pages = int(section.memory // page)
    else:
        most = device.memory_bytes // 4 if device.kind != "cpu" else min(device.memory_bytes // 4, _CPU_DEFAULT)
        pages = min(max_running * -(-max_context // page_size), int(most // page))
    if pages * page > device.memory_bytes:
        raise ResourceError(
            f"the KV pool of {pages} pages takes {pages * page / 2**20:,.0f} MiB, but {device.name} has "
            f"{device.memory_bytes / 2**20:,.0f} MiB free; lower kv_cache.pages or kv_cache.memory"
        )
    if pages < 1:
        raise ResourceError(f"the KV pool holds no page; one takes {page / 2**10:,.0f} KiB: raise kv_cache.memory")
    return pages


def cut_pool(
    layout: KVLayout,
    layers: int,
    num_pages: int,
    device: torch.device,
    allocate: Callable[[int], Tensor | None] = lambda num_bytes: None,
) -> list[tuple[Tensor, ...]]:
    """The pool as a tuple of parts per layer. `allocate` may provide the memory as uint8 [num_bytes]."""
    sizes = part_bytes(layout, num_pages)
    total = layers * sum(sizes)
    memory = allocate(total)
    if memory is None:
        memory = torch.empty(total, dtype=torch.uint8, device=device)
    dtype, at, pool = getattr(torch, layout.dtype), 0, []
    for _ in range(layers):
        parts = []
        for (_, shape), size in zip(layout.parts, sizes, strict=True):
            used = num_pages * math.prod(shape) * dtype.itemsize
            parts.append(memory[at : at + used].view(dtype).view(num_pages, *shape))
            at += size
        pool.append(tuple(parts))
    return pool


__all__ = ["count_pages", "cut_pool", "part_bytes", "pool_bytes"]
