"""Links over NCCL: slices are gathered, sent and scattered on streams of their own, beside the engine's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from engine.plugins.kv_connectors.nccl.library import Library
from engine.transport.blocks import Digests
from engine.transport.link import SLICE_BYTES, WINDOW, Landing, Link, LinkLost, Links

if TYPE_CHECKING:
    from torch import Tensor


TOGETHER: Final = 2
"""Slices that NCCL is told of at once, where as many are due. What is sent or received together is done together, so of
eight slices under way most can be scattered while the rest comes in."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory that slices go through."""

    buffer: Tensor
    idle: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # after what was last done with it


@dataclass(slots=True, eq=False, kw_only=True)
class _Operation:
    """A send or receive that waits for its turn at NCCL."""

    slot: _Slot
    num_bytes: int
    sends: bool
    queued: bool = False  # NCCL has put it on the stream


class NcclLinks(Links):
    """See `Links`."""

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        self._device, self._slice_bytes, self._library = device, max(SLICE_BYTES, slice_bytes), Library()

    def invite(self) -> bytes:
        """See `Links.invite`."""
        with torch.cuda.device(self._device):
            return self._library.unique_id()

    def join(self, invitation: bytes, *, invited: bool) -> Link:
        """See `Links.join`."""
        if len(invitation) != 128:
            raise LinkLost(f"an invitation of NCCL has 128 bytes, not {len(invitation)}")
        return NcclLink(self._library, self._device, invitation, int(invited), self._slice_bytes)


class NcclLink(Link):
    """See `Link`. Rank 0 is the end that invited."""

    def __init__(self, library: Library, device: torch.device, unique_id: bytes, rank: int, slice_bytes: int) -> None:
        self._library, self._device, self._peer = library, device, 1 - rank
        self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free = [_Slot(torch.empty(slice_bytes, dtype=torch.uint8, device=device)) for _ in range(WINDOW)]
        self._queue: deque[_Operation] = deque()
        self._begun: list[_Operation] = []
        self._left: list[NcclLanding] = []  # nobody waits for them, but their slots are being written
        self._closed = False
        with torch.cuda.device(device):
            self._comm = library.join(unique_id, rank)

    @property
    def room(self) -> bool:
        """See `Link.room`."""
        return bool(self._free)

    def send(self, fill: Callable[[Tensor], None], num_bytes: int) -> None:
        """See `Link.send`."""
        slot = self._free.pop(0)
        with torch.cuda.stream(self.copies):
            slot.idle.wait()
            fill(slot.buffer[:num_bytes])
            slot.idle.record()
        self._queue.append(_Operation(slot=slot, num_bytes=num_bytes, sends=True))

    def receive(self, num_bytes: int) -> Landing:
        """See `Link.receive`."""
        operation = _Operation(slot=self._free.pop(0), num_bytes=num_bytes, sends=False)
        self._queue.append(operation)
        return NcclLanding(self, operation)

    def pump(self) -> bool:
        """See `Link.pump`."""
        if self._closed:
            raise LinkLost("the link is closed")
        for landing in [landing for landing in self._left if landing.arrived()]:
            self._left.remove(landing)
            self._free.append(landing.operation.slot)
        with torch.cuda.device(self._device):
            while self._library.progress(self._comm):
                for operation in self._begun:
                    self._queued(operation)
                self._begun = [self._queue.popleft() for _ in range(min(TOGETHER, len(self._queue)))]
                if not self._begun:
                    return bool(self._left)
                with self._library.together():
                    for operation in self._begun:
                        self._begin(operation)
        return True

    def _begin(self, operation: _Operation) -> None:
        self._stream.wait_event(operation.slot.idle)
        call = self._library.send if operation.sends else self._library.receive
        address = operation.slot.buffer.data_ptr()
        call(self._comm, address, operation.num_bytes, self._peer, self._stream.cuda_stream)

    def _queued(self, operation: _Operation) -> None:
        """NCCL has put it on the stream."""
        operation.slot.idle.record(self._stream)
        operation.queued = True
        if operation.sends:
            self._free.append(operation.slot)

    def leave(self, landing: NcclLanding) -> None:
        """Nobody waits for a landing any more; its slot is free once nothing is written to it."""
        self._left.append(landing)

    def close(self) -> None:
        """See `Link.close`."""
        if not self._closed:
            self._closed = True
            self._queue.clear()
            with torch.cuda.device(self._device):
                self._library.abort(self._comm)
                self.copies.synchronize()


class NcclLanding(Landing):
    """See `Landing`."""

    def __init__(self, link: NcclLink, operation: _Operation) -> None:
        self.operation, self._link = operation, link
        self._digests: Digests | None = None

    def arrived(self) -> bool:
        """See `Landing.arrived`; true as well once it was taken."""
        return self.operation.queued and bool(self.operation.slot.idle.query())  # type: ignore[no-untyped-call]

    def take(self, scatter: Callable[[Tensor], Digests]) -> None:
        """See `Landing.take`."""
        with torch.cuda.stream(self._link.copies):
            self._digests = scatter(self.operation.slot.buffer[: self.operation.num_bytes])
            self.operation.slot.idle.record()

    def taken(self) -> Digests | None:
        """See `Landing.taken`."""
        return self._digests if self._digests is not None and self.arrived() else None

    def release(self) -> None:
        """See `Landing.release`."""
        if self._digests is not None:
            self.operation.slot.idle.synchronize()
        self._link.leave(self)


__all__ = ["NcclLanding", "NcclLink", "NcclLinks"]
