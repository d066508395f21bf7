"""A tool format from its parts."""

from __future__ import annotations

from collections.abc import Callable, Set

from engine.parsing.calls import call_id
from engine.parsing.program import Program, ProgramParser
from engine.specs.tool_parser import CallTag, ToolFormat, ToolParser


class ProgramFormat(ToolFormat):
    """A format whose parsers run a program.

    Args:
        program: makes the program for the names of the functions that a model was offered.
        markers: see `ToolFormat.markers`.
        tag: see `ToolFormat.tag`.
        make_id: names calls.
    """

    def __init__(
        self,
        program: Callable[[Set[str]], Program],
        *,
        markers: tuple[str, ...] = (),
        tag: Callable[[str], CallTag] | None = None,
        make_id: Callable[[], str] = call_id,
    ) -> None:
        self.markers = markers
        self._program, self._tag, self._make_id = program, tag, make_id

    def parser(self, functions: Set[str]) -> ToolParser:
        """See `ToolFormat.parser`."""
        return ProgramParser(self._program(functions), self._make_id)

    def tag(self, function: str) -> CallTag | None:
        """See `ToolFormat.tag`."""
        return None if self._tag is None else self._tag(function)


__all__ = ["ProgramFormat"]
