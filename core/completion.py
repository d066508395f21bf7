"""What a Python program asks and gets: prompts of three kinds, and completions as they grow.

Shared by `engine.llm`, which steps an engine itself, and `engine.llm_async`, which talks to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.messages import FinishReason, Output
from engine.parsing.choice import Parsers
from engine.sampling_params import SamplingParams
from engine.specs.tool_parser import Content, ToolArguments, ToolBegin, ToolEvent, ToolParser
from engine.text import ChoiceText, Delta
from engine.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""A conversation: role and content, as the model's chat template takes them."""

Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a conversation, which the model's chat template turns into text."""


_NONE: Final = Parsers()


class RequestFailed(EngineError):
    """A request could not be computed."""


@dataclass(slots=True)
class ToolCall:
    """One call of a function, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""  # JSON text, if the model wrote JSON


@dataclass(slots=True)
class Completion:
    """What came of one prompt. Thoughts and calls are parted off in answers to conversations only."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, which a single one becomes too."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


class Dialect:
    """How a model is asked, and how its answers are read.

    Args:
        template: Jinja text that replaces the checkpoint's chat template.
    """

    def __init__(self, tokenizer: Tokenizer, parsers: Parsers, template: str | None) -> None:
        self.tokenizer, self._parsers, self._template = tokenizer, parsers, template

    def begin(self, prompt: Prompt, params: SamplingParams, variables: Mapping[str, Any]) -> Writing:
        """A completion of which nothing is written yet; `variables` go to the chat template.

        Raises:
            RequestFailed: the chat template refuses the conversation.
        """
        if isinstance(prompt, str):
            return Writing(self.tokenizer.encode(prompt, add_special_tokens=True), self.tokenizer, params)
        if not prompt or isinstance(prompt[0], int):
            return Writing(list(prompt), self.tokenizer, params)  # type: ignore[arg-type]
        try:
            text = self.tokenizer.apply_chat_template(prompt, **{"template": self._template, **variables})  # type: ignore[arg-type]
        except ValueError as error:
            raise RequestFailed(str(error)) from None
        names = frozenset(tool["function"]["name"] for tool in variables.get("tools") or ())
        parsers = self._parsers if names else Parsers(reasoning=self._parsers.reasoning)
        return Writing(self.tokenizer.encode(text), self.tokenizer, params, parsers, text, names)


class Writing:
    """A completion in the making.

    Args:
        parsers: what is parted off the text.
        asked: the text of the prompt, which may have opened the thoughts.
        functions: what the model may call.
    """

    def __init__(
        self,
        prompt: list[int],
        tokenizer: Tokenizer,
        params: SamplingParams,
        parsers: Parsers = _NONE,
        asked: str = "",
        functions: frozenset[str] = frozenset(),
    ) -> None:
        self.completion = Completion(prompt)
        markers = [text for form in (parsers.reasoning, parsers.tools) if form is not None for text in form.markers]
        detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, tokenizer.special_among(markers))
        thoughts = parsers.reasoning.parser(asked) if parsers.reasoning is not None else None
        self._text = ChoiceText(0, params, detokenizer, frozenset(tokenizer.eos_token_ids), thoughts)
        self._tools: ToolParser | None = parsers.tools.parser(functions) if parsers.tools is not None else None

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
        done.reasoning += delta.reasoning
        done.token_ids += delta.token_ids
        done.cached_tokens, done.kv_transfer = delta.cached_tokens, delta.kv_transfer
        if delta.finish_reason is not None:
            done.finish_reason = FinishReason(delta.finish_reason)
        for event in self._meaning(delta):
            match event:
                case Content(text):
                    done.text += text
                case ToolBegin(_, call_id, name):
                    done.tool_calls.append(ToolCall(call_id, name))
                case ToolArguments(index, text):
                    done.tool_calls[index].arguments += text
        return delta

    def _meaning(self, delta: Delta) -> Sequence[ToolEvent]:
        if self._tools is None:
            return [Content(delta.text)]
        events = self._tools.feed(delta.text)
        return events + self._tools.finish() if delta.finish_reason is not None else events


__all__ = ["Completion", "Dialect", "Messages", "Prompt", "RequestFailed", "ToolCall", "Writing", "several"]
