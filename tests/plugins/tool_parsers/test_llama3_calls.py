"""Llama's JSON through the shared suite."""

from __future__ import annotations

from engine.plugins.tool_parsers import llama3_json
from engine.testing.tool_parser import Example, ToolParserConformance


class TestLlama3Json(ToolParserConformance):
    (offer,) = llama3_json.tool_parsers()
    module = "engine.plugins.tool_parsers.llama3_json"
    examples = (
        Example('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        Example('\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        Example(
            '{"name": "f", "parameters": {"a": ";"}}; {"name": "g", "parameters": {}}',
            "",
            [("f", '{"a": ";"}'), ("g", "{}")],
        ),
        Example('<|python_tag|>{"name": "any", "parameters": {}}', "", [("any", "{}")]),
        Example('Well: <|python_tag|>{"name": "f", "parameters": {}} ok', "Well: ok", [("f", "{}")]),
        Example('{"name": "f", "parameters": {}}; and so on', "; and so on", [("f", "{}")]),
        # JSON that is an answer, not a call: an unknown name, or no arguments.
        Example('{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}'),
        Example('{"name": "f"}', '{"name": "f"}'),
        Example('Here: {"name": "f", "parameters": {}}', 'Here: {"name": "f", "parameters": {}}'),
        Example("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    )
