"""Calls as a Python list: `[f(a=1, b="x"), g()]`, Llama 3.2 and 4, and others."""

from __future__ import annotations

from collections.abc import Set
from functools import partial

from engine.hooks import hookimpl
from engine.parsing.calls import Calls
from engine.parsing.formats import ProgramFormat
from engine.parsing.marked import read_calls
from engine.parsing.program import Program
from engine.parsing.python_call import read_python_call
from engine.parsing.reader import Reader, Reading
from engine.plugin import Options
from engine.specs.tool_parser import ModelText, ToolFormat, ToolParserOffer

BEGIN, END = "<|python_start|>", "<|python_end|>"


def program(functions: Set[str]) -> Program:
    """Calls stand at the beginning of the answer, where only known names count, or between the markers."""

    def run(reader: Reader, calls: Calls) -> Reading[None]:
        reader.hold()
        yield from reader.space()
        if not (yield from _list(reader, calls, functions)):
            calls.content(reader.taken())
        while (yield from reader.seek((BEGIN,), calls.content)):
            yield from reader.space()
            if not (yield from _list(reader, calls, None)):
                calls.content(reader.taken())
                continue
            yield from reader.space()
            yield from reader.accept(END)

    return run


def _list(reader: Reader, calls: Calls, known: Set[str] | None) -> Reading[bool]:
    if not (yield from reader.accept("[")):
        return False
    yield from reader.space()
    return (yield from read_calls(reader, calls, partial(read_python_call, known=known), ",", "]"))


def build(options: Options) -> ToolFormat:
    """The format."""
    return ProgramFormat(program, markers=(BEGIN, END))


def recognizes(model: ModelText) -> str | None:
    """Models that have the markers, which came with Llama 4."""
    return f"{BEGIN} is a token of its own" if BEGIN in model.added_tokens else None


@hookimpl
def tool_parsers() -> list[ToolParserOffer]:
    """Lists of Python calls."""
    return [
        ToolParserOffer(
            name="pythonic",
            summary='[f(a=1, b="x"), g()]: Llama 4, small Llama 3.2.',
            build=build,
            recognizes=recognizes,
            rank=1,
        )
    ]
