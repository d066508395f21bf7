"""How fast requests finish, and so when one that was refused should come back."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

_KEPT: Final = 128
_LONGEST: Final = 120


class Pace:
    """Remembers when the latest requests finished. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_KEPT)

    def finished(self, now: float) -> None:
        """A request was computed to its end."""
        self._ends.append(now)

    def per_second(self, now: float) -> float | None:
        """Requests finished a second, over the latest; None until two have."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return None
        return len(self._ends) / (now - self._ends[0])

    def wait(self, requests: int, now: float) -> int:
        """Whole seconds, 1 to 120, until so many more will have finished; 1 while nothing is known."""
        rate = self.per_second(now)
        return 1 if rate is None else min(_LONGEST, max(1, math.ceil(requests / rate)))


__all__ = ["Pace"]
