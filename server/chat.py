"""POST /v1/chat/completions: request in, choices out, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from engine.server.errors import bad_request
from engine.server.exchange import current
from engine.server.generation import generate
from engine.server.logprobs import chat_logprobs
from engine.server.plan import Usage, check_common, choices
from engine.server.prompts import chat_prompt
from engine.server.protocol import ChatRequest
from engine.server.responses import DONE, event
from engine.server.sampling import sampling_params
from engine.server.state import ServerState
from engine.text import Delta

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_MAX_TOP_LOGPROBS = 20


async def answer(state: ServerState, body: ChatRequest) -> AsyncGenerator[bytes]:
    """Check the request and prepare its body; nothing is computed until the generator is asked.

    Raises:
        ApiError: when the request is refused.
    """
    ready, tokenizer = state.admit(body.model)
    check_common(body)
    _refuse(body)
    params = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_alternatives(body),
        prompt_logprobs=None,
        vocab_size=tokenizer.vocab_size,
        max_stop=state.config.server.max_stop,
    )
    prompt = await chat_prompt(tokenizer, body, state.config, ready.max_context)
    jobs = choices(body, tokenizer, ready, [prompt], params, state.config)
    reply = _Reply(state.model, tokenizer, body, prompt, len(jobs))
    deltas = generate(state, jobs)
    return reply.stream(deltas) if body.stream else reply.whole(deltas)


def _refuse(body: ChatRequest) -> None:
    if body.echo:
        raise bad_request("echo is a field of /v1/completions; chat answers don't repeat the prompt", "echo")
    if body.chat_template is not None:
        raise bad_request(
            "a request can't bring its own chat_template; the server's configuration may", "chat_template"
        )
    if any(kind != "text" for kind in body.modalities or ()):
        raise bad_request("modalities other than text are not possible: this model writes text only", "modalities")


def _alternatives(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if top is not None and not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise bad_request(f"top_logprobs must lie between 0 and {_MAX_TOP_LOGPROBS}, not {top}", "top_logprobs")
    return (top or 0) if body.logprobs else None


@dataclass(slots=True)
class _Choice:
    """What a whole answer gathers."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Reply:
    """Shapes the deltas of one request."""

    def __init__(self, model: str, tokenizer: Tokenizer, body: ChatRequest, prompt: list[int], n: int) -> None:
        self._tokenizer, self._body, self._prompt, self._n = tokenizer, body, prompt, n
        self._usage = Usage(prompt_tokens=len(prompt))
        self._frame = {"id": f"chatcmpl-{current().id}", "created": int(time.time()), "model": model}

    async def whole(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
        """One `chat.completion`."""
        made = [_Choice() for _ in range(self._n)]
        transfer = None
        async for delta in deltas:
            self._usage.add(delta, self._n)
            choice = made[delta.index]
            choice.text.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.logprobs += self._logprobs(delta)["content"] if self._body.logprobs else ()
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            transfer = delta.kv_transfer or transfer
        reply = {
            **self._frame,
            "object": "chat.completion",
            "choices": [self._choice(i, choice) for i, choice in enumerate(made)],
            "usage": self._usage.as_dict(),
            "system_fingerprint": None,
        }
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompt
        if transfer is not None:
            reply["kv_transfer_params"] = transfer
        yield msgspec.json.encode(reply)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        made = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**made, "token_ids": choice.token_ids} if self._body.return_token_ids else made

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs)

    async def stream(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
        """Chunks: the role first, then text, the finish reason, and the usage if it was asked for."""
        options = self._body.stream_options
        begun: set[int] = set()
        async for delta in deltas:
            self._usage.add(delta, self._n)
            out = b""
            if delta.index not in begun:
                begun.add(delta.index)
                out = self._chunk(delta.index, {"role": "assistant", "content": ""})
            if delta.text or delta.logprobs or (delta.token_ids and self._body.return_token_ids):
                out += self._chunk(delta.index, {"content": delta.text}, **self._extras(delta))
            if delta.finish_reason is not None:
                end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                out += self._chunk(delta.index, {}, delta.kv_transfer, **end)
            if out:
                yield out
        if options is not None and options.include_usage:
            usage = self._usage.as_dict()
            yield event({**self._frame, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._body.logprobs and delta.logprobs:
            extras["logprobs"] = self._logprobs(delta)
        if self._body.return_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _chunk(self, index: int, delta: dict[str, str], transfer: dict[str, Any] | None = None, **extras: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extras}
        chunk = {**self._frame, "object": "chat.completion.chunk", "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._usage.as_dict() if options.continuous_usage_stats else None
        if transfer is not None:
            chunk["kv_transfer_params"] = transfer
        return event(chunk)


__all__ = ["answer"]
