"""The radix KV cache through the shared suite, and what is its own."""

from __future__ import annotations

from engine.plugins.kv_caches import radix
from engine.testing.kv_cache import KVCacheConformance, fill


class TestRadix(KVCacheConformance):
    (offer,) = radix.kv_caches()
    module = "engine.plugins.kv_caches.radix"
    prefix_closed = True

    def test_a_prefix_below_which_a_request_works_is_held_by_it(self) -> None:
        cache = self.cache(num_pages=6)
        for name in "ab":
            cache.open(name, [1] * 8)
            assert cache.allocate(name, 8)
        cache.commit("a", [1] * 8, 8)
        cache.commit("b", [1] * 8, 8)
        first = list(cache.block_table("a"))
        cache.close("a")
        cache.open("c", [2] * 16)
        assert cache.available() == 2
        assert cache.allocate("c", 8)
        assert cache.match([1] * 9).pages == first
        cache.close("b")
        assert cache.allocate("c", 16)
        cache.check()

    def test_salts_leave_nothing_behind(self) -> None:
        cache = self.cache(num_pages=4)
        for n in range(50):
            fill(cache, "a", [1] * 9, salt=f"tenant {n}")
            cache.close("a")
        cache.reset()
        cache.check()
        assert not cache._tree.trunk.children

    def test_growth_by_one_page_at_a_time_stays_one_node(self) -> None:
        cache = self.cache()
        tokens = list(range(40))
        cache.open("a", tokens)
        assert cache.allocate("a", 40)
        for computed in range(1, 41):
            cache.commit("a", tokens, computed)
        (root,) = cache._tree.trunk.children.values()
        (node,) = root.children.values()
        assert node.pages == cache.block_table("a")
        assert not node.children
