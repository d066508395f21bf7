"""Events on their way from the connector's threads to `poll`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.specs.kv_connector import EventKind, TransferEvent


class Outbox:
    """A queue that wakes its reader."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._events: list[TransferEvent] = []

    def post(self, kind: EventKind, request_id: str, reason: str = "", corrupt: bool = False) -> None:
        """Queue an event; from any thread."""
        with self._lock:
            self._events.append(TransferEvent(kind, request_id, reason, corrupt))
        self._wake()

    def take(self) -> list[TransferEvent]:
        """All queued events, oldest first."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def recall(self, request_id: str) -> None:
        """Turn a FETCHED that nobody has taken yet into a FETCH_FAILED: the fetch was cancelled after it had ended."""
        with self._lock:
            for i, event in enumerate(self._events):
                if event == TransferEvent(EventKind.FETCHED, request_id):
                    self._events[i] = TransferEvent(EventKind.FETCH_FAILED, request_id, "cancelled")


__all__ = ["Outbox"]
