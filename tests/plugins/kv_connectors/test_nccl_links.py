"""The conversation over a link, on gloo: many slices by few words, fetches side by side, connections that are kept."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.plugins.kv_connectors import nccl
from engine.specs.kv_connector import EventKind, Role
from engine.testing.kv_end import SCHEMA, End, EndSpec
from engine.transport.channel import Channel
from engine.transport.consumer import Consumer
from engine.transport.frames import Open, ProtocolError, Word
from engine.transport.grid import Grid
from engine.transport.line import Asked, Begin, Line
from engine.transport.link import SLICE_BYTES, WINDOW
from engine.transport.publications import Publications
from engine.transport.spares import KEPT, Spares

PAGES = list(range(3 * WINDOW + 2))
SPEC = EndSpec(module=nccl.__name__, offer="nccl", options="{}", schema=replace(SCHEMA, num_pages=8 * len(PAGES)))


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    producer = End(replace(SPEC, role=Role.PRODUCER, engine_id="engine-p"))
    consumer = End(replace(SPEC, role=Role.CONSUMER, engine_id="engine-c", seed=2))
    yield producer, consumer
    consumer.close()
    producer.close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many messages went out, by kind."""
    said: Counter[str] = Counter()
    send = Channel.send

    def count(channel: Channel, message: Any) -> None:
        said[type(message).__name__] += 1
        send(channel, message)

    monkeypatch.setattr(Channel, "send", count)
    return said


def fetch(ends: tuple[End, End], name: str) -> None:
    """Publish, fetch and compare."""
    producer, consumer = ends
    consumer.fetch(name, producer.publish(name, PAGES), PAGES[::-1])
    ended = consumer.fetched(name)
    assert ended.kind is EventKind.FETCHED, ended.reason
    assert consumer.read(PAGES[::-1]) == producer.read(PAGES)


def test_one_word_asks_for_as_many_slices_as_there_is_room_for(
    ends: tuple[End, End], said: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(ends, "whole")
    assert said[Word.__name__] == 1
    monkeypatch.setattr("engine.transport.slices.SLICE_BYTES", 1)  # a block a slice
    said.clear()
    fetch(ends, "in pieces")
    assert 1 <= said[Word.__name__] <= len(PAGES) - WINDOW  # the first WINDOW slices with `Open`, the rest as they end


def test_fetches_side_by_side_share_the_link(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.transport.slices.SLICE_BYTES", 1)
    producer, consumer = ends
    names = [f"r{i}" for i in range(6)]
    targets = {name: [(i + 1) * len(PAGES) + page for page in PAGES] for i, name in enumerate(names)}
    for name in names:
        consumer.fetch(name, producer.publish(name, PAGES), targets[name])
    consumer.cancel("r2")
    for name in names:
        assert consumer.fetched(name).kind is (EventKind.FETCHED if name != "r2" else EventKind.FETCH_FAILED)
    for name in set(names) - {"r2"}:
        assert consumer.read(targets[name]) == producer.read(PAGES)


def test_a_connection_serves_the_next_fetch(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = []
    connect = socket.socket.connect_ex
    monkeypatch.setattr(socket.socket, "connect_ex", lambda sock, to: dialled.append(to) or connect(sock, to))
    for name in ("first", "second", "third"):
        fetch(ends, name)
    assert len(dialled) == 1


def test_a_kept_connection_that_has_ended_is_replaced(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(ends, "first")
    take, taken = Spares.take, []

    def ended(spares: Spares, address: str) -> Channel | None:
        channel = take(spares, address)
        if channel is not None:
            channel._sock.shutdown(socket.SHUT_RDWR)
            taken.append(channel)
        return channel

    monkeypatch.setattr(Spares, "take", ended)
    fetch(ends, "second")
    assert len(taken) == 1
    fetch(ends, "third")


def test_few_are_kept_and_not_for_ever() -> None:
    spares, channels = Spares(), []
    for _ in range(KEPT + 1):
        left, right = socket.socketpair()
        channels += [Channel(left, None, 0), Channel(right, None, 0)]  # type: ignore[arg-type]
    kept = [spares.keep("a", channel, now) for now, channel in enumerate(channels[: KEPT + 1])]
    assert kept == [True] * KEPT + [False]
    assert spares.due is not None
    assert spares.expired(spares.due) == [channels[0]]
    assert spares.drop(channels[0])
    assert not spares.drop(channels[0])
    assert spares.take("b") is None
    assert spares.take("a") is channels[KEPT - 1]  # the one that was in use last
    for channel in channels:
        channel.close()


def test_the_next_fetch_asks_for_its_slices_at_once(ends: tuple[End, End], said: Counter[str]) -> None:
    fetch(ends, "first")
    said.clear()
    fetch(ends, "second")
    assert said == {"Open": 1, "Grant": 1, "Done": 1, "Ack": 1}


def test_what_was_asked_for_at_once_and_refused_keeps_its_place(ends: tuple[End, End]) -> None:
    producer, consumer = ends
    fetch(ends, "first")
    handle = producer.publish("gone", PAGES)
    producer.withdraw("gone")
    consumer.fetch("gone", handle, PAGES)
    assert "the publication is gone" in consumer.fetched("gone").reason
    fetch(ends, "next")


def test_given_up_before_it_was_granted(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = ends
    fetch(ends, "first")
    with monkeypatch.context() as held:
        held.setattr(Publications, "digest", lambda publications: False)  # so nothing is granted
        consumer.fetch("undigested", producer.publish("undigested", PAGES), PAGES)
        producer.wait("undigested", EventKind.RENEWED)
        consumer.cancel("undigested")
        assert consumer.fetched("undigested").kind is EventKind.FETCH_FAILED
    fetch(ends, "next")


def test_no_link_is_made_for_who_was_granted_nothing(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = ends
    begin = msgspec.msgpack.encode(Begin("none", b"anywhere", 0, 0, 1, 1))

    def ask(fetch: Any, channel: Channel, word: bytes) -> None:
        channel.send(Open(fetch.handle.token, 0, len(PAGES), SPEC.schema.page_size, begin))

    monkeypatch.setattr(Consumer, "_open", ask)
    consumer.fetch("r", producer.publish("r", PAGES), PAGES)
    assert consumer.fetched("r").kind is EventKind.FETCH_FAILED
    assert not producer.connector._transport._serving  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        (Begin("a", b"", 0, 0, 5, 5), "wasn't granted"),
        (Begin("a", b"", 0, 0, 4, 4), "slices of"),
        (Begin("a", b"", 1, 0, 4, 1), "slices 1 to 5, after 2"),
        (Begin("a", b"", 2**60, 0, 4, 1), "after 2"),
        (Begin("a", b"", 4, 0, 2, 1), "slices 4 to 6, after 2"),
    ],
)
def test_slices_that_make_no_sense(begin: Begin, sentence: str) -> None:
    pool = Grid([np.zeros((8, SLICE_BYTES // 4 + 8), np.uint8)])
    left, right = socket.socketpair()
    channel = Channel(left, None, 0)  # type: ignore[arg-type]
    line = Line(link=None, name="a", patience=1.0, sequence=2)  # type: ignore[arg-type]
    asked = Asked(pool, 4)
    line.place(Begin("a", b"", 4, 0, 1, 1), channel, asked)
    with pytest.raises(ProtocolError, match=sentence):
        line.place(begin, channel, asked)
    assert list(line.queue) == [4]
    channel.close()
    right.close()
