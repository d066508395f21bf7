"""Framing: whole messages from any fragmentation, bulk bytes between them, and nonsense refused."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from engine.testing.kv_end import SCHEMA
from engine.transport.channel import TO_CONSUMER, TO_PRODUCER, Channel
from engine.transport.frames import Ack, Cancel, Done, Grant, Open, ProtocolError, Refuse, Renew

GRANT = Grant(SCHEMA, [1, 2**64 - 1], 30.0, b"detail")


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """A consumer's channel and a producer's, joined."""
    left, right = socket.socketpair(socket.AF_UNIX)
    channels = Channel(left, *TO_PRODUCER), Channel(right, *TO_CONSUMER)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket and the producer's channel that listens to it."""
    left, right = socket.socketpair(socket.AF_UNIX)
    channel = Channel(right, *TO_CONSUMER)
    yield left, channel
    left.close()
    channel.close()


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def test_messages_arrive_in_order(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    for message in (Open("t", 0, 2, 4), Renew(), Done(), Cancel("tired")):
        consumer.send(message)
    assert list(producer.receive()) == [Open("t", 0, 2, 4), Renew(), Done(), Cancel("tired")]
    for answer in (GRANT, Refuse("no"), Ack()):
        producer.send(answer)
    assert list(consumer.receive()) == [GRANT, Refuse("no"), Ack()]
    assert list(consumer.receive()) == []


def test_any_fragmentation(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    got: list[object] = []
    for byte in frame(Open("t", 1, 2, 4)) + frame(Done()):
        sock.send(bytes([byte]))
        got += channel.receive()
    assert got == [Open("t", 1, 2, 4), Done()]


def test_long_message_goes_out_in_parts(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    long = Grant(SCHEMA, list(range(400_000)), 1.0, b"")
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
        (struct.pack("<I", 2**14 + 1), "a frame of 16385 bytes, at most 16384"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (b"\xff" * 64, "a frame of 4294967295 bytes"),
        (struct.pack("<I", 3) + b"\x00\x01\x02", "malformed frame"),
        (struct.pack("<I", 0), "malformed frame"),
        (frame({"type": "open", "token": b"\xff", "first": 0, "count": 1, "block": 4}), "malformed frame"),
        (frame({"type": "open", "token": "t", "first": "0", "count": 1, "block": 4}), "malformed frame"),
        (frame({"type": "surprise"}), "malformed frame"),
        (frame(Ack()), "malformed frame"),
    ],
)
def test_nonsense_is_refused(raw: tuple[socket.socket, Channel], data: bytes, sentence: str) -> None:
    sock, channel = raw
    sock.send(data)
    with pytest.raises(ProtocolError, match=sentence):
        list(channel.receive())


def test_end_of_file_and_broken_pipe(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    sock.close()
    with pytest.raises(ProtocolError, match="the peer is gone"):
        channel.receive()
    with pytest.raises(ProtocolError, match="the peer is gone"):
        channel.send(Ack())


def buffers(*lengths: int) -> tuple[bytearray, list[memoryview]]:
    """Memory for the sum of these lengths, and views that cut it up."""
    memory = bytearray(sum(lengths))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return memory, [memoryview(memory)[end - length : end] for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_000])
def test_bulk_bytes_go_between_frames_from_memory_to_memory(pair: tuple[Channel, Channel], size: int) -> None:
    """However the two ends cut them up, and with frames in the same packets before and behind."""
    consumer, producer = pair
    source, pieces = buffers(size // 3, 0, size - size // 3)
    source[:] = os.urandom(size)
    target, room = buffers(size // 2, size // 4, size - size // 2 - size // 4)
    producer.send(GRANT)
    producer.stream(iter([pieces[:1], [], pieces[1:]]))
    heard: list[object] = []
    acknowledged = False
    while len(heard) < 2:
        producer.flush()
        if not producer.streaming and not acknowledged:
            producer.send(Ack())
            acknowledged = True
        for message in consumer.receive():
            heard.append(message)
            if message == GRANT:
                consumer.expect(iter([room[:2], room[2:]]))
    assert heard == [GRANT, Ack()]
    assert target == source
    assert consumer.arrived == size
    assert not producer.backlog


def test_no_frame_may_go_into_a_stream(pair: tuple[Channel, Channel]) -> None:
    _, producer = pair
    producer.stream(iter([[memoryview(bytes(10_000_000))]]))
    assert producer.streaming or producer.backlog
    producer.stream(iter([[memoryview(bytes(10_000_000))]]))
    with pytest.raises(AssertionError, match="in the middle of a stream"):
        producer.send(Ack())


def test_end_of_file_in_a_stream_is_noticed(pair: tuple[Channel, Channel]) -> None:
    consumer, producer = pair
    _, room = buffers(100)
    consumer.expect(iter([room]))
    producer.stream(iter([[memoryview(bytes(99))]]))
    assert list(consumer.receive()) == []
    producer.close()
    with pytest.raises(ProtocolError, match="the peer is gone"):
        consumer.receive()
    assert consumer.arrived == 99
