"""Moving the KV of single tokens from slot to slot, in every layer and part: what an accepted path of a tree needs.

Works on any layout whose axes say where its tokens are. A slot is page id * page size + offset, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.batch import Entry
from engine.specs.attention import KVLayout

TOKENS = "token"
MEMBERS = "member"


class KVMoves:
    """The tokens of one pool.

    Args:
        pool: per layer the parts of the layout, each [num_pages, …].

    Raises:
        ValueError: the layout doesn't say where a token lies.
    """

    def __init__(self, layout: KVLayout, pool: Sequence[tuple[Tensor, ...]], page_size: int) -> None:
        self._page_size = page_size
        self._parts: list[tuple[Tensor, int]] = []
        self._device = pool[0][0].device if pool else torch.device("cpu")
        for number, (name, shape) in enumerate(layout.parts):
            axes = layout.axes[number] if layout.axes else ()
            if TOKENS not in axes or ((group := page_size // shape[axes.index(TOKENS)]) > 1 and MEMBERS not in axes):
                raise ValueError(f"the axes {axes!r} of the part {name!r} don't say where a token of a page lies")
            leading = [TOKENS] if group == 1 else [TOKENS, MEMBERS]
            for layers in _together([layer[number] for layer in pool]):
                sources = [1, *(axes.index(axis) + 2 for axis in leading)]
                self._parts.append((layers.movedim(sources, list(range(len(sources)))), group))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of each slot in `sources` to the one in `targets`, both int64 [N]. All are read before any is
        written."""
        for part, group in self._parts:
            part[self._place(targets, group)] = part[self._place(sources, group)]

    def settle(self, accepted: Sequence[tuple[Entry, Sequence[int]]], tables: np.ndarray) -> None:
        """Bring the KV of accepted nodes to where their tokens now stand.

        Args:
            accepted: entries with the nodes of their drafts that were accepted, from the root down.
            tables: block tables, int32 [slots, …].
        """
        moved: list[tuple[int, int, int]] = []  # slot, from position, to position
        for entry, nodes in accepted:
            first = entry.start + entry.count - len(entry.drafts)
            moved += [(entry.slot, first + node, first + place) for place, node in enumerate(nodes) if node != place]
        if moved:
            owners, *ends = np.array(moved).T
            pages = [tables[owners, positions // self._page_size].astype(np.int64) for positions in ends]
            slots = [page * self._page_size + at % self._page_size for page, at in zip(pages, ends, strict=True)]
            self.move(*(torch.from_numpy(each).to(self._device) for each in slots))

    def _place(self, slots: Tensor, group: int) -> tuple[Tensor, ...]:
        page, offset = slots // self._page_size, slots % self._page_size
        return (page, offset) if group == 1 else (page, offset // group, offset % group)


def _together(parts: Sequence[Tensor]) -> list[Tensor]:
    """One part of all layers as tensors [layers, num_pages, …]: a single one if the layers lie evenly in memory."""
    starts = [part.data_ptr() for part in parts]
    strides = {after - before for before, after in pairwise(starts)}
    same = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if len(parts) < 2 or not same or len(strides) != 1 or min(strides) <= 0:
        return [part.unsqueeze(0) for part in parts]
    first = parts[0]
    stride = strides.pop() // first.element_size()
    return [first.as_strided((len(parts), *first.shape), (stride, *first.stride()), first.storage_offset())]


__all__ = ["KVMoves"]
