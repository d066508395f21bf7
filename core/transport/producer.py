"""The producer's end: answers consumers on its own thread. What moves the blocks is the transport's."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.specs.kv_connector import EventKind, KVSchema
from engine.transport.blocks import BlockPool, Blocks
from engine.transport.channel import Channel
from engine.transport.frames import Ack, Cancel, Done, Grant, Open, ProtocolError, Refuse, Renew, Word
from engine.transport.loop import Loop
from engine.transport.outbox import Outbox
from engine.transport.publications import Publication, Publications
from engine.transport.schema import Handle, cuts
from engine.transport.spares import SECONDS
from engine.transport.wire import Transport

log = logging.getLogger(__name__)

MAX_PEERS: Final = 1024
"""Connections held at once; further ones are closed at once, and their engines recompute."""

GONE: Final = "the publication is gone: it was delivered, it expired or it was withdrawn"


@dataclass(slots=True, eq=False)
class _Peer:
    channel: Channel
    deadline: float | None  # by when it must say or take something; None while a lease watches over it
    publication: Publication | None = None
    waiting: Open | None = None  # for digests
    leaving: bool = False  # to be closed when what was said is sent
    kept: bool = False  # has fetched, and may again


class Producer(Loop):
    """Serves the publications of one engine."""

    def __init__(
        self,
        transport: Transport[Any],
        engine_id: str,
        schema: KVSchema,
        grid: BlockPool,
        outbox: Outbox,
        peer_timeout: float,
    ) -> None:
        """Listen and start.

        Raises:
            ValueError: the transport can't listen there.
        """
        self._listener, self._address = transport.listen()
        super().__init__(f"kv-{transport.name}-producer-{engine_id}")
        self._transport, self._engine_id, self._schema, self._grid = transport, engine_id, schema, grid
        self._outbox, self._peer_timeout = outbox, peer_timeout
        self._publications = Publications(grid)
        self._grids = {schema.page_size: grid}  # by tokens a block
        self._peers: set[_Peer] = set()
        self._listener.listen(MAX_PEERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        """See `KVConnector.publish`."""
        token = self._publications.add(request_id, pages, lease_seconds).token
        self.wake()
        return Handle(self._engine_id, request_id, num_tokens, self._address, token, self._schema).to_json()

    def withdraw(self, request_id: str) -> None:
        """See `KVConnector.withdraw`: from here on no reader gets an Ack."""
        self._publications.withdraw(request_id)
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
        if len(self._peers) >= MAX_PEERS:
            log.warning("refused a KV consumer: %d are connected", len(self._peers))
            sock.close()
            return
        try:
            channel = self._transport.admit(sock)
        except ProtocolError as error:
            log.warning("refused a KV consumer: %s", error)
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
            case Done(damage) if publication is not None and peer.waiting is None and not peer.channel.streaming:
                self._deliver(peer, publication, damage)
            case Word(body) if publication is not None and peer.waiting is None:
                self._transport.heard(peer.channel, body)
            case Cancel(reason):
                self._lose(peer, reason)
            case _ if not (peer.leaving or (peer.kept and publication is None)):  # then it came too late
                raise ProtocolError(f"the consumer sent {type(message).__name__} out of turn")

    def _open(self, peer: _Peer, asked: Open) -> None:
        try:
            grid = self._cut(asked.block)
        except ValueError as error:
            self._refuse(peer, str(error))
            return
        self._transport.opened(peer.channel, grid, asked.count, asked.word)
        publication = self._publications.find(asked.token)
        if publication is None:
            self._refuse(peer, GONE)
            return
        if not 0 <= asked.first <= asked.first + asked.count <= len(publication.pages) * grid.per_page:
            self._refuse(peer, f"{len(publication.pages)} pages were published, not those from {asked.first} on")
            return
        peer.publication, peer.waiting, peer.deadline = publication, asked, None
        publication.readers += 1
        self._outbox.post(EventKind.RENEWED, publication.request_id)
        self._grant(peer)

    def _cut(self, block: int) -> BlockPool:
        """The pool in blocks of so many tokens."""
        if block not in self._grids:
            self._grids[block] = self._grid.cut(cuts(self._schema, block))
        return self._grids[block]

    def _grant(self, peer: _Peer) -> None:
        publication, asked = peer.publication, peer.waiting
        if publication is None or asked is None or len(publication.digests) < len(publication.pages):
            return
        grid = self._cut(asked.block)
        blocks = grid.blocks(publication.pages)[asked.first : asked.first + asked.count]
        try:
            digests = self._digests(publication, asked, grid, blocks)
        except ValueError as error:
            self._refuse(peer, str(error))
            return
        peer.waiting = None
        detail = self._transport.offer(peer.channel, grid, blocks)
        peer.channel.send(Grant(self._schema, digests, publication.lease_seconds, detail))
        self._transport.granted(peer.channel, grid, blocks)

    def _digests(self, publication: Publication, asked: Open, grid: BlockPool, blocks: Blocks) -> list[int]:
        """Those from the time of publishing. For other blocks they are made now, if the pages are still the same."""
        if grid is self._grid:
            return publication.digests[asked.first : asked.first + asked.count]
        touched = slice(asked.first // grid.per_page, -(-(asked.first + asked.count) // grid.per_page))
        if self._grid.digests(publication.pages[touched]) != publication.digests[touched]:
            raise ValueError("the published pages have changed since their digests were made")
        return grid.digests(blocks)

    def _deliver(self, peer: _Peer, publication: Publication, damage: str) -> None:
        with self._publications.lock:
            standing = not publication.withdrawn
            if standing and not publication.delivered and not damage:
                publication.delivered = True
                self._outbox.post(EventKind.DELIVERED, publication.request_id)
        if not standing:
            self._refuse(peer, GONE)
            return
        self._part(peer)
        if damage:
            log.warning("a KV consumer says that %s was damaged: %s", publication.request_id, damage)
            self._report_lost(publication, damage)
        peer.channel.send(Ack())
        if self._transport.keeps and not damage:
            peer.kept, peer.deadline = True, time.monotonic() + 2 * SECONDS
        else:
            self._leave(peer)

    def _refuse(self, peer: _Peer, reason: str) -> None:
        if peer.channel.streaming:
            raise ProtocolError(reason)  # no word can be put in: the end of the connection has to say it
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
            self._report_lost(publication, reason)

    def _report_lost(self, publication: Publication, reason: str) -> None:
        with self._publications.lock:
            if not (publication.readers or publication.delivered or publication.withdrawn):
                self._outbox.post(EventKind.PEER_LOST, publication.request_id, reason)

    def _tick(self, now: float) -> float | None:
        undigested = self._publications.digest()
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
        turn = self._transport.producer_turn(now)
        if undigested:
            return now
        deadlines = [peer.deadline for peer in self._peers if peer.deadline is not None]
        return min([*deadlines, *([] if turn is None else [turn])], default=None)

    def _abandon(self, reason: str) -> None:
        for peer in list(self._peers):
            self._lose(peer, reason)
        self._listener.close()


__all__ = ["Producer"]
