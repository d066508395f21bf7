"""Paged attention written for being read: gather the pages, mask, softmax.

A step is cut into groups whose requests share a shape: all decodes make one group, and each prefill makes one or more
tiles of at most `TILE_ROWS` queries, which bounds the memory of the scores. Scores, softmax and the product with V are
float32 whatever the dtype of the cache; only the result is rounded. Called on the runner's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape, KVLayout

TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Group:
    """G requests with N queries each over P pages, L = P * page size keys."""

    rows: slice  # of the T tokens, G * N of them
    pages: Tensor  # int64 [G, P]
    stored: Tensor  # bool [G, L]: keys that exist; the rest of the last page, and padding, is anybody's
    masks: dict[int | None, Tensor]  # window -> bool [G, N, L]: what each query sees


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share."""

    slots: tuple[Tensor, Tensor]  # int64 [T] each: page and offset in the page of every new token
    groups: tuple[Group, ...]


class ReferenceAttention(AttentionBackend):
    """K and V per head, every mask, any device and dtype."""

    def __init__(self, shape: AttentionShape, page_size: int) -> None:
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} query heads can't be shared out among {shape.kv_heads} KV heads")
        self.shape = shape
        self.page_size = page_size
        self.windows = tuple(dict.fromkeys(shape.windows))

    def kv_layout(self) -> KVLayout:
        """K and V are [page size, KV heads, width] a page."""
        key = (self.page_size, self.shape.kv_heads, self.shape.head_dim)
        value = (self.page_size, self.shape.kv_heads, self.shape.v_head_dim)
        return KVLayout(
            parts=(("k", key), ("v", value)), dtype=self.shape.dtype, axes=(("token", "head", "width"),) * 2
        )

    def plan(self, batch: AttentionBatch) -> Plan:
        """Cut the step into groups and draw the masks of every window."""
        slots = batch.slot_mapping
        page = slots.div(self.page_size, rounding_mode="floor")
        return Plan((page, slots - page * self.page_size), tuple(self._groups(batch)))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        """See `AttentionBackend.forward`."""
        assert v is not None, "K and V are kept apart"
        kv[0][plan.slots], kv[1][plan.slots] = k, v
        return self.attend(layer, q, lambda pages: (kv[0][pages], kv[1][pages]), plan)

    def attend(self, layer: int, q: Tensor, load: Callable[[Tensor], tuple[Tensor, Tensor]], plan: Plan) -> Tensor:
        """The same for what is stored; `load` gives K and V [G, P, page size, KV heads, width] of pages [G, P]."""
        out = q.new_empty(q.shape[0], self.shape.heads, self.shape.v_head_dim)
        for group in plan.groups:
            keys, values = (part.flatten(1, 2).float() for part in load(group.pages))
            values = values.masked_fill(~group.stored[..., None, None], 0.0)  # a weight of 0 times NaN is NaN
            queries = q[group.rows].float().reshape(len(group.pages), -1, *q.shape[1:])
            out[group.rows] = self._attend(queries, keys, values, group.masks[self.shape.windows[layer]])
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [G, N, H, D], k [G, L, KVH, D], v [G, L, KVH, Dv], mask [G, N, L] -> [G * N, H, Dv], all in float32."""
        q = q.reshape(*q.shape[:2], self.shape.kv_heads, -1, q.shape[-1])
        scores = torch.einsum("gnhrd,glhd->ghrnl", q, k) * self.shape.scale
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("ghrnl,glhd->gnhrd", weights, v).flatten(2, 3).flatten(0, 1)

    def _groups(self, batch: AttentionBatch) -> Iterator[Group]:
        lengths, queries = batch.seq_lens_host.tolist(), batch.query_lens_host.tolist()
        if batch.num_decodes:
            decodes = slice(0, batch.num_decodes)
            reach = batch.seq_lens[decodes].long()[:, None]
            yield self._group(batch, decodes, decodes, reach - 1, max(lengths[decodes]))
        ends = list(accumulate(queries))
        for r in range(batch.num_decodes, len(queries)):
            first, past = ends[r] - queries[r], lengths[r] - queries[r]
            tree = (batch.tree_masks or {}).get(r)
            tile = TILE_ROWS if tree is None else max(1, queries[r])
            for start in range(0, queries[r], tile):
                stop = min(start + tile, queries[r])
                rows, requests = slice(first + start, first + stop), slice(r, r + 1)
                last = torch.arange(past + start, past + stop, device=batch.seq_lens.device)[None]
                if tree is None:
                    yield self._group(batch, rows, requests, last, past + stop)
                else:
                    yield self._tree(batch, rows, requests, past, tree)

    def _group(self, batch: AttentionBatch, rows: slice, requests: slice, last: Tensor, length: int) -> Group:
        """`last` [G, N] is the index of the last key each query sees: its own."""
        pages, index = self._keys(batch, requests, length)
        causal = index <= last[..., None]
        masks = {w: causal if w is None else causal & (index > last[..., None] - w) for w in self.windows}
        return Group(rows, pages, index <= last[:, -1:], masks)

    def _tree(self, batch: AttentionBatch, rows: slice, requests: slice, past: int, tree: Tensor) -> Group:
        """New tokens see the past and what the tree says; distances are those of positions, which siblings share."""
        length = past + tree.shape[0]
        drawn = length - tree.shape[1]
        pages, index = self._keys(batch, requests, length)
        new = batch.positions[rows]
        sees = (index < drawn).expand(len(tree), -1).clone()
        sees[:, drawn:length] = tree
        where = index.clone()
        where[past:length] = new
        masks = {w: (sees if w is None else sees & (where > new[:, None] - w))[None] for w in self.windows}
        return Group(rows, pages, (index < length)[None], masks)

    def _keys(self, batch: AttentionBatch, requests: slice, length: int) -> tuple[Tensor, Tensor]:
        """The pages that hold `length` tokens of these requests, and the index of every key in them."""
        pages = batch.block_tables[requests, : -(-length // self.page_size)].long()
        return pages, torch.arange(pages.shape[1] * self.page_size, device=pages.device)


__all__ = ["ReferenceAttention"]
