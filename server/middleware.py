"""What stands before every route: the key and the size of the body. Plain ASGI, so streams pass untouched."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError


class RequireKey:
    """Lets requests through that bring one of the keys as `Authorization: Bearer KEY`. Health checks need none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._open(scope) or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "this server needs a key: send it as `Authorization: Bearer KEY`", code="invalid_api_key")
        error.headers["WWW-Authenticate"] = "Bearer"
        await error.response()(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] == "OPTIONS" or path == "/health" or path.startswith("/health/")

    def _known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        sent = given.strip().encode("latin-1")  # the bytes as they came
        # Every key is compared in full, so that the time taken tells nothing.
        return any([hmac.compare_digest(sent, key) for key in self._keys])


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


__all__ = ["LimitBody", "RequireKey"]
