"""One message as it comes about: the object that clients see, and the events of its stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from engine.server.chat import Turn
from engine.server.errors import ApiError
from engine.server.events import Content, News, Reasoning, ToolArguments, ToolBegin
from engine.server.exchange import current
from engine.server.kv_handover import handed_over
from engine.server.messages_api.errors import error_body
from engine.server.messages_api.writer import BlockWriter, Event
from engine.server.plan import Usage
from engine.server.responses import named_event


class MessageReply:
    """Shapes the news of one request."""

    def __init__(self, turn: Turn, model: str) -> None:
        self._turn = turn
        self._counted = Usage(prompt_tokens=len(turn.prompt))
        self._writer = BlockWriter()
        self._message: dict[str, Any] = {
            "id": f"msg_{current().id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._writer.blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self) -> AsyncGenerator[bytes]:
        """The finished message."""
        async with aclosing(self._events()) as told:
            async for events in told:
                for _ in events:
                    pass
        yield msgspec.json.encode({**self._message, "usage": self._usage()})

    async def stream(self) -> AsyncGenerator[bytes]:
        """Every event."""
        async with aclosing(self._events()) as told:
            async for events in told:
                if piece := b"".join(named_event(event["type"], event) for event in events):
                    yield piece

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks off."""
        return named_event("error", error_body(error.status, error.message))

    async def _events(self) -> AsyncGenerator[Iterator[Event]]:
        """The events of one news after another. None before the first, so that a refusal is no stream."""
        begun = False
        async with aclosing(self._turn.news) as all_news:
            async for news in all_news:
                self._counted.add(news.delta, 1)
                yield self._tell(news, first=not begun)
                begun = True

    def _tell(self, news: News, first: bool) -> Iterator[Event]:
        if first:
            yield {"type": "message_start", "message": {**self._message, "usage": self._usage()}}
            yield {"type": "ping"}
        yield from self._read(news)
        if news.finish_reason is not None:
            yield from self._finish(news)

    def _read(self, news: News) -> Iterator[Event]:
        for event in news.events:
            match event:
                case Reasoning(text):
                    yield from self._writer.thinking(text)
                case Content(text):
                    yield from self._writer.text(text)
                case ToolBegin(_, call_id, name):
                    yield from self._writer.call(call_id, name)
                case ToolArguments(_, text):
                    yield from self._writer.arguments(text)
                case _:
                    yield from self._writer.close()

    def _finish(self, news: News) -> Iterator[Event]:
        yield from self._writer.close()
        reason = self._stop_reason(news)
        why = {"stop_reason": reason, "stop_sequence": news.delta.stop_reason if reason == "stop_sequence" else None}
        self._message |= why | handed_over(news.delta.kv_transfer, self._turn.kv_action)
        yield {"type": "message_delta", "delta": why, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _stop_reason(self, news: News) -> str:
        if news.finish_reason == "length":
            return "max_tokens"
        if isinstance(news.delta.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._writer.blocks) else "end_turn"

    def _usage(self) -> dict[str, int]:
        """Anthropic counts the cached tokens of the prompt apart from the others."""
        usage = self._counted
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


__all__ = ["MessageReply"]
