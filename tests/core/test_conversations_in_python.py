"""What the Python API makes of an answer to a conversation: thoughts, text, calls."""

from __future__ import annotations

from typing import Any

import pytest

from engine.completion import Dialect
from engine.config.load import load_config
from engine.messages import FinishReason, Output
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.testing.tokenizer import EOS, byte_tokenizer

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ANSWER = '<think>hm</think>So: <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    config = load_config(None, ["parsers.tools=hermes", "parsers.reasoning=think"]).config
    tokenizer = byte_tokenizer()
    return Dialect(tokenizer, choose_parsers(config, Registry.discover(), tokenizer.model_text()), None)


def write(dialect: Dialect, prompt: Any, size: int, **variables: Any) -> Any:
    writing = dialect.begin(prompt, SamplingParams(), variables)
    tokens = [*ANSWER.encode(), EOS]
    for at in range(0, len(tokens), size):
        last = at + size >= len(tokens)
        piece = tokens[at : at + size]
        writing.take(Output("x", token_ids=piece, finish_reason=FinishReason.STOP if last else None))
    assert writing.finished
    return writing.completion


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_and_calls_are_parted_off(dialect: Dialect, size: int) -> None:
    made = write(dialect, HI, size, tools=TOOLS)
    assert (made.reasoning, made.text.strip()) == ("hm", "So:")
    (call,) = made.tool_calls
    assert (call.name, call.arguments) == ("weather", '{"city": "Köln"}')
    assert call.id
    assert b"weather" in bytes(made.prompt_token_ids), "the template shows the tools"


def test_without_tools_calls_are_text(dialect: Dialect) -> None:
    made = write(dialect, HI, 3)
    assert made.reasoning == "hm"
    assert made.text.startswith("So: <tool_call>")
    assert made.tool_calls == []


def test_a_plain_prompt_is_continued_as_it_is(dialect: Dialect) -> None:
    made = write(dialect, "hi", 3, tools=TOOLS)
    assert made.text == ANSWER
    assert (made.reasoning, made.tool_calls) == ("", [])
