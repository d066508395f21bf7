"""What two ends say to each other, and the framing: a 4-byte little-endian length and one msgpack message.

One connection serves one fetch at a time, so that whatever it holds ends with it. Some transports keep it for the next
after one that ended well:

    consumer                              producer
    Open(token, range)            →
                                  ←       Grant(digests, whatever the transport adds), or Refuse
                                  ←       the blocks themselves, where the transport sends them this way
    Renew, while it pulls         →
    Done, the digests agreed      →
                                  ←       Ack, or Refuse if the publication was withdrawn meanwhile

Only an acknowledged fetch counts: pages stay pinned until a publication is withdrawn, so what was read before an Ack
was not overwritten. Damage, too, is damage only if it is acknowledged: else the pages may have been in other use.
`Cancel` ends a fetch from the consumer's side; end of file means that the peer is gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engine.specs.kv_connector import KVSchema


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Read blocks `first, …` (`count` of them, each of `block` tokens) of the publication that `token` names."""

    token: str
    first: int
    count: int
    block: int
    word: bytes = b""  # of the transport, that needs no grant to be said


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Still reading."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Everything has arrived and the digests agree, unless `damage` says which doesn't."""

    damage: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The fetch was given up."""

    reason: str


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """What will arrive."""

    schema: KVSchema
    digests: list[int]
    lease_seconds: float
    detail: bytes  # of the transport


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """No, or no longer."""

    reason: str


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The publication was still standing when Done came."""


class Word(msgspec.Struct, frozen=True, tag="word"):
    """Something of the transport's own, in either direction."""

    body: bytes


FromConsumer = Open | Renew | Done | Cancel | Word
FromProducer = Grant | Refuse | Ack | Word
Message = FromConsumer | FromProducer

FROM_CONSUMER: Final = msgspec.msgpack.Decoder(FromConsumer)
FROM_PRODUCER: Final = msgspec.msgpack.Decoder(FromProducer)


class ProtocolError(Exception):
    """The peer is gone or talks nonsense; the text says which."""


__all__ = [
    "FROM_CONSUMER",
    "FROM_PRODUCER",
    "Ack",
    "Cancel",
    "Done",
    "Grant",
    "Message",
    "Open",
    "ProtocolError",
    "Refuse",
    "Renew",
    "Word",
]
