"""What a connector adds to the rest: how two ends meet, and how blocks get from one pool into another."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.specs.kv_connector import KVSchema
from engine.transport.blocks import BlockPool, Blocks
from engine.transport.channel import Channel

if TYPE_CHECKING:
    from torch import Tensor


Checks = NDArray[np.bool_]

Pool = TypeVar("Pool", bound=BlockPool)


class Offered(NamedTuple):
    """What a consumer knows of the other end."""

    detail: bytes  # what `Transport.offer` said there
    schema: KVSchema
    block: int  # tokens in a block


class Incoming(ABC):
    """The blocks of one fetch on their way into this engine's pool. Used by the consumer's thread only."""

    pause: float | None = None
    """Seconds after which to look again although the channel has no news; None waits for the channel (or a wake)."""

    @abstractmethod
    def advance(self) -> tuple[int, list[int]]:
        """Move a bounded amount, without waiting.

        Returns:
            How many blocks have come into place since the last call, in the order that was asked for, and the digests
            of those among them that are to be checked.

        Raises:
            ProtocolError: the peer is gone or talks nonsense.
            ValueError: it offers what can't be right.
        """

    def close(self) -> None:  # noqa: B027
        """The fetch ended, however it did: write no more, and let go of everything."""


class Transport(ABC, Generic[Pool]):
    """Made with the connector. Unless said otherwise, methods run on the scheduler's thread, before the ends start."""

    name: str
    """Of the connector, for sentences and threads."""

    keeps: bool = False
    """Whether a channel may serve another fetch after one that ended well."""

    def allocate(self, num_bytes: int) -> Tensor | None:
        """See `KVConnector.allocate`; called for producers only."""
        return None

    def attach(self, pool: Sequence[tuple[Tensor, ...]], grid: Pool, wake: Callable[[], None]) -> None:
        """The pool is there; `wake` makes the consumer look at what is incoming, from any thread.

        Raises:
            ValueError: it can't be used.
        """

    @abstractmethod
    def grid(self, pool: Sequence[tuple[Tensor, ...]]) -> Pool:
        """The pool as blocks."""

    @abstractmethod
    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket for consumers, and its address for handles."""

    @abstractmethod
    def check_address(self, address: str) -> None:
        """Refuse an address that no producer here may have; raises ValueError."""

    @abstractmethod
    def dial(self, address: str) -> Channel:
        """Begin to connect to a producer, without waiting; on the consumer's thread.

        Raises:
            BlockingIOError: it can't take another connection now; ask again.
            OSError: nobody listens there.
            ValueError: it is somebody else.
        """

    @abstractmethod
    def admit(self, sock: socket.socket) -> Channel:
        """The channel to a consumer that has connected; on the producer's thread.

        Raises:
            ProtocolError: it is no consumer of ours. The socket is closed.
        """

    def opened(self, channel: Channel, grid: Pool, count: int, word: bytes) -> None:
        """A consumer has asked for `count` blocks, and said `word` with it; on the producer's thread. Whether it gets
        them is open; if not, the channel is closed.

        Raises:
            ProtocolError: the word makes no sense.
        """

    def offer(self, channel: Channel, grid: Pool, blocks: Blocks) -> bytes:
        """What the consumer must know beside the digests; on the producer's thread, just before the grant goes out."""
        return b""

    def granted(self, channel: Channel, grid: Pool, blocks: Blocks) -> None:
        """The grant went out; on the producer's thread. A transport that pushes begins now."""

    def heard(self, channel: Channel, body: bytes) -> None:
        """The consumer sent a word of this transport's own; on the producer's thread.

        Raises:
            ProtocolError: it makes no sense.
        """

    def producer_turn(self, now: float) -> float | None:
        """Do a bounded amount of what is due at the producer's end, on its thread; returns the time of the next call,
        None to wait for news. `now` is monotonic."""
        return None

    def consumer_turn(self, now: float) -> float | None:
        """The same at the consumer's end, on its thread; called after its fetches were pulled."""
        return None

    def ahead(self, channel: Channel, grid: Pool, blocks: Blocks, checks: Checks) -> tuple[bytes, Incoming | None]:
        """Begin to fill `blocks` before they are granted, over a kept channel; on the consumer's thread.

        Returns:
            What to say with `Open`, and what `receive` would return. Without the latter, `receive` is called later.
        """
        return b"", None

    def hung_up(self, channel: Channel) -> None:
        """The producer has closed a kept channel: it does not do what it was told `ahead`. On the consumer's thread."""

    @abstractmethod
    def receive(self, channel: Channel, offer: Offered, grid: Pool, blocks: Blocks, checks: Checks) -> Incoming:
        """Begin to fill `blocks` of `grid` with what was granted; on the consumer's thread.

        Args:
            checks: of each block, whether its digest is wanted.

        Raises:
            ValueError: the offer makes no sense.
        """

    def close(self) -> None:
        """Both ends have stopped: release everything."""


__all__ = ["Checks", "Incoming", "Offered", "Pool", "Transport"]
