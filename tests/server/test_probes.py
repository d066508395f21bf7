"""What probes and balancers learn."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from engine.messages import Phase
from engine.server.liveness import Liveness
from engine.server.startup import Startup


def test_a_core_that_steps_lives_however_long_requests_wait() -> None:
    liveness = Liveness(patience=10)
    assert all(liveness.complaint(steps, 5, float(steps)) is None for steps in range(0, 1000, 9))


def test_an_idle_core_lives_without_steps() -> None:
    liveness = Liveness(patience=10)
    assert all(liveness.complaint(7, 0, float(at)) is None for at in range(0, 1000, 50))
    assert liveness.complaint(7, 1, 1000.0) is None  # work has just come


def test_steps_that_stop_while_work_waits_are_a_stall() -> None:
    liveness = Liveness(patience=10)
    assert liveness.complaint(7, 2, 0.0) is None
    assert liveness.complaint(7, 2, 9.0) is None
    said = liveness.complaint(7, 3, 10.0)
    assert said == "for 10 s the engine core has done no step while 3 requests wait"
    assert liveness.complaint(8, 3, 11.0) is None  # it goes on after all
    assert liveness.complaint(8, 3, 20.0) is None
    assert liveness.complaint(8, 3, 21.0) is not None


def test_a_core_that_does_not_answer_is_a_stall_though_nothing_waits() -> None:
    liveness = Liveness(patience=10)
    assert liveness.complaint(7, 0, 0.0) is None
    assert liveness.complaint(None, 0, 5.0) is None
    assert liveness.complaint(None, 0, 14.0) is None
    assert liveness.complaint(None, 0, 15.0) == "for 10 s the engine core does not answer"
    assert liveness.complaint(7, 0, 16.0) is None


def test_live_fails_when_steps_stop_while_requests_wait(serving: Any) -> None:
    live = serving(overrides=("server.stall_seconds=0.05",))
    live.core.waiting = 2  # and its steps stay 0
    assert live.http.get("/health/live").status_code == 200
    time.sleep(0.1)
    response = live.http.get("/health/live")
    assert response.status_code == 503
    assert "has done no step while 2 requests wait" in response.json()["status"]
    live.core.waiting = 0
    assert live.http.get("/health/live").json() == {"status": "live"}


def test_live_fails_when_the_core_hangs(serving: Any) -> None:
    live = serving(overrides=("server.stall_seconds=0.05",))

    async def hang(verb: str, **arguments: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    live.core.control = hang
    assert live.http.get("/health/live").status_code == 200
    assert live.http.get("/health/live").status_code == 503
    assert live.http.get("/metrics").status_code == 200  # without the core's numbers


def test_the_start_is_followed_with_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.server.startup.time.monotonic", lambda: now[0])
    startup = Startup()
    startup.observe(Phase("composing", 0.0), ready=False)
    assert startup.remaining() is None
    now[0] = 102.0
    startup.observe(Phase("loading weights", 0.0), ready=False)
    now[0] = 112.0
    startup.observe(Phase("loading weights", 0.25), ready=False)
    assert startup.remaining() == pytest.approx(30.0)
    now[0] = 150.0
    startup.observe(Phase("ready", 1.0), ready=True)
    now[0] = 900.0
    assert startup.as_dict() == {
        "elapsed_seconds": 50.0,
        "estimate_seconds": 0.0,
        "phases": {"starting": 0.0, "composing": 2.0, "loading weights": 48.0},
    }


def test_the_startup_route(serving: Any) -> None:
    live = serving()
    ready, live.core.ready = live.core.ready, None
    live.core.phase = Phase("loading weights", 0.5, "15 of 30")
    response = live.http.get("/health/startup")
    assert response.status_code == 503
    found = response.json()
    assert (found["status"], found["phase"], found["progress"]) == ("loading", "loading weights", 0.5)
    assert found["estimate_seconds"] >= 0
    live.core.ready, live.core.phase = ready, Phase("ready", 1.0)
    response = live.http.get("/health/startup")
    assert response.status_code == 200
    assert "loading weights" in response.json()["phases"]


def test_a_long_start_says_when_to_come_back(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = serving()
    live.core.ready, live.core.phase = None, Phase("loading weights", 0.25)
    monkeypatch.setattr(live.state.startup, "remaining", lambda: 41.2)
    assert live.complete().headers["retry-after"] == "42"


def test_load_is_what_a_balancer_weighs(serving: Any) -> None:
    live = serving()
    live.core.running, live.core.waiting = 3, 2
    found = live.http.get("/load").json()
    assert found == {
        "server_load": 0,
        "running": 3,
        "waiting": 2,
        "max_running": 4,
        "max_waiting": 8,
        "kv_cache_usage": 0.0,
        "requests_per_second": None,
        "draining": False,
        "prefill": {"points": [], "age": None},
        "fetch": {"points": [], "age": None, "token_bytes": 0},
    }
