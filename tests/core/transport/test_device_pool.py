"""Blocks on a device, or through Triton's interpreter: the bytes and the digests of the grid in host memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.transport.device_pool import DevicePool

SAME = """
import numpy as np
import torch
from engine.transport.device_pool import DevicePool
from engine.transport.grid import Grid
from engine.transport.schema import Cut

chance = torch.Generator().manual_seed(0)
pool = [
    tuple(torch.randint(0, 256, (10, 4, 8, width), dtype=torch.uint8, generator=chance) for width in (16, 24))
    for _ in range(3)
]
chosen = np.array([True, False, True, True])
where = "cuda" if torch.cuda.is_available() else "cpu"
for cuts in (None, [Cut(4, 2), Cut(4, 2)]):
    theirs = [tuple(part.to(where, copy=True) for part in layer) for layer in pool]
    host, device = Grid.of_pool([tuple(part.clone() for part in layer) for layer in pool]), DevicePool.of_pool(theirs)
    if cuts:
        host, device = host.cut(cuts), device.cut(cuts)
    ids, others = np.array([3, 8, 9, 1]), np.array([0, 2, 4, 5])
    assert host.digests(ids) == device.digests(ids)
    expected = torch.zeros(host.block_bytes * 4, dtype=torch.uint8)
    got = torch.zeros_like(expected, device=where)
    host.gather(ids, expected)
    device.gather(device.ready(ids), got)
    assert torch.equal(expected, got.cpu())
    for n in (4, 3):  # the second time by the kept kernel
        digests = device.scatter(device.ready(others)[:n], got, chosen[:n])()
        assert digests == host.scatter(others[:n], expected, chosen[:n])()
        assert host.digests(others) == device.digests(others)
    assert device.scatter(device.ready(others)[:0], got, chosen[:0])() == []
print("same")
"""


def test_equals_the_grid_in_host_memory() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", SAME],
        env=os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_digests_do_not_wait_for_the_engines_stream() -> None:
    pool = DevicePool.of_pool([(torch.arange(8 * 1024, device="cuda").view(8, 1024),)])
    source = torch.arange(2048, device="cuda").view(torch.uint8)
    everything, copies = np.ones(2, np.bool_), torch.cuda.Stream()

    def move() -> tuple[list[int], list[int]]:
        with torch.cuda.stream(copies):
            written = pool.scatter(pool.ready(np.array([3, 5])), source, everything)()
        return written, pool.digests([3, 5])

    move()  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2**31)  # about a second
    written, found = move()
    assert not torch.cuda.current_stream().query(), "the engine's stream was waited for"
    assert written == found
    torch.cuda.synchronize()


def test_runs_that_are_no_words_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="run of 12 bytes in a page of 12 is no multiple of 8"):
        DevicePool([torch.zeros((4, 12), dtype=torch.uint8)])
