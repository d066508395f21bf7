"""NIXL as this connector uses it: registered memory, peers, and reads that are looked at, never waited for."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.plugins.kv_connectors.rdma import PACKAGES
from engine.transport.frames import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

Descriptors = NDArray[np.uint64]
"""Address, bytes and device of each run: [n, 3]."""


class Staging:
    """Registered memory that reads arrive in."""

    def __init__(self, agent: Any, num_bytes: int) -> None:
        self._agent, self.tensor = agent, torch.zeros(num_bytes, dtype=torch.uint8)
        self._registration = agent.register_memory(self.tensor)
        self.bytes: NDArray[np.uint8] = self.tensor.numpy()

    def close(self) -> None:
        """Unregister."""
        self._agent.deregister_memory(self._registration)


class Read:
    """One read under way."""

    def __init__(self, agent: Any, local: Descriptors, remote: Descriptors, peer: str, staging: Staging) -> None:
        """Begin; raises ProtocolError if the peer is gone."""
        self._agent, self.staging = agent, staging
        try:
            self._handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), peer
            )
            self._state = agent.transfer(self._handle)
        except Exception as error:  # NIXL's errors have no common base
            raise ProtocolError(f"the peer can't be read: {error}") from error

    def done(self) -> bool:
        """Whether everything has arrived; raises ProtocolError if it never will."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # NIXL's errors have no common base
                self._state = "ERR"
                raise ProtocolError(f"the peer is gone: {error}") from error
        if self._state == "ERR":
            raise ProtocolError("the read failed")
        return bool(self._state == "DONE")

    def ended(self) -> bool:
        """Whether nothing is written to the staging memory any more."""
        try:
            return self.done()
        except ProtocolError:
            return True

    def release(self) -> None:
        """Give the handle back; only once it has ended."""
        self._agent.release_xfer_handle(self._handle)


def open_agent(*, progress: bool = True) -> Any:
    """A NIXL agent of this process, under a name that no other has.

    With `progress` a thread of NIXL's moves on what peers want of it. That thread never rests, so an agent that nobody
    reads from does better without it: on two cores 35 MB take 15 ms instead of 45.
    """
    package = next(name for name in PACKAGES if find_spec(name))
    nixl = import_module(f"{package}._api")
    return nixl.nixl_agent(uuid.uuid4().hex, nixl.nixl_agent_config(enable_prog_thread=progress))


class Server:
    """The producer's end: a pool that peers read."""

    def __init__(self, pool: Sequence[tuple[Tensor, ...]]) -> None:
        self._nixl = open_agent()
        self._pool = self._nixl.register_memory([tensor for layer in pool for tensor in layer])
        self.metadata: bytes = self._nixl.get_agent_metadata()
        """What a peer needs to read the pool."""

    def close(self) -> None:
        """Unregister."""
        self._nixl.deregister_memory(self._pool)
        del self._nixl


class Reader:
    """The consumer's end. Reads are begun and looked at on the consumer's thread only."""

    def __init__(self, staging_bytes: int) -> None:
        self._nixl = open_agent(progress=False)
        self._staging_bytes = staging_bytes
        self._free: list[Staging] = []
        self._abandoned: list[Read] = []
        self._peers: dict[bytes, str] = {}

    def peer(self, metadata: bytes) -> str:
        """The name of the peer with this metadata; raises ValueError if it can't be one."""
        if metadata not in self._peers:
            try:
                name = self._nixl.add_remote_agent(metadata)
            except Exception as error:  # NIXL's errors have no common base
                raise ValueError(f"NIXL can't use the producer's metadata: {error}") from error
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def read(self, remote: list[tuple[int, int]], peer: str) -> Read:
        """Begin to read runs (address, bytes), one after the other, into staging memory."""
        staging = self._take()
        lengths = np.array([length for _, length in remote], np.uint64)
        local = np.zeros((len(remote), 3), np.uint64)
        local[:, 0] = staging.tensor.data_ptr() + np.cumsum(lengths) - lengths
        there = np.zeros((len(remote), 3), np.uint64)
        there[:, 0] = [address for address, _ in remote]
        local[:, 1] = there[:, 1] = lengths
        try:
            return Read(self._nixl, local, there, peer, staging)
        except ProtocolError:
            self._free.append(staging)
            raise

    def _take(self) -> Staging:
        for read in [read for read in self._abandoned if read.ended()]:
            self._abandoned.remove(read)
            self.finish(read)
        return self._free.pop() if self._free else Staging(self._nixl, self._staging_bytes)

    def finish(self, read: Read) -> None:
        """The staging memory of an ended read is free."""
        read.release()
        self._free.append(read.staging)

    def abandon(self, read: Read) -> None:
        """Nobody waits for this read any more; what it still writes goes nowhere."""
        self._abandoned.append(read)

    def close(self) -> None:
        """Let go of everything."""
        for read in self._abandoned:
            read.release()
        for staging in [*self._free, *(read.staging for read in self._abandoned)]:
            staging.close()
        for name in self._peers.values():
            self._nixl.remove_remote_agent(name)
        self._free, self._abandoned, self._peers = [], [], {}
        del self._nixl


__all__ = ["Read", "Reader", "Server", "Staging", "open_agent"]
