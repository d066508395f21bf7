"""Frames on the socket between the HTTP process and the engine core: 4 bytes of length, then one msgpack message."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final

import msgspec

MAX_FRAME: Final = 256 * 2**20
_LENGTH: Final = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """One message ready to be sent."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def _size(head: bytes) -> int:
    size: int = _LENGTH.unpack(head)[0]
    if size > MAX_FRAME:
        raise ConnectionError(f"a frame of {size} bytes is above the limit of {MAX_FRAME}")
    return size


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """Block for one message; None when the other side is gone."""
    head = _exactly(sock, _LENGTH.size)
    body = _exactly(sock, _size(head)) if head is not None else None
    return None if body is None else decoder.decode(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


async def receive_async(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """As `receive`, for asyncio."""
    try:
        return decoder.decode(await reader.readexactly(_size(await reader.readexactly(_LENGTH.size))))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


__all__ = ["MAX_FRAME", "frame", "receive", "receive_async"]
