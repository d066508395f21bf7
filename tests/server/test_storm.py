"""Clients that come and go in every rude way; `benchmarks/http/storm.py` does the same to a whole engine."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Ready
from engine.testing.client import say

STORM = Path(__file__).parents[2] / "benchmarks" / "http" / "storm.py"


@pytest.fixture
def storming() -> Any:
    """The module that storms."""
    spec = importlib.util.spec_from_file_location("storm", STORM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["storm"] = module
    spec.loader.exec_module(module)
    return module


def test_nothing_stays_of_clients_that_come_and_go(serving: Any, storming: Any, caplog: Any) -> None:
    live = serving(say(list(b"words ")))
    live.core.ready = Ready(2048, 512, 16, 64, 64, {})
    before = live.call(lambda: len(asyncio.all_tasks()))
    with storming.Neighbour(live.port, {"prompt": "abc", "max_tokens": 60}) as neighbour:
        storming.storm(live.port, 150, 16, 1)
    assert neighbour.answers == {"words " * 10}
    live.until(lambda: not live.state.active and live.core.running == 0)
    live.until(lambda: not live.server.server_state.tasks and not live.server.server_state.connections)
    assert live.call(lambda: len(asyncio.all_tasks())) == before
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(live.core.calls) > 50 + neighbour.asked, "too few visits reached the core"
    assert live.core.aborted, "none of them left in the middle"
