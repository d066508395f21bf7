"""The consumer's end: asks producers, copies pages out of their memory, checks the digests, all on its own thread."""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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
    to_producer,
)
from engine.plugins.kv_connectors.local.grid import Grid, needed_bytes
from engine.plugins.kv_connectors.local.handle import Handle, difference
from engine.plugins.kv_connectors.local.loop import Loop
from engine.plugins.kv_connectors.local.memory import map_peer
from engine.plugins.kv_connectors.local.outbox import Outbox
from engine.specs.kv_connector import EventKind, KVSchema

COPY_BYTES: Final = 2**24
"""Copied and checked in one turn of the loop (about 5 ms), so that cancelling and renewing never wait for long."""

RETRY_SECONDS: Final = 0.01
"""Pause before a producer whose queue of connections is full is asked again."""


@dataclass(slots=True, eq=False)
class _Fetch:
    request_id: str
    handle: Handle
    pages: tuple[int, ...]
    first_page: int
    deadline: float  # of the answer that is due
    channel: Channel | None = None
    grant: Grant | None = None
    mapping: mmap.mmap | None = None
    copied: int = 0  # pages
    renew_at: float = 0.0
    confirming: bool = False
    cancelled: bool = False


class Consumer(Loop):
    """Runs the fetches of one engine: each asked at once, copied in turns."""

    def __init__(self, engine_id: str, schema: KVSchema, grid: Grid, outbox: Outbox, peer_timeout: float) -> None:
        super().__init__(f"kv-local-consumer-{engine_id}")
        self._schema, self._grid, self._outbox, self._peer_timeout = schema, grid, outbox, peer_timeout
        self._slice = max(1, COPY_BYTES // sum(grid.widths))
        self._lock = threading.Lock()  # over the table, `cancelled`, and the moment at which a fetch ends
        self._fetches: dict[str, _Fetch] = {}
        self._copying: deque[_Fetch] = deque()
        self._broken: str | None = None
        self._thread.start()

    def fetch(self, request_id: str, plain: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        """See `KVConnector.fetch`."""
        self._grid.check(pages)
        handle = Handle.from_json(plain)
        if sentence := difference(self._schema, handle.schema):
            raise ValueError(sentence)
        offered = -(-handle.num_tokens // self._schema.page_size)
        if first_page < 0 or first_page + len(pages) > offered:
            raise ValueError(f"the handle offers {offered} pages, not {len(pages)} from page {first_page} on")
        fetch = _Fetch(request_id, handle, tuple(pages), first_page, time.monotonic() + self._peer_timeout)
        with self._lock:
            if request_id in self._fetches:
                raise ValueError(f"{request_id!r} is being fetched already; cancel it first")
            if self._broken is not None:
                self._outbox.post(EventKind.FETCH_FAILED, request_id, self._broken)
                return
            self._fetches[request_id] = fetch
        self.wake()

    def cancel(self, request_id: str) -> None:
        """See `KVConnector.cancel`. Fetches that have ended and been polled are not affected."""
        with self._lock:
            fetch = self._fetches.get(request_id)
            if fetch is None:
                self._outbox.recall(request_id)
                return
            fetch.cancelled = True
        self.wake()

    def _ready(self, owner: _Fetch, events: int) -> None:
        assert owner.channel is not None, "the selector watches the channel"
        try:
            if events & selectors.EVENT_WRITE:
                owner.channel.flush()
            if events & selectors.EVENT_READ:
                for message in owner.channel.receive():
                    if owner.channel is not None:  # until its end is heard
                        self._hear(owner, message)
        except (ProtocolError, ValueError) as error:
            self._end(owner, f"engine {owner.handle.engine_id}: {error}")

    def _hear(self, fetch: _Fetch, message: object) -> None:
        match message:
            case Grant() if fetch.grant is None:
                self._accept(fetch, message)
            case Ack() if fetch.confirming:
                self._end(fetch, None)
            case Refuse(reason):
                raise ValueError(reason)
            case _:
                raise ProtocolError(f"the producer sent {type(message).__name__} out of turn")

    def _accept(self, fetch: _Fetch, grant: Grant) -> None:
        assert fetch.channel is not None, "a message came in through the channel"
        if sentence := difference(self._schema, grant.schema):
            raise ValueError(sentence)
        if not len(grant.pages) == len(grant.digests) == len(fetch.pages):
            raise ValueError(f"the producer granted {len(grant.pages)} pages, {len(fetch.pages)} were asked for")
        if any(not 0 <= page < grant.schema.num_pages for page in grant.pages):
            raise ValueError("the producer granted pages that its pool doesn't have")
        if fetch.channel.file is None:
            raise ValueError("the producer's memory file did not come with its answer")
        size = needed_bytes(grant.layout, self._grid.widths, grant.schema.num_pages)
        fetch.mapping = map_peer(fetch.channel.file, size)
        fetch.grant = grant
        fetch.renew_at = time.monotonic() + grant.lease_seconds / 3
        self._copying.append(fetch)

    def _tick(self, now: float) -> float | None:
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            try:
                self._attend(fetch, now)
            except (ProtocolError, ValueError) as error:
                self._end(fetch, f"engine {fetch.handle.engine_id}: {error}")
        if self._copying:
            self._copy(self._copying[0])
        if self._copying:
            self._copying.rotate(-1)
            return now
        with self._lock:
            fetches = list(self._fetches.values())
        return min((f.deadline if f.channel else min(f.deadline, now + RETRY_SECONDS) for f in fetches), default=None)

    def _attend(self, fetch: _Fetch, now: float) -> None:
        """Whatever a fetch needs but copying: a connection, a renewal, an end."""
        if fetch.cancelled:
            if fetch.channel is None:
                self._connect(fetch)  # to tell the producer, who would wait for its lease otherwise
            self._end(fetch, "cancelled")
        elif fetch.grant is not None and not fetch.confirming:
            if fetch.channel is not None and fetch.renew_at <= now:
                fetch.renew_at = now + fetch.grant.lease_seconds / 3
                fetch.channel.send(Renew())
        elif fetch.deadline <= now:
            self._end(fetch, f"engine {fetch.handle.engine_id} did not answer within {self._peer_timeout:g} s")
        elif fetch.channel is None:
            self._connect(fetch)
        if fetch.channel is not None:
            writing = selectors.EVENT_WRITE if fetch.channel.backlog else 0
            self._selector.modify(fetch.channel, selectors.EVENT_READ | writing, fetch)

    def _connect(self, fetch: _Fetch) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(f"\0{fetch.handle.address}")
        except BlockingIOError:  # its queue of connections is full
            sock.close()
            return
        except OSError as error:
            sock.close()
            raise ValueError(f"it has stopped or restarted since it made the handle ({error.strerror})") from error
        fetch.channel = to_producer(sock)
        self._selector.register(fetch.channel, selectors.EVENT_READ, fetch)
        if (uid := fetch.channel.peer_uid()) != os.getuid():
            raise ValueError(f"its socket belongs to user {uid}, this engine runs as {os.getuid()}")
        fetch.channel.send(Open(fetch.handle.token, fetch.first_page, len(fetch.pages)))

    def _copy(self, fetch: _Fetch) -> None:
        """One slice of the fetch at the head of the queue."""
        grant, mapping = fetch.grant, fetch.mapping
        assert grant is not None, "only granted fetches are copied"
        assert mapping is not None, "a grant comes with memory"
        part = slice(fetch.copied, fetch.copied + self._slice)
        pages = fetch.pages[part]
        theirs = Grid.of_mapping(mapping, grant.layout, self._grid, grant.schema.num_pages)
        digests = self._grid.copy(pages, theirs, grant.pages[part])
        del theirs  # or the mapping can't be closed
        for at, (digest, promised) in enumerate(zip(digests, grant.digests[part], strict=True)):
            if digest != promised:
                self._end(
                    fetch,
                    f"page {fetch.first_page + fetch.copied + at} of engine {fetch.handle.engine_id} arrived "
                    f"with digest {digest:016x}, {promised:016x} was published",
                )
                return
        fetch.copied += len(pages)
        if fetch.copied == len(fetch.pages):
            self._confirm(fetch)

    def _confirm(self, fetch: _Fetch) -> None:
        assert fetch.channel is not None, "only connected fetches are copied"
        self._copying.remove(fetch)
        fetch.confirming, fetch.deadline = True, time.monotonic() + self._peer_timeout
        try:
            fetch.channel.send(Done())
        except ProtocolError as error:
            self._end(fetch, f"engine {fetch.handle.engine_id}: {error}")

    def _end(self, fetch: _Fetch, failure: str | None) -> None:
        """Let go of everything, and only then tell."""
        if fetch.channel is not None:
            if failure is not None:
                self._say_goodbye(fetch.channel, failure)
            self._selector.unregister(fetch.channel)
            fetch.channel.close()
            fetch.channel = None
        if fetch in self._copying:
            self._copying.remove(fetch)
        if fetch.mapping is not None:
            fetch.mapping.close()
        with self._lock:
            del self._fetches[fetch.request_id]
            failure = "cancelled" if fetch.cancelled else failure
            if failure is None:
                self._outbox.post(EventKind.FETCHED, fetch.request_id)
            else:
                self._outbox.post(EventKind.FETCH_FAILED, fetch.request_id, failure)

    @staticmethod
    def _say_goodbye(channel: Channel, reason: str) -> None:
        try:
            channel.send(Cancel(reason))
        except ProtocolError:
            return  # it is gone itself, which says the same

    def _abandon(self, reason: str) -> None:
        with self._lock:
            self._broken = reason
            fetches = list(self._fetches.values())
        for fetch in fetches:
            self._end(fetch, reason)


__all__ = ["Consumer"]
