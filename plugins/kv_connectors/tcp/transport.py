"""Blocks through a socket, on the connection of the fetch itself: out of one pool and into the other, with no copy
between but the kernel's.

The stream is cut into slices of blocks; a slice is sent part by part, so that neighbouring pages go out as one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from engine.transport.blocks import Blocks
from engine.transport.channel import Channel
from engine.transport.grid import Grid
from engine.transport.network import NetworkTransport
from engine.transport.options import NetworkOptions
from engine.transport.wire import Checks, Incoming, Offered

if TYPE_CHECKING:
    from torch import Tensor

SLICE_BYTES: Final = 2**23
"""Digested at once, while the next comes in; each part of each layer costs some 20 µs a slice, whatever its size."""


class Slices(msgspec.Struct, frozen=True):
    """How the stream is cut."""

    blocks: int  # in a slice


SLICES: Final = msgspec.msgpack.Decoder(Slices)


class TcpTransport(NetworkTransport[Grid]):
    """See `Transport`."""

    def __init__(self, options: NetworkOptions) -> None:
        super().__init__("tcp", options)

    def grid(self, pool: Sequence[tuple[Tensor, ...]]) -> Grid:
        """See `Transport.grid`."""
        return Grid.of_pool(pool)

    def offer(self, channel: Channel, grid: Grid, blocks: Blocks) -> bytes:
        """See `Transport.offer`."""
        return msgspec.msgpack.encode(Slices(_slice(grid)))

    def granted(self, channel: Channel, grid: Grid, blocks: Blocks) -> None:
        """See `Transport.granted`."""
        channel.stream(_batches(grid, blocks, _slice(grid)))

    def receive(self, channel: Channel, offer: Offered, grid: Grid, blocks: Blocks, checks: Checks) -> Incoming:
        """See `Transport.receive`."""
        try:
            size = SLICES.decode(offer.detail).blocks
        except msgspec.DecodeError as error:
            raise ValueError(f"the producer's offer is malformed: {error}") from error
        if size <= 0:
            raise ValueError(f"the producer sends slices of {size} blocks")
        return Stream(channel, grid, blocks, checks, size)


class Stream(Incoming):
    """What a channel fills."""

    def __init__(self, channel: Channel, grid: Grid, blocks: Blocks, checks: Checks, size: int) -> None:
        self._channel, self._grid, self._blocks, self._checks, self._size = channel, grid, blocks, checks, size
        self._bytes = sum(grid.widths)
        self._done = 0
        channel.expect(_batches(grid, blocks, size))

    def advance(self) -> tuple[int, list[int]]:
        """The slices that are complete since the last call."""
        arrived = self._channel.arrived // self._bytes
        if arrived < len(self._blocks):
            arrived -= arrived % self._size  # within a slice the parts come one after the other
        part = slice(self._done, arrived)
        digests = self._grid.digests(self._blocks[part][self._checks[part]])
        count, self._done = arrived - self._done, arrived
        return count, digests


def _slice(grid: Grid) -> int:
    return max(1, SLICE_BYTES // sum(grid.widths))


def _batches(grid: Grid, blocks: Blocks, size: int) -> Iterator[list[memoryview]]:
    for at in np.arange(0, len(blocks), size):
        yield grid.pieces(blocks[at : at + size])


__all__ = ["TcpTransport"]
