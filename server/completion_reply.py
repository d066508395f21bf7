"""What an answer of /v1/completions looks like on the wire, whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import TokenLogprobs
from engine.server.exchange import current
from engine.server.kv_handover import handed_over
from engine.server.logprobs import CompletionLogprobs, clipped, prompt_logprobs
from engine.server.plan import Usage
from engine.server.protocol import CompletionRequest
from engine.server.responses import DONE, event
from engine.text import Delta

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def alternatives(body: CompletionRequest) -> int | None:
    """How many alternatives to show; some clients say false for none, which is not 0."""
    return None if body.logprobs is False else body.logprobs


class _Choice:
    """One choice: turns deltas into pieces `{text, logprobs, …}`, the echoed prompt in front of the first."""

    def __init__(self, index: int, tokenizer: Tokenizer, body: CompletionRequest, prompt: list[int], echo: str) -> None:
        self.index = index
        self._prompt, self._echo = prompt, echo
        self._alternatives = alternatives(body)
        self._logprobs = CompletionLogprobs(tokenizer) if self._alternatives is not None else None
        self._scores: list[TokenLogprobs | None] | None = [] if self._logprobs and body.echo else None
        self._ids = bool(body.return_token_ids)
        self._tokenizer, self._asked = tokenizer, body.prompt_logprobs
        self._seen: list[TokenLogprobs | None] = []
        self._sum, self._count = 0.0, 0

    @property
    def likelihood(self) -> float:
        """Mean log-probability of the tokens, for `best_of`."""
        return self._sum / max(1, self._count)

    def prompt_logprobs(self) -> dict[str, Any]:
        """The field of that name, if it was asked for."""
        if self._asked is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, self._seen, self._asked)}

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """What the delta adds; None when that is nothing, or when the echoed prompt isn't scored to its end."""
        self._seen += delta.prompt_logprobs or ()
        self._sum += sum(entry.logprobs[0] for entry in delta.logprobs)
        self._count += len(delta.logprobs)
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
            head = self._logprobs.prompt(self._prompt, clipped(self._scores, self._alternatives))
            self._scores = None
            return _joined([head, self._logprobs.piece(delta.logprobs)])
        return self._logprobs.piece(delta.logprobs) if delta.logprobs else None


class CompletionReply:
    """Shapes the deltas of one request.

    Args:
        echoes: what is put in front of each prompt's answers if that is asked for.
        n: choices that are shown for each prompt.
        width: choices that are made for each prompt; the likeliest are shown.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
        *,
        n: int,
        width: int,
    ) -> None:
        self._body, self._prompts, self._n, self._width = body, prompts, n, width
        self._made = [
            _Choice(i, tokenizer, body, prompts[i // width], echoes[i // width] if body.echo else "")
            for i in range(len(prompts) * width)
        ]
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
            self._usage.add(delta, self._width)
            transfer = delta.kv_transfer or transfer
            if (piece := self._made[delta.index].piece(delta)) is not None:
                pieces[delta.index].append(piece)
        reply = {
            **self._frame,
            "choices": [self._choice(index, at, pieces[at]) for index, at in enumerate(self._best())],
            "usage": self._usage.as_dict(),
            "system_fingerprint": None,
        }
        yield msgspec.json.encode(reply | handed_over(transfer, self._body.kv_transfer_action))

    def _best(self) -> list[int]:
        """The choices to show, those of one prompt side by side, the likeliest first if there are more than asked."""
        groups = [range(at, at + self._width) for at in range(0, len(self._made), self._width)]
        if self._width == self._n:
            return [i for group in groups for i in group]
        ranked = [sorted(group, key=lambda i: -self._made[i].likelihood) for group in groups]
        return [i for group in ranked for i in group[: self._n]]

    def _choice(self, index: int, at: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The pieces of the choice that was made as number `at`; the last has the finish reason."""
        scored = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        whole = {
            **parts[-1],
            "index": index,
            "text": "".join(part["text"] for part in parts),
            "logprobs": None if alternatives(self._body) is None else _joined(scored),
        }
        if self._body.return_token_ids:
            whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
            whole["prompt_token_ids"] = self._prompts[at // self._width]
        return {**whole, **self._made[at].prompt_logprobs()}

    async def stream(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[bytes]:
        """Chunks of the same object, and the usage at the end if it was asked for."""
        options = self._body.stream_options
        wanted = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats)
        async for delta in deltas:
            self._usage.add(delta, self._width)
            if (piece := self._made[delta.index].piece(delta)) is None:
                continue
            chunk = {**self._frame, "choices": [piece]}
            if wanted:
                chunk["usage"] = self._usage.as_dict() if running else None
            yield event(chunk | handed_over(delta.kv_transfer, self._body.kv_transfer_action))
        if wanted:
            yield event({**self._frame, "choices": [], "usage": self._usage.as_dict()})
        yield DONE


def _joined(lists: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for piece in lists for value in piece[name]] for name in names}


__all__ = ["CompletionReply", "alternatives"]
