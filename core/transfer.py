"""The transfer ledger: which pages are held for another engine or filled from one, for whom, since when and until when.

Pure bookkeeping over KV connectors and a clock that is passed in; it knows no tensor, socket or scheduler. Called on
the scheduler's thread only. Whoever gives it pages may touch them again when `advance` reports their transfer ended,
and not before. Events of a connector may come late, twice or out of order: each transfer has an id of its own, which is
never used again, and an event for an id that has ended is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from engine.specs.kv_connector import EventKind, KVConnector, Role, TransferEvent


class TransferState(StrEnum):
    """Where a transfer stands. Published, leased, pulling and cancelling are open, the others are ends."""

    PUBLISHED = "published"  # no consumer has shown up
    LEASED = "leased"  # a consumer has shown up and renews the lease
    DELIVERED = "delivered"
    RELEASED = "released"  # its consumer is gone, or the core cancelled it
    EXPIRED = "expired"  # nobody renewed the lease
    PULLING = "pulling"
    CANCELLING = "cancelling"  # given up, but the connector may still write: the pages aren't free yet
    FETCHED = "fetched"
    FAILED = "failed"
    CORRUPT = "corrupt"  # failed, since what arrived was not what was published


_REASONS = {
    TransferState.PUBLISHED: "no consumer has shown up yet",
    TransferState.LEASED: "its consumer renews the lease",
    TransferState.PULLING: "the KV is on its way here",
}
"""Why the pages are held, where nothing else is to be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A started connector and what the engine does with it."""

    name: str  # what both engines call the connector in their configuration
    connector: KVConnector
    role: Role = Role.BOTH
    lease_seconds: float = 30.0
    fetch_timeout: float = 30.0  # seconds


class Progress(NamedTuple):
    """Transfers that ended since the last call: their pages belong to the caller again."""

    released: list[str]  # request ids whose publication ended
    fetched: list[str]  # request ids whose pages hold the KV
    failed: list[tuple[str, str]]  # request id, why nothing usable arrived


class TransferRow(NamedTuple):
    """Pages that are held for another engine or filled from one, for people: whose, why, and until when."""

    request_id: str
    side: Role
    state: TransferState
    pages: int
    expires: float  # by the ledger's clock; of a cancelled fetch: when it would have
    reason: str
    via: tuple[str, ...]  # names of the connectors


@dataclass(slots=True)
class _Transfer:
    id: str
    request_id: str
    pages: int
    links: tuple[Link, ...]
    state: TransferState
    expires: float
    reason: str = ""


class TransferLedger:
    """Owns every publication and every fetch from its start to its end."""

    def __init__(self, links: Sequence[Link], clock: Callable[[], float]) -> None:
        """Take over started connectors; `clock` gives seconds and is the one that `advance` is told the time of.

        Raises:
            ValueError: two links have one name.
        """
        if twice := [name for name, n in Counter(link.name for link in links).items() if n > 1]:
            raise ValueError(
                f"KV connector {twice[0]!r} is configured twice; give it one entry, with role 'both' if need be"
            )
        self._links = tuple(links)
        self._producers = tuple(link for link in links if link.role is not Role.CONSUMER)
        self._consumers = tuple(link for link in links if link.role is not Role.PRODUCER)
        self._clock = clock
        self._opened = 0
        self._published: dict[str, _Transfer] = {}  # by transfer id
        self._fetches: dict[str, _Transfer] = {}
        self._ended = Progress([], [], [])
        self.totals: Counter[TransferState] = Counter()
        """How many transfers ended in which state."""

    @property
    def produces(self) -> bool:
        """Whether `publish` may be called."""
        return bool(self._producers)

    @property
    def consumes(self) -> bool:
        """Whether `fetch` may be called."""
        return bool(self._consumers)

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Make pages readable through every connector that produces.

        The pages stay the ledger's until `advance` names the request among the released.

        Returns:
            The handle for the consumer's `fetch`, JSON values only.

        Raises:
            ValueError: no connector produces, or the request is published already.
        """
        if not self._producers:
            raise ValueError(f"can't publish the KV of {request_id!r}: no KV connector has the role producer or both")
        self._refuse_second(self._published, request_id, "published")
        transfer = self._open(request_id, pages, self._producers, TransferState.PUBLISHED, 0.0)
        via: dict[str, Any] = {}
        with ExitStack() as undo:
            for link in self._producers:
                via[link.name] = link.connector.publish(transfer.id, pages, num_tokens, link.lease_seconds)
                undo.callback(link.connector.withdraw, transfer.id)
            undo.pop_all()
        transfer.expires = self._clock() + max(link.lease_seconds for link in self._producers)
        self._published[transfer.id] = transfer
        return {"num_tokens": num_tokens, "via": via}

    def fetch(self, request_id: str, handle: Mapping[str, Any], pages: Sequence[int], first_page: int) -> None:
        """Start filling `pages` with the publication's pages from `first_page` on, through the first common connector.

        The pages stay the ledger's until `advance` names the request among the fetched or the failed.

        Raises:
            ValueError: the handle is malformed, foreign, or of no connector that fetches here; nothing was started.
        """
        remote_tokens(handle)
        self._refuse_second(self._fetches, request_id, "being fetched")
        via = handle["via"]
        link = next((link for link in self._consumers if link.name in via), None)
        if link is None:
            mine = ", ".join(link.name for link in self._consumers) or "none"
            raise ValueError(f"the KV is offered through {', '.join(via)}, this engine fetches through: {mine}")
        transfer = self._open(request_id, pages, (link,), TransferState.PULLING, self._clock() + link.fetch_timeout)
        link.connector.fetch(transfer.id, via[link.name], pages, first_page)
        self._fetches[transfer.id] = transfer

    def cancel(self, request_id: str) -> None:
        """The request is gone: end its transfers. The next calls of `advance` say when the pages are free."""
        for transfer in [t for t in self._published.values() if t.request_id == request_id]:
            self._end_publication(transfer, TransferState.RELEASED)
        for transfer in self._fetches.values():
            if transfer.request_id == request_id:
                self._give_up(transfer, "cancelled")

    def advance(self, now: float) -> Progress:
        """Take the connectors' events, end what has expired, and report what ended since the last call."""
        for link in self._links:
            for event in link.connector.poll():
                self._apply(link, event, now)
        for transfer in [t for t in self._published.values() if t.expires <= now]:
            self._end_publication(transfer, TransferState.EXPIRED)
        for transfer in self._fetches.values():
            if transfer.expires <= now:
                self._give_up(transfer, f"no KV within {transfer.links[0].fetch_timeout:g} s")
        ended, self._ended = self._ended, Progress([], [], [])
        return ended

    def next_expiry(self) -> float | None:
        """When `advance` must be called even if no connector wakes the engine; None if nothing is open."""
        waiting = [t.expires for t in self._fetches.values() if t.state is TransferState.PULLING]
        return min([*waiting, *(t.expires for t in self._published.values())], default=None)

    def rows(self) -> list[TransferRow]:
        """Every open transfer."""
        return [
            TransferRow(
                t.request_id,
                side,
                t.state,
                t.pages,
                t.expires,
                t.reason or _REASONS[t.state],
                tuple(link.name for link in t.links),
            )
            for side, table in ((Role.PRODUCER, self._published), (Role.CONSUMER, self._fetches))
            for t in table.values()
        ]

    def close(self) -> None:
        """End everything and close the connectors, each even if another one raises. No page is held afterwards."""
        with ExitStack() as stack:
            stack.callback(self._fetches.clear)
            for link in self._links:
                stack.callback(link.connector.close)
            for transfer in list(self._published.values()):
                self._end_publication(transfer, TransferState.RELEASED)
            for transfer in self._fetches.values():
                self._give_up(transfer, "the engine stops")

    def _open(
        self, request_id: str, pages: Sequence[int], links: tuple[Link, ...], state: TransferState, expires: float
    ) -> _Transfer:
        self._opened += 1
        return _Transfer(f"{request_id}#{self._opened}", request_id, len(pages), links, state, expires)

    @staticmethod
    def _refuse_second(table: Mapping[str, _Transfer], request_id: str, what: str) -> None:
        if any(t.request_id == request_id for t in table.values()):
            raise ValueError(f"request {request_id!r} is {what} already; wait for its end or cancel it")

    def _apply(self, link: Link, event: TransferEvent, now: float) -> None:
        if (transfer := self._published.get(event.request_id)) is not None:
            if event.kind is EventKind.RENEWED:
                transfer.state, transfer.expires = TransferState.LEASED, max(transfer.expires, now + link.lease_seconds)
            elif event.kind is EventKind.DELIVERED:
                self._end_publication(transfer, TransferState.DELIVERED)
            elif event.kind is EventKind.PEER_LOST:
                self._end_publication(transfer, TransferState.RELEASED)
        elif (transfer := self._fetches.get(event.request_id)) is not None:
            if event.kind is EventKind.FETCHED and transfer.state is TransferState.PULLING:
                self._end_fetch(transfer, TransferState.FETCHED)
                self._ended.fetched.append(transfer.request_id)
            elif event.kind in (EventKind.FETCHED, EventKind.FETCH_FAILED):
                self._end_fetch(transfer, TransferState.CORRUPT if event.corrupt else TransferState.FAILED)
                self._ended.failed.append((transfer.request_id, transfer.reason or event.reason))

    def _end_publication(self, transfer: _Transfer, state: TransferState) -> None:
        for link in transfer.links:
            link.connector.withdraw(transfer.id)
        del self._published[transfer.id]
        self.totals[state] += 1
        self._ended.released.append(transfer.request_id)

    def _give_up(self, transfer: _Transfer, reason: str) -> None:
        if transfer.state is TransferState.PULLING:
            transfer.state, transfer.reason = TransferState.CANCELLING, reason
            transfer.links[0].connector.cancel(transfer.id)

    def _end_fetch(self, transfer: _Transfer, state: TransferState) -> None:
        del self._fetches[transfer.id]
        self.totals[state] += 1


def remote_tokens(handle: Mapping[str, Any]) -> int:
    """How many tokens' KV a handle of `TransferLedger.publish` offers.

    Raises:
        ValueError: it is not such a handle.
    """
    num_tokens, via = handle.get("num_tokens"), handle.get("via")
    if type(num_tokens) is not int or num_tokens <= 0:
        raise ValueError(f"a KV handle needs num_tokens, a positive integer, not {num_tokens!r}")
    if not isinstance(via, dict) or not via or not all(isinstance(h, dict) for h in via.values()):
        raise ValueError(
            "a KV handle needs via, an object with one handle per connector; pass on what the producer returned"
        )
    return num_tokens


__all__ = ["Link", "Progress", "TransferLedger", "TransferRow", "TransferState", "remote_tokens"]
