"""Blocks over a link: the consumer asks for slices over the fetch's own connection, for as many at once as it has room
for, and posts a receive for each; the producer sends them in the order of their numbers. Over a kept connection the
first are asked for together with the fetch, so that this costs one round trip beside the data.

A link is made for a pair of engines when the first fetch needs it, and serves all fetches of the pair. Slices arrive in
memory of their own, so that one that can't be called back never writes to pages that were given up. Whatever makes no
progress within `peer_timeout` takes the link with it, and the next fetch makes a new one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import msgspec

from engine.transport.blocks import BlockPool, Blocks
from engine.transport.channel import Channel
from engine.transport.frames import ProtocolError
from engine.transport.grid import Grid
from engine.transport.line import Asked, Begin, Line
from engine.transport.link import WINDOW, LinkLost, Links
from engine.transport.network import NetworkTransport
from engine.transport.options import NetworkOptions
from engine.transport.slices import Slices
from engine.transport.wire import Checks, Incoming, Offered

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_LINKS: Final = 16
"""Held at once by either end; each has memory for a few slices on the device."""


class Producer(msgspec.Struct, frozen=True):
    """Who offers, so that the consumer finds the link it has to it."""

    name: str


PRODUCER: Final = msgspec.msgpack.Decoder(Producer)
BEGIN: Final = msgspec.msgpack.Decoder(Begin)


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
        self._asked: WeakKeyDictionary[Channel, Asked] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Channel, Line] = WeakKeyDictionary()  # by a kept channel to its producer
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

    def opened(self, channel: Channel, grid: BlockPool, count: int, word: bytes) -> None:
        """See `Transport.opened`."""
        asked = self._asked[channel] = Asked(grid, count)
        if word:
            begin = _begin(word)
            if begin.link not in self._serving:
                raise ProtocolError("the consumer asked for slices of a link that isn't there")
            self._serving[begin.link].place(begin, channel, asked)

    def offer(self, channel: Channel, grid: BlockPool, blocks: Blocks) -> bytes:
        """See `Transport.offer`. The first slice, if it was asked for with the fetch, is gathered meanwhile."""
        self._asked[channel].blocks = blocks
        self._send(at_most=1)
        return self._name

    def heard(self, channel: Channel, body: bytes) -> None:
        """See `Transport.heard`."""
        begin = _begin(body)
        line = self._serving.get(begin.link) or self._answer(begin)
        line.place(begin, channel, self._asked[channel])

    def _answer(self, begin: Begin) -> Line:
        assert self._links is not None, "attach comes first"
        if len(self._serving) >= MAX_LINKS:
            raise ProtocolError(f"{MAX_LINKS} links are open already")
        try:
            link = self._links.join(begin.invitation, invited=True)
        except LinkLost as error:
            raise ProtocolError(str(error)) from error
        line = self._serving[begin.link] = Line(link=link, name=begin.link, patience=self._patience)
        return line

    def producer_turn(self, now: float) -> float | None:
        """See `Transport.producer_turn`: send what is next in order."""
        pauses = self._send(at_most=WINDOW)
        return time.monotonic() + min(pauses) if pauses else None

    def _send(self, *, at_most: int) -> list[float]:
        """Send some slices of each link; returns the pauses of the links where something is under way."""
        pauses = []
        for line in list(self._serving.values()):
            busy = line.pump()
            for _ in range(at_most):
                if not line.ready:
                    break
                line.send()
                busy = line.pump()  # so that one slice is on its way while the next is gathered
            if busy:
                pauses.append(line.pause)
            if line.lost:
                del self._serving[line.name]
        return pauses

    # The consumer's end

    def receive(self, channel: Channel, offer: Offered, grid: BlockPool, blocks: Blocks, checks: Checks) -> Incoming:
        """See `Transport.receive`."""
        try:
            producer = PRODUCER.decode(offer.detail).name
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the producer's offer is malformed: {error}") from error
        line = self._known[channel] = self._call(producer)
        slices = Slices(line, channel, grid, blocks, checks)
        slices.ask()
        return slices

    def ahead(self, channel: Channel, grid: BlockPool, blocks: Blocks, checks: Checks) -> tuple[bytes, Incoming | None]:
        """See `Transport.ahead`."""
        line = self._known.get(channel)
        if line is None or line.lost:
            return b"", None
        slices = Slices(line, channel, grid, blocks, checks)
        return slices.begin() or b"", slices

    def hung_up(self, channel: Channel) -> None:
        """See `Transport.hung_up`: the places of its slices would never be filled."""
        if (line := self._known.get(channel)) is not None:
            line.close("the producer has stopped or restarted")

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


def _begin(body: bytes) -> Begin:
    try:
        return BEGIN.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the consumer sent a malformed word: {error}") from error


__all__ = ["LinkTransport"]
