"""The answer to a client: made by a task of its own, which ends when the client hangs up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.messages_api.errors import error_body, speaks_anthropic
from engine.server.responses import last_words, named_event
from engine.server.router.upstream import Asked, Reply, WorkerLost

log = logging.getLogger(__name__)

_GONE: Final = 499
"""What a request is booked under whose client left before its answer began; nobody is sent it."""


class Relay(Response):
    """Sends on what an engine says.

    Args:
        make: gets an answer that has begun; an ApiError that it raises becomes the answer.
        active: where the task is kept while it runs, so that a drain can wait for it and cut it off.
        told: hears of the status in the end.
    """

    def __init__(
        self,
        asked: Asked,
        make: Callable[[], Coroutine[Any, Any, Reply]],
        active: set[asyncio.Future[None]],
        told: Callable[[int], None],
    ) -> None:
        self.background = None
        self._asked, self._make, self._active, self._told = asked, make, active, told
        self._started = _GONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(_hang_up(receive))
        self._active.add(work)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.cancelled():
                await self._fail(send, ApiError(503, "this router is shutting down", retry_after=1))
            elif work.done() and (error := work.exception()) is not None:
                await self._fail(send, _as_api_error(error))
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._active.discard(work)
            self._told(self._started)

    async def _produce(self, send: Send) -> None:
        reply = await self._make()
        try:
            await self._start(send, reply)
            if reply.rest is not None:
                async for piece in reply.rest:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            if reply.rest is not None:
                await reply.rest.aclose()

    async def _start(self, send: Send, reply: Reply) -> None:
        whole = reply.rest is None
        size = [(b"content-length", str(len(reply.body)).encode())] if whole else []
        self._started = reply.status
        await send({"type": "http.response.start", "status": reply.status, "headers": [*reply.headers, *size]})
        await send({"type": "http.response.body", "body": reply.body, "more_body": not whole})

    async def _fail(self, send: Send, error: ApiError) -> None:
        if self._started == _GONE:
            await self._start(send, failure(self._asked, error))
        else:
            await send({"type": "http.response.body", "body": _last_event(self._asked.path, error)})


def failure(asked: Asked, error: ApiError) -> Reply:
    """An error of the router's own, in the words of the API that was asked."""
    anthropic = speaks_anthropic(asked.path)
    body = msgspec.json.encode(error_body(error.status, error.message)) if anthropic else error.body()
    headers = {"content-type": "application/json", "x-request-id": asked.id, **error.headers}
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Reply(status=error.status, headers=pairs, body=body)


def _last_event(path: str, error: ApiError) -> bytes:
    """How a stream ends that has begun and can't go on."""
    if speaks_anthropic(path):
        return named_event("error", error_body(error.status, error.message))
    if path == "/v1/responses":
        return named_event("error", {"type": "error", "code": "server_error", "message": error.message, "param": None})
    return last_words(error)


def _as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkerLost):
        return ApiError(502, "the engine that wrote this answer is gone; ask again", retry_after=1)
    log.error("a request failed in the router", exc_info=error)
    return ApiError(500, "the router failed on this request")


async def _hang_up(receive: Receive) -> None:
    """Return when the client is gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


__all__ = ["Relay", "failure"]
