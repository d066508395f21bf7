"""Formats in which markers stand around calls: `<tool_call>…</tool_call>` and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.parsing.calls import Calls
from engine.parsing.json_call import read_call, read_container
from engine.parsing.program import Program
from engine.parsing.reader import Reader, Reading

_LONGEST_NAME: Final = 256
"""Characters; OpenAI allows 64."""

Body = Callable[[Reader, Calls], Reading[bool]]
"""Reads what stands between the markers of one call; if it is none False, with nothing said and the text still held."""


def marked(begin: str, end: str, body: Body = read_call, section: tuple[str, str] | None = None) -> Program:
    """The program of a format.

    Args:
        begin: marker before a call.
        end: marker after it; empty if there is none. It may be missing in the text.
        section: markers around all calls, if the format has them.
    """
    starts = [begin] if section is None else [begin, section[0]]

    def program(reader: Reader, calls: Calls) -> Reading[None]:
        while word := (yield from reader.seek(starts, calls.content)):
            if word != begin:
                yield from reader.space()
                if not (yield from reader.accept(begin)):
                    calls.content(reader.taken())
                    continue
            if not (yield from body(reader, calls)):
                calls.content(reader.taken())
                continue
            yield from _close(reader, end)
            if section is not None:
                yield from _close(reader, section[1])

    return program


def _close(reader: Reader, word: str) -> Reading[None]:
    """Skip an end marker and the white space before it."""
    yield from reader.space()
    if word:
        yield from reader.accept(word)


def read_calls(reader: Reader, calls: Calls, call: Body, separator: str, close: str = "") -> Reading[bool]:
    """Several calls with a separator between them and a bracket behind; False if already the first is none."""
    if not (yield from call(reader, calls)):
        return False
    while True:
        reader.hold()
        yield from reader.space()
        if not (yield from reader.accept(separator)):
            if close and (yield from reader.accept(close)):
                reader.release()
            else:
                calls.content(reader.taken())
            return True
        yield from reader.space()
        if not (yield from call(reader, calls)):
            calls.content(reader.taken())
            return True


def named_body(separator: str) -> Body:
    """`NAME separator {…}`: the name as it is, then JSON arguments."""

    def body(reader: Reader, calls: Calls) -> Reading[bool]:
        name = yield from read_name(reader, separator)
        return (yield from stream_arguments(reader, calls, name))

    return body


def read_name(reader: Reader, separator: str) -> Reading[str]:
    """A function's name up to a separator, which is taken too; empty if there is no such thing."""
    name = ""
    yield from reader.space()
    while not (yield from reader.accept(separator)):
        char = yield from reader.take()
        if not char or char in "{}\n" or len(name) >= _LONGEST_NAME:
            return ""
        name += char
    return name.strip()


def stream_arguments(reader: Reader, calls: Calls, name: str) -> Reading[bool]:
    """A call of the function of that name, if it has one and a JSON object comes next; False if not."""
    yield from reader.space()
    if not name or (yield from reader.peek()) != "{":
        return False
    reader.release()
    calls.begin(name)
    yield from read_container(reader, calls.arguments)
    calls.end()
    return True


__all__ = ["Body", "marked", "named_body", "read_calls", "read_name", "stream_arguments"]
