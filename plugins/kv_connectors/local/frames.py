"""What the two ends say to each other, and the framing: a 4-byte little-endian length and one msgpack message.

One connection serves one fetch, so that whatever it holds ends with it:

    consumer                              producer
    Open(token, range)            →
                                  ←       Grant(layout, page ids, digests) and the pool's file, or Refuse
    Renew, while it copies        →
    Done, the digests agreed      →
                                  ←       Ack, or Refuse if the publication was withdrawn meanwhile

Only an acknowledged fetch counts: pages stay pinned until a publication is withdrawn, so what was copied before an Ack
was not overwritten. `Cancel` ends a fetch from the consumer's side; end of file means that the peer is gone.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

import msgspec

from engine.specs.kv_connector import KVSchema

_LENGTH: Final = struct.Struct("<I")
_FILE: Final = struct.Struct("i")
_READ: Final = 2**16


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Read pages `first_page, …` (`count` of them) of the publication that `token` names."""

    token: str
    first_page: int
    count: int


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Still reading."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Everything was copied and its digests agree."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The fetch was given up."""

    reason: str


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Where the pages lie in the file that comes with this message."""

    schema: KVSchema
    layout: list[tuple[int, int]]  # of each part of each layer: offset of page 0, bytes from page to page
    pages: list[int]
    digests: list[int]
    lease_seconds: float


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """No, or no longer."""

    reason: str


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The publication was still standing when Done came."""


FromConsumer = Open | Renew | Done | Cancel
FromProducer = Grant | Refuse | Ack


class ProtocolError(Exception):
    """The peer is gone or talks nonsense; the text says which."""


class Channel:
    """A non-blocking stream socket that carries frames, and files from the producer to the consumer."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[FromConsumer | FromProducer], limit: int):
        """Take over `sock`; frames longer than `limit` bytes are refused."""
        sock.setblocking(False)
        self._sock, self._decoder, self._limit = sock, decoder, limit
        self._inbox, self._outbox = bytearray(), bytearray()
        self._file_to_send: int | None = None
        self.file: int | None = None
        """The file that came in, owned by the channel."""

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def peer_uid(self) -> int:
        """The user that the peer runs as, by the kernel's word."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])

    @property
    def backlog(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._outbox)

    def send(self, message: FromConsumer | FromProducer, file: int | None = None) -> None:
        """Queue a message, and a file that goes with it, and send what the socket takes.

        Raises:
            ProtocolError: the peer is gone.
        """
        body = msgspec.msgpack.encode(message)
        if file is not None:
            self._file_to_send = file
        self._outbox += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            ProtocolError: the peer is gone.
        """
        try:
            while self._outbox:
                ancillary: list[tuple[int, int, bytes]] = []
                if self._file_to_send is not None:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FILE.pack(self._file_to_send))]
                del self._outbox[: self._sock.sendmsg([self._outbox], ancillary)]
                self._file_to_send = None
        except BlockingIOError:
            return
        except OSError as error:
            raise ProtocolError(f"the peer is gone ({error.strerror})") from error

    def receive(self) -> list[FromConsumer | FromProducer]:
        """The messages that have come in.

        Raises:
            ProtocolError: the peer is gone, or sent what is no frame of this protocol.
        """
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_READ, socket.CMSG_LEN(_FILE.size), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ProtocolError(f"the peer is gone ({error.strerror})") from error
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._keep(_FILE.unpack_from(payload)[0])
        if not data:
            raise ProtocolError("the peer is gone")
        self._inbox += data
        return list(iter(self._next, None))

    def _keep(self, file: int) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file = file

    def _next(self) -> FromConsumer | FromProducer | None:
        if len(self._inbox) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._inbox)
        if length > self._limit:
            raise ProtocolError(f"the peer sent a frame of {length} bytes, at most {self._limit} are expected")
        end = _LENGTH.size + length
        if len(self._inbox) < end:
            return None
        body = bytes(self._inbox[_LENGTH.size : end])
        del self._inbox[:end]
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the peer sent a malformed frame: {error}") from error

    def close(self) -> None:
        """Close the socket and the file that came in; harmless twice."""
        self._sock.close()
        if self.file is not None:
            os.close(self.file)
            self.file = None


def to_producer(sock: socket.socket) -> Channel:
    """The consumer's end; a frame may hold the ids and digests of a million pages."""
    return Channel(sock, msgspec.msgpack.Decoder(FromProducer), 2**24)


def to_consumer(sock: socket.socket) -> Channel:
    """The producer's end; nothing long comes from a consumer."""
    return Channel(sock, msgspec.msgpack.Decoder(FromConsumer), 2**12)


__all__ = [
    "Ack",
    "Cancel",
    "Channel",
    "Done",
    "Grant",
    "Open",
    "ProtocolError",
    "Refuse",
    "Renew",
    "to_consumer",
    "to_producer",
]
