"""The few functions of NCCL that two ends need, called without ever waiting for the other (NCCL's non-blocking mode).

Called directly and not through torch.distributed: its groups of processes wait, end the process when a peer dies, and
can't be given up alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine.transport.link import LinkLost

SUCCESS: Final = 0
IN_PROGRESS: Final = 7
_UINT8: Final = 1
_UNDEFINED: Final = -(2**31)
_MAGIC: Final = 0xCAFEBEEF
_VERSION: Final = 21700
"""Of the configuration record below: NCCL 2.17, the first that has all of its fields. Newer libraries read it too."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = (("internal", c_char * 128),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` as of 2.17."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
    )


def _find() -> str:
    """The library that torch is linked with: in the package it came in, or wherever the loader finds it."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((str(path) for folder in folders for path in folder.glob("lib/libnccl.so.2")), "libnccl.so.2")


class Library:
    """NCCL, as torch has loaded it."""

    def __init__(self) -> None:
        # NCCL has no other way to be told: both ends are on one host and there are two of them, so they meet at the
        # loopback device and need no multicast.
        os.putenv("NCCL_SOCKET_IFNAME", "lo")
        os.putenv("NCCL_NVLS_ENABLE", "0")
        self._nccl = ctypes.CDLL(_find())
        self._nccl.ncclGetErrorString.restype = c_char_p
        self._nccl.ncclCommInitRankConfig.argtypes = (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(_Config))
        for name in ("ncclSend", "ncclRecv"):
            getattr(self._nccl, name).argtypes = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
        self._nccl.ncclCommGetAsyncError.argtypes = (c_void_p, POINTER(c_int))
        self._nccl.ncclCommAbort.argtypes = (c_void_p,)

    def unique_id(self) -> bytes:
        """A new meeting place."""
        made = UniqueId()
        self._check(self._nccl.ncclGetUniqueId(byref(made)))
        return bytes(made)

    def join(self, unique_id: bytes, rank: int) -> int:
        """Begin to meet; the communicator is ready when `progress` says so. The current device is the one used."""
        comm = c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, None)
        made = UniqueId.from_buffer_copy(unique_id)
        self._check(self._nccl.ncclCommInitRankConfig(byref(comm), 2, made, rank, byref(config)))
        assert comm.value is not None, "NCCL made a communicator"
        return comm.value

    def progress(self, comm: int) -> bool:
        """Whether what was begun is done; raises LinkLost when it failed."""
        state = c_int()
        self._check(self._nccl.ncclCommGetAsyncError(comm, byref(state)))
        self._check(state.value)
        return state.value == SUCCESS

    @contextmanager
    def together(self) -> Iterator[None]:
        """Begin all sends and receives of the block at once: NCCL puts them on their streams in one piece of work."""
        self._check(self._nccl.ncclGroupStart())
        try:
            yield
        finally:
            ended = self._nccl.ncclGroupEnd()
        self._check(ended)

    def send(self, comm: int, address: int, num_bytes: int, peer: int, stream: int) -> None:
        """Begin to queue a send on a stream."""
        self._check(self._nccl.ncclSend(address, num_bytes, _UINT8, peer, comm, stream))

    def receive(self, comm: int, address: int, num_bytes: int, peer: int, stream: int) -> None:
        """Begin to queue a receive on a stream."""
        self._check(self._nccl.ncclRecv(address, num_bytes, _UINT8, peer, comm, stream))

    def abort(self, comm: int) -> None:
        """End a communicator and what it has under way."""
        self._nccl.ncclCommAbort(comm)

    def _check(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            raise LinkLost(f"NCCL: {self._nccl.ncclGetErrorString(result).decode()}")


__all__ = ["Library"]
