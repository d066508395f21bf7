"""Says when speculation hasn't paid for a while, as when a target has drifted from its head."""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger(__name__)

_PATIENCE: Final = 100
"""Steps without speculation before the alarm, and with it before the alarm ends."""

_PROBES: Final = 3
"""Probes that must have failed in that time."""

_NEWS: Final = 0.1
"""Weight of the latest drafted step in the means."""


class Alarm:
    """Follows how long speculation has been off because of what probes found, and what they found.

    Args:
        worth: how many times their cost drafts must bring for speculation to be turned on.
    """

    def __init__(self, worth: float = 1.0) -> None:
        self._worth = worth
        self.ringing = False
        self.rung = 0  # how often it began to
        self.acceptance: float | None = None  # share of draft tokens that are kept; None before any
        self.break_even: float | None = None  # share that must be kept for speculation to pay
        self._failed = self._off = self._on = 0

    def learn(self, drafted: int, accepted: int, break_even: float) -> None:
        """A step had drafts in it; a draft token costs `break_even` tokens of a plain step."""
        kept = accepted / drafted
        self.acceptance = kept if self.acceptance is None else self.acceptance + _NEWS * (kept - self.acceptance)
        self.break_even = break_even

    def probed(self) -> None:
        """Something was drafted to see whether it pays, and it didn't."""
        self._failed += 1

    def step(self, on: bool, rows: int) -> None:
        """A step of `rows` requests is over, with speculation on or not."""
        if on:
            self._failed = self._off = 0
            self._on += 1
            if self.ringing and self._on >= _PATIENCE:
                self.ringing = False
                log.info("draft tokens pay again: a share of %.2g is kept", self.acceptance)
            return
        self._off += 1
        if self._off < _PATIENCE or self._failed < _PROBES:
            return
        self._on = 0
        if not self.ringing:
            self.ringing = True
            self.rung += 1
            self._warn(rows)

    def _warn(self, rows: int) -> None:
        if self.acceptance is None:
            log.warning("the speculator made no usable draft in %d steps; they run without", self._off)
            return
        log.warning(
            "draft tokens don't pay: a share of %.2g is kept lately, and with %d requests at once it takes more than "
            "%.2g; speculation is held back until they do",
            self.acceptance,
            rows,
            (self.break_even or 0.0) * self._worth,
        )


__all__ = ["Alarm"]
