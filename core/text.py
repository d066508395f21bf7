"""From the core's tokens to the text of one choice."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.messages import FinishReason, Output, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.specs.reasoning_parser import NoReasoning, ReasoningParser, Split
from engine.stop import StopMatcher


class Detokenizing(Protocol):
    """Tokens in, text out; bytes of a character that is not complete yet wait inside."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one output of the core adds to one choice."""

    index: int
    text: str  # of the answer proper
    token_ids: list[int]  # really generated, an end token included
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens that are text
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    reasoning: str = ""
    reasoning_tokens: int = 0  # of token_ids, those that are no part of the answer proper
    cached_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None


class ChoiceText:
    """The text of one choice as it grows. Once a delta has a finish reason, nothing more may be fed.

    Thoughts are parted off first, so stop strings are looked for in the answer proper only.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        detokenizer: Detokenizing,
        eos_token_ids: Set[int],
        reasoning: ReasoningParser | None = None,
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._eos = eos_token_ids
        self._reasoning = reasoning or NoReasoning()
        self._plain = reasoning is None and not params.stop
        self._min_tokens = params.min_tokens
        self._silent = params.max_tokens == 0  # the core makes one token all the same, and nobody sees it
        self._count = 0
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)

    def feed(self, output: Output) -> Delta:
        """Take one output that is neither an error nor an abort."""
        token_ids = [] if self._silent else output.token_ids
        visible = token_ids[:-1] if token_ids and self._has_end_token(output) else token_ids
        delta = Delta(
            index=self._index,
            text="",
            token_ids=token_ids,
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.cached_tokens,
            kv_transfer=output.kv_transfer,
        )
        used = self._read(visible, delta, last=output.finish_reason is not None)
        delta.logprobs = (output.logprobs or [])[:used]
        if self._matcher.matched is not None:
            delta.token_ids = token_ids[:used]
            delta.finish_reason, delta.stop_reason = "stop", self._matcher.matched
        elif output.finish_reason is not None:
            delta.finish_reason = "length" if self._silent else output.finish_reason.value
            delta.stop_reason = output.stop_token
        return delta

    def _has_end_token(self, output: Output) -> bool:
        """Whether the last token is the one that ended the request, and so no part of its text."""
        if output.finish_reason is not FinishReason.STOP:
            return False
        last = output.token_ids[-1]
        return last in self._eos if output.stop_token is None else last == output.stop_token

    def _read(self, tokens: list[int], delta: Delta, last: bool) -> int:
        """Put the text that becomes visible into the delta; returns how many of the tokens made it."""
        if self._plain:
            delta.text = self._detokenizer.push(tokens) + (self._detokenizer.flush() if last else "")
            return len(tokens)
        for used, token in enumerate(tokens, 1):
            self._count += 1
            before = self._reasoning.thinking
            self._add(self._reasoning.feed(self._detokenizer.push([token])), delta)
            delta.reasoning_tokens += before or self._reasoning.thinking
            if self._matcher.matched is not None:
                return used
        for split in self._rest() if last else ():
            self._add(split, delta)
            if self._matcher.matched is not None:
                break
        else:
            delta.text += self._matcher.flush() if last else ""
        return len(tokens)

    def _rest(self) -> Iterator[Split]:
        yield self._reasoning.feed(self._detokenizer.flush())
        yield self._reasoning.finish()

    def _add(self, split: Split, delta: Delta) -> None:
        delta.reasoning += split.reasoning
        delta.text += self._matcher.push(split.content, armed=self._count >= self._min_tokens)


__all__ = ["ChoiceText", "Delta", "Detokenizing"]
