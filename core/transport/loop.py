"""One thread over one selector: the frame in which each end of the connector runs. Knows no message and no page."""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Final

log = logging.getLogger(__name__)

SELECTOR_SECONDS: Final = 0.001
"""What a selector rounds its timeout up to."""

_SET_TIMER_SLACK: Final = 29  # of prctl
_TIMER_SLACK: Final = 1000  # nanoseconds
"""By how much Linux may draw out a sleep of the thread; as it comes, 50 µs."""


class Loop(ABC):
    """Subclasses say what a readable or writable file means and what is due; all of it runs on the loop's thread."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _ready(self, owner: Any, events: int) -> None:
        """A file that was registered with `owner` as its data is ready."""

    @abstractmethod
    def _tick(self, now: float) -> float | None:
        """Do a bounded amount of what is due; return the time of the next call, None to wait for news."""

    @abstractmethod
    def _abandon(self, reason: str) -> None:
        """The loop ends, on request or by a defect: let go of everything that is open."""

    def wake(self) -> None:
        """Make `_tick` run soon; from any thread, until `close`."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """End the thread and wait for it; at most one `_tick` goes by."""
        self._closing = True
        self.wake()
        self._thread.join()
        self._selector.close()
        os.close(self._wakeup)

    @staticmethod
    def _wait(due: float | None) -> float | None:
        """How long to wait for news. Selectors know no less than a millisecond, so shorter pauses are slept here."""
        if due is None:
            return None
        left = max(0.0, due - time.monotonic())
        if left >= SELECTOR_SECONDS:
            return left
        time.sleep(left)
        return 0.0

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, _TIMER_SLACK)
        reason = "the engine stops"
        try:
            due: float | None = None
            while not self._closing:
                for key, events in self._selector.select(self._wait(due)):
                    if key.fd == self._wakeup:
                        os.eventfd_read(self._wakeup)
                    else:
                        self._ready(key.data, events)
                due = self._tick(time.monotonic())
        except Exception as error:
            log.exception("%s ends by a defect", self._thread.name)
            reason = f"the connector's thread failed: {error!r}"
        finally:
            self._abandon(reason)


__all__ = ["Loop"]
