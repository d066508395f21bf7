"""Calls written as Python: `f(a=1, b="x")`. Arguments are passed on one by one, as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Set
from typing import Final

from engine.parsing.calls import Calls
from engine.parsing.reader import Reader, Reading, Sink

_NAME: Final = re.compile(r"[\w.-]+")
_HALF: Final = re.compile(r"[\ud800-\udfff]")
_PLAIN: Final = re.compile(r"[^'\"()\[\]{},\\]+")


def read_python_call(reader: Reader, calls: Calls, known: Set[str] | None = None) -> Reading[bool]:
    """One call with keyword arguments. Returns and holds text as `read_call` does."""
    name = yield from reader.word(_NAME)
    if not name or (known is not None and name not in known) or not (yield from reader.accept("(")):
        return False
    yield from reader.space()
    closed = yield from reader.accept(")")
    key = "" if closed else (yield from _read_key(reader))
    if not closed and not key:
        return False
    reader.release()
    calls.begin(name)
    yield from _read_arguments(reader, calls, key)
    calls.end()
    return True


def _read_key(reader: Reader) -> Reading[str]:
    """`NAME =`, or empty."""
    key = yield from reader.word(_NAME)
    yield from reader.space()
    return key if key and (yield from reader.accept("=")) else ""


def _read_arguments(reader: Reader, calls: Calls, key: str) -> Reading[None]:
    """The arguments from the value of the first on; of a call without any, nothing is left to read."""
    text, position = "{", 0
    while key:
        calls.arguments(f"{text}{json.dumps(key, ensure_ascii=False)}: ")
        value = yield from _read_value(reader)
        calls.arguments(as_json(value))
        if not (yield from reader.accept(",")):
            if not (yield from reader.accept(")")):
                return  # the text ended
            break
        yield from reader.space()
        if (yield from reader.accept(")")):
            break
        text, position = ", ", position + 1
        reader.hold()
        key = yield from _read_key(reader)
        if not key:
            key = f"argument {position}"
            reader.back()
        reader.release()
    calls.arguments("}" if key else "{}")


def _read_value(reader: Reader) -> Reading[str]:
    """The source text of a value: up to a comma or parenthesis outside of brackets and strings."""
    parts: list[str] = []
    depth = 0
    while True:
        char = yield from reader.peek()
        if not char or (depth == 0 and char in ",)"):
            return "".join(parts)
        yield from reader.take()
        parts.append(char)
        if char in "'\"":
            yield from _read_string(reader, char, parts.append)
        depth += (char in "([{") - (char in ")]}")
        yield from reader.run(_PLAIN, parts.append)


def _read_string(reader: Reader, quote: str, sink: Sink) -> Reading[None]:
    """The rest of a string behind its opening quote."""
    while True:
        char = yield from reader.take()
        sink(char)
        if char == "\\":
            sink((yield from reader.take()))
        elif char in (quote, ""):
            return


def as_json(source: str) -> str:
    """A Python or JSON literal as JSON text; what is neither becomes a string."""
    source = source.strip()
    for text in (source, source.replace("\n", "\\n")):  # models break lines within strings
        for read in (json.loads, ast.literal_eval):
            try:
                return _dumped(read(text))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
    return json.dumps(source, ensure_ascii=False)


def _dumped(value: object) -> str:
    """JSON text. Half of a surrogate pair, which can't be sent, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value, allow_nan=False) if _HALF.search(text) else text


__all__ = ["as_json", "read_python_call"]
