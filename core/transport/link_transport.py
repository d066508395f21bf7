"""Blocks over a link: the consumer asks for slices over the fetch's own connection and posts a receive for each; the
producer sends them in the order of their numbers.

A link is made for a pair of engines when the first fetch needs it, and serves all fetches of the pair. Slices arrive in
memory of their own, so that one that can't be called back never writes to pages that were given up. Whatever makes no
progress within `peer_timeout` takes the link with it, and the next fetch makes a new one.
"""

from __future__ import annotations

import heapq
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final
from weakref import WeakKeyDictionary

import msgspec

from engine.transport.blocks import BlockPool, Blocks, Digests
from engine.transport.channel import Channel
from engine.transport.frames import ProtocolError, Word
from engine.transport.grid import Grid
from engine.transport.link import SLICE_BYTES, WINDOW, Landing, Link, LinkLost, Links
from engine.transport.network import NetworkTransport
from engine.transport.options import NetworkOptions
from engine.transport.wire import Checks, Incoming, Offered

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_LINKS: Final = 16
"""Held at once by either end; each has memory for a few slices on the device."""

PAUSE: Final = 0.0001
"""Seconds between two looks at what is under way."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Producer(msgspec.Struct, frozen=True):
    """Who offers, so that the consumer finds the link it has to it."""

    name: str


class Begin(msgspec.Struct, frozen=True):
    """Send blocks `first, …` of the fetch of this connection as slice `sequence` of the link."""

    link: str
    invitation: bytes
    sequence: Count
    first: Count
    count: Annotated[int, msgspec.Meta(gt=0)]


PRODUCER: Final = msgspec.msgpack.Decoder(Producer)
BEGIN: Final = msgspec.msgpack.Decoder(Begin)


@dataclass(slots=True, eq=False)
class Line:
    """A link, and for how long it has been waiting for the other end."""

    link: Link
    name: str
    invitation: bytes = b""
    sequence: int = 0  # of the next slice
    queue: list[tuple[int, Begin, Channel]] = field(default_factory=list)  # at the producer, a heap
    waiting_since: float | None = None
    lost: str = ""

    def pump(self, now: float, patience: float) -> bool:
        """Move on; closes the link when it is of no use. Returns whether something is under way."""
        try:
            busy = self.link.pump() or bool(self.queue)
            if not busy:
                self.waiting_since = None
            elif self.waiting_since is None:
                self.waiting_since = now
            elif now - self.waiting_since > patience:
                raise LinkLost(f"the other end did not go on within {patience:g} s")
        except LinkLost as error:
            self.close(str(error))
            return False
        return busy

    def close(self, reason: str) -> None:
        """Of no use any more."""
        if not self.lost:
            self.lost = reason
            self.link.close()


class LinkTransport(NetworkTransport[BlockPool]):
    """See `Transport`.

    Args:
        name: of the connector.
        links: makes links, given the device of the pool and the bytes of a block.
    """

    def __init__(
        self,
        name: str,
        options: NetworkOptions,
        links: Callable[[torch.device, int], Links],
    ) -> None:
        super().__init__(name, options)
        self._make_links, self._patience = links, options.peer_timeout
        self._links: Links | None = None
        self._name = msgspec.msgpack.encode(Producer(secrets.token_hex(16)))
        self._granted: WeakKeyDictionary[Channel, tuple[BlockPool, Blocks]] = WeakKeyDictionary()
        self._serving: dict[str, Line] = {}  # by the name of the link; the producer's thread
        self._calling: dict[str, Line] = {}  # by the name of the producer; the consumer's thread

    def grid(self, pool: Sequence[tuple[Tensor, ...]]) -> BlockPool:
        """See `Transport.grid`."""
        if pool[0][0].device.type == "cpu":
            return Grid.of_pool(pool)
        from engine.transport.device_pool import DevicePool  # imports Triton

        return DevicePool.of_pool(pool)

    def attach(self, pool: Sequence[tuple[Tensor, ...]], grid: BlockPool, wake: Callable[[], None]) -> None:
        """See `Transport.attach`."""
        self._links = self._make_links(pool[0][0].device, grid.block_bytes)

    # The producer's end

    def offer(self, channel: Channel, grid: BlockPool, blocks: Blocks) -> bytes:
        """See `Transport.offer`."""
        return self._name

    def granted(self, channel: Channel, grid: BlockPool, blocks: Blocks) -> None:
        """See `Transport.granted`."""
        self._granted[channel] = grid, blocks

    def heard(self, channel: Channel, body: bytes) -> None:
        """See `Transport.heard`."""
        try:
            asked = BEGIN.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the consumer sent a malformed word: {error}") from error
        grid, blocks = self._granted.get(channel, (None, ()))
        if grid is None or asked.first + asked.count > len(blocks):
            raise ProtocolError("the consumer asked for blocks that it wasn't granted")
        if asked.count * grid.block_bytes > max(SLICE_BYTES, grid.block_bytes):
            raise ProtocolError(f"the consumer asked for a slice of {asked.count * grid.block_bytes} bytes")
        line = self._serving.get(asked.link) or self._answer(asked)
        if not line.sequence <= asked.sequence < line.sequence + 2 * WINDOW:
            raise ProtocolError(f"the consumer asked for slice {asked.sequence}, the next is {line.sequence}")
        heapq.heappush(line.queue, (asked.sequence, asked, channel))

    def _answer(self, asked: Begin) -> Line:
        assert self._links is not None, "attach comes first"
        if len(self._serving) >= MAX_LINKS:
            raise ProtocolError(f"{MAX_LINKS} links are open already")
        try:
            line = Line(self._links.join(asked.invitation, invited=True), asked.link)
        except LinkLost as error:
            raise ProtocolError(str(error)) from error
        self._serving[asked.link] = line
        return line

    def producer_turn(self, now: float) -> float | None:
        """See `Transport.producer_turn`: send what is next in order."""
        busy = False
        for line in list(self._serving.values()):
            while line.queue and line.queue[0][0] == line.sequence and line.link.room and not line.lost:
                self._send(line, *heapq.heappop(line.queue)[1:])
            busy |= line.pump(now, self._patience)
            if line.lost:
                del self._serving[line.name]
        return now + PAUSE if busy else None

    def _send(self, line: Line, asked: Begin, channel: Channel) -> None:
        """One slice; of a fetch that has ended meanwhile only its length, so that those after it keep their places."""
        grid, blocks = self._granted[channel]
        part = blocks[asked.first : asked.first + asked.count]

        def fill(buffer: Tensor) -> None:
            if channel.fileno() >= 0:
                grid.gather(part, buffer)
            else:
                buffer.zero_()

        line.link.send(fill, asked.count * grid.block_bytes)
        line.sequence += 1
        line.waiting_since = None

    # The consumer's end

    def receive(self, channel: Channel, offer: Offered, grid: BlockPool, blocks: Blocks, checks: Checks) -> Incoming:
        """See `Transport.receive`."""
        try:
            producer = PRODUCER.decode(offer.detail).name
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the producer's offer is malformed: {error}") from error
        return Slices(self._call(producer), channel, grid, blocks, checks)

    def _call(self, producer: str) -> Line:
        """The link to a producer."""
        assert self._links is not None, "attach comes first"
        if producer not in self._calling:
            if len(self._calling) >= MAX_LINKS:
                raise ValueError(f"{MAX_LINKS} links are open already")
            invitation = self._links.invite()
            link = self._links.join(invitation, invited=False)
            self._calling[producer] = Line(link, secrets.token_hex(16), invitation)
        return self._calling[producer]

    def consumer_turn(self, now: float) -> float | None:
        """See `Transport.consumer_turn`."""
        busy = False
        for producer, line in list(self._calling.items()):
            busy |= line.pump(now, self._patience)
            if line.lost:
                del self._calling[producer]
        return now + PAUSE if busy else None

    def close(self) -> None:
        """See `Transport.close`."""
        for line in [*self._serving.values(), *self._calling.values()]:
            line.close("the engine stops")
        self._serving, self._calling = {}, {}
        if self._links is not None:
            self._links.close()


class Slices(Incoming):
    """A few slices of one fetch at a time."""

    pause = PAUSE

    def __init__(self, line: Line, channel: Channel, grid: BlockPool, blocks: Blocks, checks: Checks) -> None:
        self._line, self._channel, self._grid, self._blocks, self._checks = line, channel, grid, blocks, checks
        self._size = max(1, SLICE_BYTES // grid.block_bytes)
        self._asked = self._done = 0
        self._under_way: deque[tuple[Landing, int]] = deque()  # with the number of its blocks
        self._taking = False
        self._ask()

    def _ask(self) -> None:
        line = self._line
        while self._asked < len(self._blocks) and len(self._under_way) < WINDOW and line.link.room:
            count = min(self._size, len(self._blocks) - self._asked)
            begin = Begin(line.name, line.invitation, line.sequence, self._asked, count)
            self._channel.send(Word(msgspec.msgpack.encode(begin)))
            self._under_way.append((line.link.receive(count * self._grid.block_bytes), count))
            line.sequence += 1
            self._asked += count

    def advance(self) -> tuple[int, list[int]]:
        """See `Incoming.advance`."""
        if self._line.lost:
            raise ProtocolError(self._line.lost)
        arrived, found = 0, []
        while self._under_way:
            landing, count = self._under_way[0]
            if not self._taking and landing.arrived():
                landing.take(partial(self._scatter, slice(self._done, self._done + count)))
                self._taking = True
            digests = landing.taken() if self._taking else None
            if digests is None:
                break
            self._under_way.popleft()
            landing.release()
            self._taking, self._line.waiting_since = False, None
            found += digests()
            arrived += count
            self._done += count
        self._ask()
        return arrived, found

    def _scatter(self, part: slice, buffer: Tensor) -> Digests:
        return self._grid.scatter(self._blocks[part], buffer, self._checks[part])

    def close(self) -> None:
        """See `Incoming.close`."""
        for landing, _ in self._under_way:
            landing.release()
        self._under_way.clear()


__all__ = ["LinkTransport"]
