"""The producer's end: digests what is published and answers consumers, on its own thread. It never copies a page."""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.plugins.kv_connectors.local.frames import (
    Ack,
    Cancel,
    Channel,
    Done,
    Grant,
    Open,
    ProtocolError,
    Refuse,
    Renew,
    to_consumer,
)
from engine.plugins.kv_connectors.local.grid import Grid
from engine.plugins.kv_connectors.local.handle import Handle
from engine.plugins.kv_connectors.local.loop import Loop
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.plugins.kv_connectors.local.outbox import Outbox
from engine.specs.kv_connector import EventKind, KVSchema

log = logging.getLogger(__name__)

MAX_PEERS: Final = 1024
"""Connections held at once; further ones are closed at once, and their engines recompute."""

DIGEST_BYTES: Final = 2**25
"""Digested in one turn of the loop (about 6 ms), so that a long publication delays no answer for long."""

GONE: Final = "the publication is gone: it was delivered, it expired or it was withdrawn"


@dataclass(slots=True, eq=False)
class _Publication:
    request_id: str
    token: str
    pages: tuple[int, ...]
    lease_seconds: float
    digests: list[int] = field(default_factory=list)
    readers: int = 0
    delivered: bool = False
    withdrawn: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    channel: Channel
    deadline: float | None  # by when it must say or take something; None while a lease watches over it
    publication: _Publication | None = None
    waiting: Open | None = None  # for digests
    leaving: bool = False  # to be closed when what was said is sent


class Producer(Loop):
    """Serves the publications of one engine."""

    def __init__(
        self, engine_id: str, schema: KVSchema, memory: SharedMemory, grid: Grid, outbox: Outbox, peer_timeout: float
    ) -> None:
        """Listen and start.

        Raises:
            ValueError: the pool lies outside the memory.
        """
        self._layout = grid.layout(memory.tensor.data_ptr(), memory.tensor.numel())
        super().__init__(f"kv-local-producer-{engine_id}")
        self._engine_id, self._schema, self._memory, self._grid = engine_id, schema, memory, grid
        self._outbox, self._peer_timeout = outbox, peer_timeout
        self._slice = max(1, DIGEST_BYTES // sum(grid.widths))
        self._lock = threading.Lock()  # over the two tables and the flags of publications
        self._by_id: dict[str, _Publication] = {}
        self._by_token: dict[str, _Publication] = {}
        self._undigested: deque[_Publication] = deque()
        self._peers: set[_Peer] = set()
        self._address = f"engine-kv-{os.getpid():x}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self._address}")
        self._listener.listen(MAX_PEERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        """See `KVConnector.publish`."""
        self._grid.check(pages)
        publication = _Publication(request_id, secrets.token_hex(16), tuple(pages), lease_seconds)
        handle = Handle(self._engine_id, request_id, num_tokens, self._address, publication.token, self._schema)
        with self._lock:
            if request_id in self._by_id:
                raise ValueError(f"{request_id!r} is published already; withdraw it first")
            self._by_id[request_id] = self._by_token[publication.token] = publication
        self._undigested.append(publication)
        self.wake()
        return handle.to_json()

    def withdraw(self, request_id: str) -> None:
        """See `KVConnector.withdraw`: from here on no reader gets an Ack."""
        with self._lock:
            publication = self._by_id.pop(request_id, None)
            if publication is None:
                return
            del self._by_token[publication.token]
            publication.withdrawn = True
        self.wake()

    def _ready(self, owner: _Peer | None, events: int) -> None:
        if owner is None:
            self._accept()
            return
        try:
            if events & selectors.EVENT_WRITE:
                owner.channel.flush()
            if events & selectors.EVENT_READ:
                for message in owner.channel.receive():
                    if owner in self._peers:  # until it cancels
                        self._answer(owner, message)
        except ProtocolError as error:
            self._lose(owner, str(error))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the peer is gone already, or this process is out of files
            log.warning("a KV consumer could not be accepted: %s", error)
            return
        channel = to_consumer(sock)
        if len(self._peers) >= MAX_PEERS or channel.peer_uid() != os.getuid():
            log.warning("refused a KV consumer of user %d; %d are connected", channel.peer_uid(), len(self._peers))
            channel.close()
            return
        peer = _Peer(channel, time.monotonic() + self._peer_timeout)
        self._peers.add(peer)
        self._selector.register(channel, selectors.EVENT_READ, peer)

    def _answer(self, peer: _Peer, message: object) -> None:
        publication = peer.publication
        match message:
            case Open() if publication is None and not peer.leaving:
                self._open(peer, message)
            case Renew() if publication is not None:
                self._outbox.post(EventKind.RENEWED, publication.request_id)
            case Done() if publication is not None and peer.waiting is None:
                self._deliver(peer, publication)
            case Cancel(reason):
                self._lose(peer, reason)
            case _ if not peer.leaving:
                raise ProtocolError(f"the consumer sent {type(message).__name__} out of turn")

    def _open(self, peer: _Peer, message: Open) -> None:
        with self._lock:
            publication = self._by_token.get(message.token)
        if publication is None:
            self._refuse(peer, GONE)
        elif not 0 <= message.first_page <= message.first_page + message.count <= len(publication.pages):
            self._refuse(peer, f"{len(publication.pages)} pages were published, not those from {message.first_page} on")
        else:
            peer.publication, peer.waiting, peer.deadline = publication, message, None
            publication.readers += 1
            self._outbox.post(EventKind.RENEWED, publication.request_id)
            self._grant(peer)

    def _grant(self, peer: _Peer) -> None:
        publication, asked = peer.publication, peer.waiting
        if publication is None or asked is None or len(publication.digests) < len(publication.pages):
            return
        wanted = slice(asked.first_page, asked.first_page + asked.count)
        pages, digests = list(publication.pages[wanted]), publication.digests[wanted]
        peer.waiting = None
        peer.channel.send(
            Grant(self._schema, self._layout, pages, digests, publication.lease_seconds), self._memory.file
        )

    def _deliver(self, peer: _Peer, publication: _Publication) -> None:
        with self._lock:
            standing = not publication.withdrawn
            if standing and not publication.delivered:
                publication.delivered = True
                self._outbox.post(EventKind.DELIVERED, publication.request_id)
        if not standing:
            self._refuse(peer, GONE)
            return
        self._part(peer)
        peer.channel.send(Ack())
        self._leave(peer)

    def _refuse(self, peer: _Peer, reason: str) -> None:
        self._part(peer)
        peer.channel.send(Refuse(reason))
        self._leave(peer)

    def _leave(self, peer: _Peer) -> None:
        """Close once the last word is sent and the peer has hung up, or at the deadline."""
        peer.leaving, peer.deadline = True, time.monotonic() + self._peer_timeout

    def _part(self, peer: _Peer) -> None:
        if peer.publication is not None:
            peer.publication.readers -= 1
            peer.publication, peer.waiting = None, None

    def _lose(self, peer: _Peer, reason: str) -> None:
        publication = peer.publication
        self._part(peer)
        self._peers.remove(peer)
        self._selector.unregister(peer.channel)
        peer.channel.close()
        if publication is not None:
            with self._lock:
                if not (publication.readers or publication.delivered or publication.withdrawn):
                    self._outbox.post(EventKind.PEER_LOST, publication.request_id, reason)

    def _tick(self, now: float) -> float | None:
        self._digest()
        for peer in list(self._peers):
            try:
                if peer.publication is not None and peer.publication.withdrawn:
                    self._refuse(peer, GONE)
                self._grant(peer)
            except ProtocolError as error:
                self._lose(peer, str(error))
                continue
            if peer.deadline is not None and peer.deadline <= now:
                self._lose(peer, f"silent for {self._peer_timeout:g} s")
            else:
                writing = selectors.EVENT_WRITE if peer.channel.backlog else 0
                self._selector.modify(peer.channel, selectors.EVENT_READ | writing, peer)
        if self._undigested:
            return now
        return min((peer.deadline for peer in self._peers if peer.deadline is not None), default=None)

    def _digest(self) -> None:
        if not self._undigested:
            return
        publication = self._undigested[0]
        if not publication.withdrawn:
            done = len(publication.digests)
            publication.digests += self._grid.digests(publication.pages[done : done + self._slice])
        if publication.withdrawn or len(publication.digests) == len(publication.pages):
            self._undigested.popleft()

    def _abandon(self, reason: str) -> None:
        for peer in list(self._peers):
            self._lose(peer, reason)
        self._listener.close()


__all__ = ["Producer"]
