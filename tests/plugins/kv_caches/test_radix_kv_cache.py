"""The radix KV cache through the shared suite, and what is its own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plugins.kv_caches import radix
from engine.plugins.kv_caches.radix.cache import PROVEN_SHARE, RadixKVCache
from engine.plugins.kv_caches.radix.evidence import PROBES, WINDOW
from engine.specs.kv_cache import KVCache
from engine.testing.kv_cache import PAGE, Counting, KVCacheConformance, fill


def serve(cache: KVCache, tokens: list[int]) -> None:
    """A whole request."""
    fill(cache, "served", tokens)
    cache.close("served")


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

    def test_what_was_asked_for_again_outlasts_what_passes_by(self) -> None:
        cache = self.cache(num_pages=16)
        serve(cache, [1] * 17)
        serve(cache, [1] * 17)  # second sight
        for n in range(2, 20):
            serve(cache, [n] * 32)
            assert cache.match([1] * 17).num_tokens == 16
        cache.check()

    def test_what_is_used_no_more_gives_way_to_what_is(self) -> None:
        cache = self.cache(num_pages=17)
        for n in range(4):
            serve(cache, [n] * 17)
            serve(cache, [n] * 17)
        assert cache.stats().details["proven_pages"] <= PROVEN_SHARE * 17
        assert [cache.match([n] * 17).num_tokens for n in range(4)] == [16] * 4
        for n in range(4, 8):
            serve(cache, [n] * 17)
            serve(cache, [n] * 17)
        assert [cache.match([n] * 17).num_tokens for n in range(5, 8)] == [16] * 3
        cache.check()

    def test_a_continuation_has_to_prove_itself(self) -> None:
        cache = self.cache(num_pages=16)
        serve(cache, [1] * 9)
        serve(cache, [1] * 9 + [2] * 24)
        assert cache.stats().details["proven_pages"] == 2
        serve(cache, [3] * 48)
        assert cache.match([1] * 9 + [2] * 24).num_tokens == 16
        cache.check()

    def test_a_prefix_that_returns_after_it_was_reclaimed_is_proven(self) -> None:
        cache = self.cache(num_pages=8)
        serve(cache, [1] * 9)
        serve(cache, [2] * 32)
        assert cache.match([1] * 9).num_tokens == 0
        serve(cache, [1] * 9)
        assert (cache.stats().details["returned_prefixes"], cache.stats().details["proven_pages"]) == (1, 2)
        serve(cache, [3] * 24)
        serve(cache, [4] * 24)
        assert cache.match([1] * 9).num_tokens == 8
        cache.check()

    @pytest.mark.parametrize("length", [17, 16_001])
    def test_a_miss_reads_little_of_a_long_prompt(self, length: int) -> None:
        cache = self.cache(num_pages=8192)
        serve(cache, [1] * 8 + [2] * length)
        for prompt in ([3] * length, [1] * 8 + [3] * length):
            tokens = Counting(prompt)
            cache.match(tokens)
            cache.open("a", tokens)
            assert tokens.read <= 2 * 4 * PAGE
            cache.close("a")

    def test_a_return_to_what_a_request_gave_up_proves_nothing(self) -> None:
        cache = self.cache()
        fill(cache, "a", [1] * 16)
        cache.trim("a", 8)
        assert cache.allocate("a", 16)
        cache.commit("a", [1] * 16, 16)
        cache.check()
        cache.close("a")
        assert cache.stats().details["proven_pages"] == 0
        cache.check()


class Stream:
    """Prompts that share nothing, or that all begin alike, one after the other."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.count = cache, 0

    def serve(self, requests: int, shared: int = 0) -> None:
        for _ in range(requests):
            self.count += 1
            serve(self.cache, [1] * shared + [self.count + 10] * (41 - shared))
        self.cache.check()

    @property
    def details(self) -> Mapping[str, int]:
        return self.cache.stats().details


def test_prompts_that_share_nothing_bypass_the_tree_until_they_share_again() -> None:
    stream = Stream(radix.build(radix.RadixOptions(), num_pages=100, page_size=PAGE))
    stream.serve(2 * WINDOW)
    assert stream.details["bypassing"]
    evicted = stream.cache.stats().evicted_pages
    stream.serve(10 * WINDOW)
    assert stream.details["bypassing"]
    assert stream.cache.stats().evicted_pages - evicted <= 10 * 10 * WINDOW / PROBES
    stream.serve(2 * WINDOW, shared=20)
    assert not stream.details["bypassing"]
    bypassed = stream.details["bypassed_requests"]
    hits = stream.cache.stats().hit_tokens
    stream.serve(WINDOW, shared=20)
    assert stream.details["bypassed_requests"] == bypassed
    assert stream.cache.stats().hit_tokens - hits == 20 * WINDOW


def test_no_bypass_while_pages_suffice_or_when_it_is_turned_off() -> None:
    wide = Stream(radix.build(radix.RadixOptions(), num_pages=100_000, page_size=PAGE))
    off = Stream(radix.build(radix.RadixOptions(bypass=False), num_pages=100, page_size=PAGE))
    for stream in (wide, off):
        stream.serve(3 * WINDOW)
        assert not stream.details["bypassing"]
        assert not stream.details["bypassed_requests"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 40)), max_size=120))
def test_books_agree_whatever_is_kept(requests: list[tuple[int, int, int]]) -> None:
    """As the random traffic of the suite, but with a bypass that comes and goes: pages in use are never given away."""
    cache = radix.build(radix.RadixOptions(), num_pages=40, page_size=PAGE)
    assert isinstance(cache, RadixKVCache)
    open_requests: list[str] = []
    for n, (head, way, length) in enumerate(requests):
        cache._evidence.bypassing = n % 50 > 10
        tokens = [head] * 12 + [way] * length
        cache.open(str(n), tokens)
        held = {page for name in open_requests for page in cache.block_table(name)}
        matched = set(cache.block_table(str(n)))
        if cache.allocate(str(n), len(tokens)):
            assert not (set(cache.block_table(str(n))) - matched) & held
            cache.commit(str(n), tokens, len(tokens))
        open_requests.append(str(n))
        if len(open_requests) == 3:
            cache.close(open_requests.pop(n % 3))
        cache.check()
    for name in open_requests:
        cache.close(name)
    cache.check()
    assert cache.available() == 40
