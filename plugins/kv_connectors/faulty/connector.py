"""A connector that does what another does, but for the faults of its script. All on the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.faults import Trigger, kill
from engine.plugins.kv_connectors.faulty import TransferFault
from engine.specs.kv_connector import EventKind, KVConnector, TransferEvent

_LAST = frozenset({EventKind.DELIVERED, EventKind.PEER_LOST, EventKind.FETCHED, EventKind.FETCH_FAILED})
"""News after which none follows."""


class FaultyConnector(KVConnector):
    """Raises ValueError for a fault that makes no sense at its place."""

    def __init__(self, inner: KVConnector, faults: Sequence[TransferFault]) -> None:
        for fault in faults:
            if fault.kind == "corrupt" and fault.at != "publish":
                raise ValueError("the fault corrupt flips a bit of published pages: it needs at: publish")
        self._inner = inner
        self._script = [(fault, Trigger(fault)) for fault in faults]
        self._struck: dict[str, list[TransferFault]] = {}  # by request
        self._late: list[tuple[float, TransferEvent]] = []
        self._damage: dict[str, _Damage] = {}
        self._dropped: set[str] = set()  # fetches that never began

    def allocate(self, num_elements: int) -> Tensor | None:
        return self._inner.allocate(num_elements)

    def start(self, pool: Sequence[tuple[Tensor, ...]], wake: Callable[[], None]) -> None:
        self._pool = pool
        self._inner.start(pool, wake)

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        kinds = self._strike("publish", request_id)
        handle = self._inner.publish(request_id, pages, num_tokens, lease_seconds)
        if "corrupt" in kinds and pages:
            delay = next(f.seconds for f in self._struck[request_id] if f.kind == "corrupt")
            self._damage[request_id] = _Damage(self._pool[0][0][pages[0]], time.monotonic() + delay)
        return handle

    def withdraw(self, request_id: str) -> None:
        self._inner.withdraw(request_id)
        self._struck.pop(request_id, None)
        if damage := self._damage.pop(request_id, None):
            damage.mend()

    def fetch(self, request_id: str, handle: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        if "drop" in self._strike("fetch", request_id):
            self._dropped.add(request_id)
        else:
            self._inner.fetch(request_id, handle, pages, first_page)

    def cancel(self, request_id: str) -> None:
        if request_id in self._dropped:
            self._dropped.discard(request_id)
            self._late.append((0.0, TransferEvent(EventKind.FETCH_FAILED, request_id, "cancelled")))
        else:
            self._inner.cancel(request_id)

    def poll(self) -> list[TransferEvent]:
        now = time.monotonic()
        for damage in self._damage.values():
            damage.make(now)
        told: list[TransferEvent] = []
        for event in self._inner.poll():
            told += self._told(event, now)
        due = [event for at, event in self._late if at <= now]
        self._late = [(at, event) for at, event in self._late if at > now]
        return told + due

    def close(self) -> None:
        self._inner.close()

    def _strike(self, at: str, request_id: str) -> set[str]:
        """The kinds of the faults that strike this occasion; raises or ends the process if one says so."""
        striking = [fault for fault, trigger in self._script if fault.at == at and trigger.fires()]
        kinds = {fault.kind for fault in striking}
        if "kill" in kinds:
            kill()
        if "raise" in kinds:
            raise ValueError(f"injected fault: the {at} was refused")
        self._struck[request_id] = striking
        return {str(kind) for kind in kinds}

    def _told(self, event: TransferEvent, now: float) -> list[TransferEvent]:
        """What becomes of one piece of news; late ones are kept for another poll."""
        last = event.kind in _LAST
        faults = self._struck.get(event.request_id, [])
        if last and event.kind in (EventKind.FETCHED, EventKind.FETCH_FAILED):
            self._struck.pop(event.request_id, None)
        kinds = {fault.kind for fault in faults}
        if "drop" in kinds:
            return []
        events = [event, event] if "duplicate" in kinds and last else [event]
        if late := [fault.seconds for fault in faults if fault.kind == "delay"]:
            self._late += [(now + max(late), each) for each in events]
            return []
        return events


class _Damage:
    """One bit of a page that is flipped at a certain time, once digests were made, and flipped back in the end."""

    def __init__(self, page: Tensor, at: float) -> None:
        self._byte = page.view(-1)[:1].view(torch.uint8)[:1]
        self._at, self._flipped = at, False

    def make(self, now: float) -> None:
        """Flip it when it is time."""
        if not self._flipped and now >= self._at:
            self._flip()

    def mend(self) -> None:
        """Put back what was there."""
        if self._flipped:
            self._flip()

    def _flip(self) -> None:
        self._byte.bitwise_xor_(1)
        self._flipped = not self._flipped


__all__ = ["FaultyConnector"]
