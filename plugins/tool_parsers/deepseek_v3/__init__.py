"""Calls of DeepSeek V3, R1 and V3.1, between markers with full-width bars."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.parsing.calls import Calls
from engine.parsing.formats import ProgramFormat
from engine.parsing.marked import marked, read_name, stream_arguments
from engine.parsing.reader import Reader, Reading
from engine.plugin import Options
from engine.specs.tool_parser import ModelText, ToolFormat, ToolParserOffer

SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def body(reader: Reader, calls: Calls) -> Reading[bool]:
    """V3 and R1 write `function`, the separator, the name, and JSON in a fence; V3.1 the name, the separator, JSON."""
    name = yield from read_name(reader, SEPARATOR)
    if name != "function" or (yield from reader.peek()) == "{":
        return (yield from stream_arguments(reader, calls, name))
    name = yield from read_name(reader, f"\n{FENCE}json\n")
    if not (yield from stream_arguments(reader, calls, name)):
        return False
    yield from reader.space()
    yield from reader.accept(FENCE)
    return True


def build(options: Options) -> ToolFormat:
    """The format."""
    return ProgramFormat(lambda functions: marked(BEGIN, END, body, SECTION), markers=(*SECTION, BEGIN, SEPARATOR, END))


def recognizes(model: ModelText) -> str | None:
    """Models that have the marker."""
    if BEGIN in model.added_tokens:
        return f"{BEGIN} is a token of its own"
    return f"the chat template writes {BEGIN}" if BEGIN in model.chat_template else None


@hookimpl
def tool_parsers() -> list[ToolParserOffer]:
    """DeepSeek's markers."""
    return [
        ToolParserOffer(
            name="deepseek_v3",
            summary="Markers with full-width bars: DeepSeek V3, R1 and V3.1.",
            build=build,
            recognizes=recognizes,
        )
    ]
