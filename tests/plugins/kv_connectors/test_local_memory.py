"""The pool as memory and as bytes: sealed, read-only for others, copied and digested page by page."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.plugins.kv_connectors.local.grid import Grid, needed_bytes
from engine.plugins.kv_connectors.local.memory import SharedMemory, map_peer


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


def pools() -> dict[str, list[tuple[torch.Tensor, ...]]]:
    """Pools of 12 pages that lie differently: apart, K and V of a page side by side, odd widths, one part, scalars."""
    both = torch.randint(0, 100, (12, 2, 3, 5), dtype=torch.int16)
    return {
        "apart": [(torch.randn(12, 4, 2), torch.randn(12, 4, 3)), (torch.randn(12, 4, 2), torch.randn(12, 4, 3))],
        "interleaved": [(both[:, 0], both[:, 1])],
        "odd": [(torch.randint(0, 255, (12, 7), dtype=torch.uint8),)],
        "bfloat16": [(torch.randn(12, 3).bfloat16(),)],
        "scalars": [(torch.randn(12),)],
    }


@pytest.mark.parametrize("name", sorted(pools()))
def test_copy_moves_exactly_the_pages(name: str) -> None:
    pool = pools()[name]
    source = Grid.of_pool(pool)
    target_pool = [tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in layer) for layer in pool]
    target = Grid.of_pool(target_pool)
    mine, theirs = [0, 1, 2, 9, 8, 5], [3, 4, 5, 7, 8, 11]
    assert target.copy(mine, source, theirs) == source.digests(theirs)
    for layer, target_layer in zip(pool, target_pool, strict=True):
        for tensor, copied in zip(layer, target_layer, strict=True):
            assert torch.equal(copied[mine], tensor[theirs])
            assert not copied[[3, 4, 6, 7, 10, 11]].any()
    assert target.digests(mine) == source.digests(theirs)
    assert target.copy([], source, []) == []


def test_digest_sees_every_bit() -> None:
    pool = pools()["apart"]
    grid = Grid.of_pool(pool)
    before = grid.digests(range(12))
    for tensor in (tensor for layer in pool for tensor in layer):
        raw = tensor.view(torch.uint8)[5].view(-1)
        for byte in range(raw.numel()):
            raw[byte] ^= 1 << byte % 8
            after = grid.digests(range(12))
            raw[byte] ^= 1 << byte % 8
            assert [a == b for a, b in zip(before, after, strict=True)] == [page != 5 for page in range(12)]


def test_digest_is_the_weighted_sum_and_the_same_in_every_process() -> None:
    page = np.arange(24, dtype=np.uint8).reshape(1, 24)
    grid = Grid([page[:, :16], page[:, 16:]])
    stream = hashlib.shake_128(b"engine KV page digest").digest(24)
    weights = [int.from_bytes(stream[at : at + 8], "little") | 1 for at in (0, 8, 16)]
    words = [int.from_bytes(page[0, at : at + 8].tobytes(), "little") for at in (0, 8, 16)]
    assert grid.digests([0]) == [sum(w * x for w, x in zip(weights, words, strict=True)) % 2**64]


def test_digest_sees_exchanged_words_parts_and_pages() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 255, (2, 2, 64), np.uint8)
    (before, other) = Grid([first, second]).digests([0, 1])
    assert before != other
    assert Grid([second, first]).digests([0]) != [before]
    exchanged = first.copy()
    exchanged[0, :8], exchanged[0, 8:16] = first[0, 8:16], first[0, :8]
    assert Grid([exchanged, second]).digests([0]) != [before]


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
    theirs = Grid.of_mapping(mapping, layout, grid, 12)
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


def test_pages_that_are_no_run_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1 are not runs of bytes"):
        Grid.of_pool([(torch.zeros(4, 2, 3),), (torch.zeros(4, 3, 2).transpose(1, 2),)])


@pytest.mark.parametrize("layout", [[(0, 8)], [(0, 8), (-8, 8)], [(0, 8), (32, 7)], [(0, 8), (32, -8)], []])
def test_layouts_without_sense_are_refused(layout: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="the producer's layout"):
        needed_bytes(layout, [8, 8], 4)


def test_page_ids_are_checked() -> None:
    grid = Grid([np.zeros((4, 8), np.uint8)])
    grid.check([0, 3])
    for stray in (4, -1):
        with pytest.raises(ValueError, match=f"no page {stray}, it has 4"):
            grid.check([0, stray])
