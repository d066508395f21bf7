"""Mistral's two spellings through the shared suite."""

from __future__ import annotations

from engine.plugins.tool_parsers import mistral
from engine.specs.tool_parser import ToolBegin
from engine.testing.tool_parser import Example, ToolParserConformance, events_of


class TestMistral(ToolParserConformance):
    (offer,) = mistral.tool_parsers()
    module = "engine.plugins.tool_parsers.mistral"
    examples = (
        Example(
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", '{"a": "]"}'), ("g", "{}")],
        ),
        Example('Ok.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Ok.", [("f", '{"a": 1}'), ("g", "{}")]),
        Example('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        Example('[TOOL_CALLS]f{"a": 1} end', "end", [("f", '{"a": 1}')]),
        Example('[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        Example('[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]', ", 5]", [("f", "{}")]),
        Example("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing"),
        Example("[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    )

    def test_ids_are_what_its_templates_accept(self) -> None:
        (begin, *_) = events_of(self.form(), ["[TOOL_CALLS]f[ARGS]{}"])
        assert isinstance(begin, ToolBegin)
        assert len(begin.id) == 9
        assert begin.id.isalnum()
