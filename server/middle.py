"""Filling in the middle: the prompt of a completion that has a `suffix`, in the form the model was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from engine.server.errors import bad_request

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class Marks(NamedTuple):
    """Control tokens around what comes before the gap, what comes after it, and where the gap is to be filled."""

    before: str
    after: str
    gap: str


FAMILIES: Final = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""Told by the control tokens that the model's tokenizer has."""


def around(tokenizer: Tokenizer, prompts: list[str] | list[list[int]], suffix: str) -> list[str]:
    """The prompts for what comes between each of them and the suffix.

    Raises:
        ApiError: 400 when the model has no control tokens for that, or a prompt is given as token ids.
    """
    marks = next((family for family in FAMILIES if len(tokenizer.special_among(family)) == len(family)), None)
    if marks is None:
        raise bad_request("suffix is not possible: this model has no control tokens to fill in the middle", "suffix")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise bad_request("suffix needs a prompt that is text, not token ids", "suffix")
    return [f"{marks.before}{text}{marks.after}{suffix}{marks.gap}" for text in texts]


__all__ = ["FAMILIES", "Marks", "around"]
