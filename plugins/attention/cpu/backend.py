"""Paged attention on the CPU: one kernel call per layer for decodes, prefills, chunks, drafts and trees alike.

Called on the runner's thread. Softmax and sums are float32; with bfloat16 the weights of the softmax are rounded before
they meet V. A query's result does not depend on the rest of the batch nor on how its prompt was cut into chunks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.ops import native
from engine.plugin import KVKind
from engine.plugins.attention.cpu.schedule import schedule
from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape, KVLayout

LANES: Final = 16
TILE_ROWS: Final = 48
"""Rows (queries times the heads of a KV head) that visit a chunk of keys while it lies in the cache."""

WORTH_THREADS: Final = 2**17
"""Multiplications of one layer below which one thread does them: about 3 µs of work."""


class CpuAttention(AttentionBackend):
    """GQA of any ratio in float32 or bfloat16; head sizes and page sizes are multiples of 16."""

    def __init__(self, shape: AttentionShape, page_size: int) -> None:
        if shape.kind is not KVKind.GQA:
            raise ValueError(f"attention backend 'cpu' keeps K and V per KV head, not {shape.kind}")
        sizes = {"head_dim": shape.head_dim, "v_head_dim": shape.v_head_dim, "page_size": page_size}
        if odd := [f"{name} {size}" for name, size in sizes.items() if size % LANES]:
            raise ValueError(f"attention backend 'cpu' works on multiples of {LANES}, which excludes {', '.join(odd)}")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} query heads can't be shared out among {shape.kv_heads} KV heads")
        self._shape = shape
        self._page_size = page_size
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._windows = tuple(window or 0 for window in shape.windows)
        group = shape.heads // shape.kv_heads
        self._tile = max(1, TILE_ROWS // group)
        self._state = self._tile * group * (shape.v_head_dim + 2)  # floats of one running softmax
        self._scratch = torch.empty(0, 2 * self._state)

    def kv_layout(self) -> KVLayout:
        """K has 16 tokens across the lanes, V its width; neighbours along the sum are paired in bfloat16."""
        heads, size, page = self._shape.kv_heads, self._shape.head_dim, self._page_size
        width = self._shape.v_head_dim
        k: tuple[int, ...] = (heads, page // LANES, size, LANES)
        v: tuple[int, ...] = (heads, page, width)
        axes: tuple[tuple[str, ...], ...] = (("head", "token", "width", "member"), ("head", "token", "width"))
        if self._dtype is torch.bfloat16:
            k, v = (heads, page // LANES, size // 2, LANES, 2), (heads, page // 2, width, 2)
            axes = ("head", "token", "width", "member", "pair"), ("head", "token", "width", "member")
        return KVLayout(parts=(("k", k), ("v", v)), dtype=self._shape.dtype, axes=axes)

    def plan(self, batch: AttentionBatch) -> native.AttentionPlan:
        """Cut the step into work for the threads."""
        shape, threads = self._shape, torch.get_num_threads()  # of the runner's thread, which may differ from build's
        if len(self._scratch) < threads:
            self._scratch = torch.empty(threads, 2 * self._state)
        trees = {r: tree.contiguous() for r, tree in (batch.tree_masks or {}).items()}
        parts = schedule(
            batch.query_lens_host,
            batch.seq_lens_host,
            trees,
            tile=self._tile,
            segment=native.ATTENTION_SEGMENT,
            kv_heads=shape.kv_heads,
            threads=threads,
        )
        work = native.AttentionWork(
            tokens=len(batch.slot_mapping),
            requests=len(batch.seq_lens),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            page_size=self._page_size,
            dtype=self._dtype,
            threads=threads if self._is_worth_threads(batch) else 1,
            scale=shape.scale,
            softcap=shape.softcap,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_tables=batch.block_tables,
            slot_mapping=batch.slot_mapping,
            positions=batch.positions,
            trees=_addresses(trees, len(batch.seq_lens)) if trees else None,
            stores=torch.from_numpy(parts.stores),
            items=torch.from_numpy(parts.items),
            merges=torch.from_numpy(parts.merges),
            scratch=self._scratch,
            partials=torch.empty(parts.partials * shape.kv_heads, self._state),
        )
        return native.AttentionPlan(work.pack(), work, tuple(trees.values()))

    def _is_worth_threads(self, batch: AttentionBatch) -> bool:
        """Whether a layer takes longer than waking the threads."""
        width = self._shape.heads * (self._shape.head_dim + self._shape.v_head_dim)
        return int(batch.query_lens_host @ batch.seq_lens_host.astype(np.int64)) * width > WORTH_THREADS

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: native.AttentionPlan
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        assert v is not None, "K and V are kept apart"
        out = torch.empty(q.shape[0], self._shape.heads, self._shape.v_head_dim, dtype=self._dtype)
        native.attention(plan.record, q, k, v, kv, self._windows[layer], out)
        return out


def _addresses(trees: dict[int, Tensor], requests: int) -> Tensor:
    """Where the masks lie and how wide they are, int64 [R, 2]."""
    found = np.zeros((requests, 2), dtype=np.int64)
    for request, tree in trees.items():
        found[request] = tree.data_ptr(), tree.shape[1]
    return torch.from_numpy(found)


__all__ = ["CpuAttention"]
