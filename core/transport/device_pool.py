"""Pages in the memory of a device: gathered and scattered there on whatever stream is current, so beside the engine's.

Nothing here waits for what the engine has to do: digests of pages that move come to the host on the stream that moves
them, those of pages that stay are made on a stream of their own.

Digests equal those of `Grid` over the same bytes. A run of a block (its tokens of one head, say) must be a multiple of
8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.ops.triton_pages import GATHER, LOOK, SCATTER, move
from engine.transport.blocks import BlockPool, Blocks, Digests, Ready, word_weights
from engine.transport.schema import Cut

if TYPE_CHECKING:
    from torch import Tensor

WORD: Final = 8
LANES: Final = 1024


class DevicePool(BlockPool):
    """See the module."""

    swiftness = 64

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
        self._widths = [part.shape[1] // cut.per_page for part, cut in zip(self._parts, self._cuts, strict=True)]
        self._counts = [width // WORD for width in self._widths]
        self._aside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            self._table = self._put(self._rows())
            self._weights = self._put(np.concatenate(word_weights(self._counts)).view(np.int64))
        if self._aside is not None:
            self._aside.synchronize()  # other streams read them from now on
        self._compiled: dict[tuple[int, bool], Any] = {}

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
        return self._widths

    @property
    def num_pages(self) -> int:
        """See `BlockPool.num_pages`."""
        return int(self._parts[0].shape[0])

    def addresses(self) -> list[tuple[int, int]]:
        """See `BlockPool.addresses`."""
        return [(part.data_ptr(), part.stride(0)) for part in self._parts]

    def digests(self, blocks: Sequence[int] | Blocks) -> list[int]:
        """See `BlockPool.digests`; waits for this alone."""
        with torch.cuda.stream(self._aside):
            ids = self._put(np.asarray(blocks, np.int64))
            return self._told(self._move(ids, None, LOOK, weigh=True), np.ones(len(blocks), np.bool_))()

    def ready(self, blocks: Blocks) -> Ready:
        """See `BlockPool.ready`: int64 [n] on the device."""
        return self._put(np.asarray(blocks, np.int64))

    def gather(self, blocks: Ready, into: Tensor) -> None:
        """See `BlockPool.gather`."""
        self._move(blocks, into, GATHER, weigh=False)

    def scatter(self, blocks: Ready, source: Tensor, chosen: NDArray[np.bool_]) -> Digests:
        """See `BlockPool.scatter`. Once the current stream has come past this, the digests are on the host."""
        return self._told(self._move(blocks, source, SCATTER, weigh=bool(chosen.any())), chosen)

    def _told(self, sums: Tensor, chosen: NDArray[np.bool_]) -> Digests:
        """The digests of the chosen blocks, as numbers without a sign, once the current stream has come so far."""
        if not chosen.any():
            return list
        if self._aside is None:
            return partial(_read, sums, chosen)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def digests() -> list[int]:
            done.synchronize()
            return _read(sums, chosen)

        return digests

    def _move(self, ids: Tensor, buffer: Tensor | None, mode: int, *, weigh: bool) -> Tensor:
        """Returns int64 [blocks, parts] in memory of the host, which the device writes if it weighs."""
        count, parts = len(ids), len(self._table)
        sums = torch.empty((count, parts) if weigh else 0, dtype=torch.int64, pin_memory=self._aside is not None)
        if count == 0:
            return sums
        words = self._table if buffer is None else buffer.view(torch.int64)
        told = sums if weigh else self._weights  # something that is there
        grid, args = (
            (count, parts, 1),
            (
                self._table,
                ids,
                count,
                words,
                self._weights,
                told,
                mode,
                weigh,
                self.per_page == 1,
                LANES,
            ),
        )
        if (kernel := self._compiled.get((mode, weigh))) is None:
            self._compiled[mode, weigh] = move[grid](*args)
        else:
            kernel[grid](*args)
        return sums


def _read(sums: Tensor, chosen: NDArray[np.bool_]) -> list[int]:
    found: list[int] = sums.numpy().view(np.uint64)[chosen].sum(1).tolist()
    return found


__all__ = ["DevicePool"]
