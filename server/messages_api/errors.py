"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`, whichever layer refuses."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ROOT: Final = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether a path is of the Messages API."""
    return path == _ROOT or path.startswith(f"{_ROOT}/")


def error_body(status: int, message: str) -> dict[str, Any]:
    """The object for a status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicErrors:
    """Rewrites the errors of everything below it, the doorkeepers included, on the paths of the Messages API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and speaks_anthropic(scope["path"]):
            send = _Rewriter(send).send
        await self._app(scope, receive, send)


class _Rewriter:
    """Holds the beginning of an error back until its body is there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        said = msgspec.json.decode(self._body)["error"]["message"]
        body = msgspec.json.encode(error_body(start["status"], said))
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


__all__ = ["AnthropicErrors", "error_body", "speaks_anthropic"]
