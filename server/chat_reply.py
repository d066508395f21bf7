"""What a chat answer looks like on the wire, whole or as chunks. Both are made from the same events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import TokenLogprobs
from engine.server.events import Content, Event, News, Reasoning, ToolArguments, ToolBegin, ToolEnd
from engine.server.exchange import current
from engine.server.kv_handover import handed_over
from engine.server.logprobs import chat_logprobs, prompt_logprobs
from engine.server.plan import Usage
from engine.server.protocol import ChatRequest
from engine.server.responses import DONE, event
from engine.text import Delta

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """What a whole answer gathers."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, item: News) -> None:
        """Take one piece of news."""
        for happened in item.events:
            self._add(happened)
        self.token_ids += item.delta.token_ids
        self.finish_reason, self.stop_reason = item.finish_reason, item.delta.stop_reason

    def _add(self, happened: Event) -> None:
        match happened:
            case Content(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case ToolBegin(_, name_id, name):
                self.calls.append({"id": name_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolArguments(index, text):
                self.calls[index]["function"]["arguments"] += text

    def message(self) -> dict[str, Any]:
        """The assistant's message; what doesn't occur is left out."""
        text = "".join(self.content)
        silent = not text and (self.calls or self.reasoning)
        made: dict[str, Any] = {"role": "assistant", "content": None if silent else text, "refusal": None}
        if self.reasoning:
            made |= _thoughts("".join(self.reasoning))
        return {**made, "tool_calls": self.calls} if self.calls else made


def _thoughts(text: str) -> dict[str, Any]:
    """Thoughts go by two names among clients."""
    return {"reasoning_content": text, "reasoning": text}


def _deltas(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """The `delta` of one chunk for each event that a client sees."""
    for happened in events:
        match happened:
            case Content(text):
                yield {"content": text}
            case Reasoning(text):
                yield _thoughts(text)
            case ToolBegin(index, name_id, name):
                function = {"name": name, "arguments": ""}
                yield {"tool_calls": [{"index": index, "id": name_id, "type": "function", "function": function}]}
            case ToolArguments(index, text):
                yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ToolEnd():
                pass


class ChatReply:
    """Shapes the news of one request."""

    def __init__(self, model: str, tokenizer: Tokenizer, body: ChatRequest, prompt: list[int], n: int) -> None:
        self._tokenizer, self._body, self._prompt, self._n = tokenizer, body, prompt, n
        self._usage = Usage(prompt_tokens=len(prompt))
        self._frame = {"id": f"chatcmpl-{current().id}", "created": int(time.time()), "model": model}

    async def whole(self, news: AsyncGenerator[News]) -> AsyncGenerator[bytes]:
        """One `chat.completion`."""
        made = [_Choice() for _ in range(self._n)]
        transfer, scores = None, list[TokenLogprobs | None]()
        async with aclosing(news):
            async for item in news:
                self._usage.add(item.delta, self._n)
                choice = made[item.delta.index]
                choice.add(item)
                choice.logprobs += self._logprobs(item.delta)["content"] if self._body.logprobs else ()
                transfer = item.delta.kv_transfer or transfer
                scores += (item.delta.prompt_logprobs or ()) if item.delta.index == 0 else ()
        reply = {
            **self._frame,
            "object": "chat.completion",
            "choices": [self._choice(i, choice) for i, choice in enumerate(made)],
            "usage": self._usage.as_dict(),
            "system_fingerprint": None,
        }
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(self._tokenizer, scores, self._body.prompt_logprobs)
        yield msgspec.json.encode(reply | handed_over(transfer, self._body.kv_transfer_action))

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        made = {
            "index": index,
            "message": choice.message(),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**made, "token_ids": choice.token_ids} if self._body.return_token_ids else made

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs)

    async def stream(self, news: AsyncGenerator[News]) -> AsyncGenerator[bytes]:
        """Chunks: the role first, then what happens, the finish reason, and the usage if it was asked for."""
        options = self._body.stream_options
        begun: set[int] = set()
        async with aclosing(news):
            async for item in news:
                self._usage.add(item.delta, self._n)
                if out := self._chunks(item, first=item.delta.index not in begun):
                    yield out
                begun.add(item.delta.index)
        if options is not None and options.include_usage:
            usage = self._usage.as_dict()
            yield event({**self._frame, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _chunks(self, item: News, first: bool) -> bytes:
        delta = item.delta
        out = self._chunk(delta.index, {"role": "assistant", "content": ""}) if first else b""
        extras = self._extras(delta)
        for shown in [*_deltas(item.events)] or ([{"content": ""}] if extras else []):
            out += self._chunk(delta.index, shown, **extras)
            extras = {}  # tokens are told once, with the first of what they brought
        if item.finish_reason is not None:
            end = {"finish_reason": item.finish_reason, "stop_reason": delta.stop_reason}
            out += self._chunk(delta.index, {}, delta.kv_transfer, **end)
        return out

    def _extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._body.logprobs and delta.logprobs:
            extras["logprobs"] = self._logprobs(delta)
        if self._body.return_token_ids and delta.token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _chunk(self, index: int, delta: dict[str, Any], transfer: dict[str, Any] | None = None, **extras: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extras}
        chunk = {**self._frame, "object": "chat.completion.chunk", "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._usage.as_dict() if options.continuous_usage_stats else None
        return event(chunk | handed_over(transfer, self._body.kv_transfer_action))


__all__ = ["ChatReply"]
