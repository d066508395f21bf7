"""The HTTP protocol: uvicorn's over h11, with a bound on the time that headers may take.

Not over httptools, though that costs less: it has no bound on the size of headers, where h11 takes 64 KiB, and it loses
the body of a request that offers an upgrade, which every POST of Java's HttpClient and of `curl --http2` does.
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.server.errors import ApiError

_PATIENCE: Final = 75.0
"""Seconds from the connection, or from the first byte of a further request, to the end of the headers."""


class PatientHttp(H11Protocol):
    """One connection, which is closed if its client never says what it wants."""

    _deadline: asyncio.TimerHandle | None = None  # while headers are awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._relax()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some of a request, or several requests."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """An answer is over; some of the next request may have come meanwhile."""
        super().on_response_complete()
        self._look()

    def _should_upgrade(self) -> bool:
        """Never, and without the warning that uvicorn writes for each offer."""
        return False

    def _look(self) -> None:
        """Be impatient while a head is awaited that has begun; uvicorn bounds the pauses between requests itself."""
        if self.conn.their_state is not h11.IDLE or (self.cycle is not None and not self.conn.trailing_data[0]):
            self._relax()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_PATIENCE, self._refuse)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            body = ApiError(408, f"the headers were not complete after {_PATIENCE:.0f} s").body()
            head = f"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            self.transport.close()


__all__ = ["PatientHttp"]
