"""Parsers over parsers that know when an answer has said enough."""

from __future__ import annotations

from abc import abstractmethod

from engine.specs.tool_parser import Content, ToolArguments, ToolBegin, ToolEnd, ToolEvent, ToolParser


class _Ending(ToolParser):
    """Passes on what another parser says, until it is over."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._over = False

    def feed(self, text: str) -> list[ToolEvent]:
        """See `ToolParser.feed`."""
        return self._pass(self._parser.feed(text))

    def finish(self) -> list[ToolEvent]:
        """See `ToolParser.finish`."""
        return self._pass(self._parser.finish())

    @property
    def over(self) -> bool:
        """See `ToolParser.over`."""
        return self._over

    def _pass(self, events: list[ToolEvent]) -> list[ToolEvent]:
        passed: list[ToolEvent] = []
        for event in events:
            if not self._over:
                passed += self._take(event)
        return passed

    @abstractmethod
    def _take(self, event: ToolEvent) -> list[ToolEvent]:
        """What to say for an event, which may be the last."""


class OneCall(_Ending):
    """Ends with the first call, for clients that want no parallel ones."""

    def _take(self, event: ToolEvent) -> list[ToolEvent]:
        self._over = isinstance(event, ToolEnd)
        return [event]


class DistinctCalls(_Ending):
    """Ends where a call comes again with the same arguments.

    A small model that may write nothing but calls would repeat itself until its tokens run out. The first call is
    passed on as it comes, each later one when it is complete.
    """

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser)
        self._seen: set[tuple[str, str]] = set()
        self._name, self._arguments = "", ""
        self._waiting: list[ToolEvent] = []

    def _take(self, event: ToolEvent) -> list[ToolEvent]:
        match event:
            case Content():
                return [event]
            case ToolBegin(_, _, name):
                self._name, self._arguments = name, ""
            case ToolArguments(_, text):
                self._arguments += text
            case ToolEnd():
                call = (self._name, self._arguments)
                self._over = call in self._seen
                self._seen.add(call)
        if event.index == 0:
            return [event]
        self._waiting.append(event)
        if not isinstance(event, ToolEnd):
            return []
        waiting, self._waiting = self._waiting, []
        return [] if self._over else waiting


__all__ = ["DistinctCalls", "OneCall"]
