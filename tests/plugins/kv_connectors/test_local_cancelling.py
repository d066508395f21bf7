"""The consumer's end: slices, cancelling at every moment, closing, and its own defects."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.plugins.kv_connectors import local
from engine.plugins.kv_connectors.local import transport
from engine.specs.kv_connector import EventKind, Role, TransferEvent
from engine.testing.kv_end import PATIENCE, End, EndSpec, read
from engine.transport.frames import Ack, Cancel, Done, Open, Renew
from engine.transport.grid import Grid

SPEC = EndSpec(module=local.__name__, offer="local", options="{}", role=Role.CONSUMER, engine_id="engine-c")


def failure(end: End, request_id: str = "r") -> str:
    event = end.fetched(request_id)
    assert event.kind is EventKind.FETCH_FAILED
    return event.reason


def test_pages_outside_the_pool_and_second_fetches_are_refused(end: End, impostor: Any) -> None:
    with pytest.raises(ValueError, match="no page 64"):
        end.fetch("r", impostor.handle(), [64])
    end.fetch("r", impostor.handle(), [1])
    with pytest.raises(ValueError, match="'r' is being fetched already"):
        end.fetch("r", impostor.handle(), [1])


def test_long_fetches_are_copied_in_slices_and_renewed(impostor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "COPY_BYTES", 1)
    end = End(SPEC)
    pages = list(range(64))
    end.fetch("r", impostor.handle(num_tokens=256), pages)
    channel = impostor.accept()
    impostor.send(impostor.grant(pages, digests=impostor.grid.digests(pages), lease_seconds=0.0))
    heard: list[object] = []
    while not heard or heard[-1] != Done():
        heard += channel.receive()
    assert Renew() in heard
    channel.send(Ack())
    assert end.fetched("r").kind is EventKind.FETCHED
    assert end.read(pages) == read(impostor.pool, pages)
    end.close()


def test_cancel_between_slices_stops_the_writing(impostor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is held in its first slice, cancelled, and let go: no later page is written."""
    monkeypatch.setattr(transport, "COPY_BYTES", 1)
    copying, go = threading.Event(), threading.Event()
    copy = Grid.copy

    def gated(self: Grid, *args: Any) -> list[int]:
        copying.set()
        go.wait(PATIENCE)
        return copy(self, *args)

    monkeypatch.setattr(Grid, "copy", gated)
    end = End(SPEC)
    before = end.read([2])
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    impostor.send(impostor.grant())
    assert copying.wait(PATIENCE)
    end.cancel("r")
    assert end.take() == []  # still writing, so not ended
    go.set()
    assert failure(end) == "cancelled"
    assert end.read([2]) == before
    assert impostor.hear_last() == Cancel("cancelled")
    end.close()


def test_cancel_before_the_connection_still_tells_the_producer(end: End, impostor: Any) -> None:
    for i in range(30):  # whether the thread was first or the cancel
        end.fetch(f"r{i}", impostor.handle(), [1, 2])
        end.cancel(f"r{i}")
        assert failure(end, f"r{i}") == "cancelled"
        impostor.accept()
        assert impostor.hear() == Open("secret", 0, 2, 4)
        assert impostor.hear() == Cancel("cancelled")
        impostor.hang_up()


def test_cancel_after_the_end_was_reached_but_not_polled(end: End, impostor: Any) -> None:
    end.fetch("r", impostor.handle(), [1, 2])
    channel = impostor.accept()
    impostor.send(impostor.grant())
    assert impostor.hear_last() == Done()
    channel.send(Ack())
    assert end._woken.wait(PATIENCE)
    end.cancel("r")
    assert end.take() == [TransferEvent(EventKind.FETCH_FAILED, "r", "cancelled")]
    end.cancel("r")
    end.cancel("never heard of")
    assert end.take() == []


def test_close_fails_what_is_under_way(impostor: Any) -> None:
    end = End(SPEC)
    end.fetch("r", impostor.handle(), [1, 2])
    end.close()
    assert end.take() == [TransferEvent(EventKind.FETCH_FAILED, "r", "the engine stops")]


def test_a_defect_fails_this_fetch_and_all_later_ones(
    end: End, impostor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Grid, "copy", lambda self, *args: 1 / 0)
    end.fetch("r", impostor.handle(), [1, 2])
    impostor.accept()
    impostor.send(impostor.grant())
    assert "ZeroDivisionError" in failure(end)
    assert "ends by a defect" in caplog.text
    end.fetch("s", impostor.handle(), [1, 2])
    assert "ZeroDivisionError" in failure(end, "s")
