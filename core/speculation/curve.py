"""A function of one number, learned from noisy samples: straight lines between knots.

A sample moves the two knots around it, each by its share (a hat basis), so that a value that grows with its argument
isn't blurred by buckets. What is slow by accident is cut: a hiccup counts as half more than was expected, or as twice
where nothing was measured before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

KNOTS: Final = (0, 1, 2, 3, 4, *(step << shift for shift in range(1, 16) for step in (3, 4)))
"""0, 1, 2, 3, 4, 6, 8, 12, 16, 24, …: two an octave."""

_FORGET: Final = 0.05
"""Weight of a new sample at a knot that has seen many; the first ones are averaged."""

_HICCUP, _FIRST = 1.5, 2.0


class Curve:
    """Unknown until something is learned.

    Args:
        at_zero: its value at 0 to begin with, if that is known.
    """

    def __init__(self, at_zero: float | None = None) -> None:
        self._knots: list[int] = [] if at_zero is None else [0]  # the known ones, ascending
        self._values: list[float] = [] if at_zero is None else [at_zero]
        self._counts: dict[int, int] = {}

    @property
    def reach(self) -> int:
        """The largest knot that a sample has touched; 0 if none has."""
        return max(self._counts, default=0)

    def samples(self, x: float) -> int:
        """How many samples the knots around x have, whichever of them has fewer."""
        return min(self._counts.get(knot, 0) for knot, _ in _around(x))

    def at(self, x: float) -> float | None:
        """The value; beyond the outermost knots, theirs. None while nothing is known."""
        knots, values = self._knots, self._values
        if not knots:
            return None
        right = bisect_right(knots, x)
        if right == 0:
            return values[0]
        if right == len(knots):
            return values[-1]
        left = right - 1
        return values[left] + (values[right] - values[left]) * (x - knots[left]) / (knots[right] - knots[left])

    def learn(self, x: float, y: float) -> None:
        """One sample."""
        around = _around(x)
        expected = self.at(x) or y
        known = all(knot in self._counts for knot, _ in around)
        y = min(y, (_HICCUP if known else _FIRST) * expected)
        for knot, share in around:
            count = self._counts[knot] = self._counts.get(knot, 0) + 1
            at = bisect_left(self._knots, knot)
            if at == len(self._knots) or self._knots[at] != knot:
                self._knots.insert(at, knot)
                self._values.insert(at, y)
            elif count == 1:
                self._values[at] = y  # what stood there was a guess
            else:
                self._values[at] += share * max(1 / count, _FORGET) * (y - expected)


def _around(x: float) -> tuple[tuple[int, float], ...]:
    """The knots on both sides of x with their shares; one if x is a knot."""
    right = bisect_left(KNOTS, x)
    high = KNOTS[min(right, len(KNOTS) - 1)]
    if high <= x or right == 0:
        return ((high, 1.0),)
    low = KNOTS[right - 1]
    share = (x - low) / (high - low)
    return ((low, 1.0 - share), (high, share))


__all__ = ["KNOTS", "Curve"]
