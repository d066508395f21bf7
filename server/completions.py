"""POST /v1/completions: prompts in, text out, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import TokenLogprobs
from engine.server.errors import bad_request
from engine.server.exchange import current
from engine.server.generation import generate
from engine.server.logprobs import CompletionLogprobs
from engine.server.plan import Usage, check_common, check_count, choices, choices_per_prompt
from engine.server.prompts import completion_prompts, split_prompts
from engine.server.protocol import CompletionRequest
from engine.server.responses import DONE, event
from engine.server.sampling import sampling_params
from engine.server.state import ServerState
from engine.text import Delta

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

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
    _refuse(body, n)
    alternatives = _alternatives(body)
    params = sampling_params(
        body,
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=alternatives,
        prompt_logprobs=alternatives if body.echo else None,
        vocab_size=tokenizer.vocab_size,
        max_stop=limits.max_stop,
    )
    given = split_prompts(body.prompt, tokenizer.vocab_size)
    special = body.add_special_tokens is not False
    check_count(len(given) * n, ready)
    prompts, echoes = await completion_prompts(tokenizer, given, special, ready.max_context)
    jobs = choices(body, tokenizer, ready, prompts, params, state.config)
    made = [_Choice(i, tokenizer, body, prompts[i // n], echoes[i // n] if body.echo else "") for i in range(len(jobs))]
    reply = _Reply(state.model, body, made, n, prompts)
    deltas = generate(state, jobs)
    return reply.stream(deltas) if body.stream else reply.whole(deltas)


def _refuse(body: CompletionRequest, n: int) -> None:
    if body.suffix:
        raise bad_request("suffix is not supported: this model can't fill in the middle", "suffix")
    if body.best_of is not None and body.best_of != n:
        raise bad_request("best_of is not supported beyond n; leave it out, ask for n and choose yourself", "best_of")
    if body.logprobs is True:
        raise bad_request("logprobs must be a number of alternatives here; true is for chat", "logprobs")


def _alternatives(body: CompletionRequest) -> int | None:
    """How many alternatives to show; some clients say false for none, which is not 0."""
    return None if body.logprobs is False else body.logprobs


class _Choice:
    """One choice: turns deltas into pieces `{text, logprobs, …}`, the echoed prompt in front of the first."""

    def __init__(self, index: int, tokenizer: Tokenizer, body: CompletionRequest, prompt: list[int], echo: str) -> None:
        self.index = index
        self._prompt, self._echo = prompt, echo
        self._logprobs = CompletionLogprobs(tokenizer) if _alternatives(body) is not None else None
        self._scores: list[TokenLogprobs | None] | None = [] if self._logprobs and body.echo else None
        self._ids = bool(body.return_token_ids)

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """What the delta adds; None when that is nothing, or when the echoed prompt isn't scored to its end."""
        if self._scores is not None:
            self._scores += delta.prompt_logprobs or ()
            if not delta.token_ids and delta.finish_reason is None:
                return None
        text, self._echo = self._echo + delta.text, ""
        logprobs = self._score(delta)
        if not text and logprobs is None and delta.finish_reason is None and not (self._ids and delta.token_ids):
            return None
        made = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            made["stop_reason"] = delta.stop_reason
        return {**made, "token_ids": delta.token_ids} if self._ids else made

    def _score(self, delta: Delta) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if self._scores is not None:
            head = self._logprobs.prompt(self._prompt, self._scores)
            self._scores = None
            return _joined([head, self._logprobs.piece(delta.logprobs)])
        return self._logprobs.piece(delta.logprobs) if delta.logprobs else None


class _Reply:
    """Shapes the deltas of one request."""

    def __init__(
        self, model: str, body: CompletionRequest, made: list[_Choice], n: int, prompts: Sequence[list[int]]
    ) -> None:
        self._body, self._made, self._n, self._prompts = body, made, n, prompts
        self._usage = Usage(prompt_tokens=sum(map(len, prompts)))
        self._frame = {
            "id": f"cmpl-{current().id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
        """One `text_completion`."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._made]
        transfer = None
        async for delta in deltas:
            self._usage.add(delta, self._n)
            transfer = delta.kv_transfer or transfer
            if (piece := self._made[delta.index].piece(delta)) is not None:
                pieces[delta.index].append(piece)
        reply = {
            **self._frame,
            "choices": [self._choice(parts) for parts in pieces],
            "usage": self._usage.as_dict(),
            "system_fingerprint": None,
        }
        if transfer is not None:
            reply["kv_transfer_params"] = transfer
        yield msgspec.json.encode(reply)

    def _choice(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The pieces of one choice as one; the last has the finish reason."""
        scored = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        whole = {
            **parts[-1],
            "text": "".join(part["text"] for part in parts),
            "logprobs": None if _alternatives(self._body) is None else _joined(scored),
        }
        if self._body.return_token_ids:
            whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
            whole["prompt_token_ids"] = self._prompts[whole["index"] // self._n]
        return whole

    async def stream(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
        """Chunks of the same object, and the usage at the end if it was asked for."""
        options = self._body.stream_options
        wanted = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats)
        async for delta in deltas:
            self._usage.add(delta, self._n)
            if (piece := self._made[delta.index].piece(delta)) is None:
                continue
            chunk = {**self._frame, "choices": [piece]}
            if wanted:
                chunk["usage"] = self._usage.as_dict() if running else None
            if delta.kv_transfer is not None:
                chunk["kv_transfer_params"] = delta.kv_transfer
            yield event(chunk)
        if wanted:
            yield event({**self._frame, "choices": [], "usage": self._usage.as_dict()})
        yield DONE


def _joined(lists: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for piece in lists for value in piece[name]] for name in names}


__all__ = ["answer"]
