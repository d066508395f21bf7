"""Launches the kernel of `hopper` where it fits, and lays out what it reads."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.plugin import DeviceProfile
from engine.plugins.attention.triton.gather import gather
from engine.specs.attention import AttentionBatch, AttentionShape

log = logging.getLogger(__name__)

ROWS: Final = 128
"""Tokens of a tile, and keys of a block."""

WARPS: Final = 8

MOST_BYTES: Final = 2**30
"""Memory for keys and values in one piece; steps that would take more read them from their pages."""


@dataclass(frozen=True, slots=True)
class Pasts:
    """How the keys of prompts behind a past are laid in one piece, in blocks of `ROWS`; see `gather`."""

    blocks: Tensor  # int32 [blocks, 2]
    requests: Tensor  # int32 [R, 3]


class LongPrompts:
    """Prompts of a tile or more, for one model."""

    def __init__(self, shape: AttentionShape, page_size: int, scale: float) -> None:
        self._shape, self._page_size, self._scale, self._works = shape, page_size, scale, True

    @staticmethod
    def fits(shape: AttentionShape, device: DeviceProfile) -> bool:
        """Whether the kernel knows such a model and such a device."""
        widths = {shape.head_dim, shape.v_head_dim} <= {64, 128}
        plain = widths and shape.softcap is None and shape.dtype in ("bfloat16", "float16")
        capable = device.kind == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        return plain and capable

    def pasts(self, batch: AttentionBatch) -> Pasts | None:
        """How to lay out the keys of all requests but the decodes; None if they are too short, or too many."""
        first, counts, ends = batch.num_decodes, batch.query_lens_host, batch.seq_lens_host
        width = self._shape.kv_heads * (self._shape.head_dim + self._shape.v_head_dim) * 2
        if self._shape.packed or not self._works or counts[first:].sum() < ROWS * (len(counts) - first):
            return None
        blocks, requests = lay_out(first, counts, ends)
        if len(blocks) * ROWS * width > MOST_BYTES:
            return None
        device = batch.seq_lens.device
        return Pasts(*(torch.from_numpy(array).to(device, non_blocking=True) for array in (blocks, requests)))

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, ...],
        out: Tensor,
        batch: AttentionBatch,
        tiles: int,
        pasts: Pasts | None,
    ) -> bool:
        """Attention of all requests but the decodes; `tiles` as for `prefill`. False if another kernel must do it.

        Without `pasts` nothing precedes the prompts; with them, this step's keys are in the pages already.
        """
        if not (self._works and all(map(_is_taken, (q, k, v)))):
            return False
        try:
            if pasts is not None:
                k, v = self._gather(kv, batch, pasts)
            self._launch(q, k, v, out, batch, tiles, pasts)
        except (ImportError, AttributeError, TypeError, triton.TritonError) as error:
            log.warning("attention 'triton': prompts take the portable kernel, about 1.7 times slower: %s", error)
            self._works = False
        return self._works

    def _gather(self, kv: tuple[Tensor, ...], batch: AttentionBatch, pasts: Pasts) -> tuple[Tensor, Tensor]:
        shape, rows = self._shape, len(pasts.blocks) * ROWS
        k, v = (
            torch.empty(rows, shape.kv_heads, width, dtype=part.dtype, device=part.device)
            for part, width in zip(kv, (shape.head_dim, shape.v_head_dim), strict=True)
        )
        gather[(len(pasts.blocks), shape.kv_heads)](
            *kv,
            k,
            v,
            pasts.blocks,
            batch.seq_lens,
            batch.block_tables,
            kv[0].stride(0),
            kv[1].stride(0),
            batch.block_tables.stride(0),
            HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            V_DIM=shape.v_head_dim,
            PAGE=self._page_size,
            ROWS=ROWS,
            num_warps=8,
        )
        return k, v

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        batch: AttentionBatch,
        tiles: int,
        pasts: Pasts | None,
    ) -> None:
        from engine.plugins.attention.triton.hopper import descriptor, prefill_tiles

        shape = self._shape
        prefill_tiles[(shape.heads, tiles)](
            *(descriptor(x, ROWS) for x in (q, k, v)),
            out,
            batch.query_start,
            batch.query_start if pasts is None else pasts.requests,
            batch.num_decodes,
            len(batch.query_lens_host),
            self._scale,
            GROUP=shape.heads // shape.kv_heads,
            HEADS=shape.heads,
            DIM=shape.head_dim,
            V_DIM=shape.v_head_dim,
            ROWS=ROWS,
            BLOCK=ROWS,
            PAST=pasts is not None,
            num_warps=WARPS,
        )


def lay_out(first: int, counts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of keys of the requests from `first` on: the new tokens of each begin a block.

    Args:
        counts: [R], new tokens.
        ends: [R], tokens in the cache with them.

    Returns:
        int32 [blocks, 2], the request of each block and the position of its first key, which is negative where the
        first rows of a request's first block are none; and int32 [R, 3], of each request the number of its first
        block, how many of its blocks precede its new tokens, and how many rows of its first block are none.
    """
    pasts = ends - counts
    before, after = -(-pasts // ROWS), -(-counts // ROWS)
    pads = before * ROWS - pasts
    before[:first] = after[:first] = pads[:first] = 0
    total = before + after
    starts = np.cumsum(total) - total
    owner = np.repeat(np.arange(len(counts)), total)
    position = (np.arange(total.sum()) - starts[owner]) * ROWS - pads[owner]
    blocks = np.stack((owner, position), 1).astype(np.int32)
    return blocks, np.stack((starts, before, pads), 1).astype(np.int32)


def _is_taken(x: Tensor) -> bool:
    """Whether the heads of a token lie one behind the other, at addresses that the copy engine takes."""
    return x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


__all__ = ["ROWS", "LongPrompts", "Pasts", "lay_out"]
