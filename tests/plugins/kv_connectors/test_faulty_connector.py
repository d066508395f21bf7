"""Faults injected into transfers: lost, late, doubled, damaged and refused ones, and how the ledger ends each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import torch

from engine.plugins.kv_connectors import faulty, local
from engine.specs.kv_connector import EventKind, KVConnector, Role, TransferEvent
from engine.testing.kv_end import PATIENCE, SCHEMA, cut, fill, pool_bytes, read
from engine.transfer import Link, TransferLedger

(LOCAL,) = local.kv_connectors()
(FAULTY,) = faulty.kv_connectors()
PAGES = [3, 5, 8]
TOKENS = len(PAGES) * SCHEMA.page_size


class Pair:
    """A producer and a consumer over shared memory, each with a script of faults."""

    def __init__(self, producer: str = "[]", consumer: str = "[]") -> None:
        self.ends = [self._end(Role.PRODUCER, producer, 1), self._end(Role.CONSUMER, consumer, 2)]
        self.producer, self.consumer = (connector for connector, _ in self.ends)
        self.sent, self.got = (pool for _, pool in self.ends)

    def _end(self, role: Role, script: str, seed: int) -> tuple[KVConnector, list[tuple[torch.Tensor, ...]]]:
        inner = LOCAL.build(LOCAL.options(), role=role, schema=SCHEMA, engine_id=f"engine-{seed}")
        options = FAULTY.options.model_validate({"faults": json.loads(script)})
        connector = FAULTY.build(options, inner=inner, role=role, schema=SCHEMA, engine_id=f"engine-{seed}")
        pool = cut(SCHEMA, connector.allocate(pool_bytes(SCHEMA)))
        fill(pool, seed)
        connector.start(pool, lambda: None)
        return connector, pool

    def publish(self, request_id: str = "r") -> dict[str, object]:
        return self.producer.publish(request_id, PAGES, TOKENS, 60.0)

    def events(self, count: int) -> list[TransferEvent]:
        """The consumer's next events, in order; the producer is polled too, which is when its faults strike."""
        found: list[TransferEvent] = []
        end = time.monotonic() + PATIENCE
        while len(found) < count and time.monotonic() < end:
            self.producer.poll()
            found += self.consumer.poll()
            time.sleep(0.002)
        return found

    def same(self) -> bool:
        return read(self.sent, PAGES) == read(self.got, PAGES)

    def close(self) -> None:
        for connector, _ in self.ends:
            connector.close()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def opened(pairs: list[Pair], producer: str = "[]", consumer: str = "[]") -> Pair:
    pairs.append(Pair(producer, consumer))
    return pairs[-1]


def test_without_faults_everything_arrives(pairs: list[Pair]) -> None:
    pair = opened(pairs)
    assert not pair.same()
    pair.consumer.fetch("r", pair.publish(), PAGES, 0)
    assert [event.kind for event in pair.events(1)] == [EventKind.FETCHED]
    assert pair.same()


def test_a_damaged_page_is_noticed_and_put_back(pairs: list[Pair]) -> None:
    pair = opened(pairs, producer='[{"kind": "corrupt", "at": "publish", "seconds": 0.05}]')
    before = read(pair.sent, PAGES)
    handle = pair.publish()
    end = time.monotonic() + PATIENCE
    while read(pair.sent, PAGES) == before and time.monotonic() < end:
        pair.producer.poll()
        time.sleep(0.002)
    pair.consumer.fetch("r", handle, PAGES, 0)
    (event,) = pair.events(1)
    assert event.kind is EventKind.FETCH_FAILED
    assert "digest" in event.reason
    pair.producer.withdraw("r")
    assert read(pair.sent, PAGES) == before


def test_late_news_comes_once_and_late(pairs: list[Pair]) -> None:
    pair = opened(pairs, consumer='[{"kind": "delay", "seconds": 0.2}]')
    pair.consumer.fetch("r", pair.publish(), PAGES, 0)
    assert [event.kind for event in pair.events(1)] == [EventKind.FETCHED]
    pair.consumer.fetch("s", pair.publish("s"), PAGES, 0)
    assert [event.request_id for event in pair.events(1)] == ["s"], "the script strikes once"


def test_doubled_news_is_told_twice(pairs: list[Pair]) -> None:
    pair = opened(pairs, consumer='[{"kind": "duplicate"}]')
    pair.consumer.fetch("r", pair.publish(), PAGES, 0)
    assert [event.kind for event in pair.events(2)] == [EventKind.FETCHED, EventKind.FETCHED]


@pytest.mark.parametrize("at", ["publish", "fetch"])
def test_refusals_are_told_to_the_request(pairs: list[Pair], at: str) -> None:
    script = f'[{{"kind": "raise", "at": "{at}"}}]'
    pair = opened(pairs, producer=script, consumer=script)
    with pytest.raises(ValueError, match=f"injected fault: the {at} was refused"):
        pair.consumer.fetch("r", pair.publish(), PAGES, 0)


def test_a_lost_fetch_ends_by_the_ledger_s_deadline(pairs: list[Pair]) -> None:
    pair, now = opened(pairs, consumer='[{"kind": "drop"}]'), [0.0]
    link = Link(name="local", connector=pair.consumer, role=Role.CONSUMER, lease_seconds=30.0, fetch_timeout=5.0)
    ledger = TransferLedger([link], lambda: now[0])
    ledger.fetch("r", {"num_tokens": TOKENS, "via": {"local": pair.publish()}}, PAGES, 0)
    for now[0] in (1.0, 4.9):
        assert not ledger.advance(now[0]).failed
    now[0] = 5.1
    failed = [*ledger.advance(now[0]).failed, *ledger.advance(now[0]).failed]
    assert [request_id for request_id, _ in failed] == ["r"]
    assert ledger.rows() == []


def test_damage_belongs_to_publications(pairs: list[Pair]) -> None:
    with pytest.raises(ValueError, match="it needs at: publish"):
        opened(pairs, consumer='[{"kind": "corrupt"}]')
