"""Extension point: KV caches, the bookkeeping of pages and of which prefixes they hold.

A cache knows page ids and token ids, never a tensor. It is called by the scheduler only, on the scheduler's thread, a
few times per request and step, so every method must cost O(pages touched).

Threads: all methods run on the scheduler's thread, one at a time.

Errors: only those that a method documents; the scheduler makes no call that could raise them. Any other exception is a
bug in the cache and ends the engine core.

`build(options, *, num_pages: int, page_size: int) -> KVCache`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine.hooks import hookspec
from engine.plugin import Offer

API: Final = 1
HOOK: Final = "kv_caches"


class PrefixMatch(NamedTuple):
    """The longest reusable prefix of a token sequence."""

    pages: list[int]
    num_tokens: int  # a multiple of the page size, and below the length of the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheStats:
    """Counters since the start, and the pages as they are now. free + cached + held is the size of the pool."""

    pages: int
    free: int  # hold nothing
    cached: int  # hold a matchable prefix that no request uses; reclaimed when needed
    held: int  # used by at least one request
    lookup_tokens: int
    hit_tokens: int
    evicted_pages: int
    details: Mapping[str, int] = field(default_factory=dict)  # what else the cache counts, by name


class KVCache(ABC):
    """Pages of one pool. Each open request owns an append-only block table.

    Life of a request: `open` (pins the matched prefix) -> `allocate` before each step -> `commit` after each step ->
    `close`. A page becomes matchable only through `commit`, that is after the forward pass that filled it ran, and only
    when it is full. The block table of an open request never changes but by growth in `allocate` and by `trim`.
    """

    reuses: bool = True
    """Whether `match` may ever find something. If so, a request waits while another computes what it begins with."""

    @abstractmethod
    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """The longest reusable prefix, without pinning it and without counting it in the statistics.

        At most `len(tokens) - 1` tokens match, so that one is left to compute. Prefixes under another salt never match.
        """

    @abstractmethod
    def open(self, request_id: str, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """Begin a request: match as above and pin the pages, which become the head of its block table.

        Raises:
            ValueError: the request is open already.
        """

    @abstractmethod
    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Grow the block table to hold `num_tokens` tokens, evicting unpinned prefixes if need be.

        Returns False, with nothing changed, when free and evictable pages don't suffice.
        """

    @abstractmethod
    def block_table(self, request_id: str) -> list[int]:
        """The request's page ids in order: the live list, to be read only."""

    @abstractmethod
    def commit(self, request_id: str, tokens: Sequence[int], num_computed: int) -> None:
        """Tell that the KV of `tokens[:num_computed]` is in the request's pages: its full pages may now be matched."""

    @abstractmethod
    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the pages at the end of the block table that `num_tokens` tokens don't need."""

    @abstractmethod
    def close(self, request_id: str) -> None:
        """End a request: unpin its pages. Committed ones stay matchable, the others are free. Unknown ids are an error.

        A cache may stop to keep what is committed while pages are short and nothing that it kept was found for long.

        Raises:
            KeyError: no such request is open.
        """

    @abstractmethod
    def available(self) -> int:
        """Pages that `allocate` could hand out now: free and evictable."""

    @abstractmethod
    def reset(self) -> int:
        """Forget every prefix that no open request uses; returns the number of pages freed."""

    @abstractmethod
    def stats(self) -> KVCacheStats:
        """Counters; O(1)."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant of the bookkeeping (each page owned exactly once, counts agree). O(pages); for tests.

        Raises:
            AssertionError: with the invariant that is broken.
        """


BUILDS: Final = KVCache


@hookspec
def kv_caches() -> Iterable[Offer[KVCache]]:  # type: ignore[empty-body]
    """Offer KV caches. Must not import torch."""


__all__ = ["API", "HOOK", "KVCache", "KVCacheStats", "PrefixMatch", "kv_caches"]
