"""What a Python program asks and gets: prompts of three kinds, and completions as they grow.

Shared by `engine.llm`, which steps an engine itself, and `engine.llm_async`, which talks to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.messages import FinishReason, Output
from engine.sampling_params import SamplingParams
from engine.text import ChoiceText, Delta
from engine.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""A conversation: role and content, as the OpenAI API has them."""

Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a conversation, which the model's chat template turns into text."""


class RequestFailed(EngineError):
    """A request could not be computed."""


@dataclass(slots=True)
class Completion:
    """What came of one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, which a single one becomes too."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def encode(tokenizer: Tokenizer, prompt: Prompt, **template: Any) -> list[int]:
    """The token ids of a prompt; `template` goes to the chat template.

    Raises:
        RequestFailed: the chat template refuses the conversation.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=True)
    if not prompt or isinstance(prompt[0], int):
        return list(prompt)  # type: ignore[arg-type]
    try:
        return tokenizer.encode(tokenizer.apply_chat_template(prompt, **template))  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestFailed(str(error)) from None


class Writing:
    """A completion in the making."""

    def __init__(self, prompt: list[int], tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.completion = Completion(prompt)
        detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._text = ChoiceText(0, params, detokenizer, frozenset(tokenizer.eos_token_ids))

    @property
    def finished(self) -> bool:
        """Whether nothing more is to come."""
        return self.completion.finish_reason is not None

    def take(self, output: Output) -> Delta:
        """Add news of a completion that isn't finished; a stop string may finish it before the engine does.

        Raises:
            RequestFailed: the engine gave the request up.
        """
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise RequestFailed(output.error or "the request was aborted")
        done, delta = self.completion, self._text.feed(output)
        done.text += delta.text
        done.token_ids += delta.token_ids
        done.cached_tokens, done.kv_transfer = delta.cached_tokens, delta.kv_transfer
        if delta.finish_reason is not None:
            done.finish_reason = FinishReason(delta.finish_reason)
        return delta


__all__ = ["Completion", "Messages", "Prompt", "RequestFailed", "Writing", "encode", "several"]
