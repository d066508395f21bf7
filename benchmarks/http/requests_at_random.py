"""Requests that are nearly right: a grammar of bodies for every route, and ways to spoil them, from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.server.openapi import BODIES

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x", None]}}, "required": ["a"]}
TOOL_OF_MESSAGES = {"name": "f", "input_schema": SCHEMA}
FORM = {"name": "n", "schema": SCHEMA}
FORCED = {"type": "function", "function": {"name": "f"}}
TURNS: list[Any] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é😀"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "r"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "r"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
]
VALUES: dict[str, list[Any]] = {
    "messages": [[TURNS[1]], TURNS[:2], TURNS[:3], [TURNS[1], TURNS[3], TURNS[4]], TURNS[5:7], TURNS],
    "input": ["hi", "", [TURNS[1]], [TURNS[1], *TURNS[7:9]], TURNS],
    "prompt": ["hi", "", ["a", "b"], [1, 2, 3], [[1], [2, 3]], [], [[]], "a" * 20000],
    "tokens": [[], [1, 2], [-1], [10**12], list(range(300))],
    "max_tokens": [3, 0, 1, -1, 10**9],
    "max_completion_tokens": [1, 4, 0],
    "max_output_tokens": [1, 4, 16, 0],
    "min_tokens": [0, 2, 10**6],
    "temperature": [0, 0.7, 2, 5, -1, 1e308],
    "top_p": [0.5, 0, 1, 1.1],
    "top_k": [40, -1, 0, 1, 40, 10**9],
    "min_p": [0, 0.1, 1, 2],
    "repetition_penalty": [1, 0, 1.3, 1e-9],
    "presence_penalty": [0, 2, -3],
    "n": [1, 2, 4, 0, 10**6],
    "best_of": [1, 3],
    "logprobs": [True, 0, False, 3, 21, -1],
    "top_logprobs": [0, 2, 20, 21],
    "prompt_logprobs": [None, 0, 2, 100],
    "stop": ["a", ["a", "b"], [""], ["x" * 5000], ["s"] * 100],
    "stop_sequences": [["a"], [""], ["x"] * 99],
    "stop_token_ids": [[1], [-5], [10**9]],
    "logit_bias": [{"5": 1}, {"5": 1000}, {"x": 1}, {"-1": 0}, {"99999999": 5}],
    "allowed_token_ids": [[5, 6], [], [10**9]],
    "bad_words": [["the"], [""], ["a"] * 200],
    "seed": [1, -1, 2**63, 10**30],
    "stream_options": [None, {"include_usage": True}, {"continuous_usage_stats": True}, {}],
    "tools": [[TOOL], [TOOL, TOOL], [FUNCTION], [{"type": "function", **FUNCTION}], [TOOL_OF_MESSAGES]],
    "tool_choice": [None, "auto", "none", "required", FORCED, {"type": "any"}, {"type": "tool", "name": "f"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": FORM}, {"type": "text"}],
    "structured_outputs": [
        *({"regex": "[ab]{3}"}, {"regex": "("}, {"choice": ["a", "b"]}, {"choice": []}, {"json": SCHEMA}),
        *({"grammar": 'root ::= "a"'}, {"grammar": 'start: "a"'}),
    ],
    "guided_regex": ["a+", "[", "(a|b){1,5000}"],
    "guided_choice": [["x", "y"], []],
    "guided_grammar": ["start: \"a\"", "?"],
    "text": [{"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, {"format": {"type": "text"}}],
    "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}],
    "kv_transfer_params": [{}, {"do_remote_decode": True}, {"do_remote_prefill": True}, {"x": 10**30}],
    "truncate_prompt_tokens": [1, -1, 0, 10**9],
    "priority": [0, -5, 10**12],
    "cache_salt": ["a", "\0", "é" * 500],
    "model": [None, "", "gpt-4"],
    "previous_response_id": [None, "resp_x", ""],
    "system": ["s", [{"type": "text", "text": "s"}]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
    "level": ["debug", "warning", "loud"],
    "request_id": ["x", ""],
    "chat_template_kwargs": [{"enable_thinking": False}, {"messages": []}, {"x": [1]}],
    "documents": [[{"title": "t", "text": "x"}]],
    "suffix": ["", "end"],
    "metadata": [{"a": "b"}],
    "reasoning": [{"effort": "low"}],
}  # fmt: skip
"""Values by the name of a field: the first is right nearly everywhere, the others may be wrong."""

FLAGS = [True, False, True, False, None]
DEEP: Any = None
for _ in range(400):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, -(2**63), 1e308, "", "x", "\0", "�", "a" * 5000, "<|im_start|>", "{"),
    *([], {}, [[]], [None], [1, "a"], {"": None}, {"type": {}}, {"type": "text"}, {"$ref": "#"}, {"a": 10**30}, DEEP),
]
NEEDED = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
BOUND = {"/v1/responses": "max_output_tokens"}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ADMIN = tuple(path for path in BODIES if path.startswith("/engine/"))
VIEWS = (
    *("/v1/models", "/v1/models/x%2Fy", "/v1/models/%00", "/version", "/health", "/health/live", "/health/ready"),
    *("/health/startup", "/load", "/metrics", "/requests/x", "/requests/%ff", "/v1/responses/resp_x", "/openapi.json"),
    *("/engine/composition", "/engine/config", "/engine/leases", "/engine/log-level", "/nowhere", "//", "/v1/../x"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


def requests_at_random(seed: int, count: int, admin: bool = False) -> Iterator[Asked]:
    """The requests of a seed; of every ten, one is no POST of a body.

    Args:
        admin: of the routes of administrators, instead of all others.
    """
    chance = random.Random(seed)
    paths = ADMIN if admin else tuple(path for path in BODIES if path not in ADMIN)
    for _ in range(count):
        if not admin and chance.random() < 0.1:
            method = chance.choice(("GET", "GET", "GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD", "PATCH"))
            yield Asked(method, chance.choice((*VIEWS, *paths)), b"", _headers(chance))
            continue
        path = chance.choice((*GENERATING, *paths)) if not admin else chance.choice(paths)
        body = encoded(mutated(grown(path, chance), chance), chance)
        yield Asked("POST", path, body, {"content-type": "application/json", **_headers(chance)})


def grown(path: str, chance: random.Random) -> dict[str, Any]:
    """A body of the route's own fields: those it needs, and some more."""
    fields = BODIES[path].__struct_fields__
    more = chance.sample(fields, min(len(fields), chance.choice((0, 0, 1, 1, 2, 3, 6))))
    body = {name: copy.deepcopy(_value(name, chance)) for name in (*NEEDED.get(path, ()), *more)}
    if path in GENERATING:
        body.setdefault(BOUND.get(path, "max_tokens"), chance.randint(1, 5))
    return body


def _value(name: str, chance: random.Random) -> Any:
    pool = VALUES.get(name, FLAGS)
    return pool[0] if chance.random() < 0.6 else chance.choice(pool)


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys, down to a depth."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        if depth < 12:
            yield from places(inner, depth + 1)


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The body with up to three things wrong in it; half of the time with none."""
    for _ in range(chance.choice((0, 0, 0, 1, 2, 3))):
        found = [*places(body)] or [(body, "x")]
        container, key = chance.choice(found)
        what = chance.random()
        if what < 0.2 and found[0][1] != "x":
            del container[key]
        elif what < 0.4:
            other, at = chance.choice(found)
            container[key] = copy.deepcopy(other.get(at) if isinstance(other, dict) else other[at] if at != "x" else 0)
        elif what < 0.5 and isinstance(container, dict):
            container[chance.choice(("x", "", "é", "__class__", "self", "type", "a" * 300))] = chance.choice(ODD)
        else:
            container[key] = copy.deepcopy(chance.choice(ODD))
    return body


def encoded(body: Any, chance: random.Random) -> bytes:
    """The body as JSON, one in twelve damaged as bytes."""
    data = json.dumps(body).encode()
    if chance.random() > 1 / 12:
        return data
    at = chance.randrange(len(data) + 1)
    damage: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + b"\xff\xfe" + data[at:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data + data,
        lambda: b"[" * 100_000,
        lambda: data[:-1] + b', "temperature": NaN}',
        lambda: data[:-1] + b', "temperature": 1, "temperature": 1e999}',
        lambda: data[:-1] + b', "user": "\\ud800", "stop": "\\udfff"}',
        lambda: data[:-1] + b', "seed": ' + b"9" * 5000 + b"}",
        lambda: b"null",
        lambda: b" ",
        lambda: bytes(chance.randrange(256) for _ in range(at)),
    ]
    return chance.choice(damage)()


def _headers(chance: random.Random) -> dict[str, str]:
    odd = [
        *(
            {"x-request-id": "a b"},
            {"x-request-id": "é" * 9},
            {"x-request-id": "a" * 300},
            {"content-type": "text/plain"},
        ),
        *(
            {"origin": "http://x"},
            {"accept": "text/event-stream"},
            {"traceparent": "00-zz"},
            {"accept-encoding": "gzip"},
        ),
    ]
    return chance.choice(odd) if chance.random() < 0.2 else {}


__all__ = ["Asked", "requests_at_random"]
