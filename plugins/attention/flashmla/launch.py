"""Calls of the kernels: what a step shares, then one decode a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

from engine.plugins.attention.flashmla.few import HEIGHT, Few, Merge
from engine.plugins.attention.flashmla.schedule import line
from engine.plugins.attention.flashmla.store import store, store_packed
from engine.plugins.attention.flashmla.wide import wide

LOG2E: Final = 1.4426950408889634
WIDTH: Final = 576
LATENT: Final = 512
PAGE: Final = 64
TILE: Final = gl.NVMMASharedLayout(128, 16, 2)


@dataclass(frozen=True, slots=True)
class Line:
    """The work of one step's decodes; see `schedule.line`."""

    starts: Tensor  # int32 [requests + 2]
    firsts: Tensor  # int32 [parts + 1]
    items: Tensor  # int32 [parts, 8]
    seq_lens: Tensor  # int32 [requests]
    block_tables: Tensor  # int32 [requests, P]


class Decode:
    """One query token per request against latent pages of 64 rows, bfloat16 or packed.

    `few` takes up to 16 heads, and packed rows by 16 heads; `wide` takes more of them by 64.
    """

    def __init__(self, heads: int, scale: float, device: torch.device, packed: bool = False) -> None:
        self._heads, self._scale, self._packed = heads, scale * LOG2E, packed
        few = packed or heads <= HEIGHT
        self._row_blocks = -(-heads // (HEIGHT if few else 64))
        self._early = device.type == "cuda"  # see `engine.ops.dependent`
        chip = torch.cuda.get_device_properties(device).multi_processor_count if self._early else 4
        self._parts = max(1, chip // self._row_blocks)
        self._partial = torch.empty(2 * self._parts, heads, LATENT, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(2 * self._parts, heads, dtype=torch.float32, device=device)
        self._few = Few(heads, packed) if few and self._early else None
        self._merge = Merge(heads, packed) if self._early else None

    def plan(self, seq_lens: Tensor, block_tables: Tensor) -> Line:
        """Lay the line for requests of these lengths; reads nothing back."""
        requests, device = seq_lens.shape[0], seq_lens.device
        starts = torch.empty(requests + 2, dtype=torch.int32, device=device)
        firsts = torch.empty(self._parts + 1, dtype=torch.int32, device=device)
        items = torch.empty(self._parts, 8, dtype=torch.int32, device=device)
        padded = 256 if requests <= 256 else triton.next_power_of_2(requests)
        line[(1,)](seq_lens, starts, firsts, items, requests, self._parts, REQUESTS=padded)
        return Line(starts, firsts, items, seq_lens, block_tables)

    def store(self, rows: Tensor, slots: Tensor, latent: Tensor) -> None:
        """Put bfloat16 rows [T, 576] into the pages; slots int64 [T]."""
        how = {"PDL": self._early, "launch_pdl": self._early}
        if self._packed:
            flat = latent.view(-1)
            places = [flat.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16)]
            store_packed[(len(rows),)](rows, rows.stride(0), slots, *places, **how)
        else:
            store[(len(rows),)](rows, rows.stride(0), slots, latent, **how)

    def __call__(self, q: Tensor, latent: Tensor, work: Line) -> Tensor:
        """Attend: q bfloat16 [requests, heads, 576]; returns bfloat16 [requests, heads, 512].

        latent is bfloat16 [pages, 64, 576], or uint8 [pages, 64, 656] for packed rows.
        """
        q = q.contiguous()
        out = torch.empty(*q.shape[:2], LATENT, dtype=q.dtype, device=q.device)
        outputs = (out, self._partial, self._partial_lse)
        if self._few is not None:
            tables = (work.starts, work.firsts, work.seq_lens, work.block_tables)
            self._few(q, latent, outputs, tables, self._parts, self._scale)
        else:
            self._wide(q, latent, outputs, work)
        if self._merge is not None:
            self._merge(outputs, (work.starts, work.firsts, work.seq_lens), self._parts)
        return out

    def _wide(self, q: Tensor, latent: Tensor, outputs: tuple[Tensor, Tensor, Tensor], work: Line) -> None:
        rows, q_rows = latent.view(-1, latent.shape[-1]), q.view(-1, WIDTH)
        described = [TensorDescriptor.from_tensor(x, [64, width], TILE) for x in (q_rows, rows) for width in (128, 64)]
        wide[(self._parts * self._row_blocks,)](
            *described,
            *outputs,
            work.starts,
            work.items,
            work.seq_lens,
            work.block_tables,
            work.block_tables.stride(0),
            q.shape[0],
            self._scale,
            HEADS=self._heads,
            ROW_BLOCKS=self._row_blocks,
            PDL=self._early,
            launch_pdl=self._early,
            num_warps=4,
        )


__all__ = ["Decode", "Line"]
