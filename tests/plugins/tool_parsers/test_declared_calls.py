"""Formats written in YAML through the shared suite: one of each kind of body."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.plugin import Options
from engine.plugins.tool_parsers import declarative
from engine.testing.tool_parser import Example, ToolParserConformance


class Declared(ToolParserConformance):
    (offer,) = declarative.tool_parsers()
    module = "engine.plugins.tool_parsers.declarative"
    written: dict[str, Any]

    def options(self) -> Options:
        return self.offer.options.model_validate(self.written)


class TestJson(Declared):
    written = {"begin": "<call>", "end": "</call>", "name_key": "tool", "arguments_key": "input"}
    examples = (
        Example('<call>{"tool": "f", "input": {"name": 1}}</call>', "", [("f", '{"name": 1}')]),
        Example('<call>{"name": "f", "arguments": {}}</call>', '<call>{"name": "f", "arguments": {}}</call>'),
    )


class TestNamed(Declared):
    """The format of Kimi-K2, but for the form of its names."""

    written = {
        "begin": "<|tool_call_begin|>",
        "end": "<|tool_call_end|>",
        "body": "named",
        "separator": "<|tool_call_argument_begin|>",
        "section_begin": "<|tool_calls_section_begin|>",
        "section_end": "<|tool_calls_section_end|>",
    }
    examples = (
        Example(
            "Hm <|tool_calls_section_begin|><|tool_call_begin|> f <|tool_call_argument_begin|>{}<|tool_call_end|>"
            '<|tool_call_begin|>g<|tool_call_argument_begin|> {"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "Hm",
            [("f", "{}"), ("g", '{"a": 1}')],
        ),
        Example("<|tool_call_begin|>f and more", "<|tool_call_begin|>f and more"),
    )


class TestKwargs(Declared):
    written = {"begin": "```tool\n", "end": "```", "body": "kwargs"}
    examples = (
        Example("```tool\nf(a='x')\n```", "", [("f", '{"a": "x"}')]),
        Example("```tool\nhello```", "```tool\nhello```"),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"begin": ""},
        {"begin": "<", "body": "named"},
        {"begin": "<", "separator": ":"},
        {"begin": "<", "section_end": ">"},
        {"begin": "<", "body": "xml"},
    ],
)
def test_options_that_say_nothing_sensible_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        declarative.DeclarativeOptions.model_validate(options)
