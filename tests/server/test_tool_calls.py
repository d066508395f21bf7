"""Calls of functions in chat answers: their shape, whole and streamed, and what makes a model call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.messages import Ready
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.specs.tool_parser import ModelText
from engine.testing.client import say
from engine.testing.tokenizer import EOS

Chunks = Callable[[httpx.Response], list[dict[str, Any]]]
Serve = Callable[..., Any]

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
MAIL = {"type": "function", "function": {"name": "send_mail"}}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "send_mail", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def says(serving: Serve) -> Serve:
    """Starts a server whose core says a text, some tokens at a time, and whose parsers are set."""

    def start(text: str, size: int = 1, tools: str = "hermes", reasoning: str = "none", **more: Any) -> Any:
        overrides = (f"parsers.tools={tools}", f"parsers.reasoning={reasoning}", *more.pop("overrides", ()))
        live = serving(say(list(text.encode()), eos=EOS, size=size, **more), overrides)
        live.core.ready = Ready(4096, 64, 16, 4, 8, {})
        unknown = ModelText(chat_template="", added_tokens=frozenset())
        live.state.parsers = choose_parsers(live.state.config, Registry.discover(), unknown)
        return live

    return start


def params(live: Any) -> SamplingParams:
    """What the last request asked of the core."""
    found: SamplingParams = live.core.calls[-1].params
    return found


def assembled(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed message put together as OpenAI's clients do: by index, strings appended."""
    made: dict[str, Any] = {"content": "", "calls": {}, "finish": None}
    for part in parts:
        for choice in part["choices"]:
            made["content"] += choice["delta"].get("content") or ""
            made["finish"] = choice["finish_reason"] or made["finish"]
            for delta in choice["delta"].get("tool_calls", ()):
                call = made["calls"].setdefault(delta["index"], {"id": "", "type": "", "name": "", "arguments": ""})
                for key in ("id", "type"):
                    call[key] += delta.get(key, "")
                for key in ("name", "arguments"):
                    call[key] += delta["function"].get(key, "")
    return made


def test_calls_have_openais_shape(says: Serve) -> None:
    reply = says(TWO_CALLS).chat(tools=[WEATHER, MAIL]).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    assert {**first, "id": ""} == {
        "id": "",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    assert second["function"] == {"name": "send_mail", "arguments": "{}"}


def test_an_answer_of_calls_alone_has_no_content(says: Serve) -> None:
    live = says(TWO_CALLS.partition("\n")[2])
    assert live.chat(tools=[WEATHER]).json()["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_tells_id_and_name_once_and_arguments_as_they_come(says: Serve, chunks: Chunks, size: int) -> None:
    parts = chunks(says(TWO_CALLS, size).chat(tools=[WEATHER, MAIL], stream=True))
    deltas = [d for part in parts for c in part["choices"] for d in c["delta"].get("tool_calls", ())]
    begins = [delta for delta in deltas if "id" in delta]
    assert [(d["index"], d["type"], d["function"]) for d in begins] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "send_mail", "arguments": ""}),
    ]
    assert all(set(delta) == {"index", "function"} for delta in deltas if "id" not in delta)
    made = assembled(parts)
    assert (made["content"], made["finish"]) == ("Let me see.", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in made["calls"].values()] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("send_mail", "{}"),
    ]
    if size == 1:
        assert len(deltas) > 10


def test_a_call_that_the_token_limit_cuts_is_told_as_far_as_it_came(says: Serve, chunks: Chunks) -> None:
    live = says(TWO_CALLS)
    limit = TWO_CALLS.index("Oslo") + 2
    (choice,) = live.chat(tools=[WEATHER], max_tokens=limit).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'
    made = assembled(chunks(live.chat(tools=[WEATHER], max_tokens=limit, stream=True)))
    assert (made["finish"], made["calls"][0]["arguments"]) == ("length", '{"city": "Os')


def test_a_stop_string_within_a_call_is_an_ordinary_stop(says: Serve) -> None:
    live = says(TWO_CALLS)
    (cut,) = live.chat(tools=[WEATHER], stop=["lo"]).json()["choices"]
    assert (cut["finish_reason"], cut["message"]["tool_calls"][0]["function"]["arguments"]) == ("stop", '{"city": "Os')
    (between,) = live.chat(tools=[WEATHER], stop=["}}"]).json()["choices"]
    assert between["finish_reason"] == "stop"
    (after,) = live.chat(tools=[WEATHER], stop=["\n</tool_call>\n"]).json()["choices"]
    assert after["finish_reason"] == "tool_calls"


def test_what_is_no_call_is_content(says: Serve) -> None:
    text = "<tool_call>I would call get_weather.</tool_call>"
    (choice,) = says(text).chat(tools=[WEATHER]).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_calls_are_text(says: Serve, fields: dict[str, Any]) -> None:
    (choice,) = says(TWO_CALLS).chat(**fields).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TWO_CALLS, "stop")


def test_without_a_parser_calls_are_text(says: Serve) -> None:
    (choice,) = says(TWO_CALLS, tools="none").chat(tools=[WEATHER]).json()["choices"]
    assert choice["message"]["content"] == TWO_CALLS


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_with_the_first(says: Serve, chunks: Chunks, stream: bool) -> None:
    live = says(TWO_CALLS)
    response = live.chat(tools=[WEATHER, MAIL], parallel_tool_calls=False, stream=stream)
    if stream:
        made = assembled(chunks(response))
        assert (len(made["calls"]), made["finish"]) == (1, "tool_calls")
    else:
        (choice,) = response.json()["choices"]
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
        assert response.json()["usage"]["completion_tokens"] < len(TWO_CALLS)
    live.until(lambda: live.core.running == 0)
    assert live.core.aborted == [live.core.calls[0].request_id]


def test_choices_end_each_by_itself(says: Serve) -> None:
    reply = says(TWO_CALLS).chat(tools=[WEATHER], parallel_tool_calls=False, n=3).json()
    assert [len(choice["message"]["tool_calls"]) for choice in reply["choices"]] == [1, 1, 1]


# Forced calls


def test_a_named_function_gets_the_whole_text_as_arguments(says: Serve, chunks: Chunks) -> None:
    live = says('{"city": "Oslo"}', tools="none")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    (made,) = live.chat(tools=[WEATHER, MAIL], tool_choice=choice).json()["choices"]
    (call,) = made["message"]["tool_calls"]
    assert (call["function"], made["finish_reason"]) == (
        {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        "stop",  # as OpenAI has it for a named function
    )
    assert json.loads(params(live).structured.value) == CITY  # type: ignore[union-attr,arg-type]
    streamed = assembled(chunks(live.chat(tools=[WEATHER], tool_choice=choice, stream=True)))
    assert (streamed["content"], streamed["calls"][0]["arguments"]) == ("", '{"city": "Oslo"}')


CALL_LIST = '[{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "send_mail", "arguments": {}}]'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_required_calls_are_read_from_a_list(says: Serve, chunks: Chunks, size: int) -> None:
    live = says(CALL_LIST, size, tools="none")
    (choice,) = live.chat(tools=[WEATHER, MAIL], tool_choice="required").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [
        {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"name": "send_mail", "arguments": "{}"},
    ]
    made = assembled(chunks(live.chat(tools=[WEATHER, MAIL], tool_choice="required", stream=True)))
    assert [{"name": c["name"], "arguments": c["arguments"]} for c in made["calls"].values()] == calls
    schema = json.loads(params(live).structured.value)  # type: ignore[union-attr,arg-type]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert [item["properties"]["name"] for item in schema["items"]["anyOf"]] == [
        {"const": "get_weather"},
        {"const": "send_mail"},
    ]


def test_a_list_that_repeats_a_call_ends_there(says: Serve) -> None:
    call = '{"name": "send_mail", "arguments": {}}'
    other = '{"name": "send_mail", "arguments": {"urgent": true}}'
    live = says(f"[{call}, {other}, {call}, {call}]")
    (choice,) = live.chat(tools=[MAIL], tool_choice="required").json()["choices"]
    assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == ["{}", '{"urgent": true}']
    assert choice["finish_reason"] == "tool_calls"


def test_one_required_call_when_parallel_ones_are_not_wanted(says: Serve) -> None:
    live = says(CALL_LIST)
    live.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(params(live).structured.value)["maxItems"] == 1  # type: ignore[union-attr,arg-type]


def test_references_within_a_schema_follow_it_into_the_list(says: Serve) -> None:
    place = {"$defs": {"P": {"type": "string"}}, "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}}
    live = says(CALL_LIST)
    live.chat(
        tools=[MAIL, {"type": "function", "function": {"name": "f", "parameters": place}}], tool_choice="required"
    )
    items = json.loads(params(live).structured.value)["items"]  # type: ignore[union-attr,arg-type]
    reference = items["anyOf"][1]["properties"]["arguments"]["properties"]["p"]["$ref"]
    assert reference == "#/items/anyOf/1/properties/arguments/$defs/P"


def test_only_allowed_tools_may_be_called(says: Serve) -> None:
    live = says(CALL_LIST)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "send_mail"}}]}
    live.chat(tools=[WEATHER, MAIL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    items = json.loads(params(live).structured.value)["items"]  # type: ignore[union-attr,arg-type]
    assert [item["properties"]["name"]["const"] for item in items["anyOf"]] == ["send_mail"]


# Strict functions


def test_a_strict_function_is_held_to_its_schema_where_the_model_may_call(says: Serve) -> None:
    live = says("Hello.")
    strict = {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}}
    live.chat(tools=[strict, MAIL])
    structured = params(live).structured
    assert structured is not None
    assert structured.kind == "structural_tag"
    form = json.loads(str(structured.value))["format"]
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [CITY, {"type": "object"}]
    assert form["tags"][0]["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '


@pytest.mark.parametrize(
    ("tools", "overrides"),
    [("hermes", ("grammar=none",)), ("mistral", ()), ("none", ())],
    ids=["no grammar", "no tags", "no parser"],
)
def test_a_strict_function_is_free_where_nothing_can_hold_it(
    says: Serve, tools: str, overrides: tuple[str, ...]
) -> None:
    live = says("Hello.", tools=tools, overrides=overrides)
    live.chat(tools=[{"type": "function", "function": {"name": "f", "strict": True}}])
    assert params(live).structured is None


def test_functions_that_are_not_strict_are_free(says: Serve) -> None:
    live = says("Hello.")
    live.chat(tools=[WEATHER])
    assert params(live).structured is None
