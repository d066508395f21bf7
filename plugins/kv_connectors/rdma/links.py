"""Links for pools on GPUs: gathered slices are written by NIXL into registered memory of the other end.

The invitation names the consumer's slots; slice n goes into slot n modulo their number, and NIXL tells the consumer
when it is there. One large write a slice, since each of thousands of small ones costs as much as a page takes to move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from engine.plugins.kv_connectors.rdma.agent import open_agent
from engine.transport.blocks import Digests
from engine.transport.link import SLICE_BYTES, WINDOW, Landing, Link, LinkLost, Links

if TYPE_CHECKING:
    from torch import Tensor


class Slots(msgspec.Struct, frozen=True):
    """Where a consumer wants its slices."""

    metadata: bytes  # NIXL's
    addresses: list[int]
    size: int
    device: int


SLOTS = msgspec.msgpack.Decoder(Slots)


@dataclass(slots=True, eq=False)
class _Slot:
    """Registered memory that slices go through."""

    buffer: Tensor
    idle: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # after what was last done with it


class NixlLinks(Links):
    """See `Links`. Each link has an agent of its own, so that it can be given up alone."""

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        self._device, self._size = device, max(SLICE_BYTES, slice_bytes)
        self._invited: dict[bytes, NixlLink] = {}

    def invite(self) -> bytes:
        """See `Links.invite`."""
        link = NixlLink(self._device, self._size)
        invitation = msgspec.msgpack.encode(link.slots())
        self._invited[invitation] = link
        return invitation

    def join(self, invitation: bytes, *, invited: bool) -> Link:
        """See `Links.join`."""
        if not invited:
            return self._invited.pop(invitation)
        link = NixlLink(self._device, self._size)
        try:
            link.aim(SLOTS.decode(invitation))
        except Exception as error:  # NIXL's errors have no common base
            link.close()
            raise LinkLost(f"NIXL can't use the consumer's memory: {error}") from error
        return link


class NixlLink(Link):
    """See `Link`. One end writes, the other is written to."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, size
        self._agent: Any = open_agent()
        self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = [_Slot(torch.zeros(size, dtype=torch.uint8, device=device)) for _ in range(WINDOW)]
        torch.cuda.synchronize(device)
        self._registered = self._agent.register_memory([slot.buffer for slot in self._slots])
        self._free = set(range(WINDOW))
        self._filled: deque[tuple[int, int]] = deque()  # slot and bytes, to be written when the gather is done
        self._writes: dict[int, Any] = {}  # by slot
        self._sent = self._received = 0  # slices
        self._arrived: set[int] = set()
        self._left: dict[int, int] = {}  # slices that nobody waits for, and their slots
        self._peer: str | None = None
        self._target: Slots | None = None

    def slots(self) -> Slots:
        """What the other end must know to write here."""
        addresses = [slot.buffer.data_ptr() for slot in self._slots]
        return Slots(bytes(self._agent.get_agent_metadata()), addresses, self._size, self._device.index or 0)

    def aim(self, target: Slots) -> None:
        """Write to these slots."""
        name = self._agent.add_remote_agent(target.metadata)
        self._peer, self._target = name.decode() if isinstance(name, bytes) else name, target

    @property
    def room(self) -> bool:
        """See `Link.room`."""
        return bool(self._free) if self._target is not None else self._received % WINDOW in self._free

    def send(self, fill: Callable[[Tensor], None], num_bytes: int) -> None:
        """See `Link.send`."""
        at = self._free.pop()
        slot = self._slots[at]
        with torch.cuda.stream(self.copies):
            fill(slot.buffer[:num_bytes])
            slot.idle.record()
        self._filled.append((at, num_bytes))

    def receive(self, num_bytes: int) -> Landing:
        """See `Link.receive`."""
        at = self._received % WINDOW
        self._free.remove(at)
        landing = NixlLanding(self, self._received, self._slots[at], num_bytes)
        self._received += 1
        return landing

    def has(self, sequence: int) -> bool:
        """Whether a slice is here."""
        return sequence in self._arrived

    def leave(self, sequence: int) -> None:
        """Nobody waits for a slice any more; its slot is free once it is here."""
        self._left[sequence] = sequence % WINDOW

    def pump(self) -> bool:
        """See `Link.pump`."""
        if self._agent is None:
            raise LinkLost("the link is closed")
        try:
            self._write()
            self._hear()
        except LinkLost:
            raise
        except Exception as error:  # NIXL's errors have no common base
            raise LinkLost(f"NIXL: {error}") from error
        return bool(self._filled or self._writes or self._left)

    def _write(self) -> None:
        while self._filled and self._slots[self._filled[0][0]].idle.query():  # type: ignore[no-untyped-call]
            at, num_bytes = self._filled.popleft()
            assert self._target is not None, "only the end that aims sends"
            if num_bytes > self._target.size:
                raise LinkLost(f"the consumer's slots hold {self._target.size} bytes, a slice has {num_bytes}")
            here = (self._slots[at].buffer.data_ptr(), num_bytes, self._device.index or 0)
            there = (self._target.addresses[self._sent % len(self._target.addresses)], num_bytes, self._target.device)
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([here], "VRAM"),
                self._agent.get_xfer_descs([there], "VRAM"),
                self._peer,
                str(self._sent).encode(),
            )
            self._sent += 1
            self._writes[at] = handle
            if self._agent.transfer(handle) == "ERR":
                raise LinkLost("the write failed")
        for at, handle in list(self._writes.items()):
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                raise LinkLost("the write failed")
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
                del self._writes[at]
                self._free.add(at)

    def _hear(self) -> None:
        for words in self._agent.get_new_notifs().values():
            self._arrived.update(int(word) for word in words)
        for sequence in [sequence for sequence in sorted(self._left) if sequence in self._arrived]:
            at = self._left.pop(sequence)
            self._arrived.discard(sequence)
            self._free.add(at)

    def close(self) -> None:
        """See `Link.close`."""
        if self._agent is None:
            return
        self.copies.synchronize()
        for handle in self._writes.values():
            self._agent.release_xfer_handle(handle)
        if self._peer is not None:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        self._agent = None


class NixlLanding(Landing):
    """See `Landing`."""

    def __init__(self, link: NixlLink, sequence: int, slot: _Slot, num_bytes: int) -> None:
        self._link, self._sequence, self._slot, self._bytes = link, sequence, slot, num_bytes
        self._digests: Digests | None = None

    def arrived(self) -> bool:
        """See `Landing.arrived`."""
        return self._link.has(self._sequence)

    def take(self, scatter: Callable[[Tensor], Digests]) -> None:
        """See `Landing.take`."""
        with torch.cuda.stream(self._link.copies):
            self._digests = scatter(self._slot.buffer[: self._bytes])
            self._slot.idle.record()

    def taken(self) -> Digests | None:
        """See `Landing.taken`."""
        done = self._digests is not None and self._slot.idle.query()  # type: ignore[no-untyped-call]
        return self._digests if done else None

    def release(self) -> None:
        """See `Landing.release`."""
        if self._digests is not None:
            self._slot.idle.synchronize()
        self._link.leave(self._sequence)


__all__ = ["NixlLink", "NixlLinks"]
