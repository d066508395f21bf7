"""Blocks by one-sided reads: the consumer learns addresses from the grant, reads into memory of its own, checks the
digests there and copies into its pages. So a read that can't be called back never writes to pages that were given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from engine.plugins.kv_connectors.rdma.agent import Read, Reader, Server
from engine.specs.kv_connector import Role
from engine.transport.blocks import Blocks
from engine.transport.channel import Channel
from engine.transport.grid import Grid, needed_bytes, stretches
from engine.transport.network import NetworkTransport
from engine.transport.options import NetworkOptions
from engine.transport.schema import cuts
from engine.transport.wire import Checks, Incoming, Offered

if TYPE_CHECKING:
    from torch import Tensor

SLICE_BYTES: Final = 2**26
"""Read at once, into one piece of staging memory."""


class Memory(msgspec.Struct, frozen=True):
    """Where the blocks lie."""

    metadata: bytes  # NIXL's
    layout: list[tuple[int, int]]  # of each part of each layer: address of page 0, bytes from page to page
    blocks: list[int]


MEMORY: Final = msgspec.msgpack.Decoder(Memory)


class RdmaTransport(NetworkTransport[Grid]):
    """See `Transport`."""

    def __init__(self, options: NetworkOptions, role: Role) -> None:
        super().__init__("rdma", options)
        self._role = Role(role)
        self._server: Server | None = None
        self._reader: Reader | None = None

    def grid(self, pool: Sequence[tuple[Tensor, ...]]) -> Grid:
        """See `Transport.grid`."""
        return Grid.of_pool(pool)

    def attach(self, pool: Sequence[tuple[Tensor, ...]], grid: Grid, wake: Callable[[], None]) -> None:
        """Register the pool, and memory to read into, as the role needs them."""
        if self._role is not Role.CONSUMER:
            self._server = Server(pool)
        if self._role is not Role.PRODUCER:
            self._reader = Reader(max(SLICE_BYTES, grid.block_bytes))

    def offer(self, channel: Channel, grid: Grid, blocks: Blocks) -> bytes:
        """See `Transport.offer`."""
        assert self._server is not None, "attach comes first, with a role that produces"
        return msgspec.msgpack.encode(Memory(self._server.metadata, grid.addresses(), blocks.tolist()))

    def receive(self, channel: Channel, offer: Offered, grid: Grid, blocks: Blocks, checks: Checks) -> Incoming:
        """See `Transport.receive`."""
        assert self._reader is not None, "attach comes first, with a role that consumes"
        return Reads(self._reader, offer, grid, blocks, checks)

    def close(self) -> None:
        """Unregister everything."""
        for end in (self._reader, self._server):
            if end is not None:
                end.close()
        self._reader = self._server = None


class Reads(Incoming):
    """One read after the other."""

    pause = 0.0002  # NIXL tells nobody that a read has ended

    def __init__(self, reader: Reader, offer: Offered, grid: Grid, blocks: Blocks, checks: Checks) -> None:
        """Begin; raises ValueError if the offer makes no sense."""
        self._reader, self._grid, self._blocks, self._checks = reader, grid, blocks, checks
        try:
            self._memory = MEMORY.decode(offer.detail)
        except msgspec.DecodeError as error:
            raise ValueError(f"the producer's offer is malformed: {error}") from error
        there = cuts(offer.schema, offer.block)
        count = offer.schema.num_pages * there[0].per_page
        if len(self._memory.blocks) != len(blocks) or not all(0 <= block < count for block in self._memory.blocks):
            raise ValueError("the producer granted pages that its pool doesn't have, or too few")
        self._widths = grid.page_widths(there)
        needed_bytes(self._memory.layout, self._widths, offer.schema.num_pages)
        self._cuts = there * (len(self._widths) // len(there))
        self._peer = reader.peer(self._memory.metadata)
        self._slice = max(1, SLICE_BYTES // sum(grid.widths))
        self._done = 0
        self._read: Read | None = None
        self._begin()

    def _begin(self) -> None:
        blocks = self._memory.blocks[self._done : self._done + self._slice]
        if blocks:
            strides = [stride for _, stride in self._memory.layout]
            spans = stretches(blocks, strides, self._widths, self._cuts)
            runs = [
                (base + first, end - first)
                for (base, _), found in zip(self._memory.layout, spans, strict=True)
                for first, end in found
            ]
            self._read = self._reader.read(runs, self._peer)

    def advance(self) -> tuple[int, list[int]]:
        """What has been read since the last call."""
        if self._read is None or not self._read.done():
            return 0, []
        part = slice(self._done, self._done + self._slice)
        count = len(self._blocks[part])
        arrived = self._grid.over(self._read.staging.bytes, count)
        digests = self._grid.copy(self._blocks[part], arrived, range(count), self._checks[part])
        self._reader.finish(self._read)
        self._read = None
        self._done += count
        self._begin()
        return count, digests

    def close(self) -> None:
        """See `Incoming.close`."""
        if self._read is not None:
            self._reader.abandon(self._read)
            self._read = None


__all__ = ["RdmaTransport"]
