"""The HTTP protocol, with bounds on what comes before a body: its size and the time that it may take.

uvicorn's parser in C has neither, so one client could fill the memory with headers, or hold connections for ever.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.server.errors import ApiError

_LARGEST_HEAD: Final = 64 * 2**10
"""Bytes of request line and headers that may have come without being complete."""

_PATIENCE: Final = 75.0
"""Seconds from the connection, or the first byte of a further request, to the end of the headers."""

_TOO_LARGE: Final = ApiError(431, f"the request line and headers are larger than {_LARGEST_HEAD} bytes")
_TOO_SLOW: Final = ApiError(408, f"the headers were not complete after {_PATIENCE:.0f} s")
_REASONS: Final = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    _waiting: asyncio.TimerHandle | None = None  # for the headers to end
    _head = 0  # bytes of headers that are not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._received()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some of a request, or several requests."""
        super().data_received(data)
        if self._waiting is None:
            return
        self._head += len(data)
        if self._head > _LARGEST_HEAD:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request begins; called by the parser."""
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        """Its body, if any, is next; called by the parser."""
        self._received()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._received()
        self._waiting = self.loop.call_later(_PATIENCE, self._refuse, _TOO_SLOW)

    def _received(self) -> None:
        self._head = 0
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _refuse(self, error: ApiError) -> None:
        self._received()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would land within the answer before
            body = error.body()
            head = f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


__all__ = ["BoundedHttp"]
