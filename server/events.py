"""From the deltas of the core to what they mean: thoughts, text, function calls. Every chat-like API builds on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from engine.parsing.calls import joined
from engine.specs.tool_parser import Content, ToolArguments, ToolBegin, ToolEnd, ToolEvent, ToolParser
from engine.text import Delta


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thoughts. They come before everything else."""

    text: str


Event = Reasoning | Content | ToolBegin | ToolArguments | ToolEnd


@dataclass(frozen=True, slots=True)
class News:
    """One delta and what it means. `delta.text` is in the events, cut and delayed as they need it."""

    delta: Delta
    events: Sequence[Event]
    finish_reason: str | None  # the delta's, or `tool_calls`


class AnswerReader:
    """Reads one choice.

    Args:
        tools: finds the calls; None takes all text as content.
        forced: whether one certain function had to be called, for which OpenAI's finish reason is an ordinary one.
        show_reasoning: whether thoughts are told; if not they are dropped.
    """

    def __init__(
        self,
        tools: ToolParser | None = None,
        *,
        forced: bool = False,
        show_reasoning: bool = True,
    ) -> None:
        self._tools, self._forced, self._thoughts = tools, forced, show_reasoning
        self._called = False
        self._open = False  # within a call

    def read(self, delta: Delta) -> News:
        """What a delta means; the last one is the one with a finish reason.

        A parser that has read enough ends the answer: the delta gets a finish reason, and whoever made it sees that.
        """
        events: list[Event] = [Reasoning(delta.reasoning)] if delta.reasoning and self._thoughts else []
        events += self._text(delta)
        self._called = self._called or any(isinstance(event, ToolBegin) for event in events)
        cut = self._open and isinstance(delta.stop_reason, str)  # a stop string within a call
        called = delta.finish_reason == "stop" and self._called and not self._forced and not cut
        return News(delta, events, "tool_calls" if called else delta.finish_reason)

    def _text(self, delta: Delta) -> Sequence[Event]:
        if self._tools is None:
            return [Content(delta.text)] if delta.text else []
        found: list[ToolEvent] = self._tools.feed(delta.text) if delta.text else []
        for event in found:
            self._open = isinstance(event, ToolBegin | ToolArguments)
        if delta.finish_reason is None and self._tools.over:
            delta.finish_reason = "stop"
        return found if delta.finish_reason is None else joined([*found, *self._tools.finish()])


async def read_events(deltas: AsyncGenerator[Delta], readers: Sequence[AnswerReader]) -> AsyncGenerator[News]:
    """The news of all choices as they come, `readers[i]` reading choice i. Closing it closes the deltas."""
    finished: set[int] = set()
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.index in finished:
                continue  # its reader had read enough when this was on its way
            news = readers[delta.index].read(delta)
            if news.finish_reason is not None:
                finished.add(delta.index)
            yield news


__all__ = [
    "AnswerReader",
    "Content",
    "Event",
    "News",
    "Reasoning",
    "ToolArguments",
    "ToolBegin",
    "ToolEnd",
    "read_events",
]
