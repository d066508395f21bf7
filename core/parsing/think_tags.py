"""Thoughts between two markers at the beginning of an answer: `<think>…</think>` and its relatives."""

from __future__ import annotations

import re
from typing import Final, Literal

from engine.parsing.reader import Reader, Reading
from engine.specs.reasoning_parser import ReasoningFormat, ReasoningParser, Split

Opened = Literal["auto", "always"]
"""Whether answers begin within the thoughts: when the prompt ends with the opening marker, or always."""

_ANYTHING: Final = re.compile(r"[\s\S]+")


class TaggedThoughts(ReasoningFormat):
    """The format of two markers. An opening marker counts only before any other text."""

    def __init__(self, begin: str, end: str, opened: Opened = "auto") -> None:
        self.markers = (begin, end)
        self._begin, self._end, self._always = begin, end, opened == "always"

    def parser(self, prompt: str) -> ReasoningParser:
        """See `ReasoningFormat.parser`. A prompt that ends with the closing marker forbids thoughts."""
        tail = prompt.rstrip()
        opened = tail.endswith(self._begin) or (self._always and not tail.endswith(self._end))
        return _TaggedParser(self._begin, self._end, opened)

    @property
    def end(self) -> str:
        """See `ReasoningFormat.end`."""
        return self._end


class _TaggedParser(ReasoningParser):
    def __init__(self, begin: str, end: str, opened: bool) -> None:
        self._begin, self._end, self._thinking = begin, end, opened
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._space = ""  # at the end of the reasoning so far
        self._reader = Reader()
        self._run = self._read(self._reader)
        next(self._run)

    @property
    def thinking(self) -> bool:
        return self._thinking

    def feed(self, text: str) -> Split:
        if text:
            self._reader.push(text)
            next(self._run, None)
        return self._drain()

    def finish(self) -> Split:
        self._reader.end()
        next(self._run, None)
        return self._drain()

    def _read(self, reader: Reader) -> Reading[None]:
        reader.hold()
        yield from reader.space()
        self._thinking = (yield from reader.accept(self._begin)) or self._thinking
        if self._thinking:
            reader.release()
            yield from self._think(reader)
        else:
            self._content.append(reader.taken())
        yield from reader.run(_ANYTHING, self._content.append)

    def _think(self, reader: Reader) -> Reading[None]:
        yield from reader.space()
        if (yield from reader.seek((self._end,), self._add_reasoning)):
            reader.release()
            self._thinking = False
            yield from reader.space()

    def _add_reasoning(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._reasoning.append(kept)

    def _drain(self) -> Split:
        split = Split("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return split


__all__ = ["Opened", "TaggedThoughts"]
