"""Files that come along with frames over a Unix socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from engine.plugins.kv_connectors.local.channel import FileChannel
from engine.testing.kv_end import SCHEMA
from engine.transport.channel import TO_CONSUMER, TO_PRODUCER
from engine.transport.frames import Ack, Grant

GRANT = Grant(SCHEMA, [1, 2**64 - 1], 30.0, b"detail")


@pytest.fixture
def pair() -> Iterator[tuple[FileChannel, FileChannel]]:
    """A consumer's channel and a producer's, joined."""
    left, right = socket.socketpair(socket.AF_UNIX)
    channels = FileChannel(left, *TO_PRODUCER), FileChannel(right, *TO_CONSUMER)
    yield channels
    for channel in channels:
        channel.close()


def test_file_comes_with_its_message(pair: tuple[FileChannel, FileChannel]) -> None:
    consumer, producer = pair
    file = os.memfd_create("x")
    os.write(file, b"content")
    producer.attach_file(file)
    producer.send(GRANT)
    os.close(file)
    assert list(consumer.receive()) == [GRANT]
    assert consumer.file is not None
    assert os.pread(consumer.file, 20, 0) == b"content"
    assert not os.get_inheritable(consumer.file)
    consumer.close()
    assert consumer.file is None


def test_second_file_replaces_the_first(pair: tuple[FileChannel, FileChannel]) -> None:
    consumer, producer = pair
    file = os.memfd_create("x")
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        producer.attach_file(file)
        producer.send(Ack())
        consumer.receive()
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == open_before
