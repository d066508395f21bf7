"""Framing: whole messages from any fragmentation, files that come along, and nonsense refused."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

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
    to_producer,
)
from engine.testing.kv_end import SCHEMA

GRANT = Grant(SCHEMA, [(0, 96), (960, 80)], [3, 4], [1, 2**64 - 1], 30.0)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """A consumer's channel and a producer's, joined."""
    left, right = socket.socketpair(socket.AF_UNIX)
    channels = to_producer(left), to_consumer(right)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket and the producer's channel that listens to it."""
    left, right = socket.socketpair(socket.AF_UNIX)
    channel = to_consumer(right)
    yield left, channel
    left.close()
    channel.close()


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def test_messages_arrive_in_order(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    for message in (Open("t", 0, 2), Renew(), Done(), Cancel("tired")):
        consumer.send(message)
    assert producer.receive() == [Open("t", 0, 2), Renew(), Done(), Cancel("tired")]
    for answer in (GRANT, Refuse("no"), Ack()):
        producer.send(answer)
    assert consumer.receive() == [GRANT, Refuse("no"), Ack()]
    assert consumer.receive() == []


def test_any_fragmentation(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    got: list[object] = []
    for byte in frame(Open("t", 1, 2)) + frame(Done()):
        sock.send(bytes([byte]))
        got += channel.receive()
    assert got == [Open("t", 1, 2), Done()]


def test_file_comes_with_its_message(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    file = os.memfd_create("x")
    os.write(file, b"content")
    producer.send(GRANT, file)
    os.close(file)
    assert consumer.receive() == [GRANT]
    assert consumer.file is not None
    assert os.pread(consumer.file, 20, 0) == b"content"
    assert not os.get_inheritable(consumer.file)
    consumer.close()
    assert consumer.file is None


def test_second_file_replaces_the_first(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    file = os.memfd_create("x")
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        producer.send(Ack(), file)
        consumer.receive()
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_long_message_goes_out_in_parts(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    long = Grant(SCHEMA, [], list(range(200_000)), list(range(200_000)), 1.0)
    producer.send(long)
    assert producer.backlog
    got: list[object] = []
    while not got:
        producer.flush()
        got = list(consumer.receive())
    assert got == [long]
    assert not producer.backlog


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (struct.pack("<I", 2**12 + 1), "a frame of 4097 bytes, at most 4096"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (b"\xff" * 64, "a frame of 4294967295 bytes"),
        (struct.pack("<I", 3) + b"\x00\x01\x02", "malformed frame"),
        (struct.pack("<I", 0), "malformed frame"),
        (frame({"type": "open", "token": b"\xff", "first_page": 0, "count": 1}), "malformed frame"),
        (frame({"type": "open", "token": "t", "first_page": "0", "count": 1}), "malformed frame"),
        (frame({"type": "surprise"}), "malformed frame"),
        (frame(Ack()), "malformed frame"),
    ],
)
def test_nonsense_is_refused(raw: tuple[socket.socket, Channel], data: bytes, sentence: str) -> None:
    sock, channel = raw
    sock.send(data)
    with pytest.raises(ProtocolError, match=sentence):
        channel.receive()


def test_end_of_file_and_broken_pipe(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    sock.close()
    with pytest.raises(ProtocolError, match="the peer is gone"):
        channel.receive()
    with pytest.raises(ProtocolError, match="the peer is gone"):
        channel.send(Ack())


def test_peer_is_known_by_the_kernel(pair: tuple[Channel, Channel]) -> None:
    assert pair[0].peer_uid() == os.getuid()
