"""The Hermes format through the shared suite."""

from __future__ import annotations

import pytest

from engine.plugin import Options
from engine.plugins.tool_parsers import hermes
from engine.specs.tool_parser import ModelText
from engine.testing.tool_parser import Example, ToolParserConformance, events_of, said

OSLO = '{"city": "Oslo"}'


class TestHermes(ToolParserConformance):
    (offer,) = hermes.tool_parsers()
    module = "engine.plugins.tool_parsers.hermes"
    examples = (
        Example(
            f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>', "", [("get_weather", OSLO)]
        ),
        Example(
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"/"}}\n</tool_call>\n'
            '<tool_call>{"arguments": {"b":[1]}, "name": "g"}</tool_call>\n',
            "Let me see.",
            [("f", '{"a": "}<\\"/"}'), ("g", '{"b":[1]}')],
        ),
        # A name alone, arguments in a string, null arguments, further members, another name for arguments.
        Example('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        Example('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        Example('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        Example('<tool_call>{"id": [1], "name": "f", "parameters": {}, "x": {}}</tool_call>', "", [("f", "{}")]),
        # Names that weren't offered count too: the marker leaves no doubt, and the client can tell the model.
        Example('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
        # The end tag is missing, or the text was cut off.
        Example('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        Example('x <tool_call>{"name": "f", "arguments": {"a": ', "x", [("f", '{"a": ')]),
        # White space beside calls separates them, and the texts around them.
        Example('a\n\n<tool_call>{"name": "f"}</tool_call> \n b \n', "a\n\nb \n", [("f", "{}")]),
        Example(
            'a<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call> b',
            "a\nb",
            [("f", "{}"), ("g", "{}")],
        ),
        Example(' <tool_call>{"name": "f"}</tool_call> b', "b", [("f", "{}")]),
        # Calls that are none.
        Example("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>"),
        Example('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}'),
        Example('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}'),
        Example('<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}'),
        Example('<tool_call>{"name": "f"', '<tool_call>{"name": "f"'),
        Example(
            '<tool_call>no <tool_call>{"name": "f", "arguments": {}}</tool_call> yes',
            "<tool_call>no yes",
            [("f", "{}")],
        ),
    )


@pytest.mark.parametrize("key", ["name", "arguments", "other", ""])
def test_brackets_without_end_are_content(key: str) -> None:
    text = f'<tool_call>{{"{key}": ' + "[" * 100_000 + "]" * 100_000 if key else "<tool_call>{" + "[{" * 100_000
    assert said(events_of(hermes.build(Options()), [text])).content == text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("… <tool_call>\n{{ tool.arguments | tojson }}", "the chat template writes <tool_call>"),
        ("… <tool_call><function=name>", None),
        ("… <tool_call>name\n<arg_key>", None),
        ("…", None),
    ],
    ids=["qwen3", "qwen3-coder", "glm", "none"],
)
def test_templates_that_write_other_things_between_the_tags_are_left_to_others(
    template: str, expected: str | None
) -> None:
    assert hermes.recognizes(ModelText(chat_template=template, added_tokens=frozenset({"<tool_call>"}))) == expected
