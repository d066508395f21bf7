"""The transfer ledger against a scripted connector: its sentences and its clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.specs.kv_connector import EventKind, Role
from engine.testing.kv_scripted import Scripted
from engine.transfer import Link, TransferLedger, TransferState, remote_tokens

LEASE = 2
"""Ticks; also the fetch timeout."""


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
    assert [row.state for row in ledger.rows()] == [TransferState.PULLING] * 2
    good, bad = wire.fetching
    wire.say(EventKind.FETCHED, good)
    wire.say(EventKind.FETCH_FAILED, bad, "digest of page 0 differs")
    assert ledger.advance(0.0) == ([], ["good"], [("bad", "digest of page 0 differs")])
    assert ledger.rows() == []


def test_every_held_page_has_an_owner_a_reason_and_an_expiry(wire: Scripted) -> None:
    ledger, _ = make(wire)
    ledger.publish("p", [1, 2], 4)
    ledger.publish("leased", [3], 4)
    wire.say(EventKind.RENEWED, list(wire.published)[1])
    ledger.fetch("f", {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    ledger.fetch("gone", {"num_tokens": 4, "via": {"c0": {}}}, [8], 0)
    ledger.cancel("gone")
    ledger.advance(0.5)
    assert [(row.request_id, row.state, row.pages, row.expires, row.reason, row.via) for row in ledger.rows()] == [
        ("p", "published", 2, 2.0, "no consumer has shown up yet", ("c0",)),
        ("leased", "leased", 1, 2.5, "its consumer renews the lease", ("c0",)),
        ("f", "pulling", 1, 2.0, "the KV is on its way here", ("c0",)),
        ("gone", "cancelling", 1, 2.0, "cancelled", ("c0",)),
    ]


def test_damaged_fetches_are_counted_apart(wire: Scripted) -> None:
    ledger, _ = make(wire)
    for request_id in ("damaged", "lost"):
        ledger.fetch(request_id, {"num_tokens": 4, "via": {"c0": {}}}, [7], 0)
    damaged, lost = wire.fetching
    wire.say(EventKind.FETCH_FAILED, damaged, "block 0 differs", corrupt=True)
    wire.say(EventKind.FETCH_FAILED, lost, "the peer is gone")
    assert ledger.advance(0.0).failed == [("damaged", "block 0 differs"), ("lost", "the peer is gone")]
    assert ledger.totals == {TransferState.CORRUPT: 1, TransferState.FAILED: 1}


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
