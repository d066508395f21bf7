"""Requests for which a resident speculator stays at work while speculation is off, so that a probe finds it informed.

A resident that hasn't seen a request can't draft well for it, and watching everybody costs time. So while speculation
is off one new request at a time is watched from its first token on. Where none comes for long, one under way is watched
for some tokens before it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_ENOUGH: Final = 32
"""Tokens after which a request that was not watched from its beginning may be drafted for."""

_PATIENCE: Final = 256
"""Steps without a new request after which an old one will do."""

_PROBES: Final = 4
"""Probes that one scout is good for."""


class Scouts:
    """None are needed if the speculator is no resident; then everybody is ready."""

    def __init__(self, resident: bool) -> None:
        self._resident = resident
        self._watched: dict[str, int] = {}  # request -> tokens it was watched for
        self._idle = self._probes = 0

    def watches(self, request_id: str, fresh: bool, affordable: bool) -> bool:
        """Whether the request is watched; appoints it if one is wanted."""
        if request_id in self._watched:
            return True
        if not affordable or self._watched or not (fresh or self._idle >= _PATIENCE):
            return False
        self._watched[request_id] = _ENOUGH if fresh else 0
        self._probes = 0
        return True

    @property
    def armed(self) -> bool:
        """Whether a probe has anybody to draft for, if that request decodes."""
        return not self._resident or any(tokens >= _ENOUGH for tokens in self._watched.values())

    @property
    def watching(self) -> bool:
        """Whether anybody is watched."""
        return bool(self._watched)

    def ready(self, request_ids: Iterable[str]) -> list[bool]:
        """Which of these a probe may draft for."""
        return [not self._resident or self._watched.get(r, 0) >= _ENOUGH for r in request_ids]

    def step(self) -> None:
        """A step is over."""
        self._idle = 0 if self._watched else self._idle + 1
        for request_id in self._watched:
            self._watched[request_id] += 1

    def probed(self) -> None:
        """A probe is over; after some of them the scout is let go."""
        self._probes += 1
        if self._probes >= _PROBES:
            self._watched.clear()

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._watched.pop(request_id, None)


__all__ = ["Scouts"]
