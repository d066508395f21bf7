"""How far the start has come: which phase, since when, and how long it may still take."""

from __future__ import annotations

import time
from typing import Any, Final

from engine.messages import Phase

_KNOWN: Final = 0.02
"""Below this share of a phase, what is left can't be told from what was done."""


class Startup:
    """Follows the phases that the core reports. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._began = self._entered = time.monotonic()
        self._phase = Phase("starting", 0.0)
        self.seconds: dict[str, float] = {}  # of phases that are over
        self._ready: float | None = None

    def observe(self, phase: Phase, ready: bool) -> None:
        """Take in the phase of now, and whether requests are taken."""
        now = time.monotonic()
        if phase.name != self._phase.name:
            self.seconds[self._phase.name] = self.seconds.get(self._phase.name, 0.0) + now - self._entered
            self._entered = now
        self._phase = phase
        if ready and self._ready is None:
            self._ready = now

    def remaining(self) -> float | None:
        """Seconds that the present phase will still take at its pace so far; None when that can't be told yet."""
        share = self._phase.progress
        if self._ready is not None or share >= 1:
            return 0.0
        return None if share < _KNOWN else (time.monotonic() - self._entered) * (1 - share) / share

    def as_dict(self) -> dict[str, Any]:
        """The account for probes and people."""
        end = time.monotonic() if self._ready is None else self._ready
        left = self.remaining()
        return {
            "elapsed_seconds": round(end - self._began, 3),
            "estimate_seconds": None if left is None else round(left, 3),
            "phases": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
        }


__all__ = ["Startup"]
