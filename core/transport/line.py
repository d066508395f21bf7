"""One link of a pair of engines: what is asked for over it, in which order it goes out, and how often to look at it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from engine.transport.blocks import BlockPool, Blocks, Ready
from engine.transport.channel import Channel
from engine.transport.frames import ProtocolError
from engine.transport.link import SLICE_BYTES, WINDOW, Link, LinkLost

if TYPE_CHECKING:
    from torch import Tensor

PAUSE: Final = 0.0001
"""Seconds between two looks at what is under way."""

BRISK: Final = 0.00002
EAGER: Final = 0.003
"""The pause for so many seconds after something moved. Sleeps, however short, since a thread that only looks again and
again would keep the interpreter from the engine's thread."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Begin(msgspec.Struct, frozen=True):
    """Send blocks `first, …` of the fetch of this connection in slices of `size` blocks, the last of what is left, as
    slices `sequence, …` of the link."""

    link: str
    invitation: bytes
    sequence: Count
    first: Count
    count: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=0)]

    @property
    def num_slices(self) -> int:
        """How many."""
        return -(-self.count // self.size)

    def slices(self) -> list[tuple[int, int]]:
        """First block and end of each."""
        end = self.first + self.count
        return [(at, min(at + self.size, end)) for at in range(self.first, end, self.size)]


@dataclass(slots=True, eq=False)
class Asked:
    """A fetch, as the producer knows it."""

    grid: BlockPool
    count: int  # blocks
    blocks: Blocks | None = None  # once they are granted
    ready: Ready = None  # the same, once the first is sent


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Blocks `first` to `end` of a fetch, to be sent as one slice."""

    channel: Channel
    asked: Asked
    first: int
    end: int

    @property
    def over(self) -> bool:
        """Whether the fetch was refused, or given up."""
        return self.channel.fileno() < 0

    @property
    def num_bytes(self) -> int:
        """Of the slice."""
        return (self.end - self.first) * self.asked.grid.block_bytes

    def fill(self, buffer: Tensor) -> None:
        """Gather the blocks. Of a fetch that is over only the length counts: the slices after it keep their places."""
        asked = self.asked
        if asked.blocks is None or self.over:
            buffer.zero_()
            return
        if asked.ready is None:
            asked.ready = asked.grid.ready(asked.blocks)
        asked.grid.gather(asked.ready[self.first : self.end], buffer)


@dataclass(slots=True, eq=False, kw_only=True)
class Line:
    """A link, and for how long it has been waiting for the other end."""

    link: Link
    name: str
    patience: float  # seconds
    invitation: bytes = b""
    sequence: int = 0  # of the next slice
    queue: dict[int, Piece] = field(default_factory=dict)  # at the producer, by sequence
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

    def place(self, begin: Begin, channel: Channel, asked: Asked) -> None:
        """Put slices that the consumer asks for into the queue.

        Raises:
            ProtocolError: they are none of its fetch, too large, too many, or out of order.
        """
        block = asked.grid.block_bytes
        places = range(begin.sequence, begin.sequence + begin.num_slices)
        if begin.first + begin.count > asked.count:
            raise ProtocolError("the consumer asked for blocks that it wasn't granted")
        if min(begin.size, begin.count) * block > max(SLICE_BYTES, block):
            raise ProtocolError(f"the consumer asked for slices of {begin.size * block} bytes")
        if places.start < self.sequence or places.stop > self.sequence + 2 * WINDOW or self.queue.keys() & set(places):
            raise ProtocolError(f"the consumer asked for slices {places.start} to {places.stop}, after {self.sequence}")
        for place, (first, end) in zip(places, begin.slices(), strict=True):
            self.queue[place] = Piece(channel, asked, first, end)

    @property
    def ready(self) -> bool:
        """Whether the next slice can be sent."""
        piece = self.queue.get(self.sequence)
        known = piece is not None and (piece.asked.blocks is not None or piece.over)
        return known and not self.lost and self.link.room

    def send(self) -> None:
        """Send it."""
        piece = self.queue.pop(self.sequence)
        self.link.send(piece.fill, piece.num_bytes)
        self.sequence += 1
        self.stir()

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


__all__ = ["BRISK", "EAGER", "PAUSE", "Asked", "Begin", "Line", "Piece"]
