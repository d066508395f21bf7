"""Text that comes in pieces, read as if it were all there.

Reading functions are generators: `char = yield from reader.peek()` suspends the parser until there is text. Only
`held` text is kept in memory; a parser that may have to take something back holds it first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A piece of a parser: yields when it needs more text, returns T."""

Sink = Callable[[str], None]

_SPACE = re.compile(r"\s+")


class Reader:
    """A position in a growing text. `push` and `end` are the driver's, the rest is the parser's."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: int | None = None
        self._ended = False

    def push(self, text: str) -> None:
        """More text has come; what was read and isn't held is forgotten."""
        start = self._at if self._held is None else self._held
        self._text = self._text[start:] + text
        self._at -= start
        if self._held is not None:
            self._held = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def hold(self) -> None:
        """Remember everything read from here on, for `taken`."""
        self._held = self._at

    def taken(self) -> str:
        """What was read since `hold`, which ends."""
        assert self._held is not None, "nothing is held"
        text = self._text[self._held : self._at]
        self._held = None
        return text

    def back(self) -> None:
        """Return to where `hold` was called, to read on from there."""
        assert self._held is not None, "nothing is held"
        self._at = self._held

    def release(self) -> None:
        """What was read since `hold` won't be asked for."""
        self._held = None

    def more(self) -> Reading[bool]:
        """Wait for more text than is there; False when none comes."""
        have = len(self._text) - self._at
        while not self._ended and len(self._text) - self._at == have:
            yield
        return len(self._text) - self._at > have

    def peek(self) -> Reading[str]:
        """The next character, not taken; empty at the end."""
        if self._at == len(self._text) and not (yield from self.more()):
            return ""
        return self._text[self._at]

    def take(self) -> Reading[str]:
        """The next character; empty at the end."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def accept(self, word: str) -> Reading[bool]:
        """Take `word` if it comes next; else take nothing."""
        while not (found := self._text.startswith(word, self._at)):
            if not word.startswith(self._text[self._at :]) or not (yield from self.more()):
                return found
        self._at += len(word)
        return True

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Pass to `sink` all that comes next of a pattern such as `[a-z]+`: one class of characters, repeated."""
        while True:
            if found := pattern.match(self._text, self._at):
                self._at = found.end()
                sink(found[0])
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All that comes next of such a pattern; may be empty."""
        parts: list[str] = []
        yield from self.run(pattern, parts.append)
        return "".join(parts)

    def space(self) -> Reading[None]:
        """Skip white space."""
        yield from self.run(_SPACE, lambda text: None)

    def seek(self, words: Sequence[str], sink: Sink) -> Reading[str]:
        """Pass text to `sink` up to the first of `words`, which is taken and returned, held from its beginning.

        First is the one that is complete first; of several, the longest. Empty at the end of the text, all of which
        has then been passed on.
        """
        while True:
            if (found := _first(self._text, words, self._at)) is not None:
                start, word = found
                self._pass(start, sink)
                self.hold()
                self._at += len(word)
                return word
            self._pass(len(self._text) - _begun(self._text, words, self._at), sink)
            if not (yield from self.more()):
                self._pass(len(self._text), sink)
                return ""

    def _pass(self, end: int, sink: Sink) -> None:
        if end > self._at:
            sink(self._text[self._at : end])
            self._at = end


def _first(text: str, words: Sequence[str], start: int) -> tuple[int, str] | None:
    """Where the word begins that is complete first from `start` on, and which it is."""
    ends = [(at + len(word), at, word) for word in words if (at := text.find(word, start)) >= 0]
    if not ends:
        return None
    _, at, word = min(ends)
    return at, word


def _begun(text: str, words: Sequence[str], start: int) -> int:
    """Length of the longest end of `text`, from `start` on, that begins one of `words`."""
    longest = 0
    for word in words:
        at = text.find(word[0], max(start, len(text) - len(word) + 1))
        while at >= 0 and not word.startswith(text[at:]):
            at = text.find(word[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest


__all__ = ["Reader", "Reading", "Sink"]
