"""Latent rows by Triton kernels: absorbed queries of decodes, drafts and short chunks, and expanded prefill.

`plan_absorbed` and `attend` of a batch of decodes read lengths on the device only, so they may be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.latent.backend import LatentBackend
from engine.latent.triton_dense import TritonDense
from engine.latent.widths import SCALED
from engine.ops.dependent import EARLY
from engine.plugin import DeviceProfile
from engine.plugins.attention.triton import mla_decode
from engine.plugins.attention.triton.masks import joined
from engine.specs.attention import AttentionBatch, AttentionShape

LOG2E: Final = 1.4426950408889634

FEWEST: Final = 1
"""Blocks of keys that are worth a program."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the kernel cuts its work."""

    rows: int  # of queries: heads times tokens
    block: int  # keys a round
    warps: int
    stages: int
    programs: int = 1  # per multiprocessor


WIDE: Final = Tiles(64, 32, 8, 3)
"""64 rows are what the matrix instructions of compute capability 9.0 take."""

NARROW: Final = Tiles(16, 64, 4, 2, programs=2)


@dataclass(frozen=True, slots=True)
class Work:
    """Some requests of a step, and how the runs over their keys are cut."""

    first: int  # request
    requests: int
    blocks: int  # of query rows, at most, of a request
    runs: int
    tiles: Tiles
    starts: Tensor  # int32 [requests + 1]
    cuts: Tensor  # int32 [runs + 1]
    partial_out: Tensor  # float32 [2 * runs, rows, latent]
    partial_stats: Tensor  # float32 [2 * runs, rows, 2]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share."""

    batch: AttentionBatch
    decodes: Work | None
    rest: Work | None
    at: tuple[Tensor, Tensor] | None  # page and offset of tokens that are stored ahead
    trees: Tensor  # uint8, masks end to end
    tree_at: Tensor  # int64 [R]


class TritonLatent(LatentBackend):
    """Rows of 64 to 512 + 64 elements, plain or in 8 bits, in pages of any size."""

    def __init__(self, shape: AttentionShape, page_size: int, device: DeviceProfile) -> None:
        super().__init__(shape, page_size, dense=TritonDense(getattr(torch, shape.dtype)))
        latent, rope = shape.v_head_dim, shape.head_dim - shape.v_head_dim
        if odd := [width for width in (latent, rope) if width < 16 or width & (width - 1)]:
            raise ValueError(f"attention backend 'triton' needs latent widths that are powers of two, not {odd[0]}")
        if any(shape.windows) or shape.softcap is not None:
            raise ValueError("attention backend 'triton' has no sliding window and no soft cap over latent rows")
        self._device = torch.device(device.kind)
        on_gpu = device.kind == "cuda"
        self._chip = torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 4
        modern = on_gpu and (device.compute_capability or (0, 0)) >= (9, 0)
        self._wide = WIDE if modern else NARROW
        self._narrow = NARROW
        if shape.dtype == "float32":
            self._wide = self._narrow = Tiles(16, 16, 4, 1)
        self._no_tree = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        self._common: dict[str, Any] = {
            "HEADS": shape.heads,
            "LATENT": latent,
            "ROPE": rope,
            "SCALED": min(SCALED, latent),
            "PAGE": page_size,
            "ROW": self.rows.layout(1).parts[0][1][-1],  # elements, or bytes where packed
            "SIZE": getattr(torch, shape.dtype).itemsize,
            "PACKED": shape.packed,
            "NATIVE": on_gpu and (device.compute_capability or (0, 0)) >= (8, 9),
            "PRECISION": "ieee" if shape.dtype == "float32" else "tf32",
        }

    def plan_absorbed(self, batch: AttentionBatch) -> Plan:
        """Cut the runs of decodes, and of the other requests."""
        decodes, requests = batch.num_decodes, len(batch.query_lens_host)
        longest = int(batch.query_lens_host[decodes:].max(initial=0))
        trees, tree_at = joined(batch, self._device) if batch.tree_masks else (self._no_tree, self._no_tree)
        ahead = longest > 0 or batch.requests_repeat
        return Plan(
            batch,
            self._work(batch, 0, decodes, 1) if decodes else None,
            self._work(batch, decodes, requests - decodes, longest) if longest else None,
            self._at(batch.slot_mapping) if ahead else None,
            trees,
            tree_at,
        )

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        pages = slots.div(self.page_size, rounding_mode="floor")
        return pages, slots - pages * self.page_size

    def _work(self, batch: AttentionBatch, first: int, requests: int, tokens: int) -> Work:
        rows = self.shape.heads * tokens
        tiles = self._wide if rows > 32 else self._narrow
        blocks = -(-rows // tiles.rows)
        runs = max(1, tiles.programs * self._chip // blocks)
        starts = torch.empty(requests + 1, dtype=torch.int32, device=self._device)
        cuts = torch.empty(runs + 1, dtype=torch.int32, device=self._device)
        mla_decode.schedule[(1,)](
            batch.seq_lens[first : first + requests],
            starts,
            cuts,
            requests,
            runs,
            REQUESTS=max(256, triton.next_power_of_2(requests + 1)),
            PROGRAMS=triton.next_power_of_2(runs),
            BLOCK=tiles.block,
            FEWEST=FEWEST,
        )
        parts = (2 * runs, blocks * tiles.rows)
        return Work(
            first,
            requests,
            blocks,
            runs,
            tiles,
            starts,
            cuts,
            torch.empty(*parts, self.shape.v_head_dim, dtype=torch.float32, device=self._device),
            torch.empty(*parts, 2, dtype=torch.float32, device=self._device),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        """See `LatentBackend.attend`."""
        out = torch.empty(*q.shape[:2], self.shape.v_head_dim, dtype=q.dtype, device=q.device)
        if plan.at is not None:
            self.rows.store(kv[0], plan.at, k)
        for work, decode in ((plan.decodes, True), (plan.rest, False)):
            if work is not None:
                self._run(q, k, kv[0], out, plan, work, decode)
        return out

    def _run(self, q: Tensor, k: Tensor, part: Tensor, out: Tensor, plan: Plan, work: Work, decode: bool) -> None:
        batch, tiles = plan.batch, work.tiles
        scales, rotary = (part.view(torch.float32), part.view(q.dtype)) if self.shape.packed else (part, part)
        mla_decode.attend[(work.blocks, work.runs)](
            q,
            k,
            part,
            scales,
            rotary,
            out,
            work.partial_out,
            work.partial_stats,
            work.starts,
            work.cuts,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            plan.trees,
            plan.tree_at,
            *q.stride()[:2],
            k.stride(0),
            batch.block_tables.stride(0),
            work.first,
            work.requests,
            work.runs,
            self.shape.scale * LOG2E,
            ROWS=tiles.rows,
            BLOCK=tiles.block,
            DECODE=decode,
            STORE=plan.at is None,
            TREE=not decode and batch.tree_masks is not None,
            STAGES=tiles.stages,
            EARLY=EARLY,
            num_warps=tiles.warps,
            launch_pdl=EARLY,
            **self._common,
        )
        self._combine(out, batch, work, decode)

    def _combine(self, out: Tensor, batch: AttentionBatch, work: Work, decode: bool) -> None:
        rows, latent = work.blocks * work.tiles.rows, self.shape.v_head_dim
        together = triton.next_power_of_2(max(1, work.requests * rows // (8 * self._chip)))
        at_once = min(8, together)
        columns = min(latent, 128 if work.requests * rows < 2 * self._chip else 512)
        mla_decode.combine[(work.requests, -(-rows // at_once), latent // columns)](
            out,
            work.partial_out,
            work.partial_stats,
            work.starts,
            work.cuts,
            batch.query_start,
            work.first,
            work.runs,
            rows,
            HEADS=self.shape.heads,
            LATENT=latent,
            ROWS=at_once,
            COLUMNS=columns,
            AT_ONCE=max(1, 4096 // (columns * at_once)),
            DECODE=decode,
            EARLY=EARLY,
            num_warps=4,
            launch_pdl=EARLY,
        )


__all__ = ["TritonLatent"]
