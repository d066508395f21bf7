from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.errors import EngineError
from engine.messages import FinishReason, Output
from engine.testing.client import Call, say

Chunks = Callable[[httpx.Response], list[dict[str, Any]]]

ENDLESS = say(list(b"ab"))


def post(live: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and keep the connection, whose answer nobody has read."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def test_a_client_that_hangs_up_within_its_body_is_no_fault_of_ours(live: Any, caplog: Any) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"pro')
        live.until(lambda: live.server.server_state.tasks)
    live.until(lambda: not live.server.server_state.tasks)
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_aborts_all_its_choices(serving: Any, stream: bool, n: int) -> None:
    live = serving(ENDLESS)
    live.call(live.core.gate.clear)
    body = {"prompt": "abc", "n": n, "stream": stream, "max_tokens": 9}
    with post(live, "/v1/completions", body):
        live.until(lambda: live.core.running == n)
    live.until(lambda: len(live.core.aborted) == n)
    live.until(lambda: not live.state.active)
    assert live.core.running == 0
    live.call(live.core.gate.set)
    assert live.complete(max_tokens=1).status_code == 200


def test_a_client_that_hangs_up_in_the_middle_of_a_stream(serving: Any) -> None:
    live = serving(ENDLESS)
    with post(live, "/v1/completions", {"prompt": "abc", "stream": True, "max_tokens": 250}) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        live.call(live.core.gate.clear)
    live.call(live.core.gate.set)
    live.until(lambda: not live.state.active)
    assert live.core.running == 0


def test_a_full_queue_is_a_plain_429_also_for_streams(serving: Any) -> None:
    full = Output("", finish_reason=FinishReason.ERROR, error="the queue is full", refused=True)
    live = serving(lambda call: [full])
    for stream in (False, True):
        response = live.complete(stream=stream)
        error = live.error(response, 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert response.headers["retry-after"] == "1"


def test_a_fault_that_only_the_core_sees_is_a_400(serving: Any) -> None:
    bad = Output("", finish_reason=FinishReason.ERROR, error="the handle is malformed", invalid=True)
    live = serving(lambda call: [bad])
    assert live.error(live.complete(stream=True))["message"] == "the handle is malformed"


def test_one_refused_choice_ends_the_others(serving: Any) -> None:
    def script(call: Call) -> list[Output]:
        if call.request_id.endswith("-1"):
            return [Output("", finish_reason=FinishReason.ERROR, error="the queue is full", refused=True)]
        return [*ENDLESS(call)]

    live = serving(script)
    live.error(live.complete(n=3, max_tokens=200), 429)
    live.until(lambda: live.core.running == 0)
    assert len(live.core.aborted) == 2


def test_an_error_before_the_first_token_is_a_500_with_its_reason(serving: Any) -> None:
    live = serving(lambda call: [Output("", finish_reason=FinishReason.ERROR, error="not finite")])
    assert live.error(live.chat(stream=True), 500)["message"] == "not finite"


def test_an_error_in_the_middle_is_the_last_event(serving: Any, chunks: Chunks) -> None:
    bad = Output("", finish_reason=FinishReason.ERROR, error="not finite")
    live = serving(lambda call: [Output("", token_ids=[97]), bad])
    response = live.complete(stream=True)
    assert response.status_code == 200
    parts = chunks(response)
    assert parts[0]["choices"][0]["text"] == "a"
    assert parts[-1]["error"]["message"] == "not finite"
    live.error(live.complete(), 500)


def test_an_engine_that_died_is_a_503(serving: Any) -> None:
    def dies(call: Call) -> list[Output]:
        raise EngineError("the core is gone")

    assert serving(dies).complete().status_code == 503
    live = serving(lambda call: [Output("", finish_reason=FinishReason.ERROR, error="x")])
    live.core.failed = "out of memory"
    assert live.error(live.complete(), 503)["type"] == "service_unavailable_error"


def test_an_abort_by_the_core_is_a_503(serving: Any) -> None:
    live = serving(lambda call: [Output("", finish_reason=FinishReason.ABORT)])
    live.error(live.complete(), 503)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_a_500_that_shows_nothing(serving: Any, stream: bool, chunks: Chunks) -> None:
    def faulty(call: Call) -> list[Output]:
        raise KeyError("secret")

    error = serving(faulty).complete(stream=stream)
    assert error.status_code == 500
    assert "secret" not in error.text
    live = serving(lambda call: [Output("", token_ids=[97]), Output("", token_ids=[None])])  # type: ignore[list-item]
    response = live.complete(stream=stream)
    text = chunks(response)[-1]["error"]["message"] if stream else live.error(response, 500)["message"]
    assert text == "the server failed on this request"
