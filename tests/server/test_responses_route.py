"""POST /v1/responses: items in, items out, stored and streamed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.messages import FinishReason, Output
from engine.structured import Structured
from engine.testing.client import Call

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
THOUGHT_AND_CALLS = (
    "<think>hm, rain?</think>I look. "
    '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
)


def ask(live: Any, **fields: Any) -> Any:
    return live.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})


def response(live: Any, **fields: Any) -> dict[str, Any]:
    """A finished response, checked against the types of OpenAI's client."""
    answer = ask(live, **fields)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return dict(answer.json())


def streamed(live: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, checked: their order is numbered, their names stand beside the data."""
    answer = ask(live, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, block in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


def prompt(live: Any) -> str:
    return bytes(live.core.calls[-1].prompt).decode()


def stable(item: Any) -> Any:
    """Without ids and dates, which differ from answer to answer."""
    if isinstance(item, dict):
        return {k: stable(v) for k, v in item.items() if k not in ("id", "item_id", "call_id", "created_at")}
    return [stable(value) for value in item] if isinstance(item, list) else item


def test_text(live: Any) -> None:
    made = response(live, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    (item,) = made["output"]
    assert item["content"] == [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}]
    assert (made["status"], made["error"], made["incomplete_details"]) == ("completed", None, None)
    assert (made["instructions"], made["metadata"], made["temperature"]) == ("Be kind.", {"a": "b"}, 0.5)
    assert made["usage"]["output_tokens"] == 12
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + 12
    assert prompt(live) == "<system>Be kind.<user>hi<assistant>"


def test_the_events_of_a_text_come_in_order(live: Any) -> None:
    events = streamed(live, max_output_tokens=2)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    last = events[-1]["response"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["status"] == "incomplete"
    assert events[0]["response"]["output"] == []


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_thoughts_and_calls_are_items(saying: Callable[..., Any], size: int) -> None:
    live = saying(THOUGHT_AND_CALLS, size)
    made = response(live, tools=[WEATHER])
    assert [item["type"] for item in made["output"]] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, first, second = made["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm, rain?"}]
    assert message["content"][0]["text"].strip() == "I look."
    assert [json.loads(call["arguments"])["city"] for call in (first, second)] == ["Köln", "Rom"]
    assert first["call_id"] != second["call_id"]
    assert made["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = streamed(live, tools=[WEATHER])
    assert stable(events[-1]["response"]) == stable(made)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert stable(done) == stable(made["output"])
    for kind, place in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 3)):
        pieces = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta" and e["output_index"] == place]
        (whole,) = [e for e in events if e["type"] == f"response.{kind}.done" and e["output_index"] == place]
        assert "".join(pieces) == whole.get("text", whole.get("arguments"))


def test_what_the_model_wrote_comes_back_as_one_message(saying: Callable[..., Any]) -> None:
    live = saying(THOUGHT_AND_CALLS)
    items = response(live, tools=[WEATHER], store=False)["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sun"} for call in calls]
    said = [{"role": "user", "content": "And?"}, *items, *results, {"role": "user", "content": "So?"}]
    response(live, tools=[WEATHER], input=said)
    text = prompt(live).replace("\n", "")
    assert text.startswith('<user>And?<assistant>I look.[{"id": "call_')
    assert text.count("<assistant>") == 2, "one turn of the model, and the one that begins"
    assert text.count('"name": "weather", "arguments": {"city": ') == 2
    assert "<tool>sun<tool>sun<user>So?" in text


def test_a_response_goes_on_from_a_stored_one(live: Any) -> None:
    first = response(live, instructions="Be kind.")
    second = response(live, input="more", previous_response_id=first["id"])
    assert prompt(live) == "<user>hi<assistant>hello world<user>more<assistant>"
    response(live, input=[{"role": "user", "content": "end"}], previous_response_id=second["id"])
    assert prompt(live).endswith("<user>more<assistant>hello world<user>end<assistant>")
    assert live.http.get(f"/v1/responses/{second['id']}").json() == second
    assert live.http.delete(f"/v1/responses/{second['id']}").json()["deleted"] is True
    live.error(live.http.get(f"/v1/responses/{second['id']}"), 404)
    error = live.error(ask(live, previous_response_id=second["id"]), 404)
    assert error["param"] == "previous_response_id"


def test_store_false_keeps_nothing_and_memory_is_bounded(serving: Callable[..., Any]) -> None:
    live = serving(overrides=("server.response_memory=5KB",))
    made = response(live, store=False)
    live.error(live.http.get(f"/v1/responses/{made['id']}"), 404)
    ids = [response(live)["id"] for _ in range(10)]
    kept = [name for name in ids if live.http.get(f"/v1/responses/{name}").status_code == 200]
    assert 1 < len(kept) < 6
    assert kept == ids[-len(kept) :]
    assert response(live, input="x" * 100, metadata={"a": "b" * 6000})["status"] == "completed", "too large to keep"


def test_a_key_sees_its_own_responses_only(serving: Callable[..., Any]) -> None:
    live = serving(overrides=("server.api_keys=[one, two]",))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = live.http.post("/v1/responses", json={"input": "hi"}, headers=one).json()
    path = f"/v1/responses/{made['id']}"
    assert live.http.get(path, headers=one).status_code == 200
    assert live.http.get(path, headers=two).status_code == 404
    assert live.http.delete(path, headers=two).status_code == 404
    again = {"input": "hi", "previous_response_id": made["id"]}
    assert live.http.post("/v1/responses", json=again, headers=two).status_code == 404


def test_a_response_in_the_background_is_fetched_later(live: Any) -> None:
    live.call(live.core.gate.clear)
    made = response(live, background=True)
    assert (made["status"], made["output"]) == ("in_progress", [])
    path = f"/v1/responses/{made['id']}"
    live.until(lambda: live.core.running == 1)
    assert live.http.get(path).json()["status"] == "in_progress"
    live.call(live.core.gate.set)
    live.until(lambda: not live.state.active)
    done = live.http.get(path).json()
    assert done["status"] == "completed"
    assert done["output"][0]["content"][0]["text"] == "hello world"
    assert "computed in the background" in live.error(live.http.post(f"{path}/cancel"))["message"]


def test_a_response_in_the_background_can_be_cancelled(live: Any) -> None:
    live.call(live.core.gate.clear)
    names = [response(live, background=True)["id"] for _ in range(2)]
    live.until(lambda: live.core.running == 2)
    cancelled = live.http.post(f"/v1/responses/{names[0]}/cancel").json()
    Response.model_validate(cancelled)
    assert cancelled["status"] == "cancelled"
    assert live.http.get(f"/v1/responses/{names[0]}").json() == cancelled
    assert live.http.delete(f"/v1/responses/{names[1]}").status_code == 200
    live.until(lambda: len(live.core.aborted) == 2 and not live.state.active)
    assert live.http.get(f"/v1/responses/{names[1]}").status_code == 404


def failing(call: Call) -> list[Output]:
    return [
        Output("", token_ids=list(b"half")),
        Output("", finish_reason=FinishReason.ERROR, error="the step failed"),
    ]


def test_a_failure_ends_the_stream_with_an_event(serving: Callable[..., Any]) -> None:
    live = serving(failing)
    events = streamed(live)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "the step failed"}
    assert failed["output"][0]["status"] == "incomplete"
    assert live.error(ask(live), 500)["message"] == "the step failed"
    made = response(live, background=True)
    live.until(lambda: not live.state.active)
    assert live.http.get(f"/v1/responses/{made['id']}").json()["status"] == "failed"


def test_a_refusal_is_an_error_and_no_stream(serving: Callable[..., Any]) -> None:
    live = serving(lambda call: [Output("", finish_reason=FinishReason.ERROR, error="the queue is full", refused=True)])
    assert live.error(ask(live, stream=True), 429)["code"] == "queue_full"


def test_a_client_that_hangs_up_aborts_the_request(live: Any) -> None:
    live.call(live.core.gate.clear)

    async def hang_up() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        body = b'{"input": "hi", "stream": true}'
        writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        await asyncio.to_thread(live.until, lambda: live.core.running == 1)
        writer.close()

    asyncio.run(hang_up())
    live.until(lambda: len(live.core.aborted) == 1)


def test_fields_that_mean_nothing_here_are_named(serving: Callable[..., Any]) -> None:
    assert ask(serving(), service_tier="flex").headers["X-Engine-Ignored-Fields"] == "service_tier"
    strict = serving(overrides=("server.strict=true",))
    assert strict.error(ask(strict, service_tier="flex"))["param"] == "service_tier"


def test_fields_reach_the_core(live: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response(live, text={"format": form}, top_k=5, seed=7, max_output_tokens=3, top_p=0.5, stop=["!"])
    params = live.core.calls[-1].params
    assert (params.top_k, params.seed, params.max_tokens, params.top_p, params.stop) == (5, 7, 3, 0.5, ("!",))
    assert isinstance(params.structured, Structured)
    assert json.loads(str(params.structured.value)) == schema


def test_log_probabilities_come_with_the_text(live: Any) -> None:
    made = response(live, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    scores = made["output"][0]["content"][0]["logprobs"]
    assert [score["token"] for score in scores] == list("hell")
    assert len(scores[0]["top_logprobs"]) == 2
    events = streamed(live, top_logprobs=2, max_output_tokens=4)
    assert [s for e in events if e["type"].endswith("text.delta") for s in e["logprobs"]] == scores


def test_instructions_of_several_kinds_are_one_system_message(live: Any) -> None:
    items = [
        {"role": "developer", "content": "Two."},
        {"role": "system", "content": [{"type": "input_text", "text": "Three."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ]
    response(live, instructions="One.", input=items)
    assert prompt(live) == "<system>One.\nTwo.\nThree.<user>hi<assistant>"


@pytest.fixture(scope="module")
def refusing(start_server: Any) -> Iterator[Any]:
    """One server for all mistakes, none of which may reach its core."""
    with start_server() as live:
        yield live
        assert live.core.calls == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "input must hold at least one item"),
        ({"input": [{"type": "web_search_call"}]}, r"input\[0\].type must be message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not kept"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            r"input\[0\].call_id must be a string",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, r"input\[0\].output must be"),
        ({"input": [{"role": "user"}]}, r"input\[0\].content is required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be 'function'"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "names 'f'"),
        ({"truncation": "auto"}, "truncation 'auto' is not supported"),
        ({"background": True, "store": False}, "background needs store"),
        ({"background": True, "stream": True}, "exclude each other"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema must be an object"),
        ({"temperature": -1}, "temperature must be between"),
        ({"input": 5}, "input must be"),
    ],
)
def test_mistakes_are_named(refusing: Any, fields: dict[str, Any], words: str) -> None:
    message = refusing.error(ask(refusing, **fields))["message"]
    assert re.search(words, message), message
