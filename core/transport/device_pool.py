"""Pages in the memory of a device: gathered, scattered and digested there, on whatever stream is current.

Digests equal those of `Grid` over the same bytes. A run of a block (its tokens of one head, say) must be a multiple of
8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.ops.triton_pages import GATHER, LOOK, SCATTER, move
from engine.transport.blocks import BlockPool, Blocks, Digests, word_weights
from engine.transport.schema import Cut

if TYPE_CHECKING:
    from torch import Tensor

WORD: Final = 8
LANES: Final = 1024


class DevicePool(BlockPool):
    """See the module."""

    def __init__(self, parts: Sequence[Tensor], cuts: Sequence[Cut] | None = None) -> None:
        """`parts`: uint8 [num_pages, bytes] each, layer by layer; rows are dense, but may be apart.

        Raises:
            ValueError: a run is no multiple of 8 bytes.
        """
        self._parts = tuple(parts)
        self._cuts = tuple(cuts or [Cut(1, 1)] * len(self._parts))
        self.per_page = self._cuts[0].per_page
        self._device = self._parts[0].device
        for part, cut in zip(self._parts, self._cuts, strict=True):
            run = part.shape[1] // (cut.outer * cut.per_page)
            if run % WORD or part.stride(0) % WORD or part.data_ptr() % WORD:
                raise ValueError(f"a run of {run} bytes in a page of {part.shape[1]} is no multiple of {WORD}")
        self._counts = [width // WORD for width in self.widths]
        self._table = self._put(self._rows())
        self._weights = self._put(np.concatenate(word_weights(self._counts)).view(np.int64))

    @classmethod
    def of_pool(cls, pool: Sequence[tuple[Tensor, ...]]) -> DevicePool:
        """The pool over tensors `[num_pages, …]`, whose pages must each be one run of bytes.

        Raises:
            ValueError: a page isn't.
        """
        parts = []
        for layer, tensors in enumerate(pool):
            for tensor in tensors:
                if not tensor[:1].is_contiguous():
                    raise ValueError(f"the pages of layer {layer} are not runs of bytes")
                parts.append(tensor.view(torch.uint8).view(tensor.shape[0], -1))
        return cls(parts)

    def _rows(self) -> NDArray[np.int64]:
        before = np.cumsum([0, *self._counts])
        return np.array(
            [
                [
                    part.data_ptr(),
                    part.stride(0) // WORD,
                    words,
                    part.shape[1] // (cut.outer * cut.per_page) // WORD,
                    cut.per_page,
                    before[i],
                    before[i],
                ]
                for i, (part, cut, words) in enumerate(zip(self._parts, self._cuts, self._counts, strict=True))
            ],
            np.int64,
        )

    def _put(self, array: NDArray[np.int64]) -> Tensor:
        """On the device, without waiting for what its stream has to do before."""
        if self._device.type != "cuda":
            return torch.from_numpy(array.copy()).to(self._device)
        return torch.from_numpy(array.copy()).pin_memory().to(self._device, non_blocking=True)

    def cut(self, cuts: Sequence[Cut]) -> Self:
        """See `BlockPool.cut`."""
        return type(self)(self._parts, list(cuts) * (len(self._parts) // len(cuts)))

    @property
    def widths(self) -> list[int]:
        """See `BlockPool.widths`."""
        return [part.shape[1] // cut.per_page for part, cut in zip(self._parts, self._cuts, strict=True)]

    @property
    def num_pages(self) -> int:
        """See `BlockPool.num_pages`."""
        return int(self._parts[0].shape[0])

    def addresses(self) -> list[tuple[int, int]]:
        """See `BlockPool.addresses`."""
        return [(part.data_ptr(), part.stride(0)) for part in self._parts]

    def digests(self, blocks: Sequence[int] | Blocks) -> list[int]:
        """See `BlockPool.digests`; waits for the device."""
        sums = self._move(np.asarray(blocks, np.int64), None, LOOK, weigh=True)
        return _read(sums, np.ones(len(blocks), np.bool_))

    def gather(self, blocks: Blocks, into: Tensor) -> None:
        """See `BlockPool.gather`."""
        self._move(blocks, into, GATHER, weigh=False)

    def scatter(self, blocks: Blocks, source: Tensor, chosen: NDArray[np.bool_]) -> Digests:
        """See `BlockPool.scatter`."""
        sums = self._move(blocks, source, SCATTER, weigh=bool(chosen.any()))
        done = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()

        def digests() -> list[int]:
            if done is not None:
                done.synchronize()
            return _read(sums, chosen)

        return digests

    def _move(self, blocks: NDArray[np.int64] | Blocks, buffer: Tensor | None, mode: int, *, weigh: bool) -> Tensor:
        count, parts = len(blocks), len(self._table)
        sums = torch.empty((count, parts), dtype=torch.int64, device=self._device)
        if count == 0:
            return sums
        words = self._table if buffer is None else buffer.view(torch.int64)
        ids = self._put(np.asarray(blocks, np.int64))
        # A thread's own current device may be another one.
        with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
            move[(count, parts)](
                self._table, ids, count, words, self._weights, sums, MODE=mode, WEIGH=weigh, BLOCK=LANES
            )
        return sums


def _read(sums: Tensor, chosen: NDArray[np.bool_]) -> list[int]:
    """The digests of the chosen blocks, as numbers without a sign."""
    if not chosen.any():
        return []
    found = sums.sum(1).cpu().numpy().view(np.uint64)[chosen]
    return [int(digest) for digest in found]


__all__ = ["DevicePool"]
