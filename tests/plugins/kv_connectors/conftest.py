"""A producer by hand, for the tests of the shared-memory consumer."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.plugins.kv_connectors import local
from engine.plugins.kv_connectors.local.channel import FileChannel
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.plugins.kv_connectors.local.transport import Place
from engine.specs.kv_connector import Role
from engine.testing.kv_end import PATIENCE, SCHEMA, End, EndSpec, cut, fill, pool_bytes
from engine.transport.channel import TO_CONSUMER
from engine.transport.frames import Grant, Open, ProtocolError, Renew
from engine.transport.grid import Grid
from engine.transport.schema import Handle

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
        self.channel: FileChannel | None = None
        self.heard: list[object] = []

    def handle(self, **changes: Any) -> dict[str, Any]:
        return Handle("engine-i", "r", 8, self.address, "secret", SCHEMA).to_json() | changes

    def grant(self, blocks: Sequence[int] = (5, 6), layout: Any = None, **changes: Any) -> Grant:
        """What an honest producer says of pages 5 and 6, but for the changes."""
        place = msgspec.msgpack.encode(Place(layout or self.layout, list(blocks)))
        honest = Grant(SCHEMA, self.grid.digests([5, 6]), 60.0, place)
        return msgspec.structs.replace(honest, **changes)

    def send(self, grant: Grant) -> None:
        """Send it with the file."""
        assert self.channel is not None
        self.channel.attach_file(self.memory.file)
        self.channel.send(grant)

    def accept(self) -> FileChannel:
        self.channel = FileChannel(self.listener.accept()[0], *TO_CONSUMER)
        return self.channel

    def hear(self) -> object:
        """The next message, or the sentence of the end."""
        assert self.channel is not None
        deadline = time.monotonic() + PATIENCE
        while not self.heard:
            assert time.monotonic() < deadline, "no message"
            try:
                self.heard += list(self.channel.receive())
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
