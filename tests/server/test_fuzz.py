"""Nearly right requests to every route, from a seed; `benchmarks/http/fuzz.py` asks the same of a whole engine."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Ready
from engine.testing.client import say
from engine.testing.tokenizer import EOS

REQUESTS = Path(__file__).parents[2] / "benchmarks" / "http" / "requests_at_random.py"
ADMIN = 'server.api_keys=[{"key": "k", "scopes": ["infer", "metrics", "admin"]}]'


@pytest.fixture(scope="module")
def at_random() -> Any:
    """The generator of the requests."""
    spec = importlib.util.spec_from_file_location("requests_at_random", REQUESTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["requests_at_random"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module.requests_at_random


@pytest.mark.parametrize(("admin", "count"), [(False, 1000), (True, 100)])
def test_no_request_is_a_fault_of_ours(serving: Any, at_random: Any, admin: bool, count: int) -> None:
    live = serving(say(list(b'{"a": 1} hello'), eos=EOS, size=3), (ADMIN,))
    live.core.ready = Ready(512, 512, 16, 64, 64, {})
    live.http.headers["authorization"] = "Bearer k"
    statuses: Counter[int] = Counter()
    for asked in at_random(7, count, admin=admin):
        headers = {name: value.encode() for name, value in asked.headers.items()}
        answer = live.http.request(asked.method, asked.path, content=asked.body or None, headers=headers)
        assert answer.status_code < 500, (asked, answer.text)
        assert '"type":"server_error"' not in answer.text, asked  # within a stream
        statuses[answer.status_code] += 1
        live.state.draining = False
    assert min(statuses[200], statuses[400]) > count / 10, statuses
    live.until(lambda: not live.state.active and live.core.running == 0 and not live.core.waiting)
    assert live.chat().status_code == 200


def test_the_same_seed_asks_the_same(at_random: Any) -> None:
    assert list(at_random(3, 50)) == list(at_random(3, 50))
    assert list(at_random(3, 50)) != list(at_random(4, 50))
