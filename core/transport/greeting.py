"""The first words on a network connection: each side shows that it knows the shared secret, without saying it.

    consumer                              producer
                                  ←       Challenge(a number of its own, whether there is a secret)
    Answer(a number of its own, proof)  →
                                  ←       Welcome(proof)

A proof is the HMAC-SHA-256 of both numbers and the speaker's side, under the secret. Without a secret the key is empty
and the greeting only tells a consumer from a stranger, who is hung up on after at most one short frame.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Any, Final

import msgspec

from engine.transport.channel import Channel
from engine.transport.frames import ProtocolError

LIMIT: Final = 256
"""Bytes of the longest frame that is read from somebody who has not proved anything."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The producer speaks first."""

    number: bytes
    locked: bool


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The consumer's proof."""

    number: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The producer's proof."""

    proof: bytes


GREETING: Final[msgspec.msgpack.Decoder[Challenge | Answer | Welcome]] = msgspec.msgpack.Decoder(
    Challenge | Answer | Welcome
)


class GreetedChannel(Channel):
    """A channel whose frames are held back until both sides have shown who they are."""

    def __init__(
        self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], limit: int, *, secret: str, serves: bool
    ) -> None:
        """Take over `sock`; `serves` says that this is the producer's side. An empty secret is none."""
        super().__init__(sock, decoder, limit)
        self._secret, self._serves = secret, serves
        self._number = secrets.token_bytes(16)
        self._theirs = b""
        self._greeted = False
        self._held: list[bytes] = []
        if serves:
            super()._queue(msgspec.msgpack.encode(Challenge(self._number, bool(secret))))
            self.flush()

    @property
    def pending(self) -> bool:
        """See `Channel.pending`."""
        return bool(self._held) or super().pending

    def _queue(self, body: bytes) -> None:
        if self._greeted:
            super()._queue(body)
        else:
            self._held.append(body)

    def _next(self) -> Any:
        while not self._greeted:
            body = self._next_frame(LIMIT)
            if body is None:
                return None
            try:
                self._greet(GREETING.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ProtocolError(f"the peer did not greet: {error}") from error
        return super()._next()

    def _greet(self, message: Challenge | Answer | Welcome) -> None:
        match message:
            case Challenge(number, locked) if not self._serves and not self._theirs:
                if locked != bool(self._secret):
                    has, lacks = ("the producer", "this engine") if locked else ("this engine", "the producer")
                    raise ProtocolError(f"{has} has a shared secret, {lacks} has none; set the option secret on both")
                self._theirs = number
                super()._queue(msgspec.msgpack.encode(Answer(self._number, self._proof(serves=False))))
                self.flush()
            case Answer(number, proof) if self._serves:
                self._theirs = number
                self._check(proof)
                super()._queue(msgspec.msgpack.encode(Welcome(self._proof(serves=True))))
                self._open()
            case Welcome(proof) if not self._serves and self._theirs:
                self._check(proof)
                self._open()
            case _:
                raise ProtocolError(f"the peer sent {type(message).__name__} out of turn")

    def _open(self) -> None:
        self._greeted = True
        for body in self._held:
            super()._queue(body)
        self._held.clear()
        self.flush()

    def _check(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(serves=not self._serves)):
            raise ProtocolError("the peer has another shared secret; set the option secret to the same on both sides")

    def _proof(self, *, serves: bool) -> bytes:
        numbers = (self._number, self._theirs) if self._serves else (self._theirs, self._number)
        text = (b"producer" if serves else b"consumer") + b"".join(hashlib.sha256(n).digest() for n in numbers)
        return hmac.digest(self._secret.encode(), text, "sha256")


__all__ = ["GreetedChannel"]
