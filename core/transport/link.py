"""Two engines joined for bulk bytes: what one sends, in order, the other receives, in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.transport.blocks import Digests

if TYPE_CHECKING:
    from torch import Tensor

SLICE_BYTES: Final = 2**26
"""Sent at once. A slice takes four turns of the two loops (asked for, gathered and sent, arrived, taken), about a
millisecond together, whatever its size."""

WINDOW: Final = 8
"""Slices on their way at once, each with memory of its own at both ends. On one H200 with both ends of `rdma` on it,
0.54 GB take 9.0 ms; with 3 slices of half the size under way, 16.8 ms."""


class LinkLost(Exception):
    """The other end is gone; the text says how that showed."""


class Landing(ABC):
    """Bytes that were asked for and are on their way."""

    @abstractmethod
    def arrived(self) -> bool:
        """Whether all bytes are here."""

    @abstractmethod
    def take(self, scatter: Callable[[Tensor], Digests]) -> None:
        """Once they have arrived: start to move them where they belong."""

    @abstractmethod
    def taken(self) -> Digests | None:
        """The digests once `take` has done its work, None before."""

    @abstractmethod
    def release(self) -> None:
        """No more interest, whatever has arrived: nothing is written to the pages from now on. Waits for this device to
        end a `take` that was begun, never for the peer."""


class Link(ABC):
    """One of the two ends. All calls come from one thread and return at once; LinkLost means that it is of no use."""

    @property
    @abstractmethod
    def room(self) -> bool:
        """Whether a slice can be sent or received now."""

    @abstractmethod
    def send(self, fill: Callable[[Tensor], None], num_bytes: int) -> None:
        """Queue a slice; `fill` writes its bytes into uint8 [num_bytes] on the device."""

    @abstractmethod
    def receive(self, num_bytes: int) -> Landing:
        """Queue the next slice that the other end sends."""

    @abstractmethod
    def pump(self) -> bool:
        """Move on with what is queued; returns whether there is more to do."""

    @abstractmethod
    def close(self) -> None:
        """Break off whatever is under way and let go of everything; the memory of landings is written no more."""


class Links(ABC):
    """Makes links on one kind of device."""

    @abstractmethod
    def invite(self) -> bytes:
        """What the other end needs to join: at most 8 KiB, good for one link."""

    @abstractmethod
    def join(self, invitation: bytes, *, invited: bool) -> Link:
        """One end of a link, without waiting for the other; `invited` is the end that did not make the invitation.

        Raises:
            LinkLost: the invitation makes no sense.
        """

    def close(self) -> None:  # noqa: B027
        """No link is open any more."""


__all__ = ["SLICE_BYTES", "WINDOW", "Landing", "Link", "LinkLost", "Links"]
