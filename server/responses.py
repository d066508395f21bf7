"""Bodies: plain JSON, and answers that are produced while the client may hang up."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.exchange import current
from engine.server.state import ServerState

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Data that is at hand."""
    return Response(msgspec.json.encode(data), status, headers=headers, media_type="application/json")


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields which had no effect. Odd names are left out: they could forge headers."""
    plain = [name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)]
    return {"X-Engine-Ignored-Fields": ", ".join(plain[:32])} if plain else {}


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One server-sent event that says its type beside the data, too."""
    return b"event: " + name.encode() + b"\n" + event(data)


def last_words(error: ApiError) -> bytes:
    """How a stream of OpenAI's completions ends when it breaks off."""
    return b"data: " + error.body() + b"\n\n" + DONE


class Answer(Response):
    """A body from a generator, as one JSON document or as a stream of server-sent events.

    The generator runs in a task of its own. When the client hangs up, or the server stops waiting while it drains, the
    task is cancelled and with it the work in the core. Nothing is sent before the generator yields, so an ApiError that
    it raises first becomes an ordinary error; a later one becomes the last event of the stream.

    Args:
        failure: that last event, in the words of the API.
    """

    def __init__(
        self,
        state: ServerState,
        chunks: AsyncGenerator[bytes],
        *,
        stream: bool,
        headers: Mapping[str, str],
        failure: Callable[[ApiError], bytes] = last_words,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream" if stream else "application/json"
        self.init_headers({**headers, "Cache-Control": "no-cache"} if stream else headers)
        self._state, self._chunks, self._stream, self._failure_event = state, chunks, stream, failure
        self._exchange = current()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(_hang_up(receive))
        self._state.active[work] = self._exchange
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.debug("a client hung up")
            elif (error := self._failure(work)) is not None:
                await self._fail(error, scope, receive, send)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._state.active.pop(work, None)

    async def _produce(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            if self._stream:
                async for chunk in chunks:
                    await self._start(send)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            else:
                body = b"".join([chunk async for chunk in chunks])
                self.raw_headers.append((b"content-length", str(len(body)).encode()))
                await self._start(send)
                await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    def _failure(self, work: asyncio.Future[None]) -> ApiError | None:
        """What to tell the client, if anything went wrong."""
        if work.cancelled():
            if not self._state.stopping:
                return ApiError(403, self._exchange.cut or "the answer was cut short", code="aborted")
            return ApiError(503, self._exchange.cut or "the answer was cut short", retry_after=1)
        error = work.exception()
        if error is None or isinstance(error, ApiError):
            return error
        if not self._started:
            raise error
        log.error("an answer broke off", exc_info=error)
        return ApiError(500, "the server failed on this request")

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error.response()(scope, receive, send)
        elif self._stream:
            await send({"type": "http.response.body", "body": self._failure_event(error)})


async def _hang_up(receive: Receive) -> None:
    """Return when the client is gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


__all__ = ["DONE", "Answer", "event", "ignored_header", "json_response", "last_words", "named_event"]
