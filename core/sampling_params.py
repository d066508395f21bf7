"""How the next token of a request is chosen, and when the request ends.

Made once per request on the HTTP side and sent to the engine core as it is. Imports no torch.
"""

from __future__ import annotations

import math

import msgspec

from engine.structured import Structured


class Speculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request says about drafts, which change its speed but never its text."""

    method: str | None = None  # `none`, or the name of the engine's speculator; None: as the engine does
    max_tokens: int | None = None  # most draft tokens in a step; the engine's bound if unset or lower


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated on construction; a bad value raises ValueError in one sentence that begins with the field's name.

    The order of application is that of the field: logit bias and allowed tokens, penalties, temperature, min-p, top-k,
    top-p. `temperature` 0 is greedy. Stop strings and their effects belong to the HTTP side, which sees text.
    """

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None  # None: one is drawn when the request is admitted
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token; None: none at all
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: Structured | None = None  # what the text must look like
    bad_words: tuple[str, ...] = ()  # texts that are not to be generated
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # their tokens; see `engine.bad_words`
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {value}")
        self._within("temperature", 0.0, 100.0)
        self._within("min_p", 0.0, 1.0)
        self._within("presence_penalty", -2.0, 2.0)
        self._within("frequency_penalty", -2.0, 2.0)
        self._within("repetition_penalty", 0.01, 100.0)  # beyond, products of logits overflow to infinity
        self._within("min_tokens", 0, None)
        self._within("max_tokens", 0, None)
        self._within("logprobs", 0, 100)
        self._within("prompt_logprobs", 0, 100)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 0 (or -1 for all tokens), not {self.top_k}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit into 64 bits, not {self.seed}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must name at least one token")
        if self.structured is not None and self.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids can't be combined with structured output, which says what is allowed")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias of token {token} must lie between -100 and 100, not {bias}")
        if any(not ids for ids in self.bad_word_ids) or any(not word.strip() for word in self.bad_words):
            raise ValueError("bad_words must not contain an empty string")
        drafts = self.speculation.max_tokens if self.speculation is not None else None
        if drafts is not None and drafts < 0:
            raise ValueError(f"speculation.max_tokens must be at least 0, not {drafts}")
        if drafts is not None and drafts >= 2**31:
            raise ValueError("speculation.max_tokens must fit into 32 bits")
        if any(not s for s in self.stop):
            raise ValueError("stop must not contain an empty string")

    def _within(self, name: str, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value is None or (value >= low and (high is None or value <= high)):
            return
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limits}, not {value}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


__all__ = ["SamplingParams", "Speculation"]
