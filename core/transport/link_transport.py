"""Blocks over a link: the consumer asks for slices over the fetch's own connection, for as many at once as it has room
for, and posts a receive for each; the producer sends them in the order of their numbers.

A link is made for a pair of engines when the first fetch needs it, and serves all fetches of the pair. Slices arrive in
memory of their own, so that one that can't be called back never writes to pages that were given up. Whatever makes no
progress within `peer_timeout` takes the link with it, and the next fetch makes a new one.
"""

from __future__ import annotations

import secrets
import time
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

BRISK: Final = 0.00002
EAGER: Final = 0.003
"""The pause for so many seconds after something moved. Sleeps, however short, since a thread that only looks again and
again would keep the interpreter from the engine's thread."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Producer(msgspec.Struct, frozen=True):
    """Who offers, so that the consumer finds the link it has to it."""

    name: str


class Begin(msgspec.Struct, frozen=True):
    """Send blocks `first, …` of the fetch of this connection in slices of `size` blocks, the last of what is left, as
    slices `sequence, …` of the link."""

    link: str
    invitation: bytes
    sequence: Count
    first: Count
    count: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=0)]

    def slices(self) -> list[tuple[int, int]]:
        """First block and end of each."""
        end = self.first + self.count
        return [(at, min(at + self.size, end)) for at in range(self.first, end, self.size)]


PRODUCER: Final = msgspec.msgpack.Decoder(Producer)
BEGIN: Final = msgspec.msgpack.Decoder(Begin)


@dataclass(slots=True, eq=False, kw_only=True)
class Line:
    """A link, and for how long it has been waiting for the other end."""

    link: Link
    name: str
    patience: float  # seconds
    invitation: bytes = b""
    sequence: int = 0  # of the next slice
    queue: dict[int, tuple[Channel, BlockPool, Blocks]] = field(default_factory=dict)  # at the producer, by sequence
    waiting_since: float | None = None
    stirred: float = 0.0  # when something moved
    lost: str = ""

    def pump(self) -> bool:
        """Move on; closes the link when it is of no use. Returns whether something is under way."""
        if self.lost:
            return False
        now = time.monotonic()
        try:
            busy = self.link.pump() or bool(self.queue)
            if not busy:
                self.waiting_since = None
            elif self.waiting_since is None:
                self.waiting_since = now
            elif now - self.waiting_since > self.patience:
                raise LinkLost(f"the other end did not go on within {self.patience:g} s")
        except LinkLost as error:
            self.close(str(error))
            return False
        return busy

    def stir(self) -> None:
        """Something moved."""
        self.waiting_since, self.stirred = None, time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return BRISK if time.monotonic() - self.stirred < EAGER else PAUSE

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

    keeps = True

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
        granted = self._granted.get(channel)
        if granted is None or asked.first + asked.count > len(granted[1]):
            raise ProtocolError("the consumer asked for blocks that it wasn't granted")
        grid, blocks = granted
        if min(asked.size, asked.count) * grid.block_bytes > max(SLICE_BYTES, grid.block_bytes):
            raise ProtocolError(f"the consumer asked for slices of {asked.size * grid.block_bytes} bytes")
        line = self._serving.get(asked.link) or self._answer(asked)
        slices = asked.slices()
        places = range(asked.sequence, asked.sequence + len(slices))
        if places.start < line.sequence or places.stop > line.sequence + 2 * WINDOW or line.queue.keys() & set(places):
            raise ProtocolError(f"the consumer asked for slices {places.start} to {places.stop}, after {line.sequence}")
        for place, (first, end) in zip(places, slices, strict=True):
            line.queue[place] = channel, grid, blocks[first:end]

    def _answer(self, asked: Begin) -> Line:
        assert self._links is not None, "attach comes first"
        if len(self._serving) >= MAX_LINKS:
            raise ProtocolError(f"{MAX_LINKS} links are open already")
        try:
            link = self._links.join(asked.invitation, invited=True)
        except LinkLost as error:
            raise ProtocolError(str(error)) from error
        line = self._serving[asked.link] = Line(link=link, name=asked.link, patience=self._patience)
        return line

    def producer_turn(self, now: float) -> float | None:
        """See `Transport.producer_turn`: send what is next in order."""
        pauses = []
        for line in list(self._serving.values()):
            busy = line.pump()
            while line.sequence in line.queue and not line.lost and line.link.room:
                self._send(line, *line.queue.pop(line.sequence))
                busy = line.pump()  # so that one slice is on its way while the next is gathered
            if busy:
                pauses.append(line.pause)
            if line.lost:
                del self._serving[line.name]
        return time.monotonic() + min(pauses) if pauses else None

    @staticmethod
    def _send(line: Line, channel: Channel, grid: BlockPool, blocks: Blocks) -> None:
        """One slice; of a fetch that has ended meanwhile only its length, so that those after it keep their places."""

        def fill(buffer: Tensor) -> None:
            if channel.fileno() >= 0:
                grid.gather(blocks, buffer)
            else:
                buffer.zero_()

        line.link.send(fill, len(blocks) * grid.block_bytes)
        line.sequence += 1
        line.stir()

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
            self._calling[producer] = Line(
                link=link, name=secrets.token_hex(16), patience=self._patience, invitation=invitation
            )
        return self._calling[producer]

    def consumer_turn(self, now: float) -> float | None:
        """See `Transport.consumer_turn`."""
        pauses = []
        for producer, line in list(self._calling.items()):
            if line.pump():
                pauses.append(line.pause)
            if line.lost:
                del self._calling[producer]
        return time.monotonic() + min(pauses) if pauses else None

    def close(self) -> None:
        """See `Transport.close`."""
        for line in [*self._serving.values(), *self._calling.values()]:
            line.close("the engine stops")
        self._serving, self._calling = {}, {}
        if self._links is not None:
            self._links.close()


class Slices(Incoming):
    """A few slices of one fetch at a time."""

    def __init__(self, line: Line, channel: Channel, grid: BlockPool, blocks: Blocks, checks: Checks) -> None:
        self._line, self._channel, self._grid, self._blocks, self._checks = line, channel, grid, blocks, checks
        self._size = max(1, SLICE_BYTES // grid.block_bytes)
        self._asked = self._begun = 0  # blocks
        self._coming: deque[tuple[Landing, int]] = deque()  # with the number of its blocks
        self._taking: deque[tuple[Landing, int]] = deque()  # arrived, on their way to their pages
        self._ask()

    @property
    def pause(self) -> float:  # type: ignore[override]
        """See `Incoming.pause`."""
        return self._line.pause

    def _ask(self) -> None:
        """For as many slices as there is room for, in one word."""
        line, first, sequence = self._line, self._asked, self._line.sequence
        while self._asked < len(self._blocks) and len(self._coming) + len(self._taking) < WINDOW and line.link.room:
            count = min(self._size, len(self._blocks) - self._asked)
            self._coming.append((line.link.receive(count * self._grid.block_bytes), count))
            line.sequence += 1
            self._asked += count
        if self._asked > first:
            begin = Begin(line.name, line.invitation, sequence, first, self._asked - first, self._size)
            self._channel.send(Word(msgspec.msgpack.encode(begin)))
            line.stir()

    def advance(self) -> tuple[int, list[int]]:
        """See `Incoming.advance`."""
        self._line.pump()
        if self._line.lost:
            raise ProtocolError(self._line.lost)
        while self._coming and self._coming[0][0].arrived():
            landing, count = self._coming.popleft()
            landing.take(partial(self._scatter, slice(self._begun, self._begun + count)))
            self._taking.append((landing, count))
            self._begun += count
            self._line.stir()
        arrived, found = 0, []
        while self._taking and (digests := self._taking[0][0].taken()) is not None:
            landing, count = self._taking.popleft()
            landing.release()
            found += digests()
            arrived += count
            self._line.stir()
        self._ask()
        return arrived, found

    def _scatter(self, part: slice, buffer: Tensor) -> Digests:
        return self._grid.scatter(self._blocks[part], buffer, self._checks[part])

    def close(self) -> None:
        """See `Incoming.close`."""
        for landing, _ in [*self._taking, *self._coming]:
            landing.release()
        self._taking.clear()
        self._coming.clear()


__all__ = ["LinkTransport"]
