"""Thoughts in `[THINK]…[/THINK]`: Magistral."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.parsing.think_tags import TaggedThoughts
from engine.plugin import Options
from engine.specs.reasoning_parser import ReasoningParserOffer
from engine.specs.tool_parser import ModelText

BEGIN, END = "[THINK]", "[/THINK]"


def build(options: Options) -> TaggedThoughts:
    """The format of two special tokens."""
    return TaggedThoughts(BEGIN, END)


def recognizes(model: ModelText) -> str | None:
    """Models whose tokens or template know the closing marker."""
    if END in model.added_tokens:
        return f"{END} is a token of its own"
    return f"the chat template writes {END}" if END in model.chat_template else None


@hookimpl
def reasoning_parsers() -> list[ReasoningParserOffer]:
    """Mistral's markers."""
    return [
        ReasoningParserOffer(
            name="mistral",
            summary="Thoughts in [THINK]…[/THINK]: Magistral.",
            build=build,
            recognizes=recognizes,
            rank=1,
        )
    ]
