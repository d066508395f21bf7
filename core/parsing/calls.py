"""What a tool parser says, gathered: indices, ids, and white space that only separates calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from engine.specs.tool_parser import Content, ToolArguments, ToolBegin, ToolEnd, ToolEvent


def call_id() -> str:
    """An id as OpenAI writes them."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Calls:
    """Collects the events of one answer until `drain` takes them.

    White space beside a call separates it and is no content, unless it also separates texts: then what stands before
    the call is, or else what stands behind it.
    """

    def __init__(self, make_id: Callable[[], str] = call_id) -> None:
        self._make_id = make_id
        self._events: list[ToolEvent] = []
        self._space = ""  # white space that is content only if more content follows
        self._count = 0
        self._open = False
        self._said = False  # whether there was any content
        self._fresh = False  # nothing but white space came since the last call
        self._parted = False  # since before that call there is white space

    def content(self, text: str) -> None:
        """Text that is no part of a call."""
        if self._fresh and (self._parted or not self._said):
            text = text.lstrip()
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._said, self._fresh = True, False
            self._events.append(Content(kept))

    def begin(self, name: str) -> None:
        """A call of this function begins."""
        if not self._said:
            self._space = ""
        self._parted = bool(self._space)
        self._open = True
        self._events.append(ToolBegin(self._count, self._make_id(), name))

    def arguments(self, text: str) -> None:
        """More of its arguments, as JSON text."""
        self._events.append(ToolArguments(self._count, text))

    def end(self) -> None:
        """The call is over."""
        self._events.append(ToolEnd(self._count))
        self._count += 1
        self._open, self._fresh = False, True

    def close(self) -> None:
        """The text is over: end the call that is open; what white space was held is content, if there is any."""
        if self._open:
            self.end()
        if self._space and not self._fresh:
            self._events.append(Content(self._space))
        self._space = ""

    def drain(self) -> list[ToolEvent]:
        """The events since the last time, adjacent texts joined."""
        events, self._events = self._events, []
        return joined(events)


def joined(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """The same events with adjacent pieces of text, and of one call's arguments, made one."""
    made: list[ToolEvent] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, Content) and isinstance(last, Content):
            made[-1] = Content(last.text + event.text)
        elif isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and last.index == event.index:
            made[-1] = ToolArguments(event.index, last.text + event.text)
        else:
            made.append(event)
    return made


__all__ = ["Calls", "call_id", "joined"]
