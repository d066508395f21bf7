"""Delivery of request events to observers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from engine.observation import MOST_FAILURES, Observation
from engine.specs.observer import Observer, RequestEvent, Stage
from engine.testing.observer import event


class Listener(Observer):
    """Keeps what it is told; waits at its gate first."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    @property
    def heard(self) -> list[str]:
        return [name for batch in self.batches for name in batch]

    def receive(self, events: Sequence[RequestEvent]) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        self.threads.add(threading.get_ident())
        self.batches.append([e.request_id for e in events])

    def close(self) -> None:
        self.closed += 1


class Failing(Listener):
    """Raises on the calls whose numbers are given, from 0 on."""

    def __init__(self, *calls: int) -> None:
        super().__init__()
        self.calls, self.called = calls, 0

    def receive(self, events: Sequence[RequestEvent]) -> None:
        self.called += 1
        if self.called - 1 in self.calls:
            raise RuntimeError("the disk is full")
        super().receive(events)


def tell_one_by_one(observation: Observation, listener: Listener, count: int) -> None:
    """Emit events so that each is a batch of its own."""
    for number in range(count):
        observation.emit(event(Stage.QUEUED, f"r{number}"))
        for _ in range(3000):
            if len(listener.heard) > number:
                break
            threading.Event().wait(0.01)


def test_events_arrive_in_order_and_on_another_thread() -> None:
    one, two = Listener(), Listener()
    observation = Observation([one, two])
    for number in range(500):
        observation.emit(event(Stage.QUEUED, f"r{number}"))
    observation.close()
    for listener in (one, two):
        assert listener.heard == [f"r{number}" for number in range(500)]
        assert threading.get_ident() not in listener.threads
        assert len(listener.threads) == listener.closed == 1


def test_what_comes_while_an_observer_is_busy_is_one_batch() -> None:
    listener = Listener()
    listener.gate.clear()
    observation = Observation([listener])
    observation.emit(event(Stage.QUEUED, "first"))
    assert listener.entered.wait(30)
    for number in range(10):
        observation.emit(event(Stage.QUEUED, f"r{number}"))
    listener.gate.set()
    observation.close()
    assert listener.batches == [["first"], [f"r{number}" for number in range(10)]]


def test_events_beyond_the_limit_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    listener.gate.clear()
    observation = Observation([listener], most_queued=4)
    observation.emit(event(Stage.QUEUED, "first"))
    assert listener.entered.wait(30)
    for number in range(10):
        observation.emit(event(Stage.QUEUED, f"r{number}"))
    assert observation.dropped == 6
    listener.gate.set()
    observation.close()
    assert listener.heard == ["first", "r0", "r1", "r2", "r3"]
    assert "6 request events were dropped" in caplog.text


def test_an_observer_that_keeps_failing_is_dropped_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    failing, listener = Failing(*range(100)), Listener()
    observation = Observation([failing, listener])
    tell_one_by_one(observation, listener, MOST_FAILURES + 3)
    observation.close()
    assert failing.called == MOST_FAILURES
    assert listener.heard == [f"r{number}" for number in range(MOST_FAILURES + 3)]
    assert "Failing failed 3 times in a row and is dropped" in caplog.text
    assert "the disk is full" in caplog.text
    assert (failing.closed, listener.closed) == (1, 1)


def test_failures_that_are_not_in_a_row_are_forgiven(caplog: pytest.LogCaptureFixture) -> None:
    failing, listener = Failing(0, 1, 3, 4), Listener()
    observation = Observation([failing, listener])
    tell_one_by_one(observation, listener, 6)
    observation.close()
    assert failing.heard == ["r2", "r5"]


def test_an_observer_that_fails_to_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Listener):
        def close(self) -> None:
            raise OSError("no space left")

    listener = Listener()
    Observation([Stuck(), listener]).close()
    assert listener.closed == 1
    assert "Stuck failed to close" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


def test_without_observers_there_is_no_thread() -> None:
    before = threading.active_count()
    observation = Observation([])
    observation.emit(event(Stage.QUEUED))
    assert threading.active_count() == before
    observation.close()


def test_close_joins_the_thread() -> None:
    before = threading.active_count()
    observation = Observation([Listener()])
    assert threading.active_count() == before + 1
    observation.close()
    assert threading.active_count() == before
