"""Conformance of KV caches: cases with names, and random traffic against a brute-force model (`kv_cache_machine`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.capabilities import Flag, Needs
from engine.specs.kv_cache import KVCache, PrefixMatch
from engine.testing.claims import proves
from engine.testing.kv_cache_machine import KVCacheMachine
from engine.testing.offer import OfferConformance

PAGE = 4
NOTHING = PrefixMatch([], 0)


class KVCacheConformance(OfferConformance):
    """Subclasses set `offer` and `module`.

    What a cache must keep beyond the contract's words: it evicts no more pages than an allocation is short of, and a
    match is the longest run of pages, from the first on, that were committed and not evicted since. `prefix_closed`
    says that eviction takes ends first, so that whatever is cached can be matched.
    """

    prefix_closed: bool = False
    examples: int = 60  # runs of random traffic

    def cache(self, num_pages: int = 16, page_size: int = PAGE) -> KVCache:
        """An empty cache."""
        cache = self.offer.build(self.options(), num_pages=num_pages, page_size=page_size)
        assert isinstance(cache, KVCache)
        return cache

    def reusing(self, num_pages: int = 16, page_size: int = PAGE) -> KVCache:
        """An empty cache that keeps prefixes; skips the test when the offer doesn't claim to."""
        self.require(Needs(flags=frozenset({Flag.PREFIX_REUSE})))
        return self.cache(num_pages, page_size)

    def test_starts_empty(self) -> None:
        """Every page is free and nothing matches."""
        cache = self.cache()
        assert cache.available() == cache.stats().free == cache.stats().pages == 16
        assert cache.match([1] * 40) == NOTHING
        cache.check()

    @pytest.mark.parametrize("length", [0, 1, PAGE, PAGE + 1])
    def test_short_sequences_match_nothing_at_first(self, length: int) -> None:
        """Even an empty one is no error."""
        cache = self.cache()
        assert cache.match([1] * length) == NOTHING
        assert cache.open("a", [1] * length) == NOTHING
        cache.close("a")
        cache.check()

    def test_a_closed_request_leaves_nothing(self) -> None:
        """Whatever was allocated, committed or half full is free or cached afterwards."""
        cache = self.cache()
        for name, allocated, committed in [("a", 6, 4), ("b", 9, 0), ("c", 8, 8), ("d", 1, 1)]:
            cache.open(name, [3] * 9)
            assert cache.allocate(name, allocated)
            cache.commit(name, [3] * 9, committed)
            cache.close(name)
            cache.check()
            stats = cache.stats()
            assert (stats.held, stats.free + stats.cached, cache.available()) == (0, 16, 16)

    def test_allocation_grows_by_whole_pages(self) -> None:
        """The block table only grows, and only when the tokens don't fit."""
        cache = self.cache()
        cache.open("a", [1] * 9)
        tables = []
        for tokens, pages in [(1, 1), (4, 1), (5, 2), (3, 2), (9, 3)]:
            assert cache.allocate("a", tokens)
            assert len(cache.block_table("a")) == pages
            tables.append(list(cache.block_table("a")))
        assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(tables))
        assert len(set(tables[-1])) == 3

    def test_allocation_that_does_not_fit_changes_nothing(self) -> None:
        """Neither the table, nor the statistics, nor what is cached."""
        cache = self.cache(num_pages=4)
        fill(cache, "old", [7] * 9)
        cache.close("old")
        cache.open("a", [1] * 4)
        assert cache.allocate("a", 4)
        before = cache.stats(), list(cache.block_table("a")), cache.match([7] * 9)
        assert not cache.allocate("a", 17)
        assert (cache.stats(), cache.block_table("a"), cache.match([7] * 9)) == before
        assert cache.allocate("a", 16)
        cache.check()

    @proves("flags:prefix_reuse")
    def test_pages_match_only_after_commit(self) -> None:
        """Allocated or even open with the same tokens is not enough; a page in part is not either."""
        cache = self.reusing()
        tokens = [1] * 12
        cache.open("a", tokens)
        assert cache.allocate("a", 12)
        assert cache.match(tokens) == NOTHING
        for computed, matched in [(3, 0), (4, 4), (7, 4), (11, 8)]:
            cache.commit("a", tokens, computed)
            assert cache.match([*tokens, 1]).num_tokens == matched
        assert cache.match([*tokens, 1]).pages == cache.block_table("a")[:2]

    @proves("flags:prefix_reuse")
    def test_a_match_leaves_a_token_to_compute(self) -> None:
        """A sequence that is cached as a whole matches one page less."""
        cache = self.reusing()
        fill(cache, "a", [1] * 8)
        assert [cache.match([1] * n).num_tokens for n in (4, 5, 8, 9, 10, 12)] == [0, 4, 4, 8, 8, 8]

    @proves("flags:prefix_reuse")
    def test_a_second_request_shares_the_pages(self) -> None:
        """They head its table, are not counted twice, and outlive the first request."""
        cache = self.reusing()
        fill(cache, "a", [1] * 8)
        found = cache.open("b", [1] * 8 + [2])
        assert found.pages == cache.block_table("a") == cache.block_table("b")
        assert cache.stats().held == 2
        cache.close("a")
        assert cache.stats().held == 2
        assert (cache.stats().lookup_tokens, cache.stats().hit_tokens) == (17, 8)
        cache.close("b")
        assert (cache.stats().held, cache.stats().cached) == (0, 2)
        cache.check()

    @proves("flags:prefix_reuse")
    def test_branches_share_their_trunk(self) -> None:
        """Sequences that part ways in the middle of what was computed in one go."""
        cache = self.reusing()
        trunk = [1] * 8
        fill(cache, "a", trunk + [2] * 8)
        fill(cache, "b", trunk + [3] * 8)
        assert cache.block_table("a")[:2] == cache.block_table("b")[:2]
        assert cache.match(trunk + [3] * 6).pages == cache.block_table("b")[:3]
        assert cache.match(trunk + [2] * 9).pages == cache.block_table("a")
        assert cache.match([*trunk, 4]).pages == cache.block_table("a")[:2]
        cache.check()

    @proves("flags:prefix_reuse")
    def test_equal_pages_after_other_prefixes_are_apart(self) -> None:
        """A page's KV depends on everything before it, so its own tokens are not enough."""
        cache = self.reusing()
        fill(cache, "a", [1] * 4 + [9] * 4)
        fill(cache, "b", [2] * 4 + [8] * 4)
        assert cache.match([2] * 4 + [9] * 5) == ([cache.block_table("b")[0]], 4)
        assert cache.match([9] * 5) == NOTHING
        cache.check()

    @proves("flags:prefix_reuse")
    def test_salts_are_apart(self) -> None:
        """The same tokens under another salt are another prefix."""
        cache = self.reusing()
        fill(cache, "a", [1] * 8, salt="red")
        assert cache.match([1] * 9) == cache.match([1] * 9, "blue") == NOTHING
        assert cache.match([1] * 9, "red").num_tokens == 8
        fill(cache, "b", [1] * 8, salt="blue")
        assert not set(cache.block_table("a")) & set(cache.block_table("b"))
        cache.check()

    @proves("flags:prefix_reuse")
    def test_equal_work_at_once_stays_private(self) -> None:
        """Two requests compute the same; neither table changes, and what one goes on to compute can be matched."""
        cache = self.reusing()
        tokens = [1] * 8
        for name in "ab":
            cache.open(name, tokens)
            assert cache.allocate(name, 8)
        tables = {name: list(cache.block_table(name)) for name in "ab"}
        assert not set(tables["a"]) & set(tables["b"])
        cache.commit("a", tokens, 8)
        cache.commit("b", tokens, 8)
        assert {name: cache.block_table(name) for name in "ab"} == tables
        assert cache.match([*tokens, 1]).pages == tables["a"]
        assert cache.allocate("b", 12)
        cache.commit("b", [*tokens, 5, 5, 5, 5], 12)
        assert cache.match([*tokens, 5, 5, 5, 5, 5]).pages == [*tables["a"], cache.block_table("b")[2]]
        cache.close("a")
        cache.close("b")
        cache.check()
        assert (cache.stats().cached, cache.stats().free) == (3, 13)

    @proves("flags:prefix_reuse")
    def test_pinned_pages_are_never_evicted(self) -> None:
        """Neither those an open request computed nor those it matched."""
        cache = self.reusing(num_pages=8)
        fill(cache, "old", [1] * 8)
        cache.close("old")
        shared = list(cache.open("a", [1] * 9).pages)
        cache.open("b", [2] * 40)
        assert cache.available() == 6
        assert not cache.allocate("b", 28)
        assert cache.allocate("b", 24)
        assert not set(shared) & set(cache.block_table("b"))
        assert cache.match([1] * 9).pages == shared
        cache.check()

    @proves("flags:prefix_reuse")
    def test_the_least_recently_used_goes_first(self) -> None:
        """A look with `match` alone is no use; opening is."""
        cache = self.reusing(num_pages=6)
        for name in (1, 2, 3):
            fill(cache, str(name), [name] * 8)
            cache.close(str(name))
        cache.open("again", [1] * 9)
        cache.close("again")
        cache.match([2] * 9)
        cache.open("new", [4] * 8)
        assert cache.allocate("new", 8)
        assert [cache.match([n] * 9).num_tokens for n in (1, 2, 3)] == [8, 0, 8]
        assert cache.stats().evicted_pages == 2

    @proves("flags:prefix_reuse")
    def test_tails_go_before_heads(self) -> None:
        """Of one request's pages the first stay longest; no more are evicted than needed."""
        cache = self.reusing(num_pages=4)
        fill(cache, "a", [1] * 16)
        cache.close("a")
        cache.open("b", [2] * 8)
        assert cache.allocate("b", 4)
        assert cache.match([1] * 17).num_tokens == 12
        assert cache.allocate("b", 8)
        assert cache.match([1] * 17).num_tokens == 8
        cache.check()

    @proves("flags:prefix_reuse")
    def test_free_pages_are_taken_before_cached_ones(self) -> None:
        """Nothing is evicted while a page is free."""
        cache = self.reusing(num_pages=4)
        fill(cache, "a", [1] * 8)
        cache.close("a")
        cache.open("b", [2] * 8)
        assert cache.allocate("b", 8)
        assert cache.match([1] * 9).num_tokens == 8
        assert cache.stats().evicted_pages == 0

    def test_trim_gives_back_the_end(self) -> None:
        """What is not committed becomes free; a page in part is kept."""
        cache = self.cache()
        cache.open("a", [1] * 20)
        assert cache.allocate("a", 20)
        head = list(cache.block_table("a"))[:2]
        cache.trim("a", 5)
        assert cache.block_table("a") == head
        assert cache.available() == 14
        cache.trim("a", 5)
        assert cache.block_table("a") == head
        cache.check()

    @proves("flags:prefix_reuse")
    def test_trim_before_the_commit(self) -> None:
        """Tokens that a request was opened with, but that were given up, leave no trace."""
        cache = self.reusing()
        cache.open("a", [1] * 9)
        assert cache.allocate("a", 8)
        cache.trim("a", 2)
        assert cache.allocate("a", 8)
        cache.commit("a", [1, 1, *[2] * 6], 8)
        assert cache.match([1] * 9) == NOTHING
        assert cache.match([1, 1, *[2] * 7]).pages == cache.block_table("a")
        cache.check()

    @proves("flags:prefix_reuse")
    def test_trim_into_committed_pages(self) -> None:
        """They stay matchable, and the request may go another way from there."""
        cache = self.reusing()
        fill(cache, "a", [1] * 16)
        old = list(cache.block_table("a"))
        cache.trim("a", 8)
        cache.check()
        assert cache.match([1] * 17).pages == old
        assert cache.allocate("a", 16)
        cache.commit("a", [1] * 8 + [2] * 8, 16)
        assert cache.match([1] * 8 + [2] * 9).pages == cache.block_table("a")
        assert cache.match([1] * 17).pages == old
        cache.check()

    @proves("flags:prefix_reuse")
    def test_reset_forgets_what_nobody_uses(self) -> None:
        """And nothing else."""
        cache = self.reusing()
        fill(cache, "a", [1] * 8)
        fill(cache, "b", [2] * 8)
        cache.close("b")
        assert cache.reset() == 2
        assert [cache.match([n] * 9).num_tokens for n in (1, 2)] == [8, 0]
        assert cache.stats().evicted_pages == 0
        cache.check()
        cache.close("a")
        assert cache.reset() == 2
        assert cache.stats().free == 16

    def test_opening_twice_is_refused(self) -> None:
        """And harms nothing."""
        cache = self.cache()
        cache.open("a", [1])
        with pytest.raises(ValueError, match="'a'"):
            cache.open("a", [1])
        cache.close("a")
        cache.check()

    def test_unknown_requests_are_refused(self) -> None:
        """The error names the request."""
        cache = self.cache()
        for call in (cache.close, cache.block_table):
            with pytest.raises(KeyError, match="ghost"):
                call("ghost")
        with pytest.raises(KeyError, match="ghost"):
            cache.allocate("ghost", 1)

    @proves("flags:prefix_reuse")
    def test_commit_reads_each_token_once(self) -> None:
        """Though it is called after every step: a request of n tokens must not cost n²."""
        cache = self.reusing(num_pages=200)
        tokens = Counting([n % 50 for n in range(600)])
        cache.open("a", tokens)
        assert cache.allocate("a", 600)
        for computed in range(1, 601):
            cache.commit("a", tokens, computed)
        assert tokens.read <= 2 * 600
        assert cache.match([*tokens, 0]).num_tokens == 600

    @proves("contract", "flags:prefix_reuse")
    @pytest.mark.parametrize("page_size", [1, 2, 3])
    def test_random_traffic(self, page_size: int) -> None:
        """Every state the contract allows, against the model; a cache that reuses nothing may match nothing."""
        reuses = Flag.PREFIX_REUSE in self.offer.capabilities.flags
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: KVCacheMachine(self.cache(10, page_size), page_size, self.prefix_closed, reuses),  # type: ignore[arg-type]
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=50,
                deadline=None,
                database=None,
                phases=(Phase.generate,),  # shrinking 50 steps can take minutes, and the verdict stands without it
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


class Counting(Sequence[int]):
    """Tokens that count how many of them were read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.read = 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.tokens[index]
        self.read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self.tokens)
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


def fill(cache: KVCache, name: str, tokens: list[int], salt: str = "") -> None:
    """Open a request and compute all of it."""
    cache.open(name, tokens, salt)
    assert cache.allocate(name, len(tokens))
    cache.commit(name, tokens, len(tokens))


__all__ = ["KVCacheConformance"]
