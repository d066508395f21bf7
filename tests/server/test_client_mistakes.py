"""No mistake of a client is ever a 500, and none of its error messages shows internals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

LEAKS = ("Traceback", "pydantic", "msgspec", "site-packages", '.py"', "0x7f", "NoneType")
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def live(start_server: Callable[..., Any]) -> Iterator[Any]:
    """One server for all: a refused request leaves nothing behind."""
    with start_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_reached_the_core(live: Any) -> None:
    live.core.calls.clear()


def refused(live: Any, path: str, body: dict[str, Any], field: str | None = None) -> str:
    error = live.error(live.http.post(path, json=body))
    assert not any(leak in error["message"] for leak in LEAKS), error
    assert error["type"] == "invalid_request_error"
    if field is not None:
        assert field in (error["param"] or error["message"]), error
    assert live.core.calls == []
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": None},
        {"messages": ["hi"]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "bot", "content": "x"}]},
        {"messages": [{"role": 3, "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{}]}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "assistant"}]},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_k": -2},
        {"n": "two"},
        {"n": 0},
        {"n": 65},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"min_tokens": 10**30},
        {"max_tokens": 2, "min_tokens": 5},
        {"seed": 2**64},
        {"stop": 5},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"stop": ["a" * 5000]},
        {"stop_token_ids": [257]},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [10**30]},
        {"logit_bias": [1]},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"²": 1}},
        {"logit_bias": {"--5": 1}},
        {"logit_bias": {"999": 1}},
        {"logit_bias": {"-5": 1}},
        {"logit_bias": {"5": 1000}},
        {"logit_bias": {"5": None}},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": 3},
        {"stream": "perhaps"},
        {"stream_options": {"include_usage": True}},
        {"priority": 2**31},
        {"cache_salt": 5},
        {"kv_transfer_params": {"x": 2**70}},
        {"kv_transfer_params": {"do_remote_prefill": True, "handle": "h"}},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"kv_transfer_params": "x"},
        {"tools": {"a": 1}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "hammer", "function": {"name": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": "text"}}]},
        {"tools": [{"type": "function", "function": {"name": 5}}]},
        {"tools": [TOOL], "tool_choice": "always"},
        {"tools": [TOOL], "tool_choice": 3},
        {"tools": [TOOL], "tool_choice": {"type": "function"}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tools": [{"type": "function", "function": {"name": "x", "strict": "yes"}}]},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}}},
        {"tool_choice": "required"},
        {"response_format": "json"},
        {"response_format": {}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "string"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}},
        {"structured_outputs": {"regex": 1}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"whitespace_pattern": " "}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a", 1]}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": {}, "whitespace_pattern": 1}},
        {"structured_outputs": {"verbosity": 3}},
        {"guided_choice": []},
        {"guided_json": 5},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]},
        {"bad_words": [""]},
        {"speculation": "none"},
        {"speculation": {"method": 1}},
        {"speculation": {"max_tokens": -1}},
        {"speculation": {"tokens": 2}},
        {"speculation": {"max_tokens": 10**30}},
        {"bad_words": ["x"] * 129},
        {"bad_words": "x"},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 10**6},
        {"prompt_logprobs": -1},
        {"stream": True, "prompt_logprobs": 1},
        {"modalities": ["audio"]},
        {"chat_template": "{{ 1 }}"},
        {"echo": True},
        {"continue_final_message": True},
        {"add_generation_prompt": True, "continue_final_message": True},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
def test_chat_refuses(live: Any, fields: dict[str, Any]) -> None:
    refused(live, "/v1/chat/completions", {"messages": HI, **fields}, next(reversed(fields)).split("_")[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": ["a", 5]},
        {"prompt": [1.5]},
        {"prompt": [True, False]},
        {"prompt": [["a"], ["b"]]},
        {"prompt": [[1], "a"]},
        {"prompt": [257]},
        {"prompt": [-1]},
        {"prompt": [2**70]},
        {"prompt": [[1]] * 13},
        {"suffix": "x"},
        {"best_of": 0},
        {"best_of": 65},
        {"best_of": 2, "n": 3},
        {"best_of": 2, "stream": True},
        {"prompt_logprobs": 1, "stream": True},
        {"truncate_prompt_tokens": 0},
        {"logprobs": True},
        {"logprobs": 101},
        {"logprobs": "x"},
        {"response_format": {"type": "json_schema"}},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
def test_completions_refuse(live: Any, fields: dict[str, Any]) -> None:
    refused(live, "/v1/completions", {"prompt": "abc", **fields}, next(iter(fields)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{not json",
        b"[1,2]",
        b'"text"',
        b"null",
        b"{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"1" * 6000 + b"}",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [' + b'{"content":' * 5000 + b"1" + b"}" * 5000 + b"]}",
    ],
    ids=lambda body: repr(body[:24]) if isinstance(body, bytes) else body,
)
def test_bodies_that_are_no_request(live: Any, path: str, body: bytes) -> None:
    error = live.error(live.http.post(path, content=body))
    assert not any(leak in error["message"] for leak in LEAKS), error


def test_the_sentence_names_field_expectation_and_find(live: Any) -> None:
    assert refused(live, "/v1/completions", {"prompt": "a", "n": "x"}) == "n must be an integer, not a string"
    assert refused(live, "/v1/completions", {}) == "prompt is required"
    messages = [*HI, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    text = refused(live, "/v1/chat/completions", {"messages": messages}, "messages[1].content[0]")
    assert "image_url" in text
    assert "text only" in text


def test_a_prompt_that_is_too_long_is_told_both_numbers(live: Any) -> None:
    for prompt in ("x" * 256, [1] * 256):
        assert live.error(live.complete(prompt))["message"].startswith(
            "the prompt has 256 tokens, but the maximum context length is 256 tokens"
        )
    assert live.complete("x" * 255, max_tokens=9).json()["usage"]["completion_tokens"] == 1


def test_more_answers_than_can_be_queued_are_refused_before_they_are_tokenized(live: Any) -> None:
    message = live.error(live.complete(["x" * 1000] * 7, n=2))["message"]
    assert message == "prompt and n ask for 14 answers at once, but at most 12 can be queued here"


def test_long_texts_are_counted_too(live: Any) -> None:
    assert "9000 tokens" in live.error(live.complete("x" * 9000))["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_another_model_is_a_404(live: Any, stream: bool) -> None:
    error = live.error(live.chat(model="gpt-9", stream=stream), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-9" in error["message"]
    assert "tiny" in error["message"]


def test_an_endless_model_name_is_not_repeated(live: Any) -> None:
    assert len(live.error(live.chat(model="x" * 100_000), 404)["message"]) <= 501


CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 3,
    "n": 2,
    "max_tokens": 3,
    "stop": ["x"],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "logit_bias": {"5": 1},
    "stop_token_ids": [4],
    "kv_transfer_params": {"do_remote_decode": False, "handle": "h"},
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "stream": True,
    "chat_template_kwargs": {"a": 1},
    "documents": [{"a": 1}],
    "priority": 1,
    "cache_salt": "s",
}
COMPLETION = {
    "model": "tiny",
    "prompt": [[1, 2], [3]],
    "echo": True,
    "logprobs": 1,
    "max_tokens": 2,
    "stop": "x",
    "n": 1,
    "min_tokens": 1,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [1, 2],
}
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    "",
    "x",
    "\0",
    [],
    [[]],
    [None],
    {},
    {"": None},
    {"self": 1, "messages": 2},
    [{}],
]


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one thing in it replaced, dropped or added, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = {**value, key: mutated(value[key], rng)}
        if rng.random() < 0.1:
            del changed[key]
        if rng.random() < 0.1:
            changed[rng.choice(["self", "role", "type", "new"])] = rng.choice(ODD)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng), *value[i + 1 :]]
    return rng.choice(ODD)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_no_mutation_of_a_request_is_a_500(live: Any, path: str, body: dict[str, Any]) -> None:
    assert live.http.post(path, json=body).status_code == 200
    rng = random.Random(5)
    statuses = set()
    for _ in range(600):
        sent = mutated(body, rng)
        if rng.random() < 0.3 and isinstance(sent, dict):
            sent = mutated(sent, rng)
        response = live.http.post(path, json=sent)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (response.text, sent)
        if response.status_code == 200:
            assert '"error"' not in response.text, (response.text, sent)
        else:
            assert not any(leak in live.error(response, response.status_code)["message"] for leak in LEAKS)
    assert statuses >= {200, 400}
