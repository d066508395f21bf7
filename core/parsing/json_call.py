"""Calls written as JSON, read as they come.

Arguments are passed on as soon as the function's name is known, so their JSON is followed (strings, brackets) but not
judged: a client gets what the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from engine.parsing.calls import Calls
from engine.parsing.reader import Reader, Reading, Sink

_IN_STRING: Final = re.compile(r'[^"\\]+')
_IN_VALUE: Final = re.compile(r'[^"{}\[\]]+')
_IN_ATOM: Final = re.compile(r"[\w.+-]+")


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Names of the members that make a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")


def read_string(reader: Reader, sink: Sink) -> Reading[bool]:
    """One JSON string, quotes included; False when there is none, or the text ends in it."""
    if not (yield from reader.accept('"')):
        return False
    sink('"')
    while True:
        yield from reader.run(_IN_STRING, sink)
        char = yield from reader.take()
        if char == "\\":
            char += yield from reader.take()
        sink(char)
        if char in ('"', ""):
            return char == '"'


def read_container(reader: Reader, sink: Sink) -> Reading[bool]:
    """One JSON object or array; False when the text ends in it. The next character opens it."""
    depth = 0
    while True:
        char = yield from reader.peek()
        if char == '"':
            if not (yield from read_string(reader, sink)):
                return False
            continue
        yield from reader.take()
        sink(char)
        depth += (char in "{[") - (char in "}]") if char else 0
        if depth == 0 or not char:
            return bool(char)
        yield from reader.run(_IN_VALUE, sink)


def read_value(reader: Reader) -> Reading[str]:
    """One JSON value as text; empty when there is none, or the text ends in it."""
    parts: list[str] = []
    char = yield from reader.peek()
    if char == '"':
        done = yield from read_string(reader, parts.append)
    elif char in ("{", "["):
        done = yield from read_container(reader, parts.append)
    else:
        yield from reader.run(_IN_ATOM, parts.append)
        done = True
    return "".join(parts) if done else ""


def object_text(value: str) -> str | None:
    """Arguments as JSON text from how a model may write them: an object, null, or a string that holds an object."""
    if value.startswith('"'):
        value = decoded(value) or ""
    if not value.strip() or value == "null":
        return "{}"
    return value if value.lstrip().startswith("{") else None


def decoded(literal: str) -> str | None:
    """The text of a JSON string; None if it is none. Line breaks in it, which models write, are allowed."""
    if not literal.startswith('"'):
        return None  # not even looked at: it may be nested deeper than any parser goes
    try:
        text: str = json.loads(literal, strict=False)
        text.encode()  # half of a surrogate pair can be escaped in JSON, but not sent
    except ValueError:
        return None
    return text


class _Members:
    """What is known of a call while its object is read."""

    def __init__(self, calls: Calls, reader: Reader, known: Set[str] | None) -> None:
        self._calls, self._reader, self._known = calls, reader, known
        self.name: str | None = None
        self.arguments: str | None = None  # that came before the name
        self.begun = False

    def named(self, literal: str) -> bool:
        """Take the name; False if it is none."""
        self.name = decoded(literal)
        return bool(self.name) and (self._known is None or self.name in self._known)

    def streamed(self) -> Reading[bool]:
        """Pass the arguments on as they come."""
        assert self.name is not None
        self.begun = True
        self._reader.release()
        self._calls.begin(self.name)
        return (yield from read_container(self._reader, self._calls.arguments))

    def close(self, complete: bool) -> bool:
        """The object is over; whether it was a call."""
        arguments = object_text(self.arguments or "")
        if not self.begun:
            if not complete or self.name is None or arguments is None:
                return False
            if self.arguments is None and self._known is not None:
                return False  # without a marker, a mere name is too little
            self._reader.release()
            self._calls.begin(self.name)
            self._calls.arguments(arguments)
        self._calls.end()
        return True


def read_call(
    reader: Reader, calls: Calls, known: Set[str] | None = None, keys: CallKeys = CallKeys()
) -> Reading[bool]:
    """One object such as `{"name": "f", "arguments": {"a": 1}}`, its members in any order.

    Args:
        reader: holds whatever is to become content if this is no call; released once a call has begun.
        known: names that count; None takes any.

    Returns:
        Whether it was a call. If not, nothing has been said of it.
    """
    members = _Members(calls, reader, known)
    complete = yield from _read_members(reader, members, keys)
    return members.close(complete)


def _read_members(reader: Reader, members: _Members, keys: CallKeys) -> Reading[bool]:
    """Read an object; False when it is malformed or cut off, or no call."""
    yield from reader.space()
    if not (yield from reader.accept("{")):
        return False
    while True:
        yield from reader.space()
        key = decoded((yield from read_value(reader)))
        yield from reader.space()
        if key is None or not (yield from reader.accept(":")):
            return False
        yield from reader.space()
        if not (yield from _read_member(reader, members, keys, key)):
            return False
        yield from reader.space()
        if not (yield from reader.accept(",")):
            return (yield from reader.accept("}"))


def _read_member(reader: Reader, members: _Members, keys: CallKeys, key: str) -> Reading[bool]:
    if key in keys.arguments and members.name and not members.begun and (yield from reader.peek()) == "{":
        return (yield from members.streamed())
    value = yield from read_value(reader)
    if key == keys.name and members.name is None:
        return members.named(value)
    if key in keys.arguments and not members.begun:
        members.arguments = value
        return object_text(value) is not None
    return bool(value)


__all__ = ["CallKeys", "object_text", "read_call", "read_container", "read_string", "read_value"]
