"""A channel over a Unix socket, on which files travel from the producer to the consumer."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from typing import Any, Final

import msgspec

from engine.plugins.kv_connectors.local.memory import map_peer
from engine.transport.channel import Channel

_FILE: Final = struct.Struct("i")
_PEER: Final = struct.Struct("3i")  # process, user, group


class FileChannel(Channel):
    """See `Channel`."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], limit: int) -> None:
        super().__init__(sock, decoder, limit)
        self._to_send: int | None = None
        self._mapping: mmap.mmap | None = None
        self.file: int | None = None
        """The file that came in, owned by the channel."""

    def peer_uid(self) -> int:
        """The user that the peer runs as, by the kernel's word."""
        return int(_PEER.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])

    def attach_file(self, file: int) -> None:
        """Send a file with the next bytes."""
        self._to_send = file

    def _transmit(self, buffers: list[memoryview]) -> int:
        ancillary: list[tuple[int, int, bytes]] = []
        if self._to_send is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FILE.pack(self._to_send))]
        sent = self._sock.sendmsg(buffers, ancillary)
        self._to_send = None
        return sent

    def _read(self, size: int) -> bytes:
        data, ancillary, _, _ = self._sock.recvmsg(size, socket.CMSG_LEN(_FILE.size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._keep(_FILE.unpack_from(payload)[0])
        return data

    def _keep(self, file: int) -> None:
        if self.file is not None:
            if not os.path.sameopenfile(self.file, file):
                self._unmap()
            os.close(self.file)
        self.file = file

    def mapping(self, num_bytes: int) -> mmap.mmap:
        """The first bytes of the file that came in, for reading. What was mapped stays so until the channel closes or
        another file comes: a fetch that comes the same way finds the pages there.

        Raises:
            ValueError: there is no file, or it is no sealed memory file of that size.
        """
        if self.file is None:
            raise ValueError("the producer's memory file did not come with its answer")
        if self._mapping is None or len(self._mapping) < num_bytes:
            self._unmap()
            self._mapping = map_peer(self.file, num_bytes)
        return self._mapping

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def close(self) -> None:
        """Close the socket and the file that came in; harmless twice."""
        super().close()
        self._unmap()
        if self.file is not None:
            os.close(self.file)
            self.file = None


__all__ = ["FileChannel"]
