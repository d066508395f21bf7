"""How two ends on one host meet and share memory: an abstract Unix socket, and a mapping of the producer's pool."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from engine.plugins.kv_connectors.local.channel import FileChannel
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.transport.blocks import Blocks
from engine.transport.channel import TO_CONSUMER, TO_PRODUCER, Channel
from engine.transport.frames import ProtocolError
from engine.transport.grid import Grid, needed_bytes
from engine.transport.schema import cuts
from engine.transport.wire import Checks, Incoming, Offered, Transport

if TYPE_CHECKING:
    from torch import Tensor

COPY_BYTES: Final = 2**26
"""Copied and checked in one turn of the loop (about 15 ms), so that cancelling and renewing never wait for long. In
smaller turns each part of each layer costs its few calls more often: 35 MB take 12 ms in five, 9 in one."""


class Place(msgspec.Struct, frozen=True):
    """Where the blocks lie in the file that comes with this."""

    layout: list[tuple[int, int]]  # of each part of each layer: offset of page 0, bytes from page to page
    blocks: list[int]


PLACE: Final = msgspec.msgpack.Decoder(Place)


class LocalTransport(Transport[Grid]):
    """See `Transport`. A producer's pool must lie in the memory that `allocate` returned."""

    name = "local"
    keeps = True

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._layout: list[tuple[int, int]] = []

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Memory that consumers can map."""
        self._memory = SharedMemory(num_bytes)
        return self._memory.tensor

    def grid(self, pool: Sequence[tuple[Tensor, ...]]) -> Grid:
        """See `Transport.grid`."""
        grid = Grid.of_pool(pool)
        if self._memory is not None:
            self._layout = grid.layout(self._memory.tensor.data_ptr(), self._memory.tensor.numel())
        return grid

    def listen(self) -> tuple[socket.socket, str]:
        """See `Transport.listen`."""
        if self._memory is None:
            raise ValueError("a producer's KV pool must lie in the connector's memory; call allocate before start")
        address = f"engine-kv-{os.getpid():x}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{address}")
        return listener, address

    def check_address(self, address: str) -> None:
        """See `Transport.check_address`."""
        if not re.fullmatch("engine-kv-[0-9a-f-]{1,64}", address):
            raise ValueError(f"{address!r} is no address of the local KV connector")

    def dial(self, address: str) -> Channel:
        """See `Transport.dial`."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(f"\0{address}")
        except OSError:
            sock.close()
            raise
        channel = FileChannel(sock, *TO_PRODUCER)
        if (uid := channel.peer_uid()) != os.getuid():
            channel.close()
            raise ValueError(f"its socket belongs to user {uid}, this engine runs as {os.getuid()}")
        return channel

    def admit(self, sock: socket.socket) -> Channel:
        """See `Transport.admit`."""
        channel = FileChannel(sock, *TO_CONSUMER)
        if (uid := channel.peer_uid()) != os.getuid():
            channel.close()
            raise ProtocolError(f"it runs as user {uid}, this engine as {os.getuid()}")
        return channel

    def offer(self, channel: Channel, grid: Grid, blocks: Blocks) -> bytes:
        """See `Transport.offer`."""
        assert isinstance(channel, FileChannel), "admit makes them"
        assert self._memory is not None, "a producer has memory"
        channel.attach_file(self._memory.file)
        return msgspec.msgpack.encode(Place(self._layout, blocks.tolist()))

    def receive(self, channel: Channel, offer: Offered, grid: Grid, blocks: Blocks, checks: Checks) -> Incoming:
        """See `Transport.receive`."""
        assert isinstance(channel, FileChannel), "dial makes them"
        return Copy(channel, offer, grid, blocks, checks)

    def close(self) -> None:
        """Close the file; the memory goes with the last tensor over it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Copy(Incoming):
    """Copies out of the producer's memory."""

    pause = 0.0

    def __init__(self, channel: FileChannel, offer: Offered, grid: Grid, blocks: Blocks, checks: Checks) -> None:
        """Map the file; raises ValueError if it, or what is said of it, can't be right."""
        self._grid, self._blocks, self._checks = grid, blocks, checks
        try:
            place = PLACE.decode(offer.detail)
        except msgspec.DecodeError as error:
            raise ValueError(f"the producer's offer is malformed: {error}") from error
        there, there_cuts = offer.schema, cuts(offer.schema, offer.block)
        self._places = np.array(place.blocks, np.int64)
        count = there.num_pages * there_cuts[0].per_page
        if len(place.blocks) != len(blocks) or not all(0 <= block < count for block in place.blocks):
            raise ValueError("the producer granted pages that its pool doesn't have, or too few")
        widths = grid.page_widths(there_cuts)
        size = needed_bytes(place.layout, widths, there.num_pages)
        self._mapping = channel.mapping(size)
        self._layout, self._num_pages, self._cuts = place.layout, there.num_pages, there_cuts
        self._slice = max(1, COPY_BYTES // sum(grid.widths))
        self._done = 0

    def advance(self) -> tuple[int, list[int]]:
        """One slice."""
        part = slice(self._done, self._done + self._slice)
        theirs = self._grid.of_buffer(self._mapping, self._layout, self._num_pages, self._cuts)
        digests = self._grid.copy(self._blocks[part], theirs, self._places[part], self._checks[part])
        count = len(self._blocks[part])
        self._done += count
        return count, digests


__all__ = ["COPY_BYTES", "LocalTransport", "Place"]
