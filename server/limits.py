"""What a key may use, and how large a conversation or a prompt may be."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine.config.model import EngineConfig
from engine.errors import PluginError
from engine.server.errors import ApiError, bad_request
from engine.server.exchange import Exchange
from engine.specs.rate_limit import Rate, RateLimiter, Verdict

if TYPE_CHECKING:
    from engine.registry import Registry
    from engine.tokenizer import Tokenizer


def build_limiter(config: EngineConfig, registry: Registry) -> RateLimiter | None:
    """The rate limiter of the configuration; None when no key has a limit.

    Raises:
        EngineError: there is none of that name, or none at all.
    """
    keys = config.server.api_keys
    if all(key.requests_per_minute is None and key.tokens_per_minute is None for key in keys):
        return None
    section = config.server.rate_limit
    if section.use != "auto":
        owned = registry.get("rate_limits", section.use)
    else:
        offers = sorted(registry.offers("rate_limits"), key=lambda owned: -owned.offer.rank)
        if not offers:
            raise PluginError("a key of server.api_keys has a rate limit, but no rate limiter is installed")
        owned = offers[0]
    limiter: RateLimiter = owned.build(owned.offer.options.model_validate(section.options))
    return limiter


def check_concurrency(exchange: Exchange, active: Iterable[Exchange], seconds: int) -> None:
    """Refuse a request of a key that has as many under way as it may.

    Args:
        active: the exchanges under way, this one included.
        seconds: when to come back.

    Raises:
        ApiError: 429.
    """
    key = exchange.key
    if key.concurrent is not None and sum(other.key.name == key.name for other in active) > key.concurrent:
        raise ApiError(
            429,
            f"the key {key.name!r} may have {key.concurrent} requests answered at once; wait for one to end",
            code="concurrency_limit_exceeded",
            retry_after=seconds,
        )


def charge(limiter: RateLimiter | None, exchange: Exchange, prompts: Iterable[Sequence[int]]) -> None:
    """Let a request through, at the price of its prompts; choices of one prompt share it.

    Raises:
        ApiError: 429 when its key has used up its rate.
    """
    key = exchange.key
    if limiter is None or key.rate == Rate():
        return
    tokens = sum({id(prompt): len(prompt) for prompt in prompts}.values())
    verdict = limiter.begin(key.name, key.rate, tokens, time.monotonic())
    exchange.headers |= _headers(verdict)
    if not verdict.allowed:
        seconds = max(1, math.ceil(verdict.retry_after))
        raise ApiError(
            429,
            f"the key {key.name!r} has used up its rate of {_words(key.rate)}; try again in {seconds} s",
            code="rate_limit_exceeded",
            retry_after=seconds,
        )


def charge_output(limiter: RateLimiter | None, exchange: Exchange, tokens: int) -> None:
    """Charge tokens that were generated."""
    if limiter is not None and tokens and exchange.key.rate.tokens is not None:
        limiter.spend(exchange.key.name, exchange.key.rate, tokens, time.monotonic())


def _words(rate: Rate) -> str:
    parts = [
        f"{limit:g} {what} a minute"
        for what, limit in (("requests", rate.requests), ("tokens", rate.tokens))
        if limit is not None
    ]
    return " and ".join(parts)


def _headers(verdict: Verdict) -> dict[str, str]:
    """OpenAI's headers, for each limit that there is."""
    found = {}
    for what, allowance in (("requests", verdict.requests), ("tokens", verdict.tokens)):
        if allowance is not None:
            found[f"x-ratelimit-limit-{what}"] = str(math.floor(allowance.limit))
            found[f"x-ratelimit-remaining-{what}"] = str(math.floor(allowance.remaining))
            found[f"x-ratelimit-reset-{what}"] = f"{allowance.reset:.3f}s"
    return found


def check_messages(messages: Sequence[Any] | None, most: int) -> None:
    """Refuse a conversation of more messages than `server.max_messages`. Raises a 400."""
    if messages is not None and len(messages) > most:
        raise bad_request(f"messages may hold at most {most} messages, not {len(messages)}", "messages")


def check_length(tokenizer: Tokenizer, texts: Iterable[str], max_context: int) -> None:
    """Refuse a text that is certainly too long for the context, at a price that the context bounds and not the text.

    A token spells at most `longest_token` characters, so a text has at least as many tokens as fit into it. A text that
    passes may still be far too long; then its beginning is tokenized, where only the token at the cut can be another.

    Raises:
        ApiError: 400 with both lengths.
    """
    longest = tokenizer.longest_token
    plausible = max(_PLAUSIBLE * max_context, _CHEAP)
    for text in texts:
        if len(text) <= plausible:
            continue
        least = len(text) // longest
        if least <= max_context:
            head = text[:plausible]
            least = len(tokenizer.encode(head)) - longest
        if least > max_context:
            raise bad_request(
                f"the prompt has {len(text)} characters, which are more than {least} tokens, but the maximum context "
                f"length is {max_context} tokens, prompt and answer together; shorten the prompt",
                "prompt",
            )


_PLAUSIBLE = 8
"""Characters a token, above which a text is suspected not to fit; languages and code have three to five."""

_CHEAP = 2**16
"""Characters that are tokenized whatever the context: it takes some 30 ms, and the refusal can say the exact length."""

__all__ = ["build_limiter", "charge", "charge_output", "check_concurrency", "check_length", "check_messages"]
