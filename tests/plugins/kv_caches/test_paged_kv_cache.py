"""The paged KV cache through the shared suite, and what is its own."""

from __future__ import annotations

from engine.plugins.kv_caches import paged
from engine.testing.kv_cache import KVCacheConformance, fill


class TestPaged(KVCacheConformance):
    (offer,) = paged.kv_caches()
    module = "engine.plugins.kv_caches.paged"

    def test_a_hole_in_the_middle_hides_what_follows_until_it_is_filled(self) -> None:
        cache = self.cache(num_pages=6)
        for name in "ab":  # b keeps its own copy of the first page
            cache.open(name, [1] * 8)
            assert cache.allocate(name, 8)
        cache.commit("a", [1] * 8, 4)
        cache.commit("b", [1] * 8, 8)
        cache.close("a")
        cache.open("c", [2] * 16)
        assert cache.allocate("c", 16)  # evicts a's page
        assert cache.match([1] * 9).num_tokens == 0
        cache.close("c")
        fill(cache, "d", [1] * 5)
        assert cache.match([1] * 9).pages == [cache.block_table("d")[0], cache.block_table("b")[1]]
        cache.check()


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = paged.build(paged.PagedOptions(prefix_caching=False), num_pages=8, page_size=4)
    fill(cache, "a", [1] * 12)
    assert cache.match([1] * 13).pages == []
    assert cache.open("b", [1] * 13).pages == []
    assert (cache.stats().lookup_tokens, cache.stats().hit_tokens) == (25, 0)
    cache.check()
    cache.close("a")
    assert cache.stats().free == cache.available() == 8
