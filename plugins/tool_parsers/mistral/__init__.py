"""Calls behind `[TOOL_CALLS]`: a JSON list in older models of Mistral, `f[ARGS]{…}` in newer ones."""

from __future__ import annotations

import re
import uuid

from engine.hooks import hookimpl
from engine.parsing.calls import Calls
from engine.parsing.formats import ProgramFormat
from engine.parsing.json_call import read_call
from engine.parsing.marked import marked, read_calls, read_name, stream_arguments
from engine.parsing.reader import Reader, Reading
from engine.plugin import Options
from engine.specs.tool_parser import ModelText, ToolFormat, ToolParserOffer

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.-]+")


def body(reader: Reader, calls: Calls) -> Reading[bool]:
    """What follows the marker: a list, one object, or one call in the newer spelling."""
    yield from reader.space()
    char = yield from reader.peek()
    if char == "{":
        return (yield from read_call(reader, calls))
    if char == "[":
        yield from reader.accept("[")
        return (yield from read_calls(reader, calls, read_call, ",", "]"))
    name = yield from reader.word(_NAME)
    if (yield from reader.accept(CALL_ID)):
        yield from read_name(reader, ARGUMENTS)
    else:
        yield from reader.accept(ARGUMENTS)
    return (yield from stream_arguments(reader, calls, name))


def make_id() -> str:
    """Nine letters and digits, which is what Mistral's templates accept."""
    return uuid.uuid4().hex[:9]


def build(options: Options) -> ToolFormat:
    """The format. Nothing tells the two spellings apart beforehand, so constraints can't be attached to it."""
    return ProgramFormat(
        lambda functions: marked(BEGIN, "", body), markers=(BEGIN, CALL_ID, ARGUMENTS), make_id=make_id
    )


def recognizes(model: ModelText) -> str | None:
    """Models that have the marker."""
    if BEGIN in model.added_tokens:
        return f"{BEGIN} is a token of its own"
    return f"the chat template writes {BEGIN}" if BEGIN in model.chat_template else None


@hookimpl
def tool_parsers() -> list[ToolParserOffer]:
    """Mistral's two spellings."""
    return [
        ToolParserOffer(
            name="mistral",
            summary="[TOOL_CALLS] with a JSON list, or f[ARGS]{…}: all models of Mistral.",
            build=build,
            recognizes=recognizes,
        )
    ]
