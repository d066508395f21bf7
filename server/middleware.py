"""What stands before every route: exchange, key, size of the body. Plain ASGI, so streams pass untouched."""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.exchange import Exchange, current, enter, request_id
from engine.server.keys import scope_of
from engine.server.state import ServerState


class Exchanges:
    """Gives each request its exchange, puts the exchange's headers on the answer, and books it when it is over."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(id=request_id(headers.get("x-request-id")), method=scope["method"], path=scope["path"])
        exchange.headers["x-request-id"] = exchange.id
        enter(exchange)
        if (tracing := self._state.tracing) is not None:
            tracing.begin(exchange, headers)
        try:
            await self._app(scope, receive, self._with_headers(exchange, send))
        except Exception:
            exchange.status = exchange.status or 500  # the framework answers that, outside of this
            raise
        finally:
            exchange.ended = time.monotonic()
            self._state.metrics.answered(exchange.status)
            self._state.journal.close(exchange)
            if tracing is not None:
                tracing.end(exchange)

    @staticmethod
    def _with_headers(exchange: Exchange, send: Send) -> Send:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                more = [(name.encode(), value.encode("latin-1")) for name, value in exchange.headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        return answer


class RequireKey:
    """Lets requests through whose key opens the path. Health checks and preflights need none."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._keys = app, state.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and (wanted := scope_of(scope["path"])):
            error = self._objection(scope["path"], wanted, Headers(scope=scope))
        await (self._app if error is None else error.response())(scope, receive, send)

    def _objection(self, path: str, wanted: str, headers: Headers) -> ApiError | None:
        exchange = current()
        if not self._keys.open:
            key = self._keys.find(headers)
            if key is None:
                text = "this server needs a key: send it as `Authorization: Bearer KEY`"
                error = ApiError(401, text, code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                return error
            exchange.key = key
        if wanted in exchange.key.scopes:
            return None
        if self._keys.open:
            text = f"{path[:200]} is for administrators: name a key with the scope admin in server.api_keys and send it"
        else:
            scopes = ", ".join(sorted(exchange.key.scopes)) or "none"
            text = f"{path[:200]} takes a key with the scope {wanted}; {exchange.key.name!r} has {scopes}"
        return ApiError(403, text, code="insufficient_scope")


class LimitBody:
    """Refuses bodies above a size with a 413, before they are read whenever their length is stated."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdigit() and int(stated) > self._limit:
            await self._refuse(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        left = self._limit

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._error()
            return message

        return counted

    def _error(self) -> ApiError:
        error = ApiError(413, f"the body is larger than {self._limit} bytes, the most that this server takes")
        error.headers["Connection"] = "close"
        return error

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._error().response()(scope, receive, send)


__all__ = ["Exchanges", "LimitBody", "RequireKey"]
