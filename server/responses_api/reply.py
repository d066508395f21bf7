"""One response as it comes about: the object that clients see, and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from engine.server.chat import Turn
from engine.server.errors import ApiError
from engine.server.events import Content, News, Reasoning, ToolArguments, ToolBegin
from engine.server.exchange import current
from engine.server.kv_handover import handed_over
from engine.server.logprobs import chat_logprobs
from engine.server.plan import Usage
from engine.server.responses import named_event
from engine.server.responses_api.convert import wants_logprobs
from engine.server.responses_api.protocol import ResponsesRequest
from engine.server.responses_api.writer import Event, ItemWriter

_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "user", "top_logprobs")


class ResponseReply:
    """Shapes the news of one request.

    Args:
        store: takes the response when it is finished, before the client hears of it.
    """

    def __init__(self, turn: Turn, body: ResponsesRequest, model: str, store: Callable[[dict[str, Any]], None]) -> None:
        self._turn, self._store = turn, store
        self._usage = Usage(prompt_tokens=len(turn.prompt))
        self._writer = ItemWriter()
        self._scored = wants_logprobs(body)
        self._scores: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._number = 0
        self._response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._writer.items,
            "usage": None,
            **_echo(body),
        }

        current().names.append(self.id)

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self._response["id"])

    def encoded(self) -> bytes:
        """The object as it is now, as JSON."""
        return msgspec.json.encode(self._response)

    def keep(self) -> None:
        """Store the object as it is now."""
        self._store(self._response)

    async def finish(self) -> None:
        """Compute it to its end, though nobody listens."""
        async with aclosing(self._events()) as told:
            async for events in told:
                for _ in events:
                    pass

    async def whole(self) -> AsyncGenerator[bytes]:
        """The finished object."""
        await self.finish()
        yield self.encoded()

    async def stream(self) -> AsyncGenerator[bytes]:
        """Every event, numbered."""
        async with aclosing(self._events()) as told:
            async for events in told:
                if piece := b"".join(map(self._encoded, events)):
                    yield piece

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks off."""
        self.fail(error)
        return self._encoded(("response.failed", {"response": self._response}))

    def fail(self, error: ApiError) -> None:
        """The response will not be finished."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._break_off(status="failed", error={"code": code, "message": error.message})

    def cancel(self) -> None:
        """Nobody wants the response any more."""
        self._break_off(status="cancelled")

    def _break_off(self, **fields: Any) -> None:
        for _ in self._writer.close("incomplete"):
            continue  # nobody is told
        self._response |= fields
        self.keep()

    def _encoded(self, event: Event) -> bytes:
        kind, fields = event
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number - 1, **fields})

    async def _events(self) -> AsyncGenerator[Iterator[Event]]:
        """The events of one news after another. None before the first, so that a refusal is no stream."""
        begun = False
        async with aclosing(self._turn.news) as all_news:
            async for news in all_news:
                self._usage.add(news.delta, 1)
                yield self._tell(news, first=not begun)
                begun = True

    def _tell(self, news: News, first: bool) -> Iterator[Event]:
        if first:
            yield "response.created", {"response": self._response}
            yield "response.in_progress", {"response": self._response}
        yield from self._read(news)
        if news.finish_reason is not None:
            status = "incomplete" if news.finish_reason == "length" else "completed"
            yield from self._writer.close(status)
            yield self._finish(status, handed_over(news.delta.kv_transfer, self._turn.kv_action))

    def _read(self, news: News) -> Iterator[Event]:
        if self._scored:
            entries = news.delta.logprobs[news.delta.reasoning_tokens :]
            self._scores += chat_logprobs(self._turn.tokenizer, entries)["content"]
        for event in news.events:
            match event:
                case Reasoning(text):
                    yield from self._writer.reasoning(text)
                case Content(text):
                    yield from self._writer.text(text, self._scores)
                    self._scores = []
                case ToolBegin(_, call_id, name):
                    yield from self._writer.call(call_id, name)
                case ToolArguments(_, text):
                    yield from self._writer.arguments(text)
                case _:
                    yield from self._writer.close()

    def _finish(self, status: str, more: dict[str, Any]) -> Event:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._response |= {"status": status, "incomplete_details": details, "usage": _usage(self._usage), **more}
        self.keep()
        return f"response.{status}", {"response": self._response}


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What the request asked for, its defaults filled in."""
    tools = [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()]
    reasoning, text = body.reasoning, body.text
    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "background": bool(body.background),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary} if reasoning else None,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    """The names of this API; nothing is charged for what is written to the cache."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


__all__ = ["ResponseReply"]
