"""The consumer's end against producers that die, lie or dawdle. Each gives one FETCH_FAILED with a reason."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.plugins.kv_connectors import local
from engine.plugins.kv_connectors.local import consumer
from engine.plugins.kv_connectors.local.frames import (
    Ack,
    Cancel,
    Channel,
    Done,
    Grant,
    Open,
    ProtocolError,
    Refuse,
    Renew,
    to_consumer,
)
from engine.plugins.kv_connectors.local.grid import Grid
from engine.plugins.kv_connectors.local.handle import Handle
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.specs.kv_connector import EventKind, Role, TransferEvent
from engine.testing.kv_end import PATIENCE, SCHEMA, End, EndSpec, cut, differing, fill, pool_bytes, read

SPEC = EndSpec(module=local.__name__, offer="local", options="{}", role=Role.CONSUMER, engine_id="engine-c")


@pytest.fixture
def end() -> Iterator[End]:
    end = End(SPEC)
    yield end
    end.close()


@pytest.fixture
def hasty() -> Iterator[End]:
    """An end that waits for no answer longer than 0.3 s."""
    end = End(replace(SPEC, options='{"peer_timeout": 0.3}'))
    yield end
    end.close()


class Impostor:
    """A producer by hand, with a true pool: it answers as the test says."""

    def __init__(self) -> None:
        self.memory = SharedMemory(pool_bytes(SCHEMA))
        self.pool = cut(SCHEMA, self.memory.tensor)
        fill(self.pool, 9)
        self.grid = Grid.of_pool(self.pool)
        self.layout = self.grid.layout(self.memory.tensor.data_ptr(), pool_bytes(SCHEMA))
        self.address = f"engine-kv-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{self.address}")
        self.listener.listen(1)
        self.listener.settimeout(PATIENCE)
        self.channel: Channel | None = None
        self.heard: list[object] = []

    def handle(self, **changes: Any) -> dict[str, Any]:
        return Handle("engine-i", "r", 8, self.address, "secret", SCHEMA).to_json() | changes

    def grant(self, **changes: Any) -> Grant:
        """What an honest producer says of pages 5 and 6."""
        honest = Grant(SCHEMA, self.layout, [5, 6], self.grid.digests([5, 6]), 60.0)
        return msgspec.structs.replace(honest, **changes)

    def accept(self) -> Channel:
        self.channel = to_consumer(self.listener.accept()[0])
        return self.channel

    def hear(self) -> object:
        """The next message, or the sentence of the end."""
        assert self.channel is not None
        deadline = time.monotonic() + PATIENCE
        while not self.heard:
            assert time.monotonic() < deadline, "no message"
            try:
                self.heard += self.channel.receive()
            except ProtocolError as error:
                return str(error)
            time.sleep(0.002)
        return self.heard.pop(0)

    def hear_last(self) -> object:
        """The first message that isn't an Open or a Renew."""
        while isinstance(message := self.hear(), Open | Renew):
            pass
        return message

    def hang_up(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def close(self) -> None:
        self.hang_up()
        self.listener.close()
        self.grid = Grid([])
        self.pool = []
        self.memory.close()


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    impostor = Impostor()
    yield impostor
    impostor.close()


def failure(end: End, request_id: str = "r") -> str:
    event = end.fetched(request_id)
    assert event.kind is EventKind.FETCH_FAILED
    return event.reason


def test_whole_conversation(end: End, impostor: Impostor) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    assert impostor.hear() == Open("secret", 0, 2)
    channel.send(impostor.grant(), impostor.memory.file)
    assert impostor.hear() == Done()
    assert end.take() == []  # nothing counts before the Ack
    channel.send(Ack())
    assert end.fetched("r").kind is EventKind.FETCHED
    assert end.read([1, 2]) == read(impostor.pool, [5, 6])


def test_words_after_the_ack_are_ignored(end: End, impostor: Impostor) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    channel.send(impostor.grant(), impostor.memory.file)
    assert impostor.hear_last() == Done()
    frame = msgspec.msgpack.encode(Ack())
    channel._sock.send((struct.pack("<I", len(frame)) + frame) * 3)
    assert end.fetched("r").kind is EventKind.FETCHED
    assert end.take() == []


Spoil = Callable[[Impostor], Grant]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda i: i.grant(digests=[1, 2]), "page 0 of engine engine-i arrived with digest"),
        (lambda i: i.grant(pages=[5, 7]), "page 1 of engine engine-i arrived with digest"),
        (lambda i: i.grant(pages=[5], digests=[1]), "granted 1 pages, 2 were asked for"),
        (lambda i: i.grant(digests=[1]), "granted 2 pages, 2 were asked for"),
        (lambda i: i.grant(pages=[5, 64]), "pages that its pool doesn't have"),
        (lambda i: i.grant(pages=[-1, 5]), "pages that its pool doesn't have"),
        (lambda i: i.grant(schema=replace(SCHEMA, num_pages=65)), "memory file has"),
        (lambda i: i.grant(schema=replace(SCHEMA, num_pages=0)), "pages that its pool doesn't have"),
        (lambda i: i.grant(layout=i.layout[:-1]), "the producer's layout has 5 parts"),
        (lambda i: i.grant(layout=[(2**40, 96), *i.layout[1:]]), "its layout needs"),
        (lambda i: i.grant(layout=[(-96, 96), *i.layout[1:]]), "makes no sense"),
        (lambda i: i.grant(layout=[(0, 8), *i.layout[1:]]), "makes no sense"),
        *((lambda i, s=s: i.grant(schema=s), field) for field, s in differing(SCHEMA).items()),
    ],
)
def test_false_grants(end: End, impostor: Impostor, spoil: Spoil, sentence: str) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    assert isinstance(impostor.hear(), Open)
    channel.send(spoil(impostor), impostor.memory.file)
    assert sentence in failure(end)
    assert isinstance(impostor.hear(), Cancel)


def test_false_files(end: End, impostor: Impostor) -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, pool_bytes(SCHEMA))
    truncated = SharedMemory(mmap.PAGESIZE)
    cases = {
        unsealed: "is not sealed",
        truncated.file: f"has {mmap.PAGESIZE} bytes",
        None: "did not come with its answer",
    }
    for file, sentence in cases.items():
        end.fetch("r", impostor.handle(), [1, 2])
        channel = impostor.accept()
        channel.send(impostor.grant(), file)
        assert sentence in failure(end)
        channel.close()
    os.close(unsealed)
    truncated.close()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda i: i.channel.send(Refuse("no more")), "engine engine-i: no more"),
        (lambda i: i.channel.send(Ack()), "sent Ack out of turn"),
        (lambda i: i.channel.close(), "the peer is gone"),
        (lambda i: i.channel._sock.send(struct.pack("<I", 2**24 + 1)), "a frame of 16777217 bytes"),
        (lambda i: i.channel._sock.send(struct.pack("<I", 5) + b"hello"), "malformed frame"),
    ],
)
def test_other_answers(end: End, impostor: Impostor, answer: Callable[[Impostor], object], sentence: str) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    assert isinstance(impostor.hear(), Open)
    answer(impostor)
    assert sentence in failure(end)
    assert end.take() == []


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda i: i.channel.send(Refuse("withdrawn")), "withdrawn"),
        (lambda i: i.channel.send(i.grant()), "sent Grant out of turn"),
        (lambda i: i.channel.close(), "the peer is gone"),
    ],
)
def test_no_ack_no_fetch(end: End, impostor: Impostor, answer: Callable[[Impostor], object], sentence: str) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    channel.send(impostor.grant(), impostor.memory.file)
    assert impostor.hear_last() == Done()
    answer(impostor)
    assert sentence in failure(end)


@pytest.mark.parametrize("said", [b"", struct.pack("<I", 500) + b"he"])
def test_no_answer_in_time(hasty: End, impostor: Impostor, said: bytes) -> None:
    hasty.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()._sock.send(said)
    assert failure(hasty) == "engine engine-i did not answer within 0.3 s"


def test_no_ack_in_time(hasty: End, impostor: Impostor) -> None:
    hasty.fetch("r", impostor.handle(), [1, 2])
    impostor.accept().send(impostor.grant(), impostor.memory.file)
    assert "did not answer within 0.3 s" in failure(hasty)


def test_nobody_listens(end: End, impostor: Impostor) -> None:
    impostor.listener.close()
    end.fetch("r", impostor.handle(), [1, 2])
    assert "engine-i: it has stopped or restarted since it made the handle" in failure(end)


def test_full_queue_is_asked_again_until_the_deadline(hasty: End, end: End, impostor: Impostor) -> None:
    blocking = []
    try:
        while True:
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            blocking.append(sock)
            sock.connect(f"\0{impostor.address}")
    except BlockingIOError:
        pass
    hasty.fetch("r", impostor.handle(), [1, 2])
    assert "did not answer" in failure(hasty)
    end.fetch("s", impostor.handle(), [1, 2])
    for _ in blocking[:-1]:
        impostor.listener.accept()[0].close()
    impostor.accept().send(Refuse("hello"))
    assert "hello" in failure(end, "s")
    for sock in blocking:
        sock.close()


def test_producers_of_other_users_are_not_talked_to(
    end: End, impostor: Impostor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "peer_uid", lambda self: os.getuid() + 1)
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    assert "belongs to user" in failure(end)
    assert not isinstance(impostor.hear(), Open)  # the secret stays here


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"address": "/run/other.sock"}, "malformed handle .* `\\$.address`"),
        ({"address": "engine-kv-../x"}, "address"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": "8"}, "num_tokens"),
        ({"schema": {}}, "schema"),
        ({"extra": 1}, "extra"),
    ],
)
def test_handles_are_read_strictly(end: End, impostor: Impostor, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        end.fetch("r", impostor.handle(**changes), [1])


def test_pages_outside_the_pool_and_second_fetches_are_refused(end: End, impostor: Impostor) -> None:
    with pytest.raises(ValueError, match="no page 64"):
        end.fetch("r", impostor.handle(), [64])
    end.fetch("r", impostor.handle(), [1])
    with pytest.raises(ValueError, match="'r' is being fetched already"):
        end.fetch("r", impostor.handle(), [1])


def test_long_fetches_are_copied_in_slices_and_renewed(impostor: Impostor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "COPY_BYTES", 1)
    end = End(SPEC)
    pages = list(range(64))
    end.fetch("r", impostor.handle(num_tokens=256), pages)
    channel = impostor.accept()
    channel.send(
        impostor.grant(pages=pages, digests=impostor.grid.digests(pages), lease_seconds=0.0), impostor.memory.file
    )
    heard: list[object] = []
    while not heard or heard[-1] != Done():
        heard += channel.receive()
    assert Renew() in heard
    channel.send(Ack())
    assert end.fetched("r").kind is EventKind.FETCHED
    assert end.read(pages) == read(impostor.pool, pages)
    end.close()


def test_cancel_between_slices_stops_the_writing(impostor: Impostor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is held in its first slice, cancelled, and let go: no later page is written."""
    monkeypatch.setattr(consumer, "COPY_BYTES", 1)
    copying, go = threading.Event(), threading.Event()
    copy = Grid.copy

    def gated(self: Grid, *args: Any) -> list[int]:
        copying.set()
        go.wait(PATIENCE)
        return copy(self, *args)

    monkeypatch.setattr(Grid, "copy", gated)
    end = End(SPEC)
    before = end.read([2])
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept().send(impostor.grant(), impostor.memory.file)
    assert copying.wait(PATIENCE)
    end.cancel("r")
    assert end.take() == []  # still writing, so not ended
    go.set()
    assert failure(end) == "cancelled"
    assert end.read([2]) == before
    assert impostor.hear_last() == Cancel("cancelled")
    end.close()


def test_cancel_before_the_connection_still_tells_the_producer(end: End, impostor: Impostor) -> None:
    for i in range(30):  # whether the thread was first or the cancel
        end.fetch(f"r{i}", impostor.handle(), [1, 2])
        end.cancel(f"r{i}")
        assert failure(end, f"r{i}") == "cancelled"
        impostor.accept()
        assert impostor.hear() == Open("secret", 0, 2)
        assert impostor.hear() == Cancel("cancelled")
        impostor.hang_up()


def test_cancel_after_the_end_was_reached_but_not_polled(end: End, impostor: Impostor) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    channel.send(impostor.grant(), impostor.memory.file)
    assert impostor.hear_last() == Done()
    channel.send(Ack())
    assert end._woken.wait(PATIENCE)
    end.cancel("r")
    assert end.take() == [TransferEvent(EventKind.FETCH_FAILED, "r", "cancelled")]
    end.cancel("r")
    end.cancel("never heard of")
    assert end.take() == []


def test_close_fails_what_is_under_way(impostor: Impostor) -> None:
    end = End(SPEC)
    end.fetch("r", impostor.handle(), [1, 2])
    end.close()
    assert end.take() == [TransferEvent(EventKind.FETCH_FAILED, "r", "the engine stops")]


def test_a_defect_fails_this_fetch_and_all_later_ones(
    end: End, impostor: Impostor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Grid, "copy", lambda self, *args: 1 / 0)
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept().send(impostor.grant(), impostor.memory.file)
    assert "ZeroDivisionError" in failure(end)
    assert "ends by a defect" in caplog.text
    end.fetch("s", impostor.handle(), [1, 2])
    assert "ZeroDivisionError" in failure(end, "s")
