"""One request to one engine. Bytes go through as they come; what breaks off before the answer began can be retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from engine.server.errors import bad_request
from engine.server.router.worker import Worker

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
        "host",
        "content-length",
        "accept-encoding",
        "date",
        "server",
    }
)
"""Headers that belong to one connection (RFC 9110, section 7.6.1), and those that each server writes itself."""


class WorkerLost(Exception):
    """An engine could not be reached, died, or broke off before its answer had begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A client's request, read to its end."""

    method: str
    target: str  # path and query as they came
    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: Mapping[str, Any] = field(default_factory=dict)  # the JSON object in it, if there is one
    id: str  # goes with it to every engine


@dataclass(slots=True, kw_only=True)
class Reply:
    """An answer that has begun: the first bytes are here, so that its engine can't be exchanged any more."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes  # all of it, or of a stream the first piece
    rest: AsyncGenerator[bytes] | None = None  # of a stream; raises WorkerLost when it breaks off


class Upstream:
    """Sends requests to engines.

    Args:
        http: belongs to the caller.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def send(self, worker: Worker, asked: Asked, raw: bytes | None = None, seconds: float = 0.0) -> Reply:
        """The beginning of an engine's answer; a document comes whole.

        Args:
            raw: the body, if not the client's own.
            seconds: how long the prompt is estimated to take there.

        Raises:
            WorkerLost: there is none.
            ApiError: 400, the client's path is none that could be sent on.
        """
        content = asked.raw if raw is None else raw
        try:
            request = self._http.build_request(
                asked.method, worker.url + asked.target, headers=_headers(asked), content=content
            )
        except httpx.InvalidURL as error:
            raise bad_request(f"the path can't be sent on: {error}") from None
        with ExitStack() as stack:
            stack.enter_context(worker.busy(seconds))
            async with _watched(worker):
                response = await self._open(request)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                pieces = _pieces(worker, response, stack.pop_all())
                first = await anext(pieces, b"")
                return Reply(status=response.status_code, headers=_kept(response), body=first, rest=pieces)
            try:
                async with _watched(worker):
                    whole = await response.aread()
            finally:
                await response.aclose()
            return Reply(status=response.status_code, headers=_kept(response), body=whole)

    async def _open(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._http.send(request, stream=True)
        except AttributeError as error:  # anyio's, of a socket that the engine's death closed while it was connecting
            if "getpeername" not in str(error):
                raise
            raise httpx.ConnectError("closed while connecting") from error


async def _pieces(worker: Worker, response: httpx.Response, held: ExitStack) -> AsyncGenerator[bytes]:
    """The bytes of a stream; releases the connection and the worker at its end, whoever ends it."""
    with held:
        try:
            stream = response.aiter_raw()
            while True:
                async with _watched(worker):
                    piece = await anext(stream, None)
                if piece is None:
                    return
                yield piece
        finally:
            await response.aclose()


@asynccontextmanager
async def _watched(worker: Worker) -> AsyncIterator[None]:
    """Waiting for an engine: ends with WorkerLost when that fails, or when the engine is found dead meanwhile."""
    try:
        async with asyncio.timeout(None) as wait:
            worker.waits.add(wait)
            try:
                yield
            finally:
                worker.waits.discard(wait)
    except TimeoutError:
        raise WorkerLost(f"{worker.url} answers no more") from None
    except httpx.ConnectError as error:
        if worker.usable:
            worker.die()
        raise WorkerLost(f"{worker.url} can't be reached: {error}") from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise WorkerLost(f"{worker.url} broke off: {type(error).__name__}: {error}") from error


def _headers(asked: Asked) -> dict[str, str]:
    kept = {name: value for name, value in asked.headers.items() if name.lower() not in _HOP_BY_HOP}
    return {**kept, "accept-encoding": "identity", "x-request-id": asked.id}


def _kept(response: httpx.Response) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in response.headers.raw if name.decode("latin-1").lower() not in _HOP_BY_HOP]


__all__ = ["Asked", "Reply", "Upstream", "WorkerLost"]
