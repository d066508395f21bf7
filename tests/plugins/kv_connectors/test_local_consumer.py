"""The consumer's end against producers that die, lie or dawdle. Each gives one FETCH_FAILED with a reason."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.plugins.kv_connectors.local.channel import FileChannel
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.specs.kv_connector import EventKind
from engine.testing.kv_end import SCHEMA, End, differing, pool_bytes, read
from engine.transport.frames import Ack, Cancel, Done, Grant, Open, Refuse


def failure(end: End, request_id: str = "r") -> str:
    event = end.fetched(request_id)
    assert event.kind is EventKind.FETCH_FAILED
    return event.reason


def test_whole_conversation(end: End, impostor: Any) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    assert impostor.hear() == Open("secret", 0, 2, 4)
    impostor.send(impostor.grant())
    assert impostor.hear() == Done()
    assert end.take() == []  # nothing counts before the Ack
    channel.send(Ack())
    assert end.fetched("r").kind is EventKind.FETCHED
    assert end.read([1, 2]) == read(impostor.pool, [5, 6])


def test_words_after_the_ack_are_ignored(end: End, impostor: Any) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    impostor.send(impostor.grant())
    assert impostor.hear_last() == Done()
    frame = msgspec.msgpack.encode(Ack())
    channel._sock.send((struct.pack("<I", len(frame)) + frame) * 3)
    assert end.fetched("r").kind is EventKind.FETCHED
    assert end.take() == []


Spoil = Callable[[Any], Grant]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda i: i.grant(digests=[1]), "granted 1 blocks, 2 were asked for"),
        (lambda i: i.grant(blocks=[5]), "or too few"),
        (lambda i: i.grant(blocks=[5, 64]), "pages that its pool doesn't have"),
        (lambda i: i.grant(blocks=[-1, 5]), "pages that its pool doesn't have"),
        (lambda i: i.grant(schema=replace(SCHEMA, num_pages=65)), "memory file has"),
        (lambda i: i.grant(schema=replace(SCHEMA, num_pages=0)), "pages that its pool doesn't have"),
        (lambda i: i.grant(detail=b"x"), "offer is malformed"),
        (lambda i: i.grant(layout=i.layout[:-1]), "the producer's layout has 5 parts"),
        (lambda i: i.grant(layout=[(2**40, 96), *i.layout[1:]]), "its layout needs"),
        (lambda i: i.grant(layout=[(-96, 96), *i.layout[1:]]), "makes no sense"),
        (lambda i: i.grant(layout=[(0, 8), *i.layout[1:]]), "makes no sense"),
        *((lambda i, s=s: i.grant(schema=s), field) for field, s in differing(SCHEMA).items()),
    ],
)
def test_false_grants(end: End, impostor: Any, spoil: Spoil, sentence: str) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    assert isinstance(impostor.hear(), Open)
    impostor.send(spoil(impostor))
    assert sentence in failure(end)
    assert isinstance(impostor.hear(), Cancel)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda i: i.grant(digests=[1, 2]), "block 0 of engine engine-i arrived with digest"),
        (lambda i: i.grant(blocks=[5, 7]), "block 1 of engine engine-i arrived with digest"),
    ],
)
def test_damage_counts_when_the_publication_still_stood(end: End, impostor: Any, spoil: Spoil, sentence: str) -> None:
    """Else the pages may be in other use by then, and nobody is to blame."""
    for answer, told, corrupt in ((Ack(), sentence, True), (Refuse("withdrawn"), "withdrawn", False)):
        end.fetch("r", impostor.handle(), [1, 2])
        channel = impostor.accept()
        impostor.send(spoil(impostor))
        done = impostor.hear_last()
        assert isinstance(done, Done)
        assert sentence in done.damage
        channel.send(answer)
        event = end.fetched("r")
        assert told in event.reason
        assert (event.kind, event.corrupt) == (EventKind.FETCH_FAILED, corrupt)


def test_a_peer_that_damages_again_and_again_is_not_asked_for_a_while(end: End, impostor: Any) -> None:
    for i in range(3):
        end.fetch(f"r{i}", impostor.handle(), [1, 2])
        channel = impostor.accept()
        impostor.send(impostor.grant(digests=[1, 2]))
        assert isinstance(impostor.hear_last(), Done)
        channel.send(Ack())
        assert end.fetched(f"r{i}").corrupt
        channel.close()
    with pytest.raises(ValueError, match="engine engine-i: its last 3 deliveries were damaged, so it is not asked for"):
        end.fetch("next", impostor.handle(), [1, 2])


def test_false_files(end: End, impostor: Any) -> None:
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
        if file is not None:
            channel.attach_file(file)
        channel.send(impostor.grant())
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
def test_other_answers(end: End, impostor: Any, answer: Callable[[Any], object], sentence: str) -> None:
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
def test_no_ack_no_fetch(end: End, impostor: Any, answer: Callable[[Any], object], sentence: str) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    impostor.send(impostor.grant())
    assert impostor.hear_last() == Done()
    answer(impostor)
    assert sentence in failure(end)


@pytest.mark.parametrize("said", [b"", struct.pack("<I", 500) + b"he"])
def test_no_answer_in_time(hasty: End, impostor: Any, said: bytes) -> None:
    hasty.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()._sock.send(said)
    assert failure(hasty) == "engine engine-i did not answer within 0.3 s"


def test_no_ack_in_time(hasty: End, impostor: Any) -> None:
    hasty.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    impostor.send(impostor.grant())
    assert "did not answer within 0.3 s" in failure(hasty)


def test_nobody_listens(end: End, impostor: Any) -> None:
    impostor.listener.close()
    end.fetch("r", impostor.handle(), [1, 2])
    assert "engine-i: it has stopped or restarted since it made the handle" in failure(end)


def test_full_queue_is_asked_again_until_the_deadline(hasty: End, end: End, impostor: Any) -> None:
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


def test_producers_of_other_users_are_not_talked_to(end: End, impostor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileChannel, "peer_uid", lambda self: os.getuid() + 1)
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    assert "belongs to user" in failure(end)
    assert not isinstance(impostor.hear(), Open)  # the secret stays here


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"address": "/run/other.sock"}, "no address of the local KV connector"),
        ({"address": "engine-kv-../x"}, "address"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": "8"}, "num_tokens"),
        ({"schema": {}}, "schema"),
        ({"extra": 1}, "extra"),
    ],
)
def test_handles_are_read_strictly(end: End, impostor: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        end.fetch("r", impostor.handle(**changes), [1])
