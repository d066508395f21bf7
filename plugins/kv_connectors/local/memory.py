"""The producer's pool as a sealed memory file, and a consumer's read-only view of it.

The file has no name: a peer gets it over the socket, and the kernel frees it with its last user. So a crash leaves
nothing behind, and the size can't change under a reader (a shrunk mapping would kill the process that reads it).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Zeroed memory of this process that others can map read-only."""

    def __init__(self, num_bytes: int) -> None:
        writable = os.memfd_create("engine-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, num_bytes)
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, SEALS)
            self.tensor: Tensor = torch.frombuffer(mmap.mmap(writable, num_bytes), dtype=torch.uint8)
            """uint8 [num_bytes]; the mapping lives as long as a tensor over it."""
            self.file = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
            """The same memory opened for reading, to be sent to peers."""
        finally:
            os.close(writable)

    def close(self) -> None:
        """Close the file; the memory goes when its last mapping does."""
        os.close(self.file)
        del self.tensor


def map_peer(file: int, num_bytes: int) -> mmap.mmap:
    """Map the first `num_bytes` bytes of a peer's pool for reading.

    Raises:
        ValueError: the file is no sealed memory file of that size.
    """
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"what the producer sent is no memory file ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the producer's memory file is not sealed, so it could shrink while it is read")
    if (size := os.fstat(file).st_size) < num_bytes:
        raise ValueError(f"the producer's memory file has {size} bytes, its layout needs {num_bytes}")
    return mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)


__all__ = ["SharedMemory", "map_peer"]
