"""Calls of the kernels: what a step shares, then one decode a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

from engine.plugins.attention.flashmla.merge import merge
from engine.plugins.attention.flashmla.narrow import narrow
from engine.plugins.attention.flashmla.schedule import line
from engine.plugins.attention.flashmla.store import store, store_packed
from engine.plugins.attention.flashmla.wide import wide

LOG2E: Final = 1.4426950408889634
WIDTH: Final = 576
LATENT: Final = 512
PAGE: Final = 64
TILE: Final = gl.NVMMASharedLayout(128, 16, 2)
RAW: Final = gl.NVMMASharedLayout(128, 8, 2)


@dataclass(frozen=True, slots=True)
class Line:
    """The work of one step's decodes; see `schedule.line`."""

    starts: Tensor  # int32 [requests + 2]
    firsts: Tensor  # int32 [parts + 1]
    seq_lens: Tensor  # int32 [requests]
    block_tables: Tensor  # int32 [requests, P]


class Decode:
    """One query token per request against latent pages of 64 rows, bfloat16 or packed.

    `narrow` takes groups of 16 heads with tokens as rows; packed rows are always taken so.
    """

    def __init__(
        self, heads: int, scale: float, device: torch.device, packed: bool = False, narrow: bool = False
    ) -> None:
        self._heads, self._scale, self._packed = heads, scale * LOG2E, packed
        self._narrow = packed or narrow
        self._row_blocks = -(-heads // (16 if self._narrow else 64))
        self._early = device.type == "cuda"  # see `engine.ops.dependent`
        chip = torch.cuda.get_device_properties(device).multi_processor_count if self._early else 4
        self._parts = max(1, chip // self._row_blocks)
        self._partial = torch.empty(2 * self._parts, heads, LATENT, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(2 * self._parts, heads, dtype=torch.float32, device=device)

    def plan(self, seq_lens: Tensor, block_tables: Tensor) -> Line:
        """Lay the line for requests of these lengths; reads nothing back."""
        requests = seq_lens.shape[0]
        starts = torch.empty(requests + 2, dtype=torch.int32, device=seq_lens.device)
        firsts = torch.empty(self._parts + 1, dtype=torch.int32, device=seq_lens.device)
        padded = 256 if requests <= 256 else triton.next_power_of_2(requests)
        line[(1,)](seq_lens, starts, firsts, requests, self._parts, REQUESTS=padded)
        return Line(starts, firsts, seq_lens, block_tables)

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
        requests, heads = q.shape[:2]
        out = torch.empty(requests, heads, LATENT, dtype=q.dtype, device=q.device)
        rows, q_rows = latent.view(-1, latent.shape[-1]), q.reshape(-1, WIDTH)
        height = 16 if self._narrow else 64
        queries = [TensorDescriptor.from_tensor(q_rows, [height, width], TILE) for width in (256, 64)]
        shared = (
            out,
            self._partial,
            self._partial_lse,
            work.starts,
            work.firsts,
            work.seq_lens,
            work.block_tables,
            work.block_tables.stride(0),
            requests,
            self._scale,
        )
        fixed = {"HEADS": heads, "ROW_BLOCKS": self._row_blocks, "num_warps": 4}
        fixed |= {"PDL": self._early, "launch_pdl": self._early}
        grid = (self._parts * self._row_blocks,)
        if self._packed:
            raw = TensorDescriptor.from_tensor(rows.view(torch.float8_e4m3fn), [PAGE, LATENT], RAW)
            rope = TensorDescriptor.from_tensor(rows.view(torch.bfloat16), [PAGE, 64], TILE)
            narrow[grid](*queries, raw, rope, rows.view(torch.float32), *shared, PACKED=True, **fixed)
        else:
            tiles = [TensorDescriptor.from_tensor(rows, [PAGE, width], TILE) for width in (256, 64)]
            if self._narrow:
                narrow[grid](*queries, *tiles, self._partial_lse, *shared, PACKED=False, **fixed)
            else:
                wide[grid](*queries, *tiles, *shared, **fixed)
        self._merge(out, work)
        return out

    def _merge(self, out: Tensor, work: Line) -> None:
        requests, heads = out.shape[:2]
        by_part = requests > self._parts
        programs = self._parts if by_part else requests
        few = programs * heads <= 512
        each = 1 if programs * heads <= 2048 else 8
        merge[(programs, -(-heads // each), LATENT // 128 if few else 1)](
            self._partial,
            self._partial_lse,
            out,
            work.starts,
            work.firsts,
            work.seq_lens,
            requests,
            HEADS=heads,
            EACH=each,
            COLUMNS=128 if few else LATENT,
            TILE=32 if few else 8,
            MOST=triton.next_power_of_2(self._parts),
            BY_PART=by_part,
            PDL=self._early,
            launch_pdl=self._early,
        )


__all__ = ["Decode", "Line"]
