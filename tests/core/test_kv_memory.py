"""The size of the KV pool, and how its bytes are cut."""

from __future__ import annotations

import pytest
import torch

from engine.config.model import KVCacheSection
from engine.device import DeviceProfile
from engine.errors import ResourceError
from engine.kv_memory import count_pages, cut_pool, part_bytes, pool_bytes
from engine.specs.attention import KVLayout

LAYOUT = KVLayout(parts=(("k", (3, 16, 8)), ("v", (3, 16, 8))), dtype="bfloat16")
LAYERS = 4
PAGE = LAYERS * 2 * 3 * 16 * 8 * 2  # bytes


def device(memory: int, kind: str = "cpu") -> DeviceProfile:
    return DeviceProfile(kind=kind, name="a machine", memory_bytes=memory, cores=2)


def pages(free: int, running: int = 4, context: int = 64, kind: str = "cpu", **section: int) -> int:
    chosen = KVCacheSection(**section)  # type: ignore[arg-type]
    most = {"max_running": running, "max_context": context}
    return count_pages(chosen, LAYOUT, LAYERS, device(free, kind), page_size=16, **most)


def test_the_default_is_what_the_running_requests_can_need() -> None:
    assert pages(2**30) == 4 * 64 // 16
    assert pages(2**30, context=65) == 4 * 5


def test_the_default_takes_at_most_a_quarter_of_the_memory() -> None:
    assert pages(400 * PAGE, running=1000) == 100


def test_a_cpu_pool_takes_at_most_two_gibibytes_unless_told() -> None:
    assert pages(2**40, running=4000, context=10**6) == 2 * 2**30 // PAGE
    assert pages(2**40, running=4000, context=10**6, kind="cuda") > 2 * 2**30 // PAGE
    assert pages(2**40, memory=8 * 2**30) == 8 * 2**30 // PAGE
    assert pages(2**30, pages=7, memory=10 * PAGE) == 7


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match=r"100 pages takes 1 MiB, but a machine has 0 MiB free.*lower kv_cache"):
        pages(50 * PAGE, pages=100)
    with pytest.raises(ResourceError, match=r"raise kv_cache\.memory"):
        pages(2**30, memory=PAGE - 1)


def test_parts_are_apart_and_fill_the_pool() -> None:
    count = 5
    pool = cut_pool(LAYOUT, LAYERS, count, torch.device("cpu"))
    tensors = [part for layer in pool for part in layer]
    assert [t.shape for t in tensors] == [(count, 3, 16, 8)] * (2 * LAYERS)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((t == number).all() for number, t in enumerate(tensors))


def test_memory_may_come_from_outside() -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    odd = KVLayout(parts=(("latent", (1, 1, 3)),), dtype="float32")
    pool = cut_pool(odd, 2, 3, torch.device("cpu"), allocate)
    assert asked == [pool_bytes(odd, 2, 3)] == [2 * sum(part_bytes(odd, 3))]
    assert pool[1][0].data_ptr() - pool[0][0].data_ptr() == 64  # 36 bytes, padded to a cache line
