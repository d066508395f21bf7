"""A small HTTP client for OpenAI endpoints: plain asyncio, since it shares the machine with the server it measures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine.errors import EngineError


class EndpointError(EngineError):
    """The endpoint can't be reached, or refused a request."""

    exit_code = 3


class Endpoint:
    """One server. Every request has a connection of its own.

    Args:
        url: with or without the `/v1` at its end.
        key: sent as a bearer token.

    Raises:
        EndpointError: the URL is none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(f"{url!r} is no URL of a server; give one such as http://127.0.0.1:8000")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"

    async def get(self, path: str) -> Any:
        """The JSON answer to a GET. Raises EndpointError."""
        async with aclosing(self._exchange("GET", path, b"")) as pieces:
            return msgspec.json.decode(b"".join([piece async for piece in pieces]))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST. Raises EndpointError."""
        async with aclosing(self._exchange("POST", path, msgspec.json.encode(body))) as pieces:
            return msgspec.json.decode(b"".join([piece async for piece in pieces]))

    async def first_model(self) -> str:
        """The name of the first model that the server lists. Raises EndpointError when there is none."""
        answer = await self.get("/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not models:
            raise EndpointError(f"{self.url} lists no models; name one with --model")
        name: str = models[0]["id"]
        return name

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The server-sent events of a POST, up to DONE. Closing the iterator hangs up.

        Raises:
            EndpointError: refused, or broken off.
        """
        buffer = b""
        async with aclosing(self._exchange("POST", path, msgspec.json.encode(body))) as pieces:
            async for piece in pieces:
                *blocks, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                for block in blocks:
                    for line in block.split(b"\n"):
                        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                            yield _checked(msgspec.json.decode(data))

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """Send a request; the pieces of a successful answer's body as they come."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
        except OSError as error:
            raise EndpointError(f"no server answers at {self.url}: {error.strerror or error}") from None
        try:
            writer.write(self._head(method, path, len(body)) + body)
            status, headers = await _read_head(reader)
            pieces = _read_body(reader, headers)
            if status != 200:
                raise EndpointError(_complaint(status, b"".join([piece async for piece in pieces])))
            async for piece in pieces:
                yield piece
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EndpointError(f"{self.url} broke off its answer") from error
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._base}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            *(["Content-Type: application/json", f"Content-Length: {length}"] if length else []),
            *([f"Authorization: Bearer {self._key}"] if self._key else []),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


def _checked(event: Any) -> dict[str, Any]:
    """The event, unless it is an error in the middle of a stream."""
    if not isinstance(event, dict) or "error" in event:
        raise EndpointError(f"the server gave up: {_message(event)}")
    return event


def _complaint(status: int, body: bytes) -> str:
    try:
        return f"the server refused ({status}): {_message(msgspec.json.decode(body))}"
    except msgspec.DecodeError:
        return f"the server refused ({status}): {body[:200].decode(errors='replace')}"


def _message(answer: Any) -> Any:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return error.get("message", error) if isinstance(error, dict) else error


__all__ = ["Endpoint", "EndpointError"]
