"""Completions, messages and responses say the same streamed and not: random texts, cuts and stop strings."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine.messages import FinishReason, Output, Ready
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.specs.tool_parser import ModelText
from engine.testing.client import Call, Script, scores
from engine.testing.tokenizer import EOS

CASES = 60
PIECES = (
    *("Hello ", "world. ", "stop", "sto", "\n\n", "é😀", "<tool", "<tool_call>", "{", '"a": 1', "</tool_call>"),
    *(
        '<tool_call>\n{"name": "f", "arguments": {"text": "stop"}}\n</tool_call>',
        '<tool_call>{"name": "g"}</tool_call>',
    ),
)
STOPS = (None, ["stop"], ["\n\n", "é😀"], ["world. stop", "sto"])
PARAMETERS = {"type": "object"}


def cut(case: int, seed: int | None) -> Script:
    """Says the text of a case in random pieces, or in one; half of them end for their length."""
    source, chance = random.Random(case), random.Random(seed)
    thoughts = "<think>\nhm\n</think>\n\n" if case % 2 else ""
    text = thoughts + "".join(source.choices(PIECES, k=source.randint(1, 8)))

    def script(call: Call) -> list[Output]:
        left, made = [*text.encode(), *([EOS] if case % 4 < 2 else [])], []
        while left:
            size = len(left) if seed is None else chance.choice((1, 1, 2, 3, 7, 30))
            piece, left = left[:size], left[size:]
            reason = (FinishReason.STOP if piece[-1] == EOS else FinishReason.LENGTH) if not left else None
            logprobs = scores(piece, call.params.logprobs)
            made.append(Output("", token_ids=piece, logprobs=logprobs, finish_reason=reason))
        return made

    return script


@pytest.fixture(scope="module")
def live(start_server: Any) -> Iterator[Any]:
    with start_server(cut(0, None), ("parsers.tools=hermes", "parsers.reasoning=think")) as live:
        live.core.ready = Ready(8192, 64, 16, 4, 8, {})
        model = ModelText(chat_template="", added_tokens=frozenset())
        live.state.parsers = choose_parsers(live.state.config, Registry.discover(), model)
        yield live


def events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def both(live: Any, case: int, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the stream."""
    live.core.script = cut(case, None)
    whole = live.http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    live.core.script = cut(case, case)
    return whole.json(), events(live.http.post(path, json={**body, "stream": True}).text)


def test_completions(live: Any) -> None:
    for case in range(CASES):
        logprobs = 2 if case % 3 == 0 else None
        body = {"prompt": "a", "stop": STOPS[case % 4], "logprobs": logprobs, "echo": case % 5 == 0}
        answer, parts = both(live, case, "/v1/completions", body)
        (whole,) = answer["choices"]
        pieces = [part["choices"][0] for part in parts]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        last = pieces[-1]
        assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
        if logprobs:
            told = [token for piece in pieces for token in (piece["logprobs"] or {"tokens": []})["tokens"]]
            assert told == whole["logprobs"]["tokens"]


def rebuilt(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream of Anthropic's events makes."""
    blocks: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    for part in parts:
        match part["type"]:
            case "content_block_start":
                assert part["index"] == len(blocks)
                blocks.append({**part["content_block"]})
                arguments = ""
            case "content_block_delta":
                delta = part["delta"]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    blocks[-1][name] += delta[name]
            case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = arguments
            case "message_delta":
                end = part["delta"] | {"usage": part["usage"]["output_tokens"]}
    return {"content": blocks, **end}


def test_messages(live: Any) -> None:
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")]
    kinds: set[str] = set()
    for case in range(CASES):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "stop_sequences": STOPS[case % 4]}
        whole, parts = both(live, case, "/v1/messages", body | ({"tools": tools} if case % 3 else {}))
        told = rebuilt(parts)
        for block, other in zip(whole["content"], told["content"], strict=True):
            kinds.add(block["type"])
            if block["type"] == "tool_use":
                block["input"], block["id"] = json.dumps(block["input"]), ""
                arguments = other["input"] or "{}"
                try:
                    loaded = json.loads(arguments)
                except ValueError:
                    loaded = None
                other["input"] = json.dumps(loaded if isinstance(loaded, dict) else {"INVALID_JSON": arguments})
                other["id"] = ""
        assert told["content"] == whole["content"], case
        assert (told["stop_reason"], told["stop_sequence"]) == (whole["stop_reason"], whole["stop_sequence"])
        assert told["usage"] == whole["usage"]["output_tokens"]
    assert kinds >= {"text", "thinking", "tool_use"}


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between any two."""
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    kept = ("status", "incomplete_details", "usage")
    return {"output": output, **{key: response[key] for key in kept}}


def test_responses(live: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("f", "g")]
    kinds: set[str] = set()
    for case in range(CASES):
        body = {"input": "a", "stop": STOPS[case % 4], **({"tools": tools} if case % 3 else {})}
        whole, parts = both(live, case, "/v1/responses", body)
        assert plain(parts[-1]["response"]) == plain(whole), case
        assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
        texts = ["" for _ in whole["output"]]
        for part in parts:
            if part["type"].endswith(".delta"):
                texts[part["output_index"]] += part["delta"]
        for item, text in zip(whole["output"], texts, strict=True):
            kinds.add(item["type"])
            assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert kinds >= {"message", "reasoning", "function_call"}
