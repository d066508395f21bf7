"""Paged attention by Triton kernels: decodes split along their keys, everything else in tiles of queries.

Called on the runner's thread. Scores, softmax and sums are float32; with 16-bit types the weights of the softmax are
rounded before they meet V. `plan` and `forward` of a batch of decodes read lengths and tables on the device only, so
they may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.ops.dependent import EARLY
from engine.plugin import DeviceProfile, KVKind
from engine.plugins.attention.triton import decode, prefill
from engine.plugins.attention.triton.cascade import SPLITS
from engine.plugins.attention.triton.long_prompts import ROWS, LongPrompts, Pasts
from engine.plugins.attention.triton.masks import joined
from engine.plugins.attention.triton.packed import store_packed
from engine.plugins.attention.triton.shared import Cascade, Shared
from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape, KVLayout, Rotation

LOG2E: Final = 1.4426950408889634

PROGRAMS: Final = 2
"""Programs per multiprocessor that share the keys of all decodes; several, since parts end at different times."""

LONG: Final = 64
"""Mean number of new tokens from which a tile takes one query head; below, the heads of a KV head share a tile."""

MOST_REQUESTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Tiles:
    """How kernels cut their work."""

    block: int  # keys a round
    warps: int
    stages: int
    rows: int = 16  # of a prefill tile: tokens times heads


@dataclass(frozen=True, slots=True)
class Work:
    """The decodes of one step for layers with one window."""

    items: Tensor  # int32 [capacity, ITEM]
    partial_out: Tensor  # float32 [capacity, heads, v_head_dim]
    partial_stats: Tensor  # float32 [capacity, heads, 2]
    shared: Shared | None  # prefixes that are read for several at once


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share."""

    batch: AttentionBatch
    work: dict[int, Work]  # window (0: none) -> decodes
    tiles: int  # of the prefills, at most
    packed: bool  # heads of a KV head share a tile
    tiled: bool  # the prefills are long
    pasts: Pasts | None  # where something precedes them
    trees: Tensor | None  # uint8, masks end to end
    tree_at: Tensor | None  # int64 [R]


class TritonAttention(AttentionBackend):
    """GQA of any ratio in float32, bfloat16 and float16."""

    reads_shared_once = True

    def __init__(
        self, shape: AttentionShape, page_size: int, device: DeviceProfile, *, fused_rotation: bool = False
    ) -> None:
        if shape.kind is not KVKind.GQA:
            raise ValueError(f"attention backend 'triton' keeps K and V per KV head, not {shape.kind}")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} query heads can't be shared out among {shape.kv_heads} KV heads")
        if small := [size for size in (shape.head_dim, shape.v_head_dim) if size < 16]:
            raise ValueError(f"attention backend 'triton' needs heads of at least 16 elements, not {small[0]}")
        if shape.packed and device.here and (device.compute_capability or (8, 9)) < (8, 9):
            raise ValueError(f"keys and values in 8 bits need compute capability 8.9; {device.name} has less")
        self._shape, self._page_size, self._fused_rotation = shape, page_size, fused_rotation
        self._windows = tuple(window or 0 for window in shape.windows)
        self._group = shape.heads // shape.kv_heads
        self._device = torch.device(device.kind)
        chip = torch.cuda.get_device_properties(self._device).multi_processor_count if device.kind == "cuda" else 4
        self._wanted = max(1, PROGRAMS * chip // shape.kv_heads)  # parts of requests, each for every KV head
        self._counters = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._no_tree = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        wide = shape.dtype == "float32" or max(shape.head_dim, shape.v_head_dim) > 128
        self._decode = Tiles(block=32, warps=4, stages=2) if wide else Tiles(block=128, warps=4, stages=3)
        self._long = Tiles(32, 4, 1, rows=64) if wide else Tiles(128, 8, 3, rows=ROWS)
        self._short = Tiles(32, 4, 1, rows=16) if wide else Tiles(64, 4, 2, rows=16)
        cap = shape.softcap
        self._scale = shape.scale * LOG2E if cap is None else 2 * LOG2E * shape.scale / cap
        self._softcap = LOG2E * (cap or 0.0)
        self._common: dict[str, Any] = {
            "GROUP": self._group,
            "KV_HEADS": shape.kv_heads,
            "DIM": shape.head_dim,
            "DIM_PAD": triton.next_power_of_2(shape.head_dim),
            "V_DIM": shape.v_head_dim,
            "V_PAD": triton.next_power_of_2(shape.v_head_dim),
            "PAGE": page_size,
            "SOFTCAP": cap is not None,
            "PRECISION": "ieee" if shape.dtype == "float32" else "tf32",
            "PACKED": shape.packed,
        }
        fits = LongPrompts.fits(shape, device)
        self._long_prompts = LongPrompts(shape, page_size, self._scale) if fits else None
        tiles = Tiles(32, 8, 1) if wide else Tiles(64, 8, 3)
        self._cascade = Cascade(
            shape,
            page_size,
            self._device,
            max(1, chip // shape.kv_heads),
            self._common,
            block=tiles.block,
            warps=tiles.warps,
            stages=tiles.stages,
        )

    def kv_layout(self) -> KVLayout:
        """A page holds each head's rows in one piece: [KV heads, page size, width]; in 8 bits, scales beside them."""
        heads, page = self._shape.kv_heads, self._page_size
        if self._shape.packed:
            widths = (("k_packed", self._shape.head_dim), ("v_packed", self._shape.v_head_dim))
            rows = tuple((name, (heads, page, width)) for name, width in widths)
            scales = (("k_scale", (heads, page)), ("v_scale", (heads, page)))
            axes = (("head", "token", "width"),) * 2 + (("head", "token"),) * 2
            return KVLayout(parts=rows + scales, dtype="uint8", axes=axes)
        parts = (("k", (heads, page, self._shape.head_dim)), ("v", (heads, page, self._shape.v_head_dim)))
        return KVLayout(parts=parts, dtype=self._shape.dtype, axes=(("head", "token", "width"),) * 2)

    def plan(self, batch: AttentionBatch) -> Plan:
        """List the work of the decodes for every window, and count the tiles of the rest."""
        decodes, requests = batch.num_decodes, len(batch.query_lens_host)
        if self._counters.numel() < decodes * self._shape.kv_heads:
            self._counters = torch.zeros(MOST_REQUESTS * self._shape.kv_heads, dtype=torch.int32, device=self._device)
        work = {window: self._list(batch, window) for window in set(self._windows)} if decodes else {}
        lens = batch.query_lens_host[decodes:]
        tokens, packed = int(lens.sum()), len(lens) > 0 and int(lens.sum()) < LONG * len(lens)
        tile = self._short.rows // self._pack(packed) if packed else self._long.rows
        trees, tree_at = joined(batch, self._device) if batch.tree_masks else (None, None)
        tiles = tokens // tile + requests - decodes if tokens else 0
        tiled, pasts = trees is None and tiles > 0 and not packed, None
        if tiled and self._long_prompts and (batch.seq_lens_host[decodes:] > lens).any():
            pasts = self._long_prompts.pasts(batch)
            tiled = pasts is not None
        return Plan(batch, work, tiles, packed, tiled, pasts, trees, tree_at)

    def _pack(self, packed: bool) -> int:
        return min(triton.next_power_of_2(self._group), self._short.rows) if packed else 1

    def _list(self, batch: AttentionBatch, window: int) -> Work:
        decodes, shape = batch.num_decodes, self._shape
        capacity = decodes + self._wanted
        items = torch.empty(capacity, decode.ITEM, dtype=torch.int32, device=self._device)
        padded = 256 if decodes <= 256 else MOST_REQUESTS
        shared = None if window else self._cascade.plan(batch)
        decode.list_work[(1,)](
            batch.seq_lens,
            shared.own_start if shared else batch.seq_lens,
            items,
            decodes,
            capacity,
            window,
            self._wanted,
            REQUESTS=padded,
            BLOCK=self._decode.block,
            SHARED=shared is not None,
        )
        return Work(
            items,
            torch.empty(capacity, shape.heads, shape.v_head_dim, dtype=torch.float32, device=self._device),
            torch.empty(capacity, shape.heads, 2, dtype=torch.float32, device=self._device),
            shared,
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        """See `AttentionBackend.forward`."""
        assert v is not None, "K and V are kept apart"
        return self._forward(layer, q, k, v, kv, plan, None)

    def forward_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv: tuple[Tensor, ...], plan: Plan, rotation: Rotation
    ) -> Tensor:
        """See `AttentionBackend.forward_rotated`. Decodes may rotate what they read."""
        if not self._fused_rotation or plan.tiles or rotation.cos_sin.shape[1] != self._shape.head_dim:
            rotation.turn(q, k)
            return self._forward(layer, q, k, v, kv, plan, None)
        return self._forward(layer, q, k, v, kv, plan, rotation)

    def _forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, ...],
        plan: Plan,
        rotation: Rotation | None,
    ) -> Tensor:
        out = torch.empty(q.shape[0], self._shape.heads, self._shape.v_head_dim, dtype=q.dtype, device=q.device)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], kv[0].stride(0), kv[1].stride(0))
        window = self._windows[layer]
        if plan.batch.requests_repeat:
            self._store(k, v, kv, strides, plan.batch, 0, rotation)
        if plan.work:
            self._forward_decodes(q, k, v, kv, out, strides, window, plan, rotation)
        if plan.tiles:
            self._forward_rest(q, k, v, kv, out, strides, window, plan)
        return out

    def _forward_decodes(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, ...],
        out: Tensor,
        strides: tuple[int, ...],
        window: int,
        plan: Plan,
        rotation: Rotation | None,
    ) -> None:
        batch, work, shared = plan.batch, plan.work[window], plan.work[window].shared
        if shared:
            self._cascade.attend(q, kv, batch, shared, rotation, self._scale, self._softcap)
        decode.decode[(len(work.items), self._shape.kv_heads)](
            q,
            k,
            v,
            *kv[:2],
            *kv[-2:],
            out,
            work.partial_out,
            work.partial_stats,
            self._counters,
            shared.out if shared else work.partial_out,
            shared.stats if shared else work.partial_stats,
            shared.parts if shared else batch.seq_lens,
            work.items,
            batch.seq_lens,
            batch.block_tables,
            batch.slot_mapping,
            batch.positions,
            work.partial_out if rotation is None else rotation.cos_sin,
            *strides,
            batch.block_tables.stride(0),
            self._scale,
            self._softcap,
            window,
            ROWS=max(16, triton.next_power_of_2(self._group)),
            BLOCK=self._decode.block,
            WINDOW=window > 0,
            STAGES=self._decode.stages,
            STORE=not batch.requests_repeat,
            ROTATE=rotation is not None,
            SHARED=shared is not None,
            SPLITS=SPLITS,
            EARLY=EARLY,
            num_warps=self._decode.warps,
            launch_pdl=EARLY,
            **self._common,
        )

    def _forward_rest(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, ...],
        out: Tensor,
        strides: tuple[int, ...],
        window: int,
        plan: Plan,
    ) -> None:
        batch, shape, first = plan.batch, self._shape, plan.batch.num_decodes
        self._store(k, v, kv, strides, batch, first, None)
        tiled = self._long_prompts if plan.tiled and not window else None
        if tiled and tiled.launch(q, k, v, kv, out, batch, plan.tiles, plan.pasts):
            return
        tiles, pack = (self._short, self._pack(True)) if plan.packed else (self._long, 1)
        prefill.prefill[(plan.tiles, shape.kv_heads * -(-self._group // pack))](
            q,
            k,
            v,
            *kv[:2],
            *kv[-2:],
            out,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.positions,
            plan.trees if plan.trees is not None else self._no_tree,
            plan.tree_at if plan.tree_at is not None else self._no_tree,
            *strides,
            batch.block_tables.stride(0),
            first,
            len(batch.query_lens_host),
            self._scale,
            self._softcap,
            window,
            PACK=pack,
            ROWS=tiles.rows,
            BLOCK=tiles.block,
            WINDOW=window > 0,
            TREE=plan.trees is not None,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            **self._common,
        )

    def _store(
        self,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, ...],
        strides: tuple[int, ...],
        batch: AttentionBatch,
        first: int,
        rotation: Rotation | None,
    ) -> None:
        """Put the keys and values of the tokens from `first` on into their pages."""
        shape = self._shape
        given = k, v, *kv, batch.slot_mapping, batch.positions
        angles = batch.positions if rotation is None else rotation.cos_sin
        same: dict[str, Any] = {
            "HEADS": shape.kv_heads,
            "DIM": shape.head_dim,
            "V_DIM": shape.v_head_dim,
            "PAGE": self._page_size,
            "ROTATE": rotation is not None,
            "num_warps": 4,
        }
        grid = (k.shape[0] - first,)
        if shape.packed:
            padded = {name: self._common[name] for name in ("DIM_PAD", "V_PAD")}
            heads = triton.next_power_of_2(shape.kv_heads)
            store_packed[grid](*given, angles, *strides[2:6], first, HEADS_PAD=heads, **padded, **same)
            return
        width = triton.next_power_of_2(shape.kv_heads * max(shape.head_dim, shape.v_head_dim))
        prefill.store[grid](*given, angles, *strides[2:], first, WIDTH=width, **same)


__all__ = ["TritonAttention"]
