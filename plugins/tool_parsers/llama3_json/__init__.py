"""Calls as bare JSON: `{"name": …, "parameters": {…}}`, Llama 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Set
from functools import partial

from engine.hooks import hookimpl
from engine.parsing.calls import Calls
from engine.parsing.formats import ProgramFormat
from engine.parsing.json_call import read_call
from engine.parsing.marked import read_calls
from engine.parsing.program import Program
from engine.parsing.reader import Reader, Reading
from engine.plugin import Options
from engine.specs.tool_parser import ModelText, ToolFormat, ToolParserOffer

TAG = "<|python_tag|>"


def program(functions: Set[str]) -> Program:
    """Calls stand at the beginning of the answer, where only known names count, or behind the tag."""

    def run(reader: Reader, calls: Calls) -> Reading[None]:
        reader.hold()
        yield from reader.space()
        if (yield from reader.peek()) != "{" or not (yield from _calls(reader, calls, functions)):
            calls.content(reader.taken())
        while (yield from reader.seek((TAG,), calls.content)):
            if not (yield from _calls(reader, calls, None)):
                calls.content(reader.taken())

    return run


def _calls(reader: Reader, calls: Calls, known: Set[str] | None) -> Reading[bool]:
    return read_calls(reader, calls, partial(read_call, known=known), ";")


def build(options: Options) -> ToolFormat:
    """The format."""
    return ProgramFormat(program, markers=(TAG,))


def recognizes(model: ModelText) -> str | None:
    """Models that have Llama's tag."""
    return f"{TAG} is a token of its own" if TAG in model.added_tokens else None


@hookimpl
def tool_parsers() -> list[ToolParserOffer]:
    """Llama's JSON."""
    return [
        ToolParserOffer(
            name="llama3_json",
            summary='Bare {"name": …, "parameters": {…}}, several separated by ";": Llama 3.1 to 3.3.',
            build=build,
            recognizes=recognizes,
        )
    ]
