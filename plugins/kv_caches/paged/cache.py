"""A pool of pages in which full, computed pages are found by the hash of everything up to their end.

The key of a page is sha256 over the key of the page before it and its own tokens; the salt stands before the first. So
equal keys mean equal prefixes, and finding a prefix is one look-up a page. There is no tree: a page may be reclaimed
while pages that follow it stay. They can't be matched then, and age out, unless the missing page is computed again. As
tails are released before heads this is rare.

Each page is in one of three states:

    free      on the stack `_free`; no key
    cached    in `_idle`, oldest first; has a key
    held      in the block tables of `_refs[page]` requests; has a key once committed, unless another page has it
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from engine.specs.kv_cache import KVCache, KVCacheStats, PrefixMatch


@dataclass(slots=True)
class Table:
    """What an open request owns."""

    root: bytes
    pages: list[int]
    keys: list[bytes]  # of its committed pages, the first ones


class PagedKVCache(KVCache):
    """See the module. Every method costs O(pages touched); each page of a request is hashed once."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = self.reuses = prefix_caching
        self._tables: dict[str, Table] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}  # key -> page
        self._lookups = self._hits = self._evicted = 0

    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """See `KVCache.match`."""
        _, pages = self._find(_root(salt), tokens)
        return PrefixMatch(pages, len(pages) * self.page_size)

    def open(self, request_id: str, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """See `KVCache.open`."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id!r} is open in the KV cache already; close it first")
        root = _root(salt)
        keys, pages = self._find(root, tokens)
        for page in pages:
            if not self._refs[page]:
                del self._idle[page]
            self._refs[page] += 1
        self._tables[request_id] = Table(root, pages, keys)
        found = PrefixMatch(list(pages), len(pages) * self.page_size)
        self._lookups += len(tokens)
        self._hits += found.num_tokens
        return found

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """See `KVCache.allocate`."""
        pages = self._table(request_id).pages
        missing = -(-num_tokens // self.page_size) - len(pages)
        if missing > self.available():
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._evict()
            self._refs[page] = 1
            pages.append(page)
        return True

    def block_table(self, request_id: str) -> list[int]:
        """See `KVCache.block_table`."""
        return self._table(request_id).pages

    def commit(self, request_id: str, tokens: Sequence[int], num_computed: int) -> None:
        """See `KVCache.commit`. A page whose key another page has already stays private to its request."""
        table = self._table(request_id)
        done, full = len(table.keys), num_computed // self.page_size
        if full <= done or not self.prefix_caching:
            return
        for key in self._chain(table.keys[-1] if done else table.root, tokens, done, full):
            page = table.pages[len(table.keys)]
            if self._index.setdefault(key, page) == page:
                self._keys[page] = key
            table.keys.append(key)

    def trim(self, request_id: str, num_tokens: int) -> None:
        """See `KVCache.trim`."""
        self._shorten(self._table(request_id), -(-num_tokens // self.page_size))

    def close(self, request_id: str) -> None:
        """See `KVCache.close`."""
        self._shorten(self._table(request_id), 0)
        del self._tables[request_id]

    def available(self) -> int:
        """See `KVCache.available`."""
        return len(self._free) + len(self._idle)

    def reset(self) -> int:
        """See `KVCache.reset`."""
        forgotten = len(self._idle)
        while self._idle:
            self._free.append(self._forget_oldest())
        return forgotten

    def stats(self) -> KVCacheStats:
        """See `KVCache.stats`."""
        return KVCacheStats(
            pages=self.num_pages,
            free=len(self._free),
            cached=len(self._idle),
            held=self.num_pages - self.available(),
            lookup_tokens=self._lookups,
            hit_tokens=self._hits,
            evicted_pages=self._evicted,
        )

    def check(self) -> None:
        """See `KVCache.check`."""
        uses = Counter(page for table in self._tables.values() for page in table.pages)
        assert self._refs == [uses[page] for page in range(self.num_pages)], (
            "reference counts and block tables disagree"
        )
        owned = Counter([*self._free, *self._idle, *uses])
        assert owned == Counter(range(self.num_pages)), "a page is lost, or in two states"
        keyed = {key: page for page, key in enumerate(self._keys) if key is not None}
        assert keyed == self._index, "keys of pages and the index disagree"
        assert all(self._keys[page] is None for page in self._free), "a free page has a key"
        assert all(self._keys[page] is not None for page in self._idle), "a cached page has no key"
        for name, table in self._tables.items():
            assert len(table.keys) <= len(table.pages), f"request {name!r} committed more pages than it has"

    def _find(self, root: bytes, tokens: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Keys and pages of the longest prefix that is there, leaving one token at least."""
        keys: list[bytes] = []
        pages: list[int] = []
        last = (len(tokens) - 1) // self.page_size if self.prefix_caching else 0
        for key in self._chain(root, tokens, 0, last):
            page = self._index.get(key)
            if page is None:
                break
            keys.append(key)
            pages.append(page)
        return keys, pages

    def _chain(self, key: bytes, tokens: Sequence[int], first: int, last: int) -> Iterator[bytes]:
        """Keys of the pages first, …, last - 1, where `key` is that of the page before."""
        size = self.page_size
        for page in range(first, last):
            key = sha256(key + array("q", tokens[page * size : (page + 1) * size]).tobytes()).digest()
            yield key

    def _shorten(self, table: Table, count: int) -> None:
        """Release the pages from `count` on, last first, so that tails are reclaimed before heads."""
        while len(table.pages) > count:
            page = table.pages.pop()
            self._refs[page] -= 1
            if not self._refs[page]:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None
        del table.keys[count:]

    def _evict(self) -> int:
        self._evicted += 1
        return self._forget_oldest()

    def _forget_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key = self._keys[page]
        assert key is not None, f"cached page {page} has no key"
        del self._index[key]
        self._keys[page] = None
        return page

    def _table(self, request_id: str) -> Table:
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} is not open in the KV cache") from None


def _root(salt: str) -> bytes:
    return sha256(salt.encode()).digest()


__all__ = ["PagedKVCache"]
