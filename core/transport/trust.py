"""Which blocks are checked, and which peers are not asked for a while because what they sent was damaged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class Sampler:
    """Picks a share of the blocks, evenly over all fetches."""

    def __init__(self, share: float) -> None:
        self._share, self._owed = share, 0.5

    def choose(self, count: int) -> NDArray[np.bool_]:
        """Of each of the next `count` blocks, whether it is checked."""
        if self._share >= 1:
            return np.ones(count, np.bool_)
        owed = self._owed + self._share * np.arange(1, count + 1)
        due = np.floor(owed)
        self._owed = float(owed[-1] % 1) if count else self._owed
        chosen: NDArray[np.bool_] = np.diff(due, prepend=0.0) > 0
        return chosen


class Quarantine:
    """Counts damaged deliveries by the peer's address."""

    def __init__(self, after: int, seconds: float, clock: Callable[[], float]) -> None:
        self._after, self._seconds, self._clock = after, seconds, clock
        self._damaged: dict[str, tuple[int, float]] = {}  # in a row, time of the last

    def damaged(self, peer: str) -> None:
        """A delivery of the peer was damaged."""
        now = self._clock()
        self._damaged = {p: (n, at) for p, (n, at) in self._damaged.items() if now - at < self._seconds}
        count, _ = self._damaged.get(peer, (0, now))
        self._damaged[peer] = (count + 1, now)

    def sound(self, peer: str) -> None:
        """A delivery of the peer was whole."""
        self._damaged.pop(peer, None)

    def objection(self, peer: str) -> str | None:
        """Why the peer is not asked now, as a sentence; None if it may be."""
        count, at = self._damaged.get(peer, (0, 0.0))
        left = at + self._seconds - self._clock()
        if count < self._after or left <= 0:
            return None
        return f"its last {count} deliveries were damaged, so it is not asked for another {left:.0f} s"


__all__ = ["Quarantine", "Sampler"]
