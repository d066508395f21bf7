"""The greeting: frames pass only once both sides have shown the secret, and strangers get nowhere."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator

import msgspec
import pytest

from engine.transport.channel import TO_CONSUMER, TO_PRODUCER
from engine.transport.frames import Ack, Cancel, Open, ProtocolError
from engine.transport.greeting import Answer, Challenge, GreetedChannel, Welcome

Pair = tuple[GreetedChannel, GreetedChannel]


@pytest.fixture
def join() -> Iterator[Callable[[str, str], Pair]]:
    """Makes a consumer's channel and a producer's with these secrets."""
    made: list[GreetedChannel] = []

    def join(consumer: str, producer: str) -> Pair:
        left, right = socket.socketpair()
        pair = (
            GreetedChannel(left, *TO_PRODUCER, secret=consumer, serves=False),
            GreetedChannel(right, *TO_CONSUMER, secret=producer, serves=True),
        )
        made.extend(pair)
        return pair

    yield join
    for channel in made:
        channel.close()


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, GreetedChannel]]:
    """A bare socket, and the producer's channel that listens to it."""
    left, right = socket.socketpair()
    channel = GreetedChannel(right, *TO_CONSUMER, secret="s", serves=True)
    yield left, channel
    left.close()
    channel.close()


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("secret", ["", "correct horse"])
def test_frames_are_held_back_until_both_have_greeted(join: Callable[[str, str], Pair], secret: str) -> None:
    consumer, producer = join(secret, secret)
    consumer.send(Open("token", 0, 1, 4))
    assert consumer.pending
    assert list(consumer.receive()) == []  # the challenge: the answer went out
    assert list(producer.receive()) == []  # the answer: the welcome went out
    assert consumer.pending
    assert list(consumer.receive()) == []
    assert not consumer.pending
    assert list(producer.receive()) == [Open("token", 0, 1, 4)]
    producer.send(Ack())
    consumer.send(Cancel("enough"))
    assert list(consumer.receive()) == [Ack()]
    assert list(producer.receive()) == [Cancel("enough")]


@pytest.mark.parametrize(
    ("consumer", "producer", "sentence"),
    [
        ("", "s", "the producer has a shared secret, this engine has none"),
        ("s", "", "this engine has a shared secret, the producer has none"),
    ],
)
def test_one_sided_secrets_are_told(
    join: Callable[[str, str], Pair], consumer: str, producer: str, sentence: str
) -> None:
    left, _ = join(consumer, producer)
    left.send(Open("token", 0, 1, 4))
    with pytest.raises(ProtocolError, match=sentence):
        list(left.receive())


def test_another_secret_is_refused_before_anything_else_is_read(join: Callable[[str, str], Pair]) -> None:
    consumer, producer = join("mine", "other")
    consumer.send(Open("token", 0, 1, 4))
    assert list(consumer.receive()) == []
    with pytest.raises(ProtocolError, match="another shared secret"):
        list(producer.receive())


def test_a_false_producer_does_not_hear_the_token() -> None:
    left, right = socket.socketpair()
    consumer = GreetedChannel(left, *TO_PRODUCER, secret="s", serves=False)
    consumer.send(Open("token", 0, 1, 4))
    right.send(frame(Challenge(b"n" * 16, True)))
    assert list(consumer.receive()) == []
    right.send(frame(Welcome(b"p" * 32)))
    with pytest.raises(ProtocolError, match="another shared secret"):
        list(consumer.receive())
    assert b"token" not in right.recv(2**16)
    consumer.close()
    right.close()


def test_proofs_are_of_one_side_and_one_connection(join: Callable[[str, str], Pair]) -> None:
    """Neither can a challenge be thrown back, nor an answer be used twice."""
    left, right = socket.socketpair()
    recorder = GreetedChannel(left, *TO_PRODUCER, secret="s", serves=False)
    right.send(frame(Challenge(b"n" * 16, True)))
    list(recorder.receive())
    answer = right.recv(2**16)
    recorder.close()
    right.close()
    bare, served = socket.socketpair()
    producer = GreetedChannel(served, *TO_CONSUMER, secret="s", serves=True)
    bare.send(answer)
    with pytest.raises(ProtocolError, match="another shared secret"):
        list(producer.receive())
    producer.close()
    bare.close()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "a frame of"),
        (struct.pack("<I", 257), "a frame of 257 bytes, at most 256"),
        (struct.pack("<I", 3) + b"abc", "did not greet"),
        (frame(Open("token", 0, 1, 4)), "did not greet"),
        (frame(Challenge(b"", False)), "Challenge out of turn"),
        (frame(Welcome(b"")), "Welcome out of turn"),
        (frame(Answer(b"", b"")), "another shared secret"),
    ],
)
def test_strangers_get_nowhere(stranger: tuple[socket.socket, GreetedChannel], data: bytes, sentence: str) -> None:
    sock, channel = stranger
    sock.send(data)
    with pytest.raises(ProtocolError, match=sentence):
        list(channel.receive())
