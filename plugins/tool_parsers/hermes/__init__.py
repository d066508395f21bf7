"""Calls as JSON in `<tool_call>…</tool_call>`: Hermes, Qwen2.5, Qwen3 and their many descendants."""

from __future__ import annotations

import json

from engine.hooks import hookimpl
from engine.parsing.formats import ProgramFormat
from engine.parsing.marked import marked
from engine.plugin import Options
from engine.specs.tool_parser import CallTag, ModelText, ToolFormat, ToolParserOffer

BEGIN, END = "<tool_call>", "</tool_call>"
_OTHERS = ("<function=", "<arg_key>")
"""Templates that put something else than JSON between the same tags: Qwen3-Coder and GLM."""


def tag(function: str) -> CallTag:
    """The spelling that the templates teach."""
    begin = f'{BEGIN}\n{{"name": {json.dumps(function)}, "arguments": '
    return CallTag(trigger=BEGIN, begin=begin, end=f"}}\n{END}")


def build(options: Options) -> ToolFormat:
    """The format."""
    return ProgramFormat(lambda functions: marked(BEGIN, END), markers=(BEGIN, END), tag=tag)


def recognizes(model: ModelText) -> str | None:
    """Models whose template writes the tag, with JSON in it."""
    if BEGIN not in model.chat_template or any(other in model.chat_template for other in _OTHERS):
        return None
    return f"the chat template writes {BEGIN}"


@hookimpl
def tool_parsers() -> list[ToolParserOffer]:
    """The format of Hermes and Qwen."""
    return [
        ToolParserOffer(
            name="hermes",
            summary='<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen2.5, Qwen3.',
            build=build,
            recognizes=recognizes,
        )
    ]
