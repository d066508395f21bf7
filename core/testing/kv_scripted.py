"""A KV connector that moves nothing: it keeps account of what it is told, and reports what a test lets it say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.specs.kv_connector import EventKind, KVConnector, TransferEvent


class Scripted(KVConnector):
    """Raises KeyError or AssertionError when the core does something twice, or to what was never begun."""

    def __init__(self) -> None:
        self.inbox: list[TransferEvent] = []
        """What `poll` will report."""
        self.published: dict[str, tuple[int, ...]] = {}
        self.fetching: dict[str, tuple[int, ...]] = {}
        """Every fetch that ever began."""
        self.cancelled: set[str] = set()
        self.refusal: str | None = None
        """The sentence with which `publish` and `fetch` refuse."""
        self.closed = 0

    def start(self, pool: Sequence[tuple[Any, ...]], wake: Callable[[], None]) -> None:
        raise AssertionError("the ledger takes over started connectors")

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        if self.refusal:
            raise ValueError(self.refusal)
        assert request_id not in self.published
        self.published[request_id] = tuple(pages)
        return {"id": request_id, "lease": lease_seconds}

    def withdraw(self, request_id: str) -> None:
        del self.published[request_id]  # KeyError: withdrawn twice, or never published

    def fetch(self, request_id: str, handle: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self.fetching[request_id] = tuple(pages)

    def cancel(self, request_id: str) -> None:
        assert request_id not in self.cancelled, "cancelled twice"
        self.cancelled.add(request_id)

    def poll(self) -> list[TransferEvent]:
        events, self.inbox = self.inbox, []
        return events

    def close(self) -> None:
        self.closed += 1

    def say(self, kind: EventKind, transfer_id: str, reason: str = "", corrupt: bool = False) -> None:
        self.inbox.append(TransferEvent(kind, transfer_id, reason, corrupt))


__all__ = ["Scripted"]
