"""Connections whose fetch has ended well, kept for the next fetch from the same producer: no greeting, no waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.transport.channel import Channel

KEPT: Final = 4
"""Connections to one producer."""

SECONDS: Final = 30.0
"""For how long a consumer keeps one. Producers wait a little longer."""


@dataclass(frozen=True, slots=True)
class _Spare:
    address: str
    channel: Channel
    until: float


class Spares:
    """Belongs to the consumer's thread."""

    def __init__(self) -> None:
        self._spares: list[_Spare] = []  # the oldest first

    def keep(self, address: str, channel: Channel, now: float) -> bool:
        """Keep a connection unless there are enough; `now` is monotonic."""
        if sum(spare.address == address for spare in self._spares) >= KEPT:
            return False
        self._spares.append(_Spare(address, channel, now + SECONDS))
        return True

    def take(self, address: str) -> Channel | None:
        """The connection to a producer that was in use last."""
        found = next((spare for spare in reversed(self._spares) if spare.address == address), None)
        if found is None:
            return None
        self._spares.remove(found)
        return found.channel

    def drop(self, channel: Channel) -> bool:
        """Keep this no more; returns whether it was kept."""
        before = len(self._spares)
        self._spares = [spare for spare in self._spares if spare.channel is not channel]
        return len(self._spares) < before

    def expired(self, now: float) -> list[Channel]:
        """Those that were kept for long enough."""
        return [spare.channel for spare in self._spares if spare.until <= now]

    @property
    def due(self) -> float | None:
        """When the next is."""
        return self._spares[0].until if self._spares else None

    def all(self) -> list[Channel]:
        """Every one that is kept."""
        return [spare.channel for spare in self._spares]


__all__ = ["KEPT", "SECONDS", "Spares"]
