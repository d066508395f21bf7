"""Every interleaving of a small model of the transfer ledger: each page is freed once, and only when nobody uses it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from engine.specs.kv_connector import EventKind, Role
from engine.testing.kv_scripted import Scripted
from engine.transfer import Link, TransferLedger, TransferState

LEASE = 2
"""Ticks; also the fetch timeout."""

PAGES = 4

EVENTS = {
    Role.PRODUCER: (EventKind.DELIVERED, EventKind.RENEWED, EventKind.PEER_LOST),
    Role.CONSUMER: (EventKind.FETCHED, EventKind.FETCH_FAILED),
}


class World:
    """A ledger, its connector, an allocator, and what an observer outside knows.

    What may happen, in any order: a transfer begins; it finishes (DELIVERED, FETCHED); the request is cancelled or its
    client is gone (`cancel`); the peer dies (one event or all at once); time passes (leases and fetches time out); an
    event comes twice, in another order, late, or for a transfer that ended long ago; the ledger looks around.
    """

    def __init__(self) -> None:
        self.wire = Scripted()
        link = Link(name="wire", connector=self.wire, lease_seconds=LEASE, fetch_timeout=LEASE)
        self.now = 0
        self.ledger = TransferLedger([link], self.time)
        self.free = set(range(PAGES))
        self.held: dict[Role, list[int]] = {}  # what the ledger owns by the observer's count
        self.writing: dict[str, list[int]] = {}  # fetches that the connector may still write for
        self.ids: dict[Role, list[str]] = {Role.PRODUCER: [], Role.CONSUMER: []}

    def time(self) -> float:
        return self.now

    def key(self) -> str:
        """Everything the future depends on, with times relative and transfer ids in order of birth."""
        names = {tid: i for i, tid in enumerate([*self.ids[Role.PRODUCER], *self.ids[Role.CONSUMER]])}
        tables = [
            (names[t.id], t.state, min(max(t.expires - self.now, 0), LEASE), t.reason)
            for table in (self.ledger._published, self.ledger._fetches)
            for t in table.values()
        ]
        inbox = [(e.kind, names[e.request_id]) for e in self.wire.inbox]
        writing = sorted(names[tid] for tid in self.writing)
        counts = [len(ids) for ids in self.ids.values()]
        return repr((tables, inbox, self.ledger._ended, self.held, writing, counts))

    def moves(self) -> list[tuple[Any, ...]]:
        moves: list[tuple[Any, ...]] = [("look around",), ("tick",), ("cancel",)]
        if sum(len(ids) for ids in self.ids.values()) < 3:
            moves += [("begin", side) for side in EVENTS if side not in self.held]
        if len(self.wire.inbox) < 2:
            moves += [("say", kind, tid) for side in EVENTS for tid in self.ids[side] for kind in EVENTS[side]]
        if len(self.wire.inbox) == 1:
            moves.append(("again",))
        if len(self.wire.inbox) == 2:
            moves.append(("reorder",))
        if not self.wire.inbox:
            moves.append(("peer dies",))
        return moves

    def apply(self, move: tuple[Any, ...]) -> None:
        match move:
            case ("look around",):
                self.look_around()
            case ("tick",):
                self.now += 1
            case ("cancel",):
                self.ledger.cancel("r")
            case ("say", kind, transfer_id):
                self.say(kind, transfer_id)
            case ("again",):
                self.wire.inbox += self.wire.inbox
            case ("reorder",):
                self.wire.inbox.reverse()
            case ("peer dies",):
                for transfer_id in self.wire.published:
                    self.say(EventKind.PEER_LOST, transfer_id)
                for transfer_id in list(self.writing):
                    self.say(EventKind.FETCH_FAILED, transfer_id)
            case ("begin", side):
                self.begin(side)

    def say(self, kind: EventKind, transfer_id: str) -> None:
        if kind in EVENTS[Role.CONSUMER]:
            self.writing.pop(transfer_id, None)  # its last word: it writes no more
        self.wire.say(kind, transfer_id)

    def begin(self, side: Role) -> None:
        pages = sorted(self.free)[:2]
        assert len(pages) == 2, "a page is held although nothing is under way"
        in_use = {page for used in (*self.wire.published.values(), *self.writing.values()) for page in used}
        assert not in_use & set(pages), "a page was freed that a peer may read or the connector may write"
        if side is Role.PRODUCER:
            self.ledger.publish("r", pages, 8)
            self.ids[side] += self.wire.published
        else:
            self.ledger.fetch("r", {"num_tokens": 8, "via": {"wire": {}}}, pages, 0)
            self.ids[side].append(list(self.wire.fetching)[-1])
            self.writing[self.ids[side][-1]] = pages
        self.free -= set(pages)
        self.held[side] = pages

    def look_around(self) -> None:
        released, fetched, failed = self.ledger.advance(self.now)
        if released:
            assert released == ["r"]
            self.give_back(Role.PRODUCER)
        if ended := [*fetched, *(request_id for request_id, _ in failed)]:
            assert ended == ["r"]
            self.give_back(Role.CONSUMER)

    def give_back(self, side: Role) -> None:
        pages = self.held.pop(side)  # KeyError: released twice, or never held
        assert not self.free & set(pages), "freed twice"
        self.free |= set(pages)

    def check(self) -> None:
        """Nothing waits without a deadline, and every held page has an owner, a reason and an expiry."""
        rows = self.ledger.rows()
        assert all(row.request_id and row.reason and row.expires <= self.now + LEASE for row in rows)
        due = self.ledger.next_expiry()
        for row in rows:
            if row.state is TransferState.CANCELLING:  # the connector owes its last word, and knows it
                assert self.ids[Role.CONSUMER][-1] in self.wire.cancelled
            else:
                assert due is not None
                assert due <= row.expires

    def settle(self) -> None:
        """Whatever happened: time and an honest connector free everything."""
        self.look_around()  # a renewal that lies there already counts from now
        self.now += 100
        self.look_around()
        for transfer_id in list(self.writing):
            assert transfer_id in self.wire.cancelled, "a fetch timed out and was not cancelled"
            self.say(EventKind.FETCH_FAILED, transfer_id)
        self.look_around()
        assert (self.held, self.free, self.ledger.rows(), self.wire.published) == ({}, set(range(PAGES)), [], {})
        assert sum(self.ledger.totals.values()) == sum(len(ids) for ids in self.ids.values())


def test_every_interleaving_of_a_small_model_frees_each_page_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Breadth first to the fixed point."""
    seen = {World().key()}
    frontier, transitions = [World()], 0
    while frontier:
        following = []
        for world in frontier:
            world.check()
            image = pickle.dumps(world, pickle.HIGHEST_PROTOCOL)
            for move in world.moves():
                successor: World = pickle.loads(image)
                successor.apply(move)
                transitions += 1
                if (key := successor.key()) not in seen:
                    seen.add(key)
                    following.append(successor)
            world.settle()
        frontier = following
    with capsys.disabled():
        print(f" [{len(seen)} states, {transitions} transitions]", end="")
    assert len(seen) > 10_000
