"""The consumer's end: asks producers, pulls blocks through the transport and checks them, all on its own thread."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from engine.specs.kv_connector import EventKind, KVSchema
from engine.transport.blocks import BlockPool, Blocks
from engine.transport.channel import Channel
from engine.transport.frames import Ack, Cancel, Done, Grant, Open, ProtocolError, Refuse, Renew
from engine.transport.loop import Loop
from engine.transport.options import PeerOptions
from engine.transport.outbox import Outbox
from engine.transport.schema import Handle, common_block, cuts, difference
from engine.transport.spares import Spares
from engine.transport.trust import Quarantine, Sampler
from engine.transport.wire import Checks, Incoming, Offered, Transport

RETRY_SECONDS: Final = 0.01
"""Pause before a producer whose queue of connections is full is asked again."""


@dataclass(slots=True, eq=False)
class _Fetch:
    request_id: str
    handle: Handle
    block: int  # tokens
    grid: BlockPool
    blocks: Blocks
    first: int  # of the publication's blocks
    deadline: float  # of the next sign of progress
    channel: Channel | None = None
    spare: bool = False  # the channel has served another fetch
    grant: Grant | None = None
    checks: Checks = field(default_factory=lambda: np.zeros(0, np.bool_))
    incoming: Incoming | None = None
    arrived: int = 0  # blocks
    renew_at: float = 0.0
    damage: str = ""  # the first block that is not what was published
    confirming: bool = False
    cancelled: bool = False


class Consumer(Loop):
    """Runs the fetches of one engine: each asked at once, pulled in turns."""

    def __init__(
        self,
        transport: Transport[Any],
        engine_id: str,
        schema: KVSchema,
        grid: BlockPool,
        outbox: Outbox,
        options: PeerOptions,
    ) -> None:
        super().__init__(f"kv-{transport.name}-consumer-{engine_id}")
        self._transport, self._schema, self._grid, self._outbox = transport, schema, grid, outbox
        self._peer_timeout = options.peer_timeout
        self._grids = {schema.page_size: grid}  # by tokens a block
        self._sampler = Sampler(options.check)
        self._quarantine = Quarantine(options.quarantine_after, options.quarantine_seconds, time.monotonic)
        self._lock = threading.Lock()  # over the table, `cancelled`, the quarantine, and the moment a fetch ends
        self._fetches: dict[str, _Fetch] = {}
        self._spares = Spares()
        self._parting: dict[Channel, float] = {}  # to say goodbye once the peer has greeted, until a deadline
        self._broken: str | None = None
        self._thread.start()

    def fetch(self, request_id: str, plain: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        """See `KVConnector.fetch`."""
        self._grid.check(pages)
        handle = Handle.from_json(plain, self._transport.name)
        self._transport.check_address(handle.address)
        if sentence := difference(self._schema, handle.schema):
            raise ValueError(sentence)
        offered = -(-handle.num_tokens // self._schema.page_size)
        if first_page < 0 or first_page + len(pages) > offered:
            raise ValueError(f"the handle offers {offered} pages, not {len(pages)} from page {first_page} on")
        fetch = self._plan(request_id, handle, pages, first_page)
        with self._lock:
            if sentence := self._quarantine.objection(handle.address):
                raise ValueError(f"engine {handle.engine_id}: {sentence}")
            if request_id in self._fetches:
                raise ValueError(f"{request_id!r} is being fetched already; cancel it first")
            if self._broken is not None:
                self._outbox.post(EventKind.FETCH_FAILED, request_id, self._broken)
                return
            self._fetches[request_id] = fetch
        self.wake()

    def _plan(self, request_id: str, handle: Handle, pages: Sequence[int], first_page: int) -> _Fetch:
        """The fetch in blocks; those of the last page that the producer hasn't are left out."""
        block = common_block(self._schema, handle.schema)
        if block not in self._grids:
            self._grids[block] = self._grid.cut(cuts(self._schema, block))
        grid = self._grids[block]
        first = first_page * grid.per_page
        blocks = grid.blocks(pages)[: max(0, -(-handle.num_tokens // block) - first)]
        return _Fetch(request_id, handle, block, grid, blocks, first, time.monotonic() + self._peer_timeout)

    def cancel(self, request_id: str) -> None:
        """See `KVConnector.cancel`. Fetches that have ended and been polled are not affected."""
        with self._lock:
            fetch = self._fetches.get(request_id)
            if fetch is None:
                self._outbox.recall(request_id)
                return
            fetch.cancelled = True
        self.wake()

    def _ready(self, owner: _Fetch | Channel, events: int) -> None:
        if isinstance(owner, Channel):
            if self._spares.drop(owner):  # its end: nothing else is said between fetches
                self._forget(owner)
            else:
                self._part(owner, events)
            return
        assert owner.channel is not None, "the selector watches the channel"
        try:
            if events & selectors.EVENT_WRITE:
                owner.channel.flush()
            if events & selectors.EVENT_READ:
                for message in owner.channel.receive():
                    if owner.channel is not None:  # until its end is heard
                        self._hear(owner, message)
        except (ProtocolError, ValueError) as error:
            self._fail(owner, error)

    def _fail(self, fetch: _Fetch, error: ProtocolError | ValueError) -> None:
        if fetch.spare and fetch.channel is not None and fetch.grant is None and isinstance(error, ProtocolError):
            # The producer had closed it by then: ask whoever is there now, on a new one.
            if fetch.incoming is not None:
                fetch.incoming.close()
            self._transport.hung_up(fetch.channel)
            self._forget(fetch.channel)
            fetch.channel, fetch.incoming, fetch.spare = None, None, False
        else:
            self._end(fetch, f"engine {fetch.handle.engine_id}: {error}")

    def _hear(self, fetch: _Fetch, message: object) -> None:
        match message:
            case Grant() if fetch.grant is None:
                self._accept(fetch, message)
            case Ack() if fetch.confirming:
                self._end(fetch, fetch.damage or None, damaged=bool(fetch.damage))
            case Refuse(reason):
                raise ValueError(reason)
            case _:
                raise ProtocolError(f"the producer sent {type(message).__name__} out of turn")

    def _accept(self, fetch: _Fetch, grant: Grant) -> None:
        assert fetch.channel is not None, "a message came in through the channel"
        if sentence := difference(self._schema, grant.schema):
            raise ValueError(sentence)
        if common_block(self._schema, grant.schema) != fetch.block:
            raise ValueError(f"its page size is {grant.schema.page_size}, not what its handle says")
        if len(grant.digests) != len(fetch.blocks):
            raise ValueError(f"the producer granted {len(grant.digests)} blocks, {len(fetch.blocks)} were asked for")
        if fetch.incoming is None:
            fetch.checks = self._sampler.choose(len(fetch.blocks))
            offered = Offered(grant.detail, grant.schema, fetch.block)
            fetch.incoming = self._transport.receive(fetch.channel, offered, fetch.grid, fetch.blocks, fetch.checks)
        fetch.grant = grant
        now = time.monotonic()
        fetch.renew_at, fetch.deadline = now + grant.lease_seconds / 3, now + self._peer_timeout

    def _tick(self, now: float) -> float | None:
        for fetch in self._open_fetches():
            try:
                self._attend(fetch, now)
                self._pull(fetch, now)
                self._watch(fetch)
            except (ProtocolError, ValueError) as error:
                self._fail(fetch, error)
        for channel in self._spares.expired(now):
            self._spares.drop(channel)
            self._forget(channel)
        for channel in [channel for channel, deadline in self._parting.items() if deadline <= now]:
            self._hang_up(channel)
        turn = self._transport.consumer_turn(now)
        now = time.monotonic()  # pauses count from here, or there would be none after a long turn
        waiting = [self._due(fetch, now) for fetch in self._open_fetches()]
        others = [due for due in (turn, self._spares.due) if due is not None]
        return min([*waiting, *self._parting.values(), *others], default=None)

    def _open_fetches(self) -> list[_Fetch]:
        with self._lock:
            return list(self._fetches.values())

    def _due(self, fetch: _Fetch, now: float) -> float:
        """When to look at a fetch again if nothing is heard of it."""
        if fetch.channel is None:
            return min(fetch.deadline, now + RETRY_SECONDS)
        if fetch.incoming is None or fetch.grant is None or fetch.confirming:
            return fetch.deadline
        due = min(fetch.deadline, fetch.renew_at)
        return due if fetch.incoming.pause is None else min(due, now + fetch.incoming.pause)

    def _attend(self, fetch: _Fetch, now: float) -> None:
        """Whatever a fetch needs but pulling: a connection, a renewal, an end."""
        if fetch.cancelled:
            if fetch.channel is None:
                self._connect(fetch)  # to tell the producer, who would wait for its lease otherwise
            self._end(fetch, "cancelled")
            return
        if fetch.channel is None:
            self._connect(fetch)
        if fetch.channel is not None and fetch.grant is not None and not fetch.confirming and fetch.renew_at <= now:
            fetch.renew_at = now + fetch.grant.lease_seconds / 3
            fetch.channel.send(Renew())
        if fetch.deadline <= now:
            self._end(fetch, f"engine {fetch.handle.engine_id} did not answer within {self._peer_timeout:g} s")

    def _watch(self, fetch: _Fetch) -> None:
        if fetch.channel is not None:
            writing = selectors.EVENT_WRITE if fetch.channel.backlog else 0
            self._selector.modify(fetch.channel, selectors.EVENT_READ | writing, fetch)

    def _connect(self, fetch: _Fetch) -> None:
        if (channel := self._spares.take(fetch.handle.address)) is not None:
            fetch.channel, fetch.spare = channel, True
            self._selector.modify(channel, selectors.EVENT_READ, fetch)
            fetch.checks = self._sampler.choose(len(fetch.blocks))
            word, fetch.incoming = self._transport.ahead(channel, fetch.grid, fetch.blocks, fetch.checks)
            self._open(fetch, channel, word)
            return
        try:
            channel = self._transport.dial(fetch.handle.address)
        except BlockingIOError:  # its queue of connections is full
            return
        except OSError as error:
            raise ValueError(f"it has stopped or restarted since it made the handle ({error.strerror})") from error
        fetch.channel = channel
        self._selector.register(channel, selectors.EVENT_READ, fetch)
        self._open(fetch, channel, b"")

    @staticmethod
    def _open(fetch: _Fetch, channel: Channel, word: bytes) -> None:
        channel.send(Open(fetch.handle.token, fetch.first, len(fetch.blocks), fetch.block, word))

    def _pull(self, fetch: _Fetch, now: float) -> None:
        """Take a bounded amount of what is incoming, and check it."""
        if fetch.incoming is None or fetch.grant is None or fetch.confirming:
            return
        count, digests = fetch.incoming.advance()
        checked = np.flatnonzero(fetch.checks[fetch.arrived : fetch.arrived + count]) + fetch.arrived
        for at, digest in zip(checked.tolist(), digests, strict=True):
            if digest != (promised := fetch.grant.digests[at]) and not fetch.damage:
                fetch.damage = (
                    f"block {fetch.first + at} of engine {fetch.handle.engine_id} arrived "
                    f"with digest {digest:016x}, {promised:016x} was published"
                )
        fetch.arrived += count
        if count:
            fetch.deadline = now + self._peer_timeout
        if fetch.arrived == len(fetch.blocks):
            assert fetch.channel is not None, "only connected fetches are pulled"
            fetch.confirming, fetch.deadline = True, now + self._peer_timeout
            fetch.channel.send(Done(fetch.damage))

    def _end(self, fetch: _Fetch, failure: str | None, damaged: bool = False) -> None:
        """Let go of everything, and only then tell."""
        if fetch.incoming is not None:
            fetch.incoming.close()
            fetch.incoming = None
        if fetch.channel is not None:
            if failure is not None:
                self._say_goodbye(fetch.channel, failure)
            self._let_go(fetch, fetch.channel, well=failure is None and not fetch.cancelled)
            fetch.channel = None
        with self._lock:
            del self._fetches[fetch.request_id]
            if damaged:
                self._quarantine.damaged(fetch.handle.address)
            elif failure is None:
                self._quarantine.sound(fetch.handle.address)
            failure = "cancelled" if fetch.cancelled else failure
            if failure is None:
                self._outbox.post(EventKind.FETCHED, fetch.request_id)
            else:
                self._outbox.post(EventKind.FETCH_FAILED, fetch.request_id, failure, damaged)

    @staticmethod
    def _say_goodbye(channel: Channel, reason: str) -> None:
        try:
            channel.send(Cancel(reason))
        except ProtocolError:
            return  # it is gone itself, which says the same

    def _let_go(self, fetch: _Fetch, channel: Channel, *, well: bool) -> None:
        """Close the channel, or keep it for another fetch. If the producer hasn't heard of a cancelled fetch yet, it is
        closed when it has."""
        now = time.monotonic()
        if well and self._transport.keeps and self._spares.keep(fetch.handle.address, channel, now):
            self._selector.modify(channel, selectors.EVENT_READ, channel)
        elif fetch.cancelled and channel.pending:
            self._parting[channel] = now + self._peer_timeout
            self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, channel)
        else:
            self._forget(channel)

    def _part(self, channel: Channel, events: int) -> None:
        """Hear the greeting, send what is held back, and hang up."""
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ:
                list(channel.receive())
            if channel.pending:
                writing = selectors.EVENT_WRITE if channel.backlog else 0
                self._selector.modify(channel, selectors.EVENT_READ | writing, channel)
                return
        except ProtocolError:
            pass  # it is gone, which says the same
        self._hang_up(channel)

    def _hang_up(self, channel: Channel) -> None:
        del self._parting[channel]
        self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()

    def _abandon(self, reason: str) -> None:
        with self._lock:
            self._broken = reason
        for fetch in self._open_fetches():
            self._end(fetch, reason)
        for channel in list(self._parting):
            self._hang_up(channel)
        for channel in self._spares.all():
            self._forget(channel)


__all__ = ["Consumer"]
