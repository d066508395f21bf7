"""The transfer ledger against a scripted connector: its sentences, its clock, every interleaving of a small model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest

from engine.specs.kv_connector import EventKind, KVConnector, Role, TransferEvent
from engine.transfer import Link, TransferLedger, TransferState, remote_tokens

LEASE = 2
"""Ticks; also the fetch timeout."""


class Scripted(KVConnector):
    """Does nothing but keep account, and reports what the test puts into `inbox`."""

    def __init__(self) -> None:
        self.inbox: list[TransferEvent] = []
        self.published: dict[str, tuple[int, ...]] = {}
        self.fetching: dict[str, tuple[int, ...]] = {}
        self.cancelled: set[str] = set()
        self.refusal: str | None = None
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

    def say(self, kind: EventKind, transfer_id: str, reason: str = "") -> None:
        self.inbox.append(TransferEvent(kind, transfer_id, reason))


def make(*connectors: Scripted, **options: Any) -> tuple[TransferLedger, list[float]]:
    """A ledger over connectors named c0, c1, …, and its clock as a list of one number."""
    clock = [0.0]
    settings = {"lease_seconds": float(LEASE), "fetch_timeout": float(LEASE)} | options
    links = [Link(name=f"c{i}", connector=c, **settings) for i, c in enumerate(connectors)]
    return TransferLedger(links, lambda: clock[0]), clock


@pytest.fixture
def wire() -> Scripted:
    return Scripted()


def test_delivered_publication_is_released_once(wire: Scripted) -> None:
    ledger, _ = make(wire)
    handle = ledger.publish("r", [3, 4], 20)
    assert json.loads(json.dumps(handle)) == handle
    assert remote_tokens(handle) == 20
    (transfer_id,) = wire.published
    assert [(row.request_id, row.side, row.state, row.pages, row.expires) for row in ledger.rows()] == [
        ("r", Role.PRODUCER, TransferState.PUBLISHED, 2, 2.0)
    ]
    wire.say(EventKind.DELIVERED, transfer_id)
    wire.say(EventKind.DELIVERED, transfer_id)
    wire.say(EventKind.PEER_LOST, transfer_id)
    assert ledger.advance(0.0) == (["r"], [], [])
    assert ledger.advance(0.0) == ([], [], [])
    assert (wire.published, ledger.rows(), ledger.totals[TransferState.DELIVERED]) == ({}, [], 1)


def test_lease_expires_unless_renewed(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.publish("r", [1], 4)
    (transfer_id,) = wire.published
    wire.say(EventKind.RENEWED, transfer_id)
    assert ledger.advance(1.5).released == []
    assert ledger.rows()[0].state is TransferState.LEASED
    assert ledger.next_expiry() == 3.5
    assert ledger.advance(3.0).released == []
    assert ledger.advance(3.5).released == ["r"]
    assert (wire.published, ledger.next_expiry(), ledger.totals[TransferState.EXPIRED]) == ({}, None, 1)


def test_a_renewal_that_was_polled_late_still_counts(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.publish("r", [1], 4)
    (transfer_id,) = wire.published
    wire.say(EventKind.RENEWED, transfer_id)
    assert ledger.advance(50.0).released == []


def test_lost_consumer_releases_at_once(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.publish("r", [1], 4)
    (transfer_id,) = wire.published
    wire.say(EventKind.PEER_LOST, transfer_id)
    assert ledger.advance(0.0).released == ["r"]
    assert ledger.totals[TransferState.RELEASED] == 1


def test_fetched_and_failed_with_its_reason(wire: Scripted) -> None:
    ledger, _ = make(wire)
    for request_id in ("good", "bad"):
        ledger.fetch(request_id, {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    assert [row.state for row in ledger.rows()] == [TransferState.FETCHING] * 2
    good, bad = wire.fetching
    wire.say(EventKind.FETCHED, good)
    wire.say(EventKind.FETCH_FAILED, bad, "digest of page 0 differs")
    assert ledger.advance(0.0) == ([], ["good"], [("bad", "digest of page 0 differs")])
    assert ledger.rows() == []


@pytest.mark.parametrize("last_word", [EventKind.FETCHED, EventKind.FETCH_FAILED])
def test_pages_of_a_cancelled_fetch_stay_held_until_the_connector_let_go(wire: Scripted, last_word: EventKind) -> None:
    ledger, _ = make(wire)
    ledger.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    (transfer_id,) = wire.fetching
    ledger.cancel("r")
    ledger.cancel("r")
    assert ledger.advance(1e9) == ([], [], [])
    assert ledger.rows()[0].state is TransferState.CANCELLING
    with pytest.raises(ValueError, match="being fetched already"):
        ledger.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [8], 0)
    wire.say(last_word, transfer_id)
    assert ledger.advance(1e9).failed == [("r", "cancelled")]


def test_fetch_times_out(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    (transfer_id,) = wire.fetching
    assert ledger.next_expiry() == 2.0
    assert ledger.advance(2.0) == ([], [], [])
    assert wire.cancelled == {transfer_id}
    assert ledger.next_expiry() is None  # only the connector's word ends it now
    wire.say(EventKind.FETCH_FAILED, transfer_id, "cancelled")
    assert ledger.advance(2.0).failed == [("r", "no KV within 2 s")]


def test_events_of_an_earlier_attempt_do_not_touch_a_later_one(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    (first,) = wire.fetching
    wire.say(EventKind.FETCH_FAILED, first, "lost")
    ledger.advance(0.0)
    ledger.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    wire.say(EventKind.FETCHED, first)
    assert ledger.advance(0.0) == ([], [], [])


def test_events_of_the_wrong_side_are_ignored(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.fetch("r", ledger.publish("r", [1], 4), [2], 0)
    wire.say(EventKind.FETCHED, *wire.published)
    wire.say(EventKind.DELIVERED, *wire.fetching)
    assert ledger.advance(0.0) == ([], [], [])


def test_one_request_may_be_fetched_and_published(wire: Scripted) -> None:
    """An engine with both roles passes on what it fetched."""
    ledger, _ = make(wire)
    ledger.fetch("r", ledger.publish("r", [1], 4), [2], 0)
    ledger.cancel("r")
    assert ledger.advance(0.0).released == ["r"]
    assert [row.side for row in ledger.rows()] == [Role.CONSUMER]


def test_published_through_every_producer_and_ended_through_all() -> None:
    wires = Scripted(), Scripted()
    ledger, _ = make(*wires)
    handle = ledger.publish("r", [1], 4)
    assert list(handle["via"]) == ["c0", "c1"]
    wires[1].say(EventKind.DELIVERED, *wires[1].published)
    assert ledger.advance(0.0).released == ["r"]
    assert (wires[0].published, wires[1].published) == ({}, {})


def test_publication_that_one_connector_refuses_is_taken_back_from_the_others() -> None:
    wires = Scripted(), Scripted()
    wires[1].refusal = "no room"
    ledger, _ = make(*wires)
    with pytest.raises(ValueError, match="no room"):
        ledger.publish("r", [1], 4)
    assert (wires[0].published, ledger.rows(), ledger.advance(99.0)) == ({}, [], ([], [], []))


def test_fetch_goes_through_the_first_common_connector() -> None:
    wires = Scripted(), Scripted()
    ledger, _ = make(*wires)
    ledger.fetch("r", {"num_tokens": 4, "via": {"other": {}, "c1": {"x": 1}}}, [2], 0)
    assert (len(wires[0].fetching), len(wires[1].fetching)) == (0, 1)


def test_refused_fetch_leaves_nothing(wire: Scripted) -> None:
    wire.refusal = "page size 16 there, 32 here"
    ledger, _ = make(wire)
    with pytest.raises(ValueError, match="page size"):
        ledger.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    assert ledger.rows() == []


@pytest.mark.parametrize(
    ("handle", "sentence"),
    [
        ({}, "num_tokens, a positive integer, not None"),
        ({"num_tokens": True, "via": {"c0": {}}}, "not True"),
        ({"num_tokens": 0, "via": {"c0": {}}}, "not 0"),
        ({"num_tokens": "9", "via": {"c0": {}}}, "not '9'"),
        ({"num_tokens": 9}, "needs via"),
        ({"num_tokens": 9, "via": {}}, "needs via"),
        ({"num_tokens": 9, "via": {"c0": 1}}, "needs via"),
        (
            {"num_tokens": 9, "via": {"carrier pigeon": {}}},
            "offered through carrier pigeon, this engine fetches through: c0",
        ),
    ],
)
def test_bad_handles_are_refused(wire: Scripted, handle: dict[str, Any], sentence: str) -> None:
    ledger, _ = make(wire)
    with pytest.raises(ValueError, match=sentence):
        ledger.fetch("r", handle, [1], 0)
    assert ledger.rows() == []


def test_roles_are_kept(wire: Scripted) -> None:
    consumer, _ = make(wire, role=Role.CONSUMER)
    assert (consumer.produces, consumer.consumes) == (False, True)
    with pytest.raises(ValueError, match="no KV connector has the role producer"):
        consumer.publish("r", [1], 4)
    producer, _ = make(wire, role=Role.PRODUCER)
    assert (producer.produces, producer.consumes) == (True, False)
    with pytest.raises(ValueError, match="fetches through: none"):
        producer.fetch("r", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)


def test_second_publication_of_an_open_request_is_refused(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.publish("r", [1], 4)
    with pytest.raises(ValueError, match="published already"):
        ledger.publish("r", [1], 4)


def test_two_links_of_one_name_are_refused(wire: Scripted) -> None:
    link = Link(name="local", connector=wire)
    with pytest.raises(ValueError, match="'local' is configured twice"):
        TransferLedger([link, link], lambda: 0.0)


def test_close_ends_everything_even_if_a_connector_raises() -> None:
    class Raising(Scripted):
        def close(self) -> None:
            raise OSError("device gone")

    wires = Scripted(), Raising(), Scripted()
    ledger, _ = make(*wires)
    ledger.publish("p", [1], 4)
    ledger.fetch("f", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    with pytest.raises(OSError, match="device gone"):
        ledger.close()
    assert ledger.rows() == []
    assert [w.closed for w in wires] == [1, 0, 1]
    assert all(not w.published for w in wires)
    assert len(wires[0].cancelled) == 1


class World:
    """A ledger, its connector, and what an observer outside knows: the model that the exploration walks."""

    kinds = {
        Role.PRODUCER: (EventKind.DELIVERED, EventKind.RENEWED, EventKind.PEER_LOST),
        Role.CONSUMER: (EventKind.FETCHED, EventKind.FETCH_FAILED),
    }

    def __init__(self) -> None:
        self.wire = Scripted()
        self.ledger = make(self.wire)[0]
        self.now = 0.0
        self.ledger._clock = self.time
        self.held: set[Role] = set()  # what the ledger owns by the observer's count
        self.started = {Role.PRODUCER: 0, Role.CONSUMER: 0}
        self.ids: dict[Role, list[str]] = {Role.PRODUCER: [], Role.CONSUMER: []}

    def time(self) -> float:
        return self.now

    def key(self) -> object:
        """Everything the future depends on, with times relative and transfer ids in order of birth."""
        names = {tid: i for i, tid in enumerate([*self.ids[Role.PRODUCER], *self.ids[Role.CONSUMER]])}
        tables = [
            (names[t.id], t.state, min(max(t.expires - self.now, 0.0), LEASE), t.reason)
            for table in (self.ledger._published, self.ledger._fetches)
            for t in table.values()
        ]
        inbox = tuple((e.kind, names[e.request_id]) for e in self.wire.inbox)
        return repr((tables, inbox, self.ledger._ended, sorted(self.held), self.started))

    def moves(self) -> list[tuple[Any, ...]]:
        """What may happen next. Any event of its side may come for any transfer that ever was, however senseless."""
        moves: list[tuple[Any, ...]] = [("advance",), ("tick",), ("cancel",)]
        if sum(self.started.values()) < 3:
            moves += [("begin", side) for side in self.kinds if side not in self.held]
        if len(self.wire.inbox) < 2:
            moves += [
                ("event", kind, tid) for side in self.kinds for tid in self.ids[side] for kind in self.kinds[side]
            ]
        return moves

    def apply(self, move: tuple[Any, ...]) -> None:
        match move:
            case ("advance",):
                self.advance()
            case ("tick",):
                self.now += 1
            case ("cancel",):
                self.ledger.cancel("r")
            case ("event", kind, transfer_id):
                self.wire.say(kind, transfer_id)
            case ("begin", side):
                self.begin(side)

    def begin(self, side: Role) -> None:
        if side is Role.PRODUCER:
            self.ledger.publish("r", [1, 2], 8)
            self.ids[side] += self.wire.published
        else:
            self.ledger.fetch("r", {"num_tokens": 8, "via": {"c0": {}}}, [3, 4], 0)
            self.ids[side].append(list(self.wire.fetching)[-1])
        self.held.add(side)
        self.started[side] += 1

    def advance(self) -> None:
        last_words = {e.request_id for e in self.wire.inbox if e.kind in self.kinds[Role.CONSUMER]}
        released, fetched, failed = self.ledger.advance(self.now)
        if released:
            assert released == ["r"]
            self.held.remove(Role.PRODUCER)  # KeyError: released twice, or never held
            assert not self.wire.published, "released but still readable"
        if ended := [*fetched, *(request_id for request_id, _ in failed)]:
            assert ended == ["r"]
            self.held.remove(Role.CONSUMER)
            assert self.ids[Role.CONSUMER][-1] in last_words, "ended without the connector's word"

    def settle(self) -> None:
        """Whatever happened: time and an honest connector free everything."""
        self.advance()  # a renewal that lies there already counts from now
        self.now += 100
        self.advance()
        for transfer_id in sorted(self.wire.cancelled):
            self.wire.say(EventKind.FETCH_FAILED, transfer_id, "cancelled")
        self.advance()
        assert self.held == set()
        assert self.ledger.rows() == []
        assert self.wire.published == {}
        assert sum(self.ledger.totals.values()) == sum(self.started.values())


def test_every_interleaving_of_a_small_model_frees_each_page_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Breadth first to the fixed point: finish, cancel, loss, timeout, duplicates and any order of events."""
    seen = {World().key()}
    frontier, transitions = [World()], 0
    while frontier:
        following = []
        for world in frontier:
            deepcopy(world).settle()
            for move in world.moves():
                successor = deepcopy(world)
                successor.apply(move)
                transitions += 1
                if (key := successor.key()) not in seen:
                    seen.add(key)
                    following.append(successor)
        frontier = following
    with capsys.disabled():
        print(f" [{len(seen)} states, {transitions} transitions]", end="")
    assert len(seen) > 1000
