"""The same answer streamed and not: 200 texts, cut at random, with stop strings, tools and thoughts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.messages import FinishReason, Output, Ready
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.specs.tool_parser import ModelText
from engine.testing.client import Call, Script
from engine.testing.tokenizer import EOS

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"text": "stop, </tool_call> stop"}}\n</tool_call>'
PIECES = (
    *(
        "Hello ",
        "world. ",
        "stop",
        "sto",
        "\n\n",
        " ",
        "é😀",
        "<tool",
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"a": 1',
    ),
    *(CALL, CALL, '<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": [1, '),
)
STOPS = (None, ["stop"], ["\n\n", "é😀!"], ["</tool_call>"], ["world. stop", "sto"])
CASES = 200


def text_of(case: int) -> str:
    """Some text, with thoughts before it in half of the cases."""
    source = random.Random(case)
    thoughts = f"<think>\n{''.join(source.choices(PIECES, k=3))}\n</think>\n\n" if case % 2 else ""
    return thoughts + "".join(source.choices(PIECES, k=source.randint(1, 8)))


def cut(case: int, seed: int | None) -> Script:
    """Says the text of a case in random pieces, or in one."""
    source = random.Random(seed)

    def pieces(tokens: list[int]) -> Iterator[list[int]]:
        while tokens:
            size = len(tokens) if seed is None else source.choice((1, 1, 2, 3, 7, 30))
            yield tokens[:size]
            tokens = tokens[size:]

    def script(call: Call) -> list[Output]:
        cuts = list(pieces([*text_of(case).encode(), EOS]))
        return [
            Output("", token_ids=piece, finish_reason=FinishReason.STOP if i == len(cuts) - 1 else None)
            for i, piece in enumerate(cuts)
        ]

    return script


def told(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream adds up to, in the shape of a whole message; checks the order of a call's pieces."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    end = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(dict(call["function"]))
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            end = {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return {**message, **end, "usage": parts[-1]["usage"]}


def whole(reply: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer."""
    (choice,) = reply["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "tool_calls": [call["function"] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "usage": reply["usage"],
    }


@pytest.fixture(scope="module")
def live(start_server: Any) -> Iterator[Any]:
    with start_server(cut(0, None), ("parsers.tools=hermes", "parsers.reasoning=think")) as live:
        live.core.ready = Ready(8192, 64, 16, 4, 8, {})
        model = ModelText(chat_template="", added_tokens=frozenset())
        live.state.parsers = choose_parsers(live.state.config, Registry.discover(), model)
        yield live


def test_a_stream_adds_up_to_the_whole_answer(live: Any, chunks: Callable[..., list[dict[str, Any]]]) -> None:
    seen: set[str] = set()
    for case in range(CASES):
        fields: dict[str, Any] = {"stop": STOPS[case % len(STOPS)], "tools": TOOLS if case % 3 else None}
        live.core.script = cut(case, None)
        expected = whole(live.chat(**fields).json())
        live.core.script = cut(case, case)
        assert whole(live.chat(**fields).json()) == expected, text_of(case)
        parts = chunks(live.chat(**fields, stream=True, stream_options={"include_usage": True}))
        assert told(parts) == expected, text_of(case)
        for word in fields["stop"] or ():
            assert word not in expected["content"]
        seen |= {key for key in ("reasoning", "tool_calls") if expected[key]} | {str(expected["stop_reason"])}
        seen.add(expected["finish_reason"])
        json.dumps(expected)
    assert seen >= {"reasoning", "tool_calls", "stop"} | {"None", "\n\n", "sto"}, seen
