"""A producer's memory stays mapped between fetches, and no longer than the producer lives."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from engine.plugins.kv_connectors import local
from engine.plugins.kv_connectors.local.channel import FileChannel
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.specs.kv_connector import EventKind, Role
from engine.testing.kv_end import PATIENCE, End, EndSpec
from engine.transport.channel import TO_PRODUCER

SPEC = EndSpec(module=local.__name__, offer="local", options="{}", engine_id="engine-p", role=Role.PRODUCER)


def mapped() -> int:
    """Mappings of pools in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:engine-kv")


def test_mapped_once_until_the_producer_ends() -> None:
    before = mapped()
    producer = End(SPEC)
    consumer = End(replace(SPEC, role=Role.CONSUMER, engine_id="engine-c"))
    assert mapped() == before + 1  # the producer's own
    for name in ("first", "second"):
        consumer.fetch(name, producer.publish(name, [1, 2]), [3, 4])
        assert consumer.fetched(name).kind is EventKind.FETCHED
        assert consumer.read([3, 4]) == producer.read([1, 2])
        assert mapped() == before + 2
    producer.close()
    deadline = time.monotonic() + PATIENCE
    while mapped() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mapped() == before
    consumer.close()


def test_another_file_takes_the_place_of_the_first() -> None:
    left, right = socket.socketpair()
    channel = FileChannel(left, *TO_PRODUCER)
    memories = [SharedMemory(8192) for _ in range(2)]
    for value, memory in enumerate(memories):
        memory.tensor.fill_(value)
        channel._keep(os.dup(memory.file))
        assert channel.mapping(4096)[0] == value
        assert channel.mapping(8192)[8191] == value
    channel.close()
    right.close()
    for memory in memories:
        memory.close()
