"""The producer's end against consumers that die, lie, dawdle or only knock."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.plugins.kv_connectors import local
from engine.plugins.kv_connectors.local.channel import FileChannel
from engine.plugins.kv_connectors.local.connector import LocalConnector
from engine.plugins.kv_connectors.local.transport import PLACE
from engine.specs.kv_connector import EventKind, Role
from engine.testing.kv_end import PATIENCE, SCHEMA, End, EndSpec
from engine.transport.channel import TO_PRODUCER
from engine.transport.frames import Ack, Cancel, Done, Grant, Open, ProtocolError, Refuse, Renew
from engine.transport.grid import Grid
from engine.transport.options import PeerOptions

SPEC = EndSpec(module=local.__name__, offer="local", options="{}", role=Role.PRODUCER, engine_id="engine-p")


@pytest.fixture
def end() -> Iterator[End]:
    end = End(SPEC)
    yield end
    end.close()


class Caller:
    """A consumer by hand."""

    def __init__(self, handle: dict[str, Any]) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(f"\0{handle['address']}")
        self.channel = FileChannel(self.sock, *TO_PRODUCER)
        self.token: str = handle["token"]

    def hear(self) -> object:
        """The next message, or the sentence of the end."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if messages := list(self.channel.receive()):
                    (message,) = messages
                    return message
            except ProtocolError as error:
                return str(error)
            time.sleep(0.002)
        raise AssertionError("no answer")

    def open(self, count: int = 2) -> object:
        self.channel.send(Open(self.token, 0, count, 4))
        return self.hear()


@pytest.fixture
def call() -> Iterator[Callable[[dict[str, Any]], Caller]]:
    callers: list[Caller] = []

    def make(handle: dict[str, Any]) -> Caller:
        callers.append(Caller(handle))
        return callers[-1]

    yield make
    for caller in callers:
        caller.channel.close()


Call = Callable[[dict[str, Any]], Caller]


def test_whole_conversation(end: End, call: Call) -> None:
    caller = call(end.publish("r", [7, 3, 5]))
    caller.channel.send(Open(caller.token, 1, 2, 4))
    grant = caller.hear()
    assert isinstance(grant, Grant)
    assert (grant.schema, grant.lease_seconds) == (SCHEMA, 60.0)
    assert PLACE.decode(grant.detail).blocks == [3, 5]
    assert grant.digests == Grid.of_pool(end.pool).digests([3, 5])
    assert caller.channel.file is not None
    end.wait("r", EventKind.RENEWED)
    caller.channel.send(Renew())
    end.wait("r", EventKind.RENEWED)
    caller.channel.send(Done())
    assert caller.hear() == Ack()
    end.wait("r", EventKind.DELIVERED)
    caller.channel.close()
    assert end.take() == []


def test_handle_holds_a_secret_and_a_name_without_a_file(end: End) -> None:
    first, second = end.publish("a", [1]), end.publish("b", [1])
    assert first["token"] != second["token"]
    assert len(first["token"]) == 32
    assert first["engine_id"] == "engine-p"
    assert not os.path.exists(first["address"])


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, struct.pack("<I", 5) + b"hello", struct.pack("<I", 4096) + b"x" * 4096],
)
def test_strangers_are_hung_up_on_and_harm_nobody(end: End, call: Call, data: bytes) -> None:
    handle = end.publish("r", [1, 2])
    stranger = call(handle)
    stranger.sock.send(data)
    assert "gone" in str(stranger.hear())
    assert isinstance(call(handle).open(), Grant)
    assert [event.kind for event in end.take()] == [EventKind.RENEWED]


def test_silent_and_half_spoken_callers_are_hung_up_on(call: Call) -> None:
    end = End(replace(SPEC, options='{"peer_timeout": 0.3}'))
    handle = end.publish("r", [1, 2])
    silent, half = call(handle), call(handle)
    half.sock.send(struct.pack("<I", 50) + b"x")
    assert "gone" in str(silent.hear())
    assert "gone" in str(half.hear())
    end.close()


def test_messages_out_of_turn_end_the_conversation(end: End, call: Call) -> None:
    handle = end.publish("r", [1, 2])
    for message in (Done(), Renew()):
        caller = call(handle)
        caller.channel.send(message)
        assert "gone" in str(caller.hear())
    assert end.take() == []
    caller = call(handle)
    assert isinstance(caller.open(), Grant)
    assert "gone" in str(caller.open())  # a second Open
    assert end.wait("r", EventKind.PEER_LOST).reason == "the consumer sent Open out of turn"


def test_words_after_the_last_one_are_ignored(end: End, call: Call) -> None:
    caller = call(end.publish("r", [1, 2]))
    assert isinstance(caller.open(), Grant)
    caller.channel.send(Done())
    caller.channel.send(Done())
    caller.channel.send(Cancel("changed my mind"))
    assert caller.hear() == Ack()
    end.wait("r", EventKind.DELIVERED)
    assert "gone" in str(caller.hear())
    assert [event.kind for event in end.take() if event.kind is not EventKind.RENEWED] == []


@pytest.mark.parametrize(("token", "first", "count", "reason"), [("0" * 32, 0, 1, "is gone"), ("", 0, 1, "is gone")])
def test_unknown_tokens_are_refused(end: End, call: Call, token: str, first: int, count: int, reason: str) -> None:
    caller = call(end.publish("r", [1, 2]))
    caller.channel.send(Open(token, first, count, 4))
    answer = caller.hear()
    assert isinstance(answer, Refuse)
    assert reason in answer.reason
    assert caller.channel.file is None


@pytest.mark.parametrize(("first", "count"), [(0, 3), (2, 1), (-1, 1), (1, -1), (2**40, 1)])
def test_pages_that_were_not_published_are_refused(end: End, call: Call, first: int, count: int) -> None:
    caller = call(end.publish("r", [1, 2]))
    caller.channel.send(Open(caller.token, first, count, 4))
    answer = caller.hear()
    assert isinstance(answer, Refuse)
    assert "2 pages were published" in answer.reason
    assert caller.channel.file is None


def test_lost_and_cancelling_readers_are_reported(end: End, call: Call) -> None:
    lost = call(end.publish("lost", [1, 2]))
    assert isinstance(lost.open(), Grant)
    lost.channel.close()
    assert "gone" in end.wait("lost", EventKind.PEER_LOST).reason
    cancelling = call(end.publish("cancelled", [1, 2]))
    assert isinstance(cancelling.open(), Grant)
    cancelling.channel.send(Cancel("request aborted"))
    assert end.wait("cancelled", EventKind.PEER_LOST).reason == "request aborted"


def test_loss_counts_only_when_no_other_reader_is_left(end: End, call: Call) -> None:
    handle = end.publish("r", [1, 2])
    first, second = call(handle), call(handle)
    assert isinstance(first.open(), Grant)
    assert isinstance(second.open(), Grant)
    first.channel.close()
    second.channel.send(Renew())
    for _ in range(3):
        end.wait("r", EventKind.RENEWED)
    assert end.take() == []
    second.channel.close()
    end.wait("r", EventKind.PEER_LOST)


def test_second_delivery_is_acknowledged_and_reported_once(end: End, call: Call) -> None:
    handle = end.publish("r", [1, 2])
    for _ in range(2):
        caller = call(handle)
        assert isinstance(caller.open(), Grant)
        caller.channel.send(Done())
        assert caller.hear() == Ack()
    end.wait("r", EventKind.DELIVERED)
    assert EventKind.DELIVERED not in [event.kind for event in end.take()]


def test_reader_of_a_withdrawn_publication_hears_of_it(end: End, call: Call) -> None:
    caller = call(end.publish("r", [1, 2]))
    assert isinstance(caller.open(), Grant)
    end.withdraw("r")
    answer = caller.hear()
    assert isinstance(answer, Refuse)
    assert "withdrawn" in answer.reason
    assert [event.kind for event in end.take()] == [EventKind.RENEWED]


def test_done_after_withdraw_gets_no_ack(end: End, call: Call) -> None:
    for i in range(20):
        caller = call(end.publish(f"r{i}", [1, 2]))
        assert isinstance(caller.open(), Grant)
        end.withdraw(f"r{i}")
        caller.channel.send(Done())
        assert isinstance(caller.hear(), Refuse)


def test_withdraw_is_idempotent_and_a_second_publication_of_an_id_is_refused(end: End) -> None:
    end.publish("r", [1])
    with pytest.raises(ValueError, match="'r' is published already"):
        end.publish("r", [1])
    end.withdraw("r")
    end.withdraw("r")
    end.publish("r", [1])


def test_pages_outside_the_pool_are_refused(end: End) -> None:
    with pytest.raises(ValueError, match="no page 64, it has 64"):
        end.publish("r", [1, 64])


def test_consumers_of_other_users_are_refused(end: End, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = end.publish("r", [1])
    monkeypatch.setattr(FileChannel, "peer_uid", lambda self: os.getuid() + 1)
    assert "gone" in str(call(handle).hear())


def test_long_publications_are_digested_in_slices(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr("engine.transport.publications.DIGEST_BYTES", 1)
    end = End(SPEC)
    long, short = call(end.publish("long", list(range(64)))), call(end.publish("short", [9]))
    short_grant, long_grant = short.open(1), long.open(64)
    assert isinstance(long_grant, Grant)
    assert isinstance(short_grant, Grant)
    assert long_grant.digests == Grid.of_pool(end.pool).digests(range(64))
    end.close()


def test_withdrawn_before_it_is_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its turn is dropped, and what comes after it is served."""
    monkeypatch.setattr("engine.transport.publications.DIGEST_BYTES", 1)
    with_digest: list[int] = []
    digests = Grid.digests
    gate = threading.Event()

    def gated(self: Grid, pages: Any) -> list[int]:
        gate.wait(PATIENCE)
        with_digest.extend(pages)
        return digests(self, pages)

    monkeypatch.setattr(Grid, "digests", gated)
    end = End(SPEC)
    end.publish("first", [1])
    end.publish("second", [2, 3])
    handle = end.publish("third", [4])
    end.withdraw("second")
    gate.set()
    caller = Caller(handle)
    assert isinstance(caller.open(1), Grant)
    assert with_digest == [1, 4]
    caller.channel.close()
    end.close()


def test_pool_must_be_what_was_allocated() -> None:
    def connector(role: Role = Role.PRODUCER) -> LocalConnector:
        return LocalConnector(role, SCHEMA, "engine", PeerOptions())

    elsewhere = [(torch.zeros(64, 4, 2, 6).bfloat16(), torch.zeros(64, 4, 2, 5).bfloat16())] * 3
    with pytest.raises(ValueError, match="call allocate before start"):
        connector().start(elsewhere, lambda: None)
    strange = connector()
    strange.allocate(1000)
    with pytest.raises(ValueError, match="outside the memory"):
        strange.start(elsewhere, lambda: None)
    strange.close()
    with pytest.raises(ValueError, match="2 layers of 64 pages, its schema 3 of 64"):
        connector(Role.CONSUMER).start(elsewhere[:2], lambda: None)
    assert connector(Role.CONSUMER).allocate(100) is None


def test_close_is_idempotent_and_does_not_need_start() -> None:
    connector = LocalConnector(Role.BOTH, SCHEMA, "engine", PeerOptions())
    connector.allocate(100)
    connector.close()
    connector.close()


def test_a_defect_ends_the_conversations_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, end: End, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    caller = call(end.publish("r", [1, 2]))
    assert isinstance(caller.open(), Grant)
    monkeypatch.setattr(Grid, "digests", lambda self, pages: 1 / 0)
    end.publish("s", [1])
    assert "gone" in str(caller.hear())
    assert "ZeroDivisionError" in end.wait("r", EventKind.PEER_LOST).reason
    assert "ends by a defect" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        call(end.publish("t", [1]))
