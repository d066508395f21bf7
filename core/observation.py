"""Delivers request events to the observers, in batches and on a thread of its own.

The step thread only appends to a queue. A slow observer delays nobody but itself; one that keeps raising is dropped,
with a line in the log; when the queue is full, new events are counted and thrown away.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from engine.specs.observer import Observer, RequestEvent
from engine.timing import Timekeeper

log = logging.getLogger(__name__)

MOST_QUEUED: Final = 100_000
"""Events that may wait."""

MOST_FAILURES: Final = 3
"""Failures in a row after which an observer is dropped."""


class Observation:
    """The observers of one engine, and the times of its requests. Without observers there is no thread."""

    def __init__(self, observers: Sequence[Observer], most_queued: int = MOST_QUEUED) -> None:
        self._failures = dict.fromkeys(observers, 0)
        self._observers = tuple(observers)
        self._queue: deque[RequestEvent] = deque()
        self._most_queued = most_queued
        self._wake = threading.Condition()
        self._closing = False
        self.dropped = 0
        self.times = Timekeeper()
        self._thread = threading.Thread(target=self._deliver, name="observers", daemon=True) if observers else None
        if self._thread is not None:
            self._thread.start()

    def emit(self, event: RequestEvent) -> None:
        """Note the time, and queue the event."""
        self.times.follow(event)
        if self._thread is None:
            return
        with self._wake:
            if len(self._queue) >= self._most_queued:
                self.dropped += 1
                return
            self._queue.append(event)
            self._wake.notify()

    def close(self) -> None:
        """Deliver what is queued, close the observers and join the thread."""
        if self._thread is None:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        for observer in self._observers:
            try:
                observer.close()
            except Exception:  # the others must be closed too
                log.exception("the observer %s failed to close", type(observer).__name__)
        if self.dropped:
            log.warning("%d request events were dropped, since the observers were too slow", self.dropped)

    def _deliver(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                events = tuple(self._queue)
                self._queue.clear()
            if not events:
                return
            for observer in list(self._failures):
                self._tell(observer, events)

    def _tell(self, observer: Observer, events: Sequence[RequestEvent]) -> None:
        try:
            observer.receive(events)
            self._failures[observer] = 0
        except Exception:
            self._failures[observer] += 1
            log.exception("the observer %s failed", type(observer).__name__)
            if self._failures[observer] >= MOST_FAILURES:
                log.error(
                    "the observer %s failed %d times in a row and is dropped", type(observer).__name__, MOST_FAILURES
                )
                del self._failures[observer]


__all__ = ["MOST_FAILURES", "MOST_QUEUED", "Observation"]
