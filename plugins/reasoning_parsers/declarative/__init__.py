"""Thoughts between two markers that the configuration names."""

from __future__ import annotations

from pydantic import Field

from engine.hooks import hookimpl
from engine.parsing.think_tags import Opened, TaggedThoughts
from engine.plugin import Options
from engine.specs.reasoning_parser import ReasoningParserOffer
from engine.specs.tool_parser import ModelText


class DeclarativeOptions(Options):
    """The markers."""

    begin: str = Field(min_length=1, description="Text that opens the thoughts; counts before any other text only.")
    end: str = Field(min_length=1, description="Text that closes them.")
    opened: Opened = Field(
        default="auto",
        description="Where an answer begins: auto, within the thoughts if the prompt ends with `begin`; always, within "
        "them unless the prompt ends with `end`.",
    )


def build(options: DeclarativeOptions) -> TaggedThoughts:
    """The format of these markers."""
    return TaggedThoughts(options.begin, options.end, options.opened)


def recognizes(model: ModelText) -> str | None:
    """Never taken unasked: the markers are the user's to name."""
    return None


@hookimpl
def reasoning_parsers() -> list[ReasoningParserOffer]:
    """A format made of options."""
    return [
        ReasoningParserOffer(
            name="declarative",
            summary="Thoughts between two markers of your own.",
            build=build,
            options=DeclarativeOptions,
            recognizes=recognizes,
        )
    ]
