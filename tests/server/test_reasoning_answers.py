"""Thoughts in chat answers: parted from the content, before stop strings and tool calls are looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.messages import Ready
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.specs.tool_parser import ModelText
from engine.testing.client import say
from engine.testing.tokenizer import EOS, byte_tokenizer

Chunks = Callable[[httpx.Response], list[dict[str, Any]]]
Serve = Callable[..., Any]

THOUGHT = "<think>\nOne.\n\nTwo.\n</think>\n\nThree. Four."
THOUGHT_TOKENS = len("<think>\nOne.\n\nTwo.\n</think>") - len("<think")
"""They count from the token on that completes the opening tag; a real tokenizer has one for the whole tag."""

OPENING = "{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"


@pytest.fixture
def says(serving: Serve) -> Serve:
    def start(text: str, size: int = 1, overrides: tuple[str, ...] = ()) -> Any:
        script = say(list(text.encode()), eos=EOS, size=size)
        live = serving(script, ("parsers.reasoning=think", "parsers.tools=hermes", *overrides))
        live.core.ready = Ready(4096, 64, 16, 4, 8, {})
        unknown = ModelText(chat_template="", added_tokens=frozenset())
        live.state.parsers = choose_parsers(live.state.config, Registry.discover(), unknown)
        return live

    return start


def sides(response: httpx.Response) -> tuple[str | None, str | None, str | None, str]:
    """Reasoning under both names, content and finish reason of a whole answer."""
    (choice,) = response.json()["choices"]
    message = choice["message"]
    return message.get("reasoning_content"), message.get("reasoning"), message["content"], choice["finish_reason"]


def test_thoughts_have_fields_of_their_own(says: Serve) -> None:
    response = says(THOUGHT).chat()
    assert sides(response) == ("One.\n\nTwo.", "One.\n\nTwo.", "Three. Four.", "stop")
    assert response.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": THOUGHT_TOKENS}


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stream_tells_thoughts_first(says: Serve, chunks: Chunks, size: int) -> None:
    parts = chunks(says(THOUGHT, size).chat(stream=True, stream_options={"include_usage": True}))
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    order = ["t" if "reasoning" in delta else "c" for delta in deltas[1:-1]]
    assert "".join(order).lstrip("t").rstrip("c") == ""
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "One.\n\nTwo."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "One.\n\nTwo."
    assert "".join(delta.get("content", "") for delta in deltas) == "Three. Four."
    assert parts[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == THOUGHT_TOKENS


def test_thoughts_can_be_left_out(says: Serve, chunks: Chunks) -> None:
    live = says(THOUGHT)
    assert sides(live.chat(include_reasoning=False)) == (None, None, "Three. Four.", "stop")
    assert "One" not in live.chat(include_reasoning=False, stream=True).text


def test_thoughts_that_never_end_leave_no_content(says: Serve) -> None:
    assert sides(says(THOUGHT).chat(max_tokens=12)) == ("One.", "One.", None, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_looked_for_in_the_content_only(says: Serve, chunks: Chunks, stream: bool) -> None:
    response = says(THOUGHT).chat(stop=["\n\n", " Four"], stream=stream)
    if stream:
        choices = [choice for part in chunks(response) for choice in part["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Three."
        assert choices[-1]["stop_reason"] == " Four"
    else:
        assert sides(response) == ("One.\n\nTwo.", "One.\n\nTwo.", "Three.", "stop")
        assert response.json()["usage"]["completion_tokens"] == len(THOUGHT) - 1


def test_a_template_that_opens_the_thoughts(says: Serve) -> None:
    live = says("One.</think>Two.", overrides=(f"model.chat_template={OPENING!r}",))
    assert sides(live.chat()) == ("One.", "One.", "Two.", "stop")
    off = sides(live.chat(chat_template_kwargs={"enable_thinking": False}))
    assert off == (None, None, "One.</think>Two.", "stop")


def test_an_answer_that_goes_on_within_its_thoughts(says: Serve) -> None:
    live = says(" Two.</think>Three.")
    history = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "<think>One."}]
    reply = live.http.post("/v1/chat/completions", json={"messages": history, "continue_final_message": True})
    assert sides(reply) == (" Two.", " Two.", "Three.", "stop")


@pytest.mark.parametrize("kept", ["[THINK]", "[/THINK]"])
def test_markers_that_are_special_tokens_are_seen_and_others_are_not_shown(says: Serve, kept: str) -> None:
    live = says("", overrides=("parsers.reasoning=mistral",))
    live.state.tokenizer = byte_tokenizer("[THINK]", "[/THINK]", "<other>")
    live.core.script = say([257, *b"One.", 259, 258, *b"Two.", 259], eos=EOS)
    assert sides(live.chat()) == ("One.", "One.", "Two.", "stop")
    assert kept not in live.chat(stream=True).text


def test_effort_none_turns_thinking_off_and_others_reach_the_template(says: Serve) -> None:
    live = says("Two.", overrides=(f"model.chat_template={OPENING + '{{ reasoning_effort }}'!r}",))
    live.chat(reasoning_effort="none")
    live.chat(reasoning_effort="high")
    live.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "mine"})
    assert [bytes(call.prompt).decode() for call in live.core.calls] == ["hinone", "hi<think>high", "hi<think>mine"]


def test_calls_are_found_behind_the_thoughts_only(says: Serve) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    live = says(f"<think>I could {call}.</think>{call}")
    (choice,) = live.chat(tools=[{"type": "function", "function": {"name": "f"}}]).json()["choices"]
    assert choice["message"]["reasoning"] == f"I could {call}."
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"


def test_a_forced_call_comes_behind_thoughts_that_the_prompt_opened(says: Serve) -> None:
    live = says('Hm.</think>{"a": 1}', overrides=(f"model.chat_template={OPENING!r}",))
    choice = {"type": "function", "function": {"name": "f"}}
    (made,) = live.chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=choice).json()["choices"]
    assert made["message"]["reasoning"] == "Hm."
    assert made["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert live.core.calls[0].params.structured.after == "</think>"


def test_earlier_thoughts_reach_the_template_under_either_name(says: Serve) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}"
    live = says("x", overrides=(f"model.chat_template={template!r}",))
    history = [{"role": "assistant", "content": "a", "reasoning": "r"}]
    history.append({"role": "assistant", "content": "b", "reasoning_content": "s"})
    live.http.post("/v1/chat/completions", json={"messages": history})
    assert bytes(live.core.calls[0].prompt) == b"[r][s]"
