"""Prompt at one engine, answer at another: what each is asked, in every API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "prompt", "handle": {"num_tokens": 8, "via": {"local": {}}}}
CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
ASKED = [
    ("/v1/chat/completions", CHAT | {"max_completion_tokens": 20, "n": 1, "min_tokens": 2}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "hello there", "max_tokens": 20}),
    ("/v1/completions", {"prompt": [104, 105, 106], "max_tokens": 20, "stream": True}),
    ("/v1/completions", {"prompt": ["hello there"], "max_tokens": 20}),
    ("/v1/responses", {"input": "hello there", "max_output_tokens": 20}),
    ("/v1/responses", {"input": "hello there", "stream": True}),
    ("/v1/chat/completions", CHAT | {"kv_transfer_params": None, "n": None}),
    ("/v1/messages", {**CHAT, "max_tokens": 20}),
    ("/v1/messages", {**CHAT, "max_tokens": 20, "stream": True}),
]


@pytest.fixture
def pair(engines: Callable[..., Any], routing: Callable[..., Any]) -> tuple[Any, Any, Any]:
    prefill, decode = engines("prompt"), engines("answer")
    router = routing([prefill.base], [decode.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    return router, prefill, decode


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_the_decode_engine_goes_on_from_the_kv_of_the_prefill_engine(
    pair: tuple[Any, Any, Any], path: str, body: dict[str, Any]
) -> None:
    router, prefill, decode = pair
    answer = router.http.post(path, json=body, headers={"x-request-id": "my-id"})
    assert answer.status_code == 200, answer.text
    assert "answer" in answer.text.replace('"}}]}', "") or body.get("stream")
    assert answer.headers["x-request-id"] == "my-id"
    assert "x-engine-ignored-fields" not in answer.headers
    (first,), (second,) = prefill.core.calls, decode.core.calls
    assert first.prompt == second.prompt
    assert first.kv_transfer["do_remote_decode"] is True
    assert first.kv_transfer["do_remote_prefill"] is False
    assert first.params.max_tokens == 1
    assert first.params.min_tokens == 0
    assert second.kv_transfer == PARAMS
    assert second.params.max_tokens == 20 or "max_tokens" not in str(body)


WHOLE = [
    CHAT | {"n": 2},
    CHAT | {"prompt_logprobs": 1},
    {"prompt": ["one", "two"]},
    {"prompt": "one", "echo": True},
    {"prompt": "one", "best_of": 3},
]


@pytest.mark.parametrize("body", WHOLE)
def test_what_has_no_single_prompt_and_answer_stays_in_one_place(
    pair: tuple[Any, Any, Any], body: dict[str, Any]
) -> None:
    router, prefill, decode = pair
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert router.http.post(path, json=body).status_code == 200
    assert prefill.core.calls == []
    assert all(call.kv_transfer is None for call in decode.core.calls)


def test_a_client_that_hands_over_itself_is_not_helped(pair: tuple[Any, Any, Any]) -> None:
    router, prefill, decode = pair
    first = router.chat(max_tokens=1, kv_transfer_params={"do_remote_decode": True}).json()
    assert first["kv_transfer_params"] == PARAMS
    router.chat(kv_transfer_params=first["kv_transfer_params"])
    assert [call.kv_transfer for call in prefill.core.calls] == [{"do_remote_decode": True}]
    assert [call.kv_transfer for call in decode.core.calls] == [PARAMS]


def test_hand_over_by_token(pair: tuple[Any, Any, Any]) -> None:
    router, prefill, decode = pair
    token = router.chat(max_tokens=1, kv_transfer_action="export").json()["kv_transfer_token"]
    answer = router.chat(kv_transfer_action="import", kv_transfer_token=token).json()
    assert answer["choices"][0]["message"]["content"] == "answer"
    assert "kv_transfer_token" not in answer
    assert [call.kv_transfer for call in prefill.core.calls] == [{"do_remote_decode": True}]
    assert [call.kv_transfer for call in decode.core.calls] == [PARAMS]


def test_the_mistakes_of_clients_are_told_by_the_engine(pair: tuple[Any, Any, Any]) -> None:
    router, _, decode = pair
    assert router.chat(temperature="hot").json() == decode.chat(temperature="hot").json()
    for raw in (b"", b"[]", b"{}", b"nonsense", b'{"messages": 3, "n": 99999999999999999999999}'):
        answer = router.http.post("/v1/chat/completions", content=raw)
        assert answer.status_code == 400, answer.text
        assert answer.content == decode.http.post("/v1/chat/completions", content=raw).content


def test_the_body_goes_on_byte_by_byte(pair: tuple[Any, Any, Any]) -> None:
    router, _, decode = pair
    raw = b' { "messages":[{"role":"user","content":"\\u00e9"}], "seed": 7, "temperature": 1e-1}'
    assert router.http.post("/v1/chat/completions", content=raw).status_code == 200
    (call,) = decode.core.calls
    assert (call.params.seed, call.params.temperature) == (7, 0.1)
    assert "é".encode() in bytes(call.prompt)


def test_without_prefill_engines_decode_engines_do_it_alone(
    engines: Callable[..., Any], routing: Callable[..., Any]
) -> None:
    prefill, decode = engines("prompt"), engines("answer")
    router = routing([prefill.base], [decode.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    prefill.call(lambda: setattr(prefill.state, "draining", True))
    assert router.chat().json()["choices"][0]["message"]["content"] == "answer"
    router.until(lambda: not router.worker(prefill.base).usable)
    assert router.chat().json()["choices"][0]["message"]["content"] == "answer"
    assert [call.kv_transfer for call in decode.core.calls] == [None, None]
    assert router.http.get("/health/ready").status_code == 200


def test_without_decode_engines_prefill_engines_answer(
    engines: Callable[..., Any], routing: Callable[..., Any]
) -> None:
    prefill, decode = engines("prompt"), engines("answer")
    router = routing([prefill.base], [decode.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    decode.call(lambda: setattr(decode.state, "draining", True))
    assert router.chat().json()["choices"][0]["message"]["content"] == "prompt"
    assert prefill.core.calls[-1].kv_transfer is None
