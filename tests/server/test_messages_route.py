"""POST /v1/messages: Anthropic's blocks in, blocks out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from engine.messages import FinishReason, Output
from engine.testing.client import Call, say
from engine.testing.tokenizer import EOS

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
THOUGHT_AND_CALLS = (
    "<think>hm, rain?</think>I look. "
    '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
)


def ask(live: Any, **fields: Any) -> Any:
    return live.http.post("/v1/messages", json={"model": "tiny", "max_tokens": 1000, "messages": HI, **fields})


def message(live: Any, **fields: Any) -> dict[str, Any]:
    """A finished message, checked against the types of Anthropic's client."""
    answer = ask(live, **fields)
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json())
    return dict(answer.json())


def streamed(live: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, checked; their names stand beside the data."""
    answer = ask(live, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        events.append(event)
    return events


def refusal(answer: Any, status: int = 400) -> dict[str, Any]:
    """The error of a refused request, checked for Anthropic's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return dict(body["error"])


def prompt(live: Any) -> str:
    return bytes(live.core.calls[-1].prompt).decode()


def test_text(live: Any) -> None:
    made = message(live, system="Be kind.")
    assert made["content"] == [{"type": "text", "text": "hello world"}]
    assert (made["role"], made["stop_reason"], made["stop_sequence"]) == ("assistant", "end_turn", None)
    assert made["usage"]["output_tokens"] == 12
    assert prompt(live) == "<system>Be kind.<user>hi<assistant>"


def test_the_events_of_a_text_come_in_order(live: Any) -> None:
    events = streamed(live, max_tokens=2)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_thoughts_and_calls_are_blocks(saying: Callable[..., Any], size: int) -> None:
    live = saying(THOUGHT_AND_CALLS, size)
    made = message(live, tools=[WEATHER])
    thought, text, first, second = made["content"]
    assert thought == {"type": "thinking", "thinking": "hm, rain?", "signature": ""}
    assert text["text"].strip() == "I look."
    assert [(call["name"], call["input"]) for call in (first, second)] == [
        ("weather", {"city": "Köln"}),
        ("weather", {"city": "Rom"}),
    ]
    assert made["stop_reason"] == "tool_use"
    events = streamed(live, tools=[WEATHER])
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    parts = [""] * 4
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            parts[event["index"]] += delta.get("text", delta.get("thinking", delta.get("partial_json")))
    assert parts[:2] == [thought["thinking"], text["text"]]
    assert [json.loads(part) for part in parts[2:]] == [first["input"], second["input"]]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_conversation_with_tools_goes_back(saying: Callable[..., Any]) -> None:
    live = saying(THOUGHT_AND_CALLS)
    blocks = message(live, tools=[WEATHER])["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "sun"},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
    ]
    history = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    message(live, tools=[WEATHER], messages=history)
    text = prompt(live).replace("\n", "")
    assert text.startswith('<user>hi<assistant>I look.[{"id": "call_')
    assert "<tool>sun<tool>rain<user>So?" in text
    assert text.count('"name": "weather", "arguments": {"city": ') == 2


def test_a_message_of_the_assistant_at_the_end_is_continued(live: Any) -> None:
    message(live, messages=[*HI, {"role": "assistant", "content": "hel"}])
    assert prompt(live) == "<user>hi<assistant>hel"


def test_a_stop_sequence_is_named(live: Any) -> None:
    made = message(live, stop_sequences=["x", "wor"])
    assert made["content"] == [{"type": "text", "text": "hello "}]
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "wor")


def test_cached_tokens_are_counted_apart(serving: Callable[..., Any]) -> None:
    live = serving(lambda call: [Output("", token_ids=[EOS], finish_reason=FinishReason.STOP, cached_tokens=16)])
    usage = message(live)["usage"]
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] == len(live.core.calls[0].prompt) - 16
    start = streamed(live)[0]
    assert start["message"]["usage"]["cache_read_input_tokens"] == 16


def test_fields_that_mean_nothing_here_are_named(serving: Callable[..., Any]) -> None:
    assert ask(serving(), metadata={"user_id": "x"}).headers["X-Engine-Ignored-Fields"] == "metadata"
    strict = serving(overrides=("server.strict=true",))
    assert "no field 'metadata'" in refusal(ask(strict, metadata={}))["message"]


def test_fields_reach_the_core(live: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    message(live, top_k=5, temperature=0.5, top_p=0.5, max_tokens=3, output_config={"format": form})
    params = live.core.calls[-1].params
    assert (params.top_k, params.temperature, params.top_p, params.max_tokens) == (5, 0.5, 0.5, 3)
    assert json.loads(params.structured.value) == schema


def test_a_forced_call_ends_with_tool_use(serving: Callable[..., Any]) -> None:
    live = serving(say(list(b'{"city": "Rom"}'), eos=EOS))
    made = message(live, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    (block,) = made["content"]
    assert (block["name"], block["input"]) == ("weather", {"city": "Rom"})
    assert made["stop_reason"] == "tool_use"
    assert live.core.calls[-1].params.structured.kind == "json_schema"


def test_a_call_that_was_cut_short_keeps_its_text(serving: Callable[..., Any]) -> None:
    live = serving(say(list(b'{"city": "Rom"}'), eos=EOS))
    made = message(live, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=8)
    assert made["stop_reason"] == "max_tokens"
    assert made["content"][0]["input"] == {"INVALID_JSON": '{"city":'}


@pytest.mark.parametrize(("thinking", "value"), [("enabled", "True"), ("disabled", "False"), ("adaptive", "")])
def test_thinking_is_told_to_the_template(serving: Callable[..., Any], thinking: str, value: str) -> None:
    live = serving(overrides=('model.chat_template="{{ enable_thinking }}|{{ messages[0].content }}"',))
    message(live, thinking={"type": thinking, "budget_tokens": 1024})
    assert prompt(live) == f"{value}|hi"


def test_tokens_are_counted(live: Any) -> None:
    fields = {"messages": HI, "system": [{"type": "text", "text": "Be kind."}], "tools": [WEATHER]}
    answer = live.http.post("/v1/messages/count_tokens", json={"model": "tiny", **fields})
    assert answer.status_code == 200
    assert message(live, **fields)["usage"]["input_tokens"] == answer.json()["input_tokens"]
    assert set(answer.json()) == {"input_tokens"}


def test_errors_have_the_shape_of_the_api_whoever_refuses(serving: Callable[..., Any]) -> None:
    live = serving(overrides=("server.api_keys=[secret]", "server.max_body=1KB"))
    assert refusal(ask(live), 401)["type"] == "authentication_error"
    live.http.headers["x-api-key"] = "secret"
    assert message(live)["stop_reason"] == "end_turn"
    assert refusal(ask(live, model="other"), 404)["type"] == "not_found_error"
    assert refusal(ask(live, metadata={"x": "y" * 2000}), 413)["type"] == "request_too_large"
    assert refusal(live.http.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert refusal(live.http.post("/v1/messages/count_tokens", content=b"{"))["type"] == "invalid_request_error"
    assert "error" in live.http.get("/v1/messagesx").json()


def test_failures_have_the_shape_of_the_api(serving: Callable[..., Any]) -> None:
    full = serving(lambda call: [Output("", finish_reason=FinishReason.ERROR, error="the queue is full", refused=True)])
    assert refusal(ask(full, stream=True), 429) == {"type": "rate_limit_error", "message": "the queue is full"}
    full.call(lambda: setattr(full.state, "draining", True))
    assert refusal(ask(full), 503)["type"] == "overloaded_error"
    full.call(lambda: setattr(full.state, "draining", False))

    def broken(call: Call) -> list[Output]:
        return [Output("", token_ids=[97]), Output("", finish_reason=FinishReason.ERROR, error="the step failed")]

    events = streamed(serving(broken))
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the step failed"}}


def test_a_fault_of_the_server_has_the_shape_of_the_api(serving: Callable[..., Any]) -> None:
    live = serving(lambda call: [None])  # no output at all
    assert refusal(ask(live), 500) == {"type": "api_error", "message": "the server failed on this request"}


@pytest.fixture(scope="module")
def refusing(start_server: Any) -> Iterator[Any]:
    """One server for all mistakes, none of which may reach its core."""
    with start_server() as live:
        yield live
        assert live.core.calls == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role must be 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content must be a string or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "must be text or tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a string"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "must be text, thinking or tool_use"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools that a server runs do not exist here"),
        ({"tools": [{"name": ""}]}, "name must be a non-empty string"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type must be auto, any, tool or none"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, "names 'f'"),
        ({"thinking": {"type": "x"}}, "thinking.type must be"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format must have"),
        ({"max_tokens": "x"}, "max_tokens must be an integer"),
        ({"temperature": -1}, "temperature must be between"),
    ],
)
def test_mistakes_are_named(refusing: Any, fields: dict[str, Any], words: str) -> None:
    said = refusal(ask(refusing, **fields))["message"]
    assert re.search(words, said), said
