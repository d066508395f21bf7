"""Watches whether keeping prefixes pays, and says for which requests to do it.

While pages are reclaimed and hardly a token is found again, the tree is work for nothing: requests bypass it, and their
pages are free as soon as they end. One in some goes on to be kept, as a probe. If prompts begin to have something in
common, the probes are found, and all are kept again.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 256
"""Requests after which the question is asked anew."""

ENOUGH: Final = 0.01
"""Share of the tokens looked up that must be found for keeping to pay."""

PROBES: Final = 8
"""One request in so many is kept during a bypass."""


class Evidence:
    """Counts what is looked up and found."""

    def __init__(self, *, may_bypass: bool) -> None:
        self.bypassing = False
        self.bypassed = 0  # requests, since the start
        self._may_bypass = may_bypass
        self._opened = self._looked_up = self._found = self._evicted_before = 0

    def opened(self, looked_up: int, found: int, evicted: int) -> bool:
        """A request looked for its tokens and found some.

        Args:
            evicted: pages reclaimed since the start.

        Returns:
            Whether to keep what it will compute.
        """
        self._opened += 1
        self._looked_up += looked_up
        self._found += found
        if self._opened == WINDOW:
            self._judge(evicted)
        if not self.bypassing or self._opened % PROBES == 0:
            return True
        self.bypassed += 1
        return False

    def _judge(self, evicted: int) -> None:
        """Keeping costs next to nothing where nothing had to be reclaimed, so that alone is no reason to begin."""
        little = self._found < ENOUGH * self._looked_up
        pressed = self.bypassing or evicted > self._evicted_before
        self.bypassing = self._may_bypass and little and pressed
        self._evicted_before = evicted
        self._opened = self._looked_up = self._found = 0


__all__ = ["ENOUGH", "PROBES", "WINDOW", "Evidence"]
