"""What one producer has published: looked up by request and by secret, digested little by little."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.transport.blocks import BlockPool

DIGEST_BYTES: Final = 2**25
"""Digested by a core of a CPU in one turn of the loop (about 6 ms), so that long publications delay no answer long."""


@dataclass(slots=True, eq=False)
class Publication:
    """Pages that are pinned until it is withdrawn."""

    request_id: str
    token: str
    pages: tuple[int, ...]
    lease_seconds: float
    digests: list[int] = field(default_factory=list)  # of the pages, as far as they were computed
    readers: int = 0
    delivered: bool = False
    withdrawn: bool = False


class Publications:
    """Added and withdrawn on the scheduler's thread, digested and found on the producer's."""

    def __init__(self, grid: BlockPool) -> None:
        self._grid = grid
        self._slice = max(1, DIGEST_BYTES * grid.swiftness // grid.block_bytes)
        self.lock = threading.Lock()
        """Over the tables and the flags of publications."""
        self._by_id: dict[str, Publication] = {}
        self._by_token: dict[str, Publication] = {}
        self._undigested: deque[Publication] = deque()

    def add(self, request_id: str, pages: Sequence[int], lease_seconds: float) -> Publication:
        """Publish; the digests come later.

        Raises:
            ValueError: the pages don't exist, or the request is published already.
        """
        self._grid.check(pages)
        publication = Publication(request_id, secrets.token_hex(16), tuple(pages), lease_seconds)
        with self.lock:
            if request_id in self._by_id:
                raise ValueError(f"{request_id!r} is published already; withdraw it first")
            self._by_id[request_id] = self._by_token[publication.token] = publication
        self._undigested.append(publication)
        return publication

    def withdraw(self, request_id: str) -> None:
        """End a publication; unknown ids are no news."""
        with self.lock:
            publication = self._by_id.pop(request_id, None)
            if publication is not None:
                del self._by_token[publication.token]
                publication.withdrawn = True

    def find(self, token: str) -> Publication | None:
        """The publication that a secret names."""
        with self.lock:
            return self._by_token.get(token)

    def digest(self) -> bool:
        """Compute some of the digests that are missing; returns whether more are."""
        if self._undigested:
            publication = self._undigested[0]
            if not publication.withdrawn:
                done = len(publication.digests)
                publication.digests += self._grid.digests(publication.pages[done : done + self._slice])
            if publication.withdrawn or len(publication.digests) == len(publication.pages):
                self._undigested.popleft()
        return bool(self._undigested)


__all__ = ["Publication", "Publications"]
