"""What a key changes below the door: cached prefixes, shares, rates; and when a refused request should come back."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import Any

import pytest

from engine.config.load import load_config
from engine.errors import EngineError
from engine.messages import FinishReason, Output
from engine.registry import Registry
from engine.server.limits import build_limiter
from engine.server.pace import Pace

KEYS = (
    "server.api_keys=[{key: a, name: alice, cache_group: team}, {key: b, name: bob, cache_group: team, weight: 3},"
    " {key: c, name: carol}, {key: d, name: dave}]",
)


def ask(live: Any, key: str, prompt: str = "abc", **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **fields}
    return live.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def limited(serving: Any, limits: str, **fields: Any) -> Any:
    live = serving(overrides=(f"server.api_keys=[{{key: k, name: kim, {limits}}}, free]",), **fields)
    live.state.limiter = build_limiter(live.state.config, Registry.discover())
    return live


def test_keys_find_the_prefixes_of_their_group_only(serving: Any) -> None:
    live = serving(overrides=KEYS)
    for key in "abcd":
        assert ask(live, key).status_code == 200
        assert ask(live, key, cache_salt="mine").status_code == 200
    plain, salted = live.core.calls[::2], live.core.calls[1::2]
    a, b, c, d = (call.cache_salt for call in plain)
    assert a == b
    assert len({a, c, d, *(call.cache_salt for call in salted)}) == 6
    assert "" not in {a, c, d}
    assert not any(text in call.cache_salt for call in live.core.calls for text in ("alice", "carol"))


def test_a_salt_does_not_lead_into_the_cache_of_another_key(serving: Any) -> None:
    live = serving(overrides=KEYS)
    ask(live, "a")
    stolen = live.core.calls[0].cache_salt
    ask(live, "c", cache_salt=stolen)
    ask(live, "c", cache_salt=f"\0{stolen}")
    assert stolen not in {call.cache_salt for call in live.core.calls[1:]}


def test_without_keys_the_salt_is_the_clients(live: Any) -> None:
    live.complete(cache_salt="x")
    live.complete()
    assert [call.cache_salt for call in live.core.calls] == ["x", ""]


def test_tenant_and_weight_reach_the_core(serving: Any) -> None:
    live = serving(overrides=KEYS)
    ask(live, "b", n=2)
    ask(live, "d")
    assert [(call.tenant, call.weight) for call in live.core.calls] == [("bob", 3.0)] * 2 + [("dave", 1.0)]


def test_a_rate_of_requests(serving: Any) -> None:
    live = limited(serving, "requests_per_minute: 2")
    for left in ("1", "0"):
        response = ask(live, "k")
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == left
        assert "x-ratelimit-limit-tokens" not in response.headers
    refused = ask(live, "k")
    error = live.error(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "'kim' has used up its rate of 2 requests a minute" in error["message"]
    assert 29 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(live.core.calls) == 2
    assert ask(live, "free").status_code == 200  # the others go on


@pytest.mark.parametrize("stream", [False, True])
def test_a_rate_of_tokens_counts_prompt_and_answer(serving: Any, stream: bool) -> None:
    live = limited(serving, "tokens_per_minute: 60")
    response = ask(live, "k", prompt="x" * 20, max_tokens=11, stream=stream, n=2)
    assert response.headers["x-ratelimit-remaining-tokens"] == "40"  # the prompt of both choices counts once
    refused = ask(live, "k", prompt="x" * 30)  # 60 - 20 - 2 * 11 leaves 18
    assert refused.status_code == 429
    assert 11 <= int(refused.headers["retry-after"]) <= 12
    assert ask(live, "k", prompt="x" * 15).status_code == 200


def test_no_limiter_is_built_when_no_key_has_a_limit() -> None:
    config = load_config(None, KEYS).config
    assert build_limiter(config, Registry.discover()) is None


def test_a_limiter_that_is_not_installed_is_named() -> None:
    key = "server.api_keys=[{key: k, requests_per_minute: 1}]"
    with pytest.raises(EngineError, match="no rate limiter is installed"):
        build_limiter(load_config(None, [key]).config, Registry.of({}))
    with pytest.raises(EngineError, match="nosuch"):
        build_limiter(load_config(None, [key, "server.rate_limit=nosuch"]).config, Registry.discover())


def test_a_full_queue_says_when_half_of_it_will_be_gone(serving: Any) -> None:
    live = serving(lambda call: [Output("", finish_reason=FinishReason.ERROR, error="the queue is full", refused=True)])
    assert live.complete().headers["retry-after"] == "1"  # nothing is known yet

    def busy() -> None:
        now = asyncio.get_running_loop().time()  # the monotonic clock
        for i in range(21):
            live.state.pace.finished(now - 10 + i / 2)
        live.core.waiting = 40

    live.call(busy)
    response = live.complete()
    assert live.error(response, 429)["code"] == "queue_full"
    assert 9 <= int(response.headers["retry-after"]) <= 10


def test_the_pace_stays_within_reason() -> None:
    pace = Pace()
    assert pace.wait(1000, 5.0) == 1
    pace.finished(0.0)
    pace.finished(1.0)
    assert pace.wait(1, 1.0) == 1
    assert pace.wait(10, 1.0) == 5
    assert pace.wait(10**9, 1.0) == 120
    assert pace.wait(4, 20.0) == 40  # and slows down while nothing finishes


def test_a_key_may_have_so_many_requests_under_way(serving: Any) -> None:
    live = serving(overrides=("server.api_keys=[{key: k, name: kim, concurrent_requests: 2}, free]",))
    live.call(live.core.gate.clear)
    threads = [Thread(target=ask, args=(live, "k")) for _ in range(2)]
    for thread in threads:
        thread.start()
    live.until(lambda: len(live.core.calls) == 2)
    refused = ask(live, "k")
    error = live.error(refused, 429)
    assert error["code"] == "concurrency_limit_exceeded"
    assert "'kim' may have 2 requests answered at once" in error["message"]
    assert refused.headers["retry-after"] == "1"
    live.call(live.core.gate.set)
    for thread in threads:
        thread.join(20)
    live.until(lambda: not live.state.active)
    assert ask(live, "k").status_code == ask(live, "free").status_code == 200
