"""The consumer's end of a fetch over a link: asks for slices, and moves what has arrived to its pages."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from engine.transport.blocks import BlockPool, Blocks, Digests, Ready
from engine.transport.channel import Channel
from engine.transport.frames import ProtocolError, Word
from engine.transport.line import Begin, Line
from engine.transport.link import SLICE_BYTES, WINDOW, Landing
from engine.transport.wire import Checks, Incoming

if TYPE_CHECKING:
    from torch import Tensor


class Slices(Incoming):
    """A few slices of one fetch at a time."""

    def __init__(self, line: Line, channel: Channel, grid: BlockPool, blocks: Blocks, checks: Checks) -> None:
        self._line, self._channel, self._grid, self._blocks, self._checks = line, channel, grid, blocks, checks
        self._ready: Ready = None
        self._size = max(1, SLICE_BYTES // grid.block_bytes)
        self._asked = self._begun = 0  # blocks
        self._coming: deque[tuple[Landing, int]] = deque()  # with the number of its blocks
        self._taking: deque[tuple[Landing, int]] = deque()  # arrived, on their way to their pages

    @property
    def pause(self) -> float:  # type: ignore[override]
        """See `Incoming.pause`."""
        return self._line.pause

    def begin(self) -> bytes | None:
        """Make ready for as many slices as there is room for; returns the word that asks for them."""
        line, first, sequence = self._line, self._asked, self._line.sequence
        while self._asked < len(self._blocks) and len(self._coming) + len(self._taking) < WINDOW and line.link.room:
            count = min(self._size, len(self._blocks) - self._asked)
            self._coming.append((line.link.receive(count * self._grid.block_bytes), count))
            line.sequence += 1
            self._asked += count
        if self._asked == first:
            return None
        line.stir()
        return msgspec.msgpack.encode(
            Begin(line.name, line.invitation, sequence, first, self._asked - first, self._size)
        )

    def ask(self) -> None:
        """Say so."""
        if (word := self.begin()) is not None:
            self._channel.send(Word(word))

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
        self.ask()
        return arrived, found

    def _scatter(self, part: slice, buffer: Tensor) -> Digests:
        if self._ready is None:
            self._ready = self._grid.ready(self._blocks)
        return self._grid.scatter(self._ready[part], buffer, self._checks[part])

    def close(self) -> None:
        """See `Incoming.close`."""
        for landing, _ in [*self._taking, *self._coming]:
            landing.release()
        self._taking.clear()
        self._coming.clear()


__all__ = ["Slices"]
