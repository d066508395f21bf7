"""Thoughts in `<think>…</think>`: Qwen3, DeepSeek-R1 and V3.1, GLM, Kimi, MiniMax and many more."""

from __future__ import annotations

from pydantic import Field

from engine.hooks import hookimpl
from engine.parsing.think_tags import Opened, TaggedThoughts
from engine.plugin import Options
from engine.specs.reasoning_parser import ReasoningParserOffer
from engine.specs.tool_parser import ModelText

BEGIN, END = "<think>", "</think>"


class ThinkOptions(Options):
    """Where thoughts begin."""

    opened: Opened = Field(
        default="auto",
        description="Where an answer begins: auto, within the thoughts if the prompt ends with <think>; always, within "
        "them unless the prompt ends with </think>.",
    )


def build(options: ThinkOptions) -> TaggedThoughts:
    """The format of two tags."""
    return TaggedThoughts(BEGIN, END, options.opened)


def recognizes(model: ModelText) -> str | None:
    """Models whose template or tokens know the closing tag."""
    if END in model.chat_template:
        return f"the chat template writes {END}"
    return f"{END} is a token of its own" if END in model.added_tokens else None


@hookimpl
def reasoning_parsers() -> list[ReasoningParserOffer]:
    """The tags of most models that think."""
    return [
        ReasoningParserOffer(
            name="think",
            summary="Thoughts in <think>…</think>: Qwen3, DeepSeek-R1, GLM, Kimi, MiniMax.",
            build=build,
            options=ThinkOptions,
            recognizes=recognizes,
        )
    ]
