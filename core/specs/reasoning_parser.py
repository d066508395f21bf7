"""Extension point: reasoning parsers, which part a model's thoughts from its answer.

Thoughts come first, so an answer has one border at most. It is looked for before stop strings and tool calls are, which
both belong to the answer proper. Everything runs where text is made: in the HTTP process, or with `LLM`.

Threads: one at a time; `feed` and `finish` must cost no more than the text is long.

Errors: none. A border that never comes leaves everything on one side; no piece of text may be lost, but for the markers
and the white space around them.

`build(options) -> ReasoningFormat`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.hooks import hookspec
from engine.plugin import Offer
from engine.specs.tool_parser import ModelText

API: Final = 1
HOOK: Final = "reasoning_parsers"


class Split(NamedTuple):
    """A piece of text, parted."""

    reasoning: str
    content: str


class ReasoningParser(ABC):
    """Reads one answer. However its text is cut into pieces, both sides add up to the same."""

    @abstractmethod
    def feed(self, text: str) -> Split:
        """What this piece makes certain. Only text that may yet become a marker, and white space, is held back."""

    @abstractmethod
    def finish(self) -> Split:
        """The text has ended: the rest. Nothing may be fed after this."""

    @property
    @abstractmethod
    def thinking(self) -> bool:
        """Whether the text read so far ends within the thoughts."""


class NoReasoning(ReasoningParser):
    """For models that don't think aloud: all text is content."""

    def feed(self, text: str) -> Split:
        """The piece as it is."""
        return Split("", text)

    def finish(self) -> Split:
        """Nothing is held back."""
        return Split("", "")

    @property
    def thinking(self) -> bool:
        """Never."""
        return False


class ReasoningFormat(ABC):
    """One way to mark thoughts."""

    markers: tuple[str, ...] = ()
    """Texts of the format that may be special tokens, which are otherwise kept out of the text."""

    @abstractmethod
    def parser(self, prompt: str) -> ReasoningParser:
        """A parser for one answer to this prompt, whose end may have opened the thoughts already."""

    @property
    @abstractmethod
    def end(self) -> str:
        """The text that ends the thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParserOffer(Offer[ReasoningFormat]):
    """An offer that also knows the models which mark their thoughts so.

    `recognizes` answers why a model does, in a few words that follow "because", or None.
    """

    recognizes: Callable[[ModelText], str | None]


OFFER: Final = ReasoningParserOffer


BUILDS: Final = ReasoningFormat


@hookspec
def reasoning_parsers() -> Iterable[ReasoningParserOffer]:  # type: ignore[empty-body]
    """Offer reasoning parsers. Must not import torch."""


__all__ = [
    "API",
    "HOOK",
    "OFFER",
    "NoReasoning",
    "ReasoningFormat",
    "ReasoningParser",
    "ReasoningParserOffer",
    "Split",
    "reasoning_parsers",
]
