"""POST /v1/completions: prompts in, text out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from engine.server.completion_reply import CompletionReply, alternatives
from engine.server.errors import bad_request
from engine.server.generation import generate
from engine.server.middle import around
from engine.server.plan import check_common, check_count, choices, choices_per_prompt
from engine.server.prompts import completion_prompts, split_prompts
from engine.server.protocol import CompletionRequest
from engine.server.sampling import sampling_params
from engine.server.state import ServerState

_DEFAULT_MAX_TOKENS = 16


async def answer(state: ServerState, body: CompletionRequest) -> AsyncGenerator[bytes]:
    """Check the request and prepare its body; nothing is computed until the generator is asked.

    Raises:
        ApiError: when the request is refused.
    """
    ready, tokenizer = state.admit(body.model)
    check_common(body)
    limits = state.config.server
    n = choices_per_prompt(body, limits.max_n)
    width = _width(body, n, limits.max_n)
    _refuse(body)
    shown = alternatives(body)
    params = sampling_params(
        body,
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if shown is None and width > n else shown,
        prompt_logprobs=_prompt_alternatives(body, shown),
        vocab_size=tokenizer.vocab_size,
        max_stop=limits.max_stop,
    )
    given = split_prompts(body.prompt, tokenizer.vocab_size)
    if body.suffix:
        given = around(tokenizer, given, body.suffix)
    check_count(len(given) * width, ready)
    prompts, echoes = await completion_prompts(tokenizer, given, body, ready.max_context)
    jobs = choices(body, tokenizer, ready, prompts, params, state.config, width=width)
    reply = CompletionReply(state.model, tokenizer, body, prompts, echoes, n=n, width=width)
    deltas = generate(state, jobs)
    return reply.stream(deltas) if body.stream else reply.whole(deltas)


def _width(body: CompletionRequest, n: int, max_n: int) -> int:
    """How many answers are made for each prompt: `best_of`, of which n are shown."""
    width = n if body.best_of is None else body.best_of
    if not n <= width <= max_n:
        raise bad_request(f"best_of must lie between n ({n}) and {max_n}, not {width}", "best_of")
    if width > n and body.stream:
        raise bad_request("best_of can't be streamed: which answers are best is known at the end", "best_of")
    return width


def _prompt_alternatives(body: CompletionRequest, shown: int | None) -> int | None:
    """How many alternatives per prompt token the core must report, for an echo or by themselves."""
    counts = [count for count in (shown if body.echo else None, body.prompt_logprobs) if count is not None]
    return max(counts, default=None)


def _refuse(body: CompletionRequest) -> None:
    if body.suffix and body.echo:
        raise bad_request("suffix and echo exclude each other", "suffix")
    if body.logprobs is True:
        raise bad_request("logprobs must be a number of alternatives here; true is for chat", "logprobs")


__all__ = ["answer"]
