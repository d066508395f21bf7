"""A resident's own KV: the batches of its attention, over the target's pages and a few of its own.

The draft pool has the page ids of the target's pool, and behind them scratch pages for each slot, which take the places
of a draft that lie beyond the page of the newest token. Requests that may not see their first pages get a block table
without them, and lengths that are shorter by as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.specs.attention import AttentionBackend, AttentionBatch
from engine.specs.model import Forward
from engine.specs.speculator import DraftBatch

if TYPE_CHECKING:
    from engine.runner import StepForward


class NoLayers(Forward):
    """For residents that asked for no KV."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        raise RuntimeError("this speculator planned no KV (ResidentPlan.kv), so it has no attention")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the places of a draft lie: R requests."""

    tables: Tensor  # int32 [R, P], from the first visible page on
    slots: np.ndarray  # int64 [R, places], where each place is kept
    begin: np.ndarray  # int32 [R], index of place 0 among the visible items
    hidden: Tensor | None  # int64 [R, 1], items that are not visible; None if all are

    def __len__(self) -> int:
        return len(self.begin)


class DraftPages:
    """The draft pool of one runner.

    Args:
        forward: runs the resident's layers on the pool.
        tables: the runner's block tables, int32 [slots, P].
        pages: of the target's pool.
        scratch: pages per slot behind them; a slot more than there are has some too, for padding.
    """

    def __init__(
        self,
        forward: StepForward,
        backend: AttentionBackend,
        tables: np.ndarray,
        *,
        page_size: int,
        pages: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        self._forward, self._backend, self._tables = forward, backend, tables
        self.page_size, self._device = page_size, device
        own = np.arange((len(tables) + 1) * scratch, dtype=np.int32).reshape(len(tables) + 1, scratch)
        self._scratch = pages + own
        self.scratch = self._put(self._scratch)  # int32 [slots + 1, scratch]

    def follow(self, slots: np.ndarray, first: np.ndarray, begin: np.ndarray, counts: np.ndarray) -> Forward:
        """Attention for `counts[r]` items of each slot from position `begin[r]` on; those before `first[r]`, which is
        the beginning of a page, are not seen. Requests with one item come first. All int64 [R]."""
        ends = np.concatenate(([0], np.cumsum(counts)))
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(ends[-1]) - ends[owner] + begin[owner]
        pages = self._tables[slots[owner], positions // self.page_size].astype(np.int64)
        lens = (begin + counts - first).astype(np.int32)
        skipped = first // self.page_size
        width = -(-int(lens.max()) // self.page_size)
        columns = np.minimum(skipped[:, None] + np.arange(width), self._tables.shape[1] - 1)
        return self.planned(
            AttentionBatch(
                query_start=self._put(ends.astype(np.int32)),
                seq_lens=self._put(lens),
                block_tables=self._put(self._tables[slots[:, None], columns]),
                slot_mapping=self._put(pages * self.page_size + positions % self.page_size),
                positions=self._put(positions - first[owner]),
                num_decodes=int((counts == 1).sum()),
                query_lens_host=counts.astype(np.int32),
                seq_lens_host=lens,
            )
        )

    def places(self, slots: np.ndarray, first: np.ndarray, begin: np.ndarray) -> Places:
        """Where drafts of the slots go whose newest tokens stand at `begin`; all int64 [R]."""
        size = self.page_size
        own = begin // size - first // size + 1  # visible pages up to that of the newest token
        tables = np.zeros((len(slots), int(own.max()) + self._scratch.shape[1]), dtype=np.int32)
        for row, (slot, skipped, count) in enumerate(zip(slots, first // size, own, strict=True)):
            tables[row, :count] = self._tables[slot, skipped : skipped + count]
            tables[row, count : count + self._scratch.shape[1]] = self._scratch[slot]
        visible = begin - first
        index = visible[:, None] + np.arange(self._scratch.shape[1] * size)
        pages = np.take_along_axis(tables, index // size, 1).astype(np.int64)
        hidden = self._put(first[:, None]) if first.any() else None
        return Places(self._put(tables), pages * size + index % size, visible.astype(np.int32), hidden)

    def step(self, places: Places, first: int, positions: Tensor, sees: Tensor | None) -> Forward:
        """Attention for one step of a draft; see `DraftBatch.step`."""
        requests, count = positions.shape
        lens = places.begin + np.int32(first + count)
        seen = positions if places.hidden is None else positions - places.hidden
        return self.planned(
            AttentionBatch(
                query_start=self._put(np.arange(0, requests * count + 1, count, dtype=np.int32)),
                seq_lens=self._put(lens),
                block_tables=places.tables,
                slot_mapping=self._put(places.slots[:, first : first + count].ravel()),
                positions=seen.flatten(),
                num_decodes=requests if count == 1 and sees is None else 0,
                query_lens_host=np.full(requests, count, dtype=np.int32),
                seq_lens_host=lens,
                tree_masks=None if sees is None else dict(enumerate(sees)),
            )
        )

    def planned(self, batch: AttentionBatch) -> Forward:
        """What runs the resident's layers on a batch of the draft pool."""
        self._forward.plan = self._backend.plan(batch)
        return self._forward

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


@dataclass(slots=True, kw_only=True)
class PagedDrafts(DraftBatch):
    """Requests of one step to be drafted for."""

    pages: DraftPages | None
    places: Places | None

    def step(self, first: int, positions: Tensor, sees: Tensor | None = None) -> Forward:
        """See `DraftBatch.step`."""
        if self.pages is None or self.places is None:
            return NoLayers()
        return self.pages.step(self.places, first, positions, sees)


__all__ = ["DraftPages", "NoLayers", "PagedDrafts", "Places"]
