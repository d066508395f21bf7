"""Conformance of lifecycle observers: they take whatever comes, in whatever pieces."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

import pytest

from engine.specs.observer import Observer, RequestEvent, Stage
from engine.testing.offer import OfferConformance


def event(stage: Stage, name: str = "a", time: float = 0.0, output_tokens: int = 0, reason: str = "") -> RequestEvent:
    """An event of a request with 100 prompt tokens, 64 of them cached."""
    return RequestEvent(stage, name, time, 100, output_tokens, 64, reason)


def life(name: str, start: float = 0.0) -> list[RequestEvent]:
    """Half a second in the queue, one of prefill, two of decode with a preemption in it."""
    return [
        event(Stage.QUEUED, name, start),
        event(Stage.ADMITTED, name, start + 0.5),
        event(Stage.FIRST_TOKEN, name, start + 1.5, 1),
        event(Stage.PREEMPTED, name, start + 2.0, 5),
        event(Stage.FINISHED, name, start + 3.5, 9, "stop"),
    ]


class ObserverConformance(OfferConformance):
    """Subclasses set `offer` and `module`."""

    patience: ClassVar[float] = 20.0
    """Seconds after which an observer that has not returned is stuck; its thread would keep the engine from ending."""

    def observer(self) -> Observer:
        """An observer with the options of the suite."""
        observer = self.offer.build(self.options())
        assert isinstance(observer, Observer)
        return observer

    def deliver(self, observer: Observer, batches: Sequence[Sequence[RequestEvent]]) -> None:
        """Hand over the batches and close, on a thread as in the engine; raises what the observer raised."""
        raised: list[Exception] = []

        def run() -> None:
            try:
                for batch in batches:
                    observer.receive(batch)
                observer.close()
            except Exception as error:  # raised again below, where the test sees it
                raised.append(error)

        thread = threading.Thread(target=run, name="observer", daemon=True)
        thread.start()
        thread.join(self.patience)
        assert not thread.is_alive(), f"the observer did not return within {self.patience:g} s"
        if raised:
            raise raised[0]

    @pytest.mark.parametrize("size", [1, 2, 5, 100])
    def test_batches_of_any_size(self, size: int) -> None:
        """Ten requests, their events in turn, as one batch or many."""
        lives = [life(f"r{i}", float(i)) for i in range(10)]
        events = sorted((e for one in lives for e in one), key=lambda e: e.time)
        observer = self.observer()
        self.deliver(observer, [events[at : at + size] for at in range(0, len(events), size)])

    @pytest.mark.parametrize(
        "events",
        [
            [],
            [event(Stage.FINISHED, reason="abort")],
            [event(Stage.QUEUED), event(Stage.FINISHED, reason="abort")],
            [event(Stage.FIRST_TOKEN), event(Stage.FINISHED, reason="length")],
            [event(Stage.PREEMPTED), event(Stage.ADMITTED)],
            life("a")[:3],
            life("a") + life("a", 9.0),
        ],
        ids=["none", "only the end", "never admitted", "beginning lost", "odd order", "end lost", "an id again"],
    )
    def test_lives_with_gaps(self, events: Sequence[RequestEvent]) -> None:
        """Events are dropped when observers are slow, and requests end anywhere."""
        self.deliver(self.observer(), [events])


__all__ = ["ObserverConformance", "event", "life"]
