"""Conformance suite for KV connectors: exact or refused, one end to every transfer, nothing left behind.

Two ends in one process, and an end in a process of its own where that one is stopped or killed.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.plugin import Flag, Needs, Offer
from engine.specs.kv_connector import EventKind, KVSchema, Role
from engine.testing.claims import proves
from engine.testing.kv_end import PATIENCE, SCHEMA, End, EndSpec, RemoteEnd, differing, expected
from engine.testing.offer import OfferConformance

Open = Callable[..., End]
"""Makes an end that the test's teardown closes; takes the fields of `EndSpec`."""

CANARY = 0x5A

BOTH = proves("flags:producer", "flags:consumer")


def _flip(raw: Tensor) -> None:
    raw[2, 7] ^= 16


def _cut(raw: Tensor) -> None:
    raw[3, raw.shape[1] // 2 :] = 0


def _swap(raw: Tensor) -> None:
    raw[[1, 2]] = raw[[2, 1]]


def _repeat(raw: Tensor) -> None:
    raw[2] = raw[1]


DAMAGES: dict[str, Callable[[Tensor], None]] = {
    "a bit flips": _flip,
    "a tail is lost": _cut,
    "pages change places": _swap,
    "a page comes twice": _repeat,
}
"""What may happen to the bytes [pages, bytes a page] of the pages 1, 2 and 3 of one part of one layer."""


class KVConnectorConformance(OfferConformance):
    """Subclasses set `offer` and `module`; see `OfferConformance`."""

    offer: ClassVar[Offer[Any]]
    schema: ClassVar[KVSchema] = SCHEMA
    patience: ClassVar[float] = PATIENCE
    """Seconds after which an event that has not come is a failure."""

    @pytest.fixture(autouse=True)
    def _both_roles(self) -> None:
        self.require(Needs(flags=frozenset({Flag.PRODUCER, Flag.CONSUMER})))

    def spec(self, **fields: Any) -> EndSpec:
        """An end's specification with the suite's options."""
        options = self.options().model_dump_json()
        common: dict[str, Any] = {"schema": self.schema, "patience": self.patience}
        return EndSpec(module=self.module, offer=self.offer.name, options=options, **(common | fields))

    def remote_spec(self) -> EndSpec:
        """What the `remote` fixture is made from."""
        return self.spec(role=Role.PRODUCER, engine_id="engine-r", seed=3)

    @pytest.fixture
    def open_end(self) -> Iterator[Open]:
        """A maker of ends."""
        with ExitStack() as stack:

            def make(**fields: Any) -> End:
                end = End(self.spec(**fields))
                stack.callback(end.close)
                return end

            yield make

    @pytest.fixture
    def producer(self, open_end: Open) -> End:
        """An end that publishes."""
        return open_end(role=Role.PRODUCER, engine_id="engine-p", seed=1)

    @pytest.fixture
    def consumer(self, open_end: Open) -> End:
        """An end that fetches, with another number of pages."""
        return open_end(role=Role.CONSUMER, engine_id="engine-c", seed=2, schema=replace(self.schema, num_pages=40))

    @pytest.fixture
    def remote(self) -> Iterator[RemoteEnd]:
        """A producer in a process of its own."""
        end = RemoteEnd(self.remote_spec())
        yield end
        end.close()

    # What is moved

    @BOTH
    @pytest.mark.parametrize("count", [1, 7, 40])
    def test_pages_arrive_exactly_and_nowhere_else(self, producer: End, consumer: End, count: int) -> None:
        """Scattered pages and runs, whole or from a later page on; every other page of the consumer stays as it was."""
        rng = random.Random(count)
        theirs = [*rng.sample(range(64), count - count // 2), *range(10, 10 + count // 2)]
        mine = [*rng.sample(range(20, 40), count // 2), *range(count - count // 2)]
        for first in {0, count // 3, count - 1}:
            handle = producer.publish(f"p{first}", theirs)
            consumer.scribble(range(40), CANARY)
            consumer.fetch(f"f{first}", handle, mine[first:], first)
            assert consumer.fetched(f"f{first}").kind is EventKind.FETCHED
            assert consumer.read(mine[first:]) == producer.read(theirs[first:])
            rest = [page for page in range(40) if page not in mine[first:]]
            assert b"".join(consumer.read(rest)).strip(bytes([CANARY])) == b""
            producer.wait(f"p{first}", EventKind.DELIVERED)
            producer.withdraw(f"p{first}")
        assert [e for e in producer.take() if e.kind is not EventKind.RENEWED] == []
        assert consumer.take() == []

    @BOTH
    def test_across_processes(self, remote: RemoteEnd, consumer: End) -> None:
        """The same between two processes."""
        handle = remote.call("publish", "r", [5, 6, 7, 60, 2])
        consumer.fetch("r", handle, [9, 8, 7, 6, 5])
        assert consumer.fetched("r").kind is EventKind.FETCHED
        assert consumer.read([9, 8, 7, 6, 5]) == expected(self.remote_spec(), [5, 6, 7, 60, 2])
        assert remote.call("wait", "r", EventKind.DELIVERED).request_id == "r"

    def test_nothing_to_fetch_is_delivered_all_the_same(self, producer: End, consumer: End) -> None:
        """A consumer that holds the whole prefix already lets the producer's pages go."""
        consumer.fetch("r", producer.publish("r", [1, 2]), [], 2)
        assert consumer.fetched("r").kind is EventKind.FETCHED
        producer.wait("r", EventKind.DELIVERED)

    @BOTH
    def test_one_engine_may_do_both(self, open_end: Open) -> None:
        """What was fetched can be published again."""
        first, second = open_end(engine_id="engine-1", seed=1), open_end(engine_id="engine-2", seed=2)
        second.fetch("r", first.publish("r", [1, 2, 3]), [4, 5, 6])
        assert second.fetched("r").kind is EventKind.FETCHED
        first.fetch("back", second.publish("back", [4, 5, 6]), [11, 12, 13])
        assert first.fetched("back").kind is EventKind.FETCHED
        assert first.read([11, 12, 13]) == first.read([1, 2, 3])

    @BOTH
    def test_many_at_once_end_once_each(self, producer: End, consumer: End) -> None:
        """Forty transfers, every third cancelled: one end for each on either side, and what was fetched is right."""
        handles = {f"r{i}": producer.publish(f"r{i}", [i, i + 10]) for i in range(40)}
        for i, (name, handle) in enumerate(handles.items()):
            consumer.fetch(name, handle, [i])
            if i % 3 == 0:
                consumer.cancel(name)
        ends = {name: consumer.fetched(name).kind for name in handles}
        for i, (name, end) in enumerate(ends.items()):
            assert end is (EventKind.FETCH_FAILED if i % 3 == 0 else EventKind.FETCHED)
            if end is EventKind.FETCHED:
                assert consumer.read([i]) == producer.read([i])
            producer.wait(name, *([EventKind.DELIVERED] if i % 3 else [EventKind.DELIVERED, EventKind.PEER_LOST]))
        assert consumer.take() == []

    # What is refused

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damage_is_noticed(self, producer: End, consumer: End, damage: str) -> None:
        """What changes after the digests were made fails the fetch, in whichever part and layer it is."""
        handle = producer.publish("r", [1, 2, 3])
        consumer.fetch("good", handle, [1, 2, 3])
        assert consumer.fetched("good").kind is EventKind.FETCHED
        raw = producer.pool[-1][-1].view(torch.uint8).flatten(1)
        DAMAGES[damage](raw)
        consumer.fetch("bad", handle, [4, 5, 6])
        failure = consumer.fetched("bad")
        assert failure.kind is EventKind.FETCH_FAILED
        assert failure.reason

    @pytest.mark.parametrize("field", sorted(differing(SCHEMA)))
    def test_other_schema_is_refused_with_a_sentence(self, producer: End, open_end: Open, field: str) -> None:
        """The sentence names the field that differs."""
        stranger = open_end(role=Role.CONSUMER, engine_id="engine-s", schema=differing(self.schema)[field])
        with pytest.raises(ValueError, match=field):
            stranger.fetch("r", producer.publish("r", [1]), [1])
        assert stranger.take() == []

    def test_malformed_handles_are_refused(self, producer: End, consumer: End) -> None:
        """Each key missing, and each value of another type."""
        handle = producer.publish("r", [1, 2])
        without = [{k: v for k, v in handle.items() if k != key} for key in handle]
        mistyped = [handle | {key: [None]} for key in handle]
        for spoilt in [{}, *without, *mistyped]:
            with pytest.raises(ValueError):
                consumer.fetch("r", spoilt, [1, 2])
        assert consumer.take() == []

    def test_altered_handles_never_give_other_bytes(self, producer: End, consumer: End) -> None:
        """Any text in the handle replaced: refused, failed, or still the right pages."""
        producer.publish("other", [8, 9])
        handle = producer.publish("r", [1, 2])
        for i, spoilt in enumerate(altered(handle)):
            consumer.scribble([1, 2], CANARY)
            try:
                consumer.fetch(f"r{i}", spoilt, [1, 2])
            except ValueError:
                continue
            if consumer.fetched(f"r{i}").kind is EventKind.FETCHED:
                assert consumer.read([1, 2]) == producer.read([1, 2])

    def test_more_pages_than_published_are_refused(self, producer: End, consumer: End) -> None:
        """Whether the handle or the producer says so."""
        handle = producer.publish("r", [1, 2])
        for pages, first in (([1, 2, 3], 0), ([1, 2], 1), ([1], -1)):
            with pytest.raises(ValueError):
                consumer.fetch("r", handle, pages, first)
        consumer.fetch("r", handle | {"num_tokens": 12}, [1, 2, 3])
        assert consumer.fetched("r").kind is EventKind.FETCH_FAILED

    def test_withdrawn_publication_is_gone(self, producer: End, consumer: End) -> None:
        """Its handle is refused with a reason; publishing the same pages anew makes another one."""
        handle = producer.publish("r", [1, 2])
        producer.withdraw("r")
        again = producer.publish("r", [1, 2])
        consumer.fetch("old", handle, [1, 2])
        failure = consumer.fetched("old")
        assert failure.kind is EventKind.FETCH_FAILED
        assert failure.reason
        consumer.fetch("new", again, [1, 2])
        assert consumer.fetched("new").kind is EventKind.FETCHED

    def test_pages_reused_after_withdraw_are_never_taken_for_the_old_ones(self, producer: End, consumer: End) -> None:
        """Withdraw and overwrite at any moment of a fetch: it fails, or it has the bytes from before."""
        rng = random.Random(0)
        pages = list(range(40))
        for i in range(60):
            producer.scribble(pages, i)
            before = producer.read(pages)
            consumer.fetch(f"r{i}", producer.publish(f"r{i}", pages), pages)
            time.sleep(rng.random() * 0.004)
            producer.withdraw(f"r{i}")
            producer.scribble(pages, 255)
            if consumer.fetched(f"r{i}").kind is EventKind.FETCHED:
                assert consumer.read(pages) == before

    def test_restarted_producer_refuses_old_handles(self, open_end: Open, consumer: End) -> None:
        """Same engine id, same pages, another life."""
        first = open_end(role=Role.PRODUCER, engine_id="engine-x")
        handle = first.publish("r", [1, 2])
        first.connector.close()
        second = open_end(role=Role.PRODUCER, engine_id="engine-x")
        second.publish("r", [1, 2])
        consumer.fetch("r", handle, [1, 2])
        failure = consumer.fetched("r")
        assert failure.kind is EventKind.FETCH_FAILED
        assert failure.reason

    # What goes wrong

    def test_cancelled_fetch_writes_no_more(self, remote: RemoteEnd, consumer: End) -> None:
        """Early, late, or while the producer is stopped: after FETCH_FAILED the pages are the core's."""
        handle = remote.call("publish", "r", list(range(40)))
        for i in range(12):
            consumer.fetch(f"r{i}", handle, list(range(40)))
            time.sleep(0.001 * i)
            consumer.cancel(f"r{i}")
            assert consumer.fetched(f"r{i}").kind is EventKind.FETCH_FAILED
            consumer.scribble(range(40), CANARY)
            assert b"".join(consumer.read(range(40))).strip(bytes([CANARY])) == b""
        remote.signal(signal.SIGSTOP)
        consumer.fetch("stopped", handle, [1, 2])
        consumer.cancel("stopped")
        assert consumer.fetched("stopped").kind is EventKind.FETCH_FAILED
        remote.signal(signal.SIGCONT)
        time.sleep(0.1)
        assert b"".join(consumer.read(range(40))).strip(bytes([CANARY])) == b""
        assert consumer.take() == []

    def test_slow_producer_is_waited_for(self, remote: RemoteEnd, consumer: End) -> None:
        """A producer that stops for a moment is slow, not gone."""
        handle = remote.call("publish", "r", [1, 2])
        remote.signal(signal.SIGSTOP)
        consumer.fetch("slow", handle, [5, 6])
        time.sleep(0.3)
        remote.signal(signal.SIGCONT)
        assert consumer.fetched("slow").kind is EventKind.FETCHED
        assert consumer.read([5, 6]) == expected(self.remote_spec(), [1, 2])

    def test_calls_return_while_the_producer_is_stopped(self, remote: RemoteEnd, consumer: End) -> None:
        """They are made on the scheduler's thread: none may wait for a peer, who goes on here only when one did."""
        handle = remote.call("publish", "r", [1, 2])
        remote.signal(signal.SIGSTOP)
        waited: list[bool] = []

        def go_on() -> None:
            waited.append(True)
            remote.signal(signal.SIGCONT)

        rescue = threading.Timer(self.patience / 6, go_on)
        rescue.start()
        consumer.fetch("r", handle, [1, 2])
        consumer.take()
        consumer.cancel("r")
        consumer.take()
        rescue.cancel()
        rescue.join()
        remote.signal(signal.SIGCONT)
        assert not waited, "a call waited for the peer"

    def test_killed_producer_fails_its_fetches(self, remote: RemoteEnd, consumer: End) -> None:
        """Those under way, and those that come later."""
        handle = remote.call("publish", "r", [1, 2])
        remote.signal(signal.SIGSTOP)
        consumer.fetch("under way", handle, [1, 2])
        remote.signal(signal.SIGKILL)
        consumer.fetch("later", handle, [3, 4])
        for name in "under way", "later":
            failure = consumer.fetched(name)
            assert failure.kind is EventKind.FETCH_FAILED
            assert failure.reason

    def test_killed_consumer_does_not_trouble_the_producer(self, producer: End, consumer: End) -> None:
        """A reader shows up as RENEWED and ends as DELIVERED or PEER_LOST; the producer goes on serving others."""
        handle = producer.publish("r", list(range(40)))
        victim = RemoteEnd(self.spec(role=Role.CONSUMER, engine_id="engine-v"))
        victim.call("fetch", "r", handle, list(range(40)))
        producer.wait("r", EventKind.RENEWED)
        victim.signal(signal.SIGKILL)
        victim.close()
        producer.wait("r", EventKind.DELIVERED, EventKind.PEER_LOST)
        producer.withdraw("r")
        consumer.fetch("next", producer.publish("next", [1]), [1])
        assert consumer.fetched("next").kind is EventKind.FETCHED

    def test_close_leaves_nothing(self, remote: RemoteEnd) -> None:
        """No thread, file, socket, mapping or name in /dev/shm, whatever was under way."""
        handle = remote.call("publish", "r", [1, 2])
        self._live_and_close(handle, lambda: None)
        before = possessions()
        self._live_and_close(handle, lambda: remote.signal(signal.SIGSTOP))
        gc.collect()
        assert possessions() - before == Counter()

    def _live_and_close(self, handle: dict[str, Any], disturb: Callable[[], None]) -> None:
        end = End(self.spec(engine_id="engine-z"))
        end.fetch("own", end.publish("own", [1, 2]), [3, 4])
        end.fetched("own")
        end.publish("unread", [5])
        disturb()
        end.fetch("under way", handle, [6, 7])
        end.close()


def altered(handle: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The handle with each of its texts, however deep, changed in one character."""
    for key, value in handle.items():
        if isinstance(value, dict):
            yield from (handle | {key: inner} for inner in altered(value))
        elif isinstance(value, str) and value:
            for at in {0, len(value) // 2, len(value) - 1}:
                yield handle | {key: value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]}


def possessions() -> Counter[str]:
    """What this process holds of the operating system."""
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [fields[5] for fields in maps if len(fields) == 6 and fields[5].startswith(("/dev/shm", "/memfd"))]
    return Counter(
        [
            *(f"thread {thread.name}" for thread in threading.enumerate()),
            *(f"file {name.split(':')[0]}" for name in files),
            *(f"mapping {name}" for name in mapped),
            *(f"shared memory {name}" for name in os.listdir("/dev/shm")),
        ]
    )


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


__all__ = ["KVConnectorConformance"]
