"""The pool as memory: sealed, read-only for others, described to a peer."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from engine.plugins.kv_connectors.local.memory import SharedMemory, map_peer
from engine.transport.grid import Grid, needed_bytes
from engine.transport.schema import Cut


def test_memory_is_zeroed_writable_and_seen_by_a_peer() -> None:
    memory = SharedMemory(8192)
    assert memory.tensor.dtype is torch.uint8
    assert memory.tensor.shape == (8192,)
    assert not memory.tensor.any()
    memory.tensor[4096:] = 7
    mapping = map_peer(memory.file, 8192)
    assert mapping[4095:4098] == b"\0\7\7"
    mapping.close()
    memory.close()


def test_a_peer_can_neither_write_nor_resize_it() -> None:
    memory = SharedMemory(4096)
    mapping = map_peer(memory.file, 4096)
    with pytest.raises(TypeError, match="readonly"):
        mapping[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(memory.file, 4096)
    with pytest.raises(OSError):
        os.ftruncate(memory.file, 0)
    with pytest.raises(OSError):
        os.open(f"/proc/self/fd/{memory.file}", os.O_RDWR | os.O_TRUNC)
    assert os.fstat(memory.file).st_size == 4096
    mapping.close()
    memory.close()


def test_unsealed_small_and_ordinary_files_are_refused(tmp_path: Path) -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    with pytest.raises(ValueError, match="not sealed"):
        map_peer(unsealed, 4096)
    os.close(unsealed)
    memory = SharedMemory(4096)
    with pytest.raises(ValueError, match="has 4096 bytes, its layout needs 4097"):
        map_peer(memory.file, 4097)
    memory.close()
    (tmp_path / "f").write_bytes(bytes(4096))
    with (tmp_path / "f").open("rb") as file, pytest.raises(ValueError, match="no memory file"):
        map_peer(file.fileno(), 4096)


def test_layout_describes_the_pool_to_a_peer() -> None:
    memory = SharedMemory(4096)
    both = memory.tensor[128 : 128 + 12 * 2 * 16].view(torch.int16).view(12, 2, 8)
    both.copy_(torch.arange(192).view(12, 2, 8))
    grid = Grid.of_pool([(both[:, 0], both[:, 1])])
    layout = grid.layout(memory.tensor.data_ptr(), 4096)
    assert layout == [(128, 32), (144, 32)]
    size = needed_bytes(layout, grid.widths, 12)
    assert size == 128 + 12 * 32
    mapping = map_peer(memory.file, size)
    theirs = grid.of_buffer(mapping, layout, 12, [Cut(1, 1)])
    assert theirs.digests(range(12)) == grid.digests(range(12))
    del theirs
    mapping.close()
    memory.close()


def test_pool_elsewhere_has_no_layout() -> None:
    memory = SharedMemory(4096)
    base, inside = memory.tensor.data_ptr(), memory.tensor.view(4, 1024)
    for outside in (torch.zeros(4, 16, dtype=torch.uint8), inside[:, 512:]):
        with pytest.raises(ValueError, match="outside the memory"):
            Grid.of_pool([(outside,)]).layout(base, 2048)
    memory.close()
