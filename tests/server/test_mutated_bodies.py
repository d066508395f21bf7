"""Valid bodies of Responses and Messages with something wrong in them: refused or answered, never a fault of ours."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "stream": False,
}
BLOCKS = [
    {"type": "thinking", "thinking": "t", "signature": ""},
    {"type": "text", "text": "x"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}
MESSAGE: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [{"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [RESULT]}],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["z"],
    "stream": False,
}
ODD: list[Any] = [
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "x",
    "\0",
    "a" * 3000,
    [],
    [[]],
    [None],
    {},
    {"type": {}},
    {"$ref": "#"},
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    made = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice([*places(made)] or [(made, "x")])
        if chance.random() < 0.25:
            del container[key]
        else:
            container[key] = copy.deepcopy(chance.choice(ODD))
    return made


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_no_body_is_answered_with_a_fault(saying: Any, path: str) -> None:
    live = saying('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    chance, statuses = random.Random(path), set()
    for _ in range(150):
        body = mutated(RESPONSE if path == "/v1/responses" else MESSAGE, chance)
        answer = live.http.post(path, json=body)
        assert answer.status_code < 500, json.dumps(body)
        statuses.add(answer.status_code)
    assert {200, 400} <= statuses
    live.until(lambda: not live.state.active and live.core.running == 0)
