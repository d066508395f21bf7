"""From the core's tokens to the text of one choice."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.messages import FinishReason, Output, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.stop import StopMatcher


class Detokenizing(Protocol):
    """Tokens in, text out; bytes of a character that is not complete yet wait inside."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one output of the core adds to one choice."""

    index: int
    text: str
    token_ids: list[int]  # really generated, an end token included
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens that are text
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    cached_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None


class ChoiceText:
    """The text of one choice as it grows. Once a delta has a finish reason, nothing more may be fed."""

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizing, eos_token_ids: Set[int]) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._eos = eos_token_ids
        self._min_tokens = params.min_tokens
        self._silent = params.max_tokens == 0  # the core makes one token all the same, and nobody sees it
        self._count = 0
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None

    def feed(self, output: Output) -> Delta:
        """Take one output that is neither an error nor an abort."""
        token_ids = [] if self._silent else output.token_ids
        visible = token_ids[:-1] if token_ids and self._has_end_token(output) else token_ids
        text, used, matched = self._read(visible, last=output.finish_reason is not None)
        delta = Delta(
            index=self._index,
            text=text,
            token_ids=token_ids if matched is None else token_ids[:used],
            logprobs=(output.logprobs or [])[:used],
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.cached_tokens,
            kv_transfer=output.kv_transfer,
        )
        if matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", matched
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

    def _read(self, tokens: list[int], last: bool) -> tuple[str, int, str | None]:
        """The text that becomes visible, how many of the tokens made it, and the stop string that was met."""
        matcher = self._matcher
        if matcher is None:
            text = self._detokenizer.push(tokens)
            return (text + self._detokenizer.flush() if last else text), len(tokens), None
        shown = []
        for used, token in enumerate(tokens, 1):
            self._count += 1
            shown.append(matcher.push(self._detokenizer.push([token]), armed=self._count >= self._min_tokens))
            if matcher.matched is not None:
                return "".join(shown), used, matcher.matched
        if last:
            shown.append(matcher.push(self._detokenizer.flush(), armed=self._count >= self._min_tokens))
            if matcher.matched is None:
                shown.append(matcher.flush())
        return "".join(shown), len(tokens), matcher.matched


__all__ = ["ChoiceText", "Delta", "Detokenizing"]
