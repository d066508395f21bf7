"""What it costs to compute a prompt here, or elsewhere and to fetch its KV, from measured times.

Costs are seconds that clients wait, all together: the one that asks, and those whose streams stand still while the
prompt is computed between their tokens. Pure arithmetic; whoever measures passes sizes, seconds and the time of day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

_NEWEST: Final = 0.3
"""Weight of the newest sample of a size in its mean."""

_FORGET: Final = 300.0
"""Seconds after which an unrepeated measurement counts as half as slow: what was slow is tried again some day."""

_SMALL: Final = 512
"""Tokens of a prompt that is short enough to try a link with that nobody has measured."""

_PATIENCE: Final = 16
"""Decisions without a small prompt after which a link is tried with any."""


@dataclass(slots=True)
class Curve:
    """Seconds by size, learned: for each power of two, running means over the samples of about that size."""

    _buckets: dict[int, tuple[float, float]] = field(default_factory=dict)
    _last: float | None = None

    def add(self, size: int, seconds: float, now: float) -> None:
        """Take in a sample; sizes below 1 say nothing."""
        if size < 1:
            return
        self._last = now
        at = int(math.log2(size))
        if at not in self._buckets:
            self._buckets[at] = (float(size), seconds)
            return
        x, y = self._buckets[at]
        self._buckets[at] = (x + _NEWEST * (size - x), y + _NEWEST * (seconds - y))

    def as_dict(self, now: float) -> dict[str, Any]:
        """`points`, pairs of size and seconds in order, and `age`, seconds since the last sample or None."""
        points = [list(point) for _, point in sorted(self._buckets.items())]
        return {"points": points, "age": None if self._last is None else now - self._last}


@dataclass(frozen=True, slots=True)
class Measured:
    """A curve as it stood when somebody told of it."""

    points: tuple[tuple[float, float], ...] = ()
    age: float = 0.0

    @classmethod
    def of(cls, told: object) -> Measured:
        """From `Curve.as_dict`; nothing measured if it is something else, for it may come from another server."""
        if not isinstance(told, Mapping) or not isinstance(told.get("points"), list):
            return cls()
        if not all(isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) for p in told["points"]):
            return cls()
        points = sorted({float(x): float(y) for x, y in told["points"] if x > 0}.items())
        age = told.get("age")
        return cls(tuple(points), float(age) if _is_number(age) else 0.0)

    def seconds(self, size: float) -> float | None:
        """Interpolated; beyond the last point as the last two lead, below the first in proportion. None: no points."""
        if not self.points:
            return None
        before = (0.0, 0.0)
        for after in self.points:
            if size <= after[0]:
                return _line(before, after, size)
            before = after
        first, last = (self.points[-2] if len(self.points) > 1 else (0.0, 0.0)), self.points[-1]
        return max(_line(first, last, size), last[1])

    def hoped(self, size: float) -> float | None:
        """`seconds`, the less the older the last sample is."""
        found = self.seconds(size)
        return None if found is None else found * 0.5 ** (self.age / _FORGET)

    @property
    def per_second(self) -> float | None:
        """Size per second at the largest size that was measured."""
        return self.points[-1][0] / self.points[-1][1] if self.points and self.points[-1][1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One engine that might compute the prompt."""

    prefill: Measured
    cached: int  # tokens of the prompt that it need not compute
    queue: float = 0.0  # seconds of prompts before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where the prompt should be computed; None for what isn't measured."""

    remote: bool
    local_seconds: float | None
    remote_seconds: float | None
    why: str


class Weigher:
    """Compares the two ways, and sees to it that what was never measured is tried.

    Args:
        stall_weight: how much a second counts for which one stream of the decode engine stands still.
    """

    def __init__(self, stall_weight: float) -> None:
        self._stall_weight = stall_weight
        self._untried = 0

    def choose(self, tokens: int, *, here: Side, there: Side, link: Measured, streams: int) -> Choice:
        """Compare.

        Args:
            tokens: of the prompt.
            here: the decode engine.
            there: the prefill engine.
            link: fetching by number of tokens.
            streams: requests that the decode engine is writing for.
        """
        own = here.prefill.hoped(max(1, tokens - here.cached))
        local = None if own is None else here.queue + own * (1 + self._stall_weight * streams)
        theirs = there.prefill.hoped(max(1, tokens - there.cached))
        moved = link.hoped(max(1, tokens - here.cached))
        if theirs is None or moved is None:
            return self._try(tokens, local)
        self._untried = 0
        remote = there.queue + theirs + moved
        if local is None:
            return Choice(
                remote=False, local_seconds=None, remote_seconds=remote, why="a prompt here was never measured"
            )
        cheaper = remote < local
        why = "costs less there" if cheaper else "costs less here"
        return Choice(remote=cheaper, local_seconds=local, remote_seconds=remote, why=why)

    def _try(self, tokens: int, local: float | None) -> Choice:
        self._untried += 1
        bold = tokens <= _SMALL or self._untried > _PATIENCE
        why = "the link was never measured"
        return Choice(
            remote=bold,
            local_seconds=local,
            remote_seconds=None,
            why=why if bold else f"{why}, and this prompt is too long to try it",
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _line(first: tuple[float, float], last: tuple[float, float], at: float) -> float:
    (x0, y0), (x1, y1) = first, last
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


__all__ = ["Choice", "Curve", "Measured", "Side", "Weigher"]
