"""Calls that constrained decoding forced a model to write: plain JSON, whatever the model's own format is."""

from __future__ import annotations

import re
from typing import Final

from engine.parsing.calls import Calls
from engine.parsing.json_call import read_call
from engine.parsing.marked import read_calls, stream_arguments
from engine.parsing.program import Program
from engine.parsing.reader import Reader, Reading

_ANYTHING: Final = re.compile(r"[\s\S]+")


def one_call(name: str) -> Program:
    """The text is the arguments of one call of that function."""

    def program(reader: Reader, calls: Calls) -> Reading[None]:
        reader.hold()
        if not (yield from stream_arguments(reader, calls, name)):
            calls.content(reader.taken())
        yield from reader.run(_ANYTHING, calls.content)

    return program


def call_list() -> Program:
    """The text is a list of objects with `name` and `arguments`."""

    def program(reader: Reader, calls: Calls) -> Reading[None]:
        reader.hold()
        yield from reader.space()
        if not (yield from reader.accept("[")) or not (yield from read_calls(reader, calls, read_call, ",", "]")):
            calls.content(reader.taken())
        yield from reader.run(_ANYTHING, calls.content)

    return program


__all__ = ["call_list", "one_call"]
