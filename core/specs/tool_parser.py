"""Extension point: tool parsers, which find the calls of functions in what a model writes.

An offer knows the text format of one family of models. What it builds makes one parser per answer, which takes the
answer's text in whatever pieces it comes and says what they mean. Everything runs in the HTTP process.

Threads: one event loop; `feed` and `finish` must cost no more than the text is long.

Errors: none. What looks like a call and is none is content again; no piece of text may be lost.

`build(options) -> ToolFormat`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Final

from engine.hooks import hookspec
from engine.plugin import Offer

API: Final = 1
HOOK: Final = "tool_parsers"


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text that is for people."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolBegin:
    """A call begins. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of a call's arguments; the pieces together are a JSON object if the model wrote one."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """The call is complete, or the text ended within it."""

    index: int


ToolEvent = Content | ToolBegin | ToolArguments | ToolEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTag:
    """How a call of one function is spelled around its arguments, so that constrained decoding can enforce them.

    Once the model has written `trigger`, with which `begin` starts, it can only go on with the `begin` of one function,
    JSON arguments, and `end`.
    """

    trigger: str
    begin: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """What a checkpoint says about the text it writes; `auto` goes by this."""

    chat_template: str  # all its templates, one after another; empty if there is none
    added_tokens: frozenset[str]  # texts of the tokens beside the vocabulary proper


class ToolParser(ABC):
    """Reads one answer. However its text is cut into pieces, the events (adjacent texts joined) are the same."""

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """What this piece makes certain. Only text that may yet become part of a call is held back."""

    @abstractmethod
    def finish(self) -> list[ToolEvent]:
        """The text has ended: the rest. Nothing may be fed after this."""

    @property
    def over(self) -> bool:
        """Whether the answer has said enough, so that generating more of it is a waste; False unless overridden."""
        return False


class ToolFormat(ABC):
    """One text format."""

    markers: tuple[str, ...] = ()
    """Texts of the format that may be special tokens, which are otherwise kept out of the text."""

    @abstractmethod
    def parser(self, functions: Set[str]) -> ToolParser:
        """A parser for one answer of a model that was offered functions of these names."""

    def tag(self, function: str) -> CallTag | None:
        """How a call of this function is spelled; None when constraints can't be attached to the format."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserOffer(Offer[ToolFormat]):
    """An offer that also knows the models which write its format.

    `recognizes` answers why a model does, in a few words that follow "because", or None.
    """

    recognizes: Callable[[ModelText], str | None]


OFFER: Final = ToolParserOffer


BUILDS: Final = ToolFormat


@hookspec
def tool_parsers() -> Iterable[ToolParserOffer]:  # type: ignore[empty-body]
    """Offer tool parsers. Must not import torch."""


__all__ = [
    "API",
    "HOOK",
    "OFFER",
    "CallTag",
    "Content",
    "ModelText",
    "ToolArguments",
    "ToolBegin",
    "ToolEnd",
    "ToolEvent",
    "ToolFormat",
    "ToolParser",
    "ToolParserOffer",
    "tool_parsers",
]
