"""A pool of pages whose computed prefixes hang in a tree.

An open request stands in the tree at the end of what it has committed and locks the path to there. Where the tree has
a run already that the request computed too, the request keeps its own copy, private until it closes, and walks down the
tree's. So block tables never change, and what the request computes next hangs below a prefix that can be matched.

A page is free, in the tree, or private to one request: those above its commits, and its copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.plugins.kv_caches.radix.audit import audit
from engine.plugins.kv_caches.radix.evidence import Evidence
from engine.plugins.kv_caches.radix.run import TOKEN_BYTES, Run
from engine.plugins.kv_caches.radix.tree import Node, Tree
from engine.specs.kv_cache import KVCache, KVCacheStats, PrefixMatch

PROVEN_SHARE = 0.75
"""Share of the pool that prefixes which were asked for again may keep from others, once unused."""


@dataclass(slots=True)
class Table:
    """What an open request owns."""

    root: Node
    node: Node  # where it stands: `committed` pages below the root
    pages: list[int] = field(default_factory=list)
    committed: int = 0  # pages
    copies: set[int] = field(default_factory=set)  # committed pages that the tree has in another copy
    kept: bool = True  # what it commits is put into the tree


class RadixKVCache(KVCache):
    """See the module. Every method costs O(pages touched); each page of a request is compared once."""

    def __init__(self, num_pages: int, page_size: int, *, bypass: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._tree = Tree(page_size * TOKEN_BYTES, int(PROVEN_SHARE * num_pages))
        self._evidence = Evidence(may_bypass=bypass)
        self._tables: dict[str, Table] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._lookups = self._hits = self._evicted = 0

    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """See `KVCache.match`."""
        pages: list[int] = []
        if root := self._tree.trunk.children.get(salt.encode()):
            for node, agree in self._tree.walk(root, self._matchable(tokens)):
                pages += node.pages[:agree]
        return PrefixMatch(pages, len(pages) * self.page_size)

    def open(self, request_id: str, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """See `KVCache.open`."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id!r} is open in the KV cache already; close it first")
        root = self._tree.enter(salt.encode())
        table = self._tables[request_id] = Table(root, root)
        for node, agree in self._tree.walk(root, self._matchable(tokens)):
            table.node = self._tree.step(node, agree)
            table.pages += table.node.pages
        table.committed = len(table.pages)
        found = PrefixMatch(list(table.pages), table.committed * self.page_size)
        self._lookups += len(tokens)
        self._hits += found.num_tokens
        table.kept = self._evidence.opened(len(tokens), found.num_tokens, self._evicted)
        return found

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """See `KVCache.allocate`."""
        pages = self._table(request_id).pages
        missing = -(-num_tokens // self.page_size) - len(pages)
        if missing <= 0:
            return True
        if missing > self.available():
            return False
        if missing > len(self._free):
            short = missing - len(self._free)
            self._free += self._tree.reclaim(short)
            self._evicted += short
        pages += self._free[-missing:]
        del self._free[-missing:]
        return True

    def block_table(self, request_id: str) -> list[int]:
        """See `KVCache.block_table`."""
        return self._table(request_id).pages

    def commit(self, request_id: str, tokens: Sequence[int], num_computed: int) -> None:
        """See `KVCache.commit`. Pages that the tree has already stay private to the request."""
        table = self._table(request_id)
        done, full = table.committed, num_computed // self.page_size
        if full <= done or not table.kept:
            return
        run = Run(tokens, self.page_size, done, full)
        for node, agree in self._tree.walk(table.node, run):
            table.node = self._tree.step(node, agree)
            done += agree
        table.copies.update(table.pages[table.committed : done])
        if done < full:
            table.node = self._tree.grow(table.node, run.pages(done, full), table.pages[done:full])
        table.committed = full

    def trim(self, request_id: str, num_tokens: int) -> None:
        """See `KVCache.trim`."""
        self._shorten(self._table(request_id), -(-num_tokens // self.page_size))

    def close(self, request_id: str) -> None:
        """See `KVCache.close`."""
        table = self._table(request_id)
        self._shorten(table, 0)
        self._tree.leave(table.root)
        del self._tables[request_id]

    def available(self) -> int:
        """See `KVCache.available`."""
        return len(self._free) + self._tree.idle_pages

    def reset(self) -> int:
        """See `KVCache.reset`."""
        pages = self._tree.reclaim(self._tree.idle_pages)
        self._free += pages
        return len(pages)

    def stats(self) -> KVCacheStats:
        """See `KVCache.stats`. A prefix that a request holds a copy of counts as held too."""
        return KVCacheStats(
            pages=self.num_pages,
            free=len(self._free),
            cached=self._tree.idle_pages,
            held=self.num_pages - self.available(),
            lookup_tokens=self._lookups,
            hit_tokens=self._hits,
            evicted_pages=self._evicted,
            details={
                "proven_pages": self._tree.proven_pages,
                "returned_prefixes": self._tree.returns,
                "bypassing": int(self._evidence.bypassing),
                "bypassed_requests": self._evidence.bypassed,
            },
        )

    def check(self) -> None:
        """See `KVCache.check`."""
        tables = self._tables.values()
        in_tree = audit(self._tree, [(table.root, table.node, table.committed) for table in tables])
        private = [page for table in tables for page in [*table.pages[table.committed :], *table.copies]]
        owned = Counter([*self._free, *in_tree, *private])
        assert owned == Counter(range(self.num_pages)), "a page is lost, or owned twice"
        for name, table in self._tables.items():
            assert table.committed <= len(table.pages), f"request {name!r} committed more pages than it has"
            assert set(table.pages[: table.committed]) - in_tree == table.copies, f"copies of {name!r} are wrong"

    def _matchable(self, tokens: Sequence[int]) -> Run:
        """The whole pages of `tokens`, but for one token at least."""
        return Run(tokens, self.page_size, 0, max(0, len(tokens) - 1) // self.page_size)

    def _shorten(self, table: Table, count: int) -> None:
        """Give back the pages from `count` on, the first of them to be used again first; the tree keeps its own."""
        freed = table.pages[max(count, table.committed) :]
        if table.copies:
            copies = [page for page in table.pages[count : table.committed] if page in table.copies]
            table.copies.difference_update(copies)
            freed = copies + freed
        self._free += reversed(freed)
        del table.pages[count:]
        if table.committed > count:
            table.node = self._tree.rise(table.node, table.committed, count)
            table.committed = count

    def _table(self, request_id: str) -> Table:
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} is not open in the KV cache") from None


__all__ = ["PROVEN_SHARE", "RadixKVCache"]
