"""A tool parser from a program: a generator that reads one answer from its beginning to its end."""

from __future__ import annotations

from collections.abc import Callable

from engine.parsing.calls import Calls, call_id
from engine.parsing.reader import Reader, Reading
from engine.specs.tool_parser import ToolEvent, ToolParser

Program = Callable[[Reader, Calls], Reading[None]]
"""Reads all text and tells it to the `Calls`. It returns at the end of the text only."""


class ProgramParser(ToolParser):
    """Runs a program as far as the text goes."""

    def __init__(self, program: Program, make_id: Callable[[], str] = call_id) -> None:
        self._reader = Reader()
        self._calls = Calls(make_id)
        self._run = program(self._reader, self._calls)
        next(self._run, None)

    def feed(self, text: str) -> list[ToolEvent]:
        """See `ToolParser.feed`."""
        if text:
            self._reader.push(text)
            next(self._run, None)
        return self._calls.drain()

    def finish(self) -> list[ToolEvent]:
        """See `ToolParser.finish`."""
        self._reader.end()
        for _ in self._run:
            raise AssertionError("the program waits for text after its end")
        self._calls.close()
        return self._calls.drain()


__all__ = ["Program", "ProgramParser"]
