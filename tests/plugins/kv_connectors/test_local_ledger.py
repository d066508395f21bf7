"""The core's ledger over the shared-memory connector: random traffic between two engines leaves nothing held."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest

from engine.plugins.kv_connectors import local
from engine.specs.kv_connector import Role
from engine.testing.kv_end import PATIENCE, End, EndSpec
from engine.transfer import Link, TransferLedger, TransferState


class Engine:
    """An end, its ledger and the page bookkeeping that a scheduler would do."""

    def __init__(self, name: str, role: Role) -> None:
        self.end = End(EndSpec(module=local.__name__, offer="local", options="{}", role=role, engine_id=name, seed=5))
        link = Link(name="local", connector=self.end.connector, role=role, lease_seconds=20.0, fetch_timeout=20.0)
        self.ledger = TransferLedger([link], time.monotonic)
        self.held: dict[str, list[int]] = {}
        self.fetched: list[str] = []
        self.failed: dict[str, str] = {}

    def hold(self, request_id: str, count: int) -> list[int]:
        used = {page for pages in self.held.values() for page in pages}
        self.held[request_id] = [page for page in range(64) if page not in used][:count]
        return self.held[request_id]

    def advance(self) -> None:
        released, fetched, failed = self.ledger.advance(time.monotonic())
        for request_id in released:
            del self.held[request_id]
        self.fetched += fetched
        self.failed.update(failed)


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    pair = Engine("prefill", Role.PRODUCER), Engine("decode", Role.CONSUMER)
    yield pair
    for engine in pair:
        engine.ledger.close()


def test_random_traffic_with_aborts_on_both_sides(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    rng = random.Random(4)
    for i in range(150):
        request_id, count = f"r{i}", rng.randrange(1, 9)
        source = list(prefill.hold(request_id, count))
        if len(source) < count:  # pool is full: wait for releases, as a scheduler does
            del prefill.held[request_id]
            settle(prefill, decode)
            source = list(prefill.hold(request_id, count))
        handle = json.loads(json.dumps(prefill.ledger.publish(request_id, source, 4 * count)))
        if rng.random() < 0.2:
            prefill.ledger.cancel(request_id)
        target = decode.hold(request_id, count)
        if len(target) < count:
            del decode.held[request_id]
            prefill.ledger.cancel(request_id)
            settle(prefill, decode)
            continue
        decode.ledger.fetch(request_id, handle, target, 0)
        if rng.random() < 0.2:
            decode.ledger.cancel(request_id)
        prefill.advance()
        decode.advance()
    settle(prefill, decode)
    assert prefill.held == {}
    assert sum(prefill.ledger.totals.values()) == 150
    assert prefill.ledger.totals[TransferState.DELIVERED] > 30
    assert prefill.ledger.totals[TransferState.EXPIRED] == 0
    assert len(decode.failed) > 10
    assert all(decode.failed.values())


def settle(prefill: Engine, decode: Engine) -> None:
    """Until no transfer is open; then the decode side's requests finish and give their pages back."""
    deadline = time.monotonic() + PATIENCE
    while decode.ledger.rows() or prefill.ledger.rows():
        assert time.monotonic() < deadline, (prefill.ledger.rows(), decode.ledger.rows())
        prefill.advance()
        decode.advance()
        time.sleep(0.001)
    decode.advance()
    decode.held.clear()


def test_pages_arrive_through_two_ledgers(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    decode.end.scribble(range(64), 0)
    handle = json.loads(json.dumps(prefill.ledger.publish("r", prefill.hold("r", 3), 11)))
    decode.ledger.fetch("r", handle, [9, 4], 1)
    settle(prefill, decode)
    assert decode.fetched == ["r"]
    assert decode.end.read([9, 4]) == prefill.end.read([1, 2])
    assert prefill.held == {}
    assert prefill.ledger.totals[TransferState.DELIVERED] == 1
