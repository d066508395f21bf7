"""A non-blocking stream socket that carries frames, and between them bulk bytes straight out of and into memory."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine.transport.frames import FROM_CONSUMER, FROM_PRODUCER, Message, ProtocolError

_LENGTH: Final = struct.Struct("<I")
_READ: Final = 2**16

PIECES: Final = 512
"""Buffers handed to the kernel in one call; half of what Linux takes."""

TURN_BYTES: Final = 2**24
"""Bulk bytes moved in one call, so that a fast peer keeps nobody else waiting."""

Batches = Iterator[list[memoryview]]


class Channel:
    """See the module. Subclasses may add to what goes over the socket."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], limit: int) -> None:
        """Take over `sock`; frames longer than `limit` bytes are refused."""
        sock.setblocking(False)
        self._sock, self._decoder, self._limit = sock, decoder, limit
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self._stream: Batches = iter(())
        self._wanted: deque[memoryview] = deque()
        self._awaited: Batches = iter(())
        self.streaming = False
        """Whether a stream is going out: nothing else may be sent until it ends."""
        self.arrived = 0
        """Bytes of the awaited stream that are in place."""

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    @property
    def backlog(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._outbox) or self.streaming

    @property
    def pending(self) -> bool:
        """Whether what was sent is still here, to be flushed or to wait for the peer."""
        return self.backlog

    def send(self, message: Message) -> None:
        """Queue a message and send what the socket takes.

        Raises:
            ProtocolError: the peer is gone.
        """
        self._queue(msgspec.msgpack.encode(message))
        self.flush()

    def _queue(self, body: bytes) -> None:
        assert not self.streaming, "a message in the middle of a stream would be taken for a part of it"
        self._outbox.append(memoryview(_LENGTH.pack(len(body)) + body))

    def stream(self, batches: Batches) -> None:
        """Send bulk bytes after what is queued, a batch of buffers at a time.

        Raises:
            ProtocolError: the peer is gone.
        """
        self._stream, self.streaming = batches, True
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes, up to a bound.

        Raises:
            ProtocolError: the peer is gone.
        """
        budget = TURN_BYTES
        try:
            while budget > 0 and self._refill():
                sent = self._transmit([self._outbox[i] for i in range(min(PIECES, len(self._outbox)))])
                _drop(self._outbox, sent)
                budget -= sent
        except BlockingIOError:
            return
        except OSError as error:
            raise ProtocolError(f"the peer is gone ({error.strerror})") from error

    def _refill(self) -> bool:
        while self.streaming and not self._outbox:
            batch = next(self._stream, None)
            if batch is None:
                self.streaming = False
            else:
                self._outbox.extend(piece for piece in batch if len(piece))
        return bool(self._outbox)

    def _transmit(self, buffers: list[memoryview]) -> int:
        """Send once; returns how many bytes went."""
        return self._sock.sendmsg(buffers)

    def expect(self, batches: Batches) -> None:
        """The next bytes are bulk: fill these buffers, a batch after the other, before frames come again."""
        self._awaited, self.arrived = batches, 0
        self._fill()

    def _fill(self) -> None:
        """Move bulk bytes that came in together with frames."""
        while self._inbox and self._next_wanted():
            piece = self._wanted[0]
            count = min(len(piece), len(self._inbox))
            piece[:count] = self._inbox[:count]
            del self._inbox[:count]
            self._arrive(count)

    def _next_wanted(self) -> bool:
        while not self._wanted:
            batch = next(self._awaited, None)
            if batch is None:
                return False
            self._wanted.extend(piece for piece in batch if len(piece))
        return True

    def _arrive(self, count: int) -> None:
        _drop(self._wanted, count)
        self.arrived += count

    def receive(self) -> Iterator[Any]:
        """Take what has come in, up to a bound: bulk bytes go where they belong, the rest are messages.

        Each message is taken out when it is asked for, so that `expect` may be called after one of them.

        Raises:
            ProtocolError: the peer is gone, or sent what is no frame of this protocol.
        """
        budget = TURN_BYTES
        try:
            while budget > 0 and not self._inbox and self._next_wanted():
                pieces = [self._wanted[i] for i in range(min(PIECES, len(self._wanted)))]
                count = self._sock.recvmsg_into(pieces)[0]
                if not count:
                    raise ProtocolError("the peer is gone")
                self._arrive(count)
                budget -= count
            if budget > 0:
                self._take_in()
        except BlockingIOError:
            return iter(())
        except OSError as error:
            raise ProtocolError(f"the peer is gone ({error.strerror})") from error
        self._fill()
        return iter(self._next, None)

    def _take_in(self) -> None:
        """Read once into the inbox."""
        data = self._read(_READ)
        if not data:
            raise ProtocolError("the peer is gone")
        self._inbox += data

    def _read(self, size: int) -> bytes:
        return self._sock.recv(size)

    def _next(self) -> Any:
        body = self._next_frame(self._limit)
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the peer sent a malformed frame: {error}") from error

    def _next_frame(self, limit: int) -> bytes | None:
        if self._wanted or len(self._inbox) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._inbox)
        if length > limit:
            raise ProtocolError(f"the peer sent a frame of {length} bytes, at most {limit} are expected")
        end = _LENGTH.size + length
        if len(self._inbox) < end:
            return None
        body = bytes(self._inbox[_LENGTH.size : end])
        del self._inbox[:end]
        return body

    def close(self) -> None:
        """Close the socket; harmless twice."""
        self._outbox.clear()
        self._wanted.clear()
        self._stream = self._awaited = iter(())
        self.streaming = False
        self._sock.close()


def _drop(buffers: deque[memoryview], count: int) -> None:
    """Take `count` bytes off the front."""
    while count:
        if count < len(buffers[0]):
            buffers[0] = buffers[0][count:]
            return
        count -= len(buffers.popleft())


FROM_CONSUMER_LIMIT: Final = 2**14
"""Nothing long comes from a consumer; an invitation to a link is the longest."""

FROM_PRODUCER_LIMIT: Final = 2**24
"""A grant may hold the digests of a million blocks."""

TO_CONSUMER: Final = (FROM_CONSUMER, FROM_CONSUMER_LIMIT)
TO_PRODUCER: Final = (FROM_PRODUCER, FROM_PRODUCER_LIMIT)
"""What a channel decodes, and how long its frames may be."""

__all__ = ["TO_CONSUMER", "TO_PRODUCER", "Batches", "Channel"]
