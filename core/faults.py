"""When injected faults strike: the part of their script that every fault-injecting component shares."""

from __future__ import annotations

import os
import random
import signal

from pydantic import Field

from engine.plugin import Options


class When(Options):
    """Which occasions go wrong. What an occasion is, the component says."""

    after: int = Field(0, ge=0, description="Occasions that pass before the first fault.")
    times: int | None = Field(1, gt=0, description="How often it strikes; null: without end.")
    share: float = Field(1.0, gt=0, le=1, description="Share of the occasions that it strikes, drawn at random.")
    seed: int = Field(0, description="Of the draw: the same script strikes the same occasions.")


class Trigger:
    """Counts the occasions of one fault."""

    def __init__(self, when: When) -> None:
        self._when = when
        self._passed = self._struck = 0
        self._draw = random.Random(when.seed)

    def fires(self) -> bool:
        """Whether this occasion, the next one, goes wrong."""
        self._passed += 1
        spent = self._when.times is not None and self._struck >= self._when.times
        if spent or self._passed <= self._when.after or self._draw.random() >= self._when.share:
            return False
        self._struck += 1
        return True


def kill() -> None:
    """End this process at once, as a crash would: no clean-up, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["Trigger", "When", "kill"]
