"""A step as one packed sequence: T queries over the L tokens that its requests have in the cache, and a mask.

The mask says that a query sees keys of its own request, up to itself and within the window of the layer; in a tree it
sees its ancestors. flex_attention leaves out the blocks of which nothing is seen. Keys are gathered from
their pages token by token, so nothing is read that was never written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from engine.plugin import KVKind
from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape, KVLayout


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share."""

    slots: tuple[Tensor, Tensor]  # int64 [T] each: page and offset of every new token
    keys: tuple[Tensor, Tensor]  # int64 [L] each: page and offset of every token of the step's requests
    masks: dict[int | None, BlockMask]  # by window


class FlexAttention(AttentionBackend):
    """Every kind of KV and every mask."""

    def __init__(self, shape: AttentionShape, page_size: int) -> None:
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} query heads can't be shared out among {shape.kv_heads} KV heads")
        self.shape, self.page_size = shape, page_size
        # Its operations run one by one, without being traced anew for every shape: 5 ms a call instead of 40.
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
        self._cap = _softcap(shape.softcap) if shape.softcap is not None else None

    def kv_layout(self) -> KVLayout:
        """[page size, KV heads, width] for K and for V; MLA has latent rows alone."""
        key = (self.page_size, self.shape.kv_heads, self.shape.head_dim)
        value = (self.page_size, self.shape.kv_heads, self.shape.v_head_dim)
        parts = (("latent", key),) if self.shape.kind is KVKind.MLA else (("k", key), ("v", value))
        return KVLayout(parts=parts, dtype=self.shape.dtype)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Number the packed tokens, and draw one mask for each window that a layer has."""
        lengths, counts = batch.seq_lens_host.tolist(), batch.query_lens_host.tolist()
        keys = _packed(lengths, batch.positions.device)
        queries = _packed(counts, batch.positions.device)
        past = batch.seq_lens - batch.query_start.diff()  # tokens of each request from before this step
        new = keys.index - past[keys.request]  # below 0 for those
        row = (batch.query_start[keys.request] + new).clamp(min=0)  # of T: where a new key stands among the queries
        place = torch.where(new >= 0, batch.positions[row], keys.index)
        sees = _trees(batch, counts) if batch.tree_masks else None

        def mask(window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
            def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                same = queries.request[i] == keys.request[j]
                before = new[j] <= queries.index[i] if sees is None else (new[j] < 0) | sees[i, row[j]]
                near = place[j] > batch.positions[i] - window if window is not None else same
                return same & before & near

            return visible

        windows = set(self.shape.windows) if any(counts) else ()  # a step without tokens has nothing to mask
        masks = {
            window: create_block_mask(mask(window), None, None, sum(counts), sum(lengths), device=keys.index.device)
            for window in windows
        }
        pages = batch.block_tables[keys.request, keys.index // self.page_size].long()
        slots = batch.slot_mapping
        return Plan((slots // self.page_size, slots % self.page_size), (pages, keys.index % self.page_size), masks)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        """See `AttentionBackend.forward`."""
        kv[0][plan.slots] = k
        if v is not None:
            kv[1][plan.slots] = v
        if not plan.masks:
            return q.new_empty(0, self.shape.heads, self.shape.v_head_dim)
        keys = kv[0][plan.keys]
        values = keys[..., : self.shape.v_head_dim] if v is None else kv[1][plan.keys]
        query, key, value = (x.transpose(0, 1)[None] for x in (q, keys, values))
        out = flex.flex_attention(
            query,
            key,
            value,
            score_mod=self._cap,
            block_mask=plan.masks[self.shape.windows[layer]],
            scale=self.shape.scale,
            enable_gqa=self.shape.heads != self.shape.kv_heads,
        )
        return out[0].transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class Packed:
    """Ragged rows laid end to end."""

    request: Tensor  # int64 [N]
    index: Tensor  # int64 [N]: within the request


def _packed(lengths: list[int], device: torch.device) -> Packed:
    request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    starts = torch.tensor([0, *accumulate(lengths)])
    return Packed(request.to(device), (torch.arange(sum(lengths)) - starts[request]).to(device))


def _trees(batch: AttentionBatch, counts: list[int]) -> Tensor:
    """bool [T, T]: which new token sees which, causal but for the trees; rows of other requests don't matter."""
    total = sum(counts)
    sees = torch.ones(total, total, dtype=torch.bool, device=batch.positions.device).tril()
    ends = list(accumulate(counts))
    for request, tree in (batch.tree_masks or {}).items():
        mine = slice(ends[request] - counts[request], ends[request])
        sees[mine, mine] = tree
    return sees


def _softcap(cap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
