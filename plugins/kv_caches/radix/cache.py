"""A pool of pages whose computed prefixes hang in a tree.

An open request stands in the tree at the end of what it has committed and locks the path to there. Where the tree has
a run already that the request computed too, the request keeps its own copy, private until it closes, and walks down the
tree's. So block tables never change, and what the request computes next hangs below a prefix that can be matched.

A page is free, in the tree (`_in_tree`), or private to one request.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.plugins.kv_caches.radix.audit import audit
from engine.plugins.kv_caches.radix.tree import Node, Tree
from engine.specs.kv_cache import KVCache, KVCacheStats, PrefixMatch

TOKEN_BYTES = 8


@dataclass(slots=True)
class Table:
    """What an open request owns."""

    root: Node
    node: Node  # where it stands: `committed` pages below the root
    pages: list[int] = field(default_factory=list)
    committed: int = 0  # pages


class RadixKVCache(KVCache):
    """See the module. Every method costs O(pages touched); each page of a request is compared once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._tree = Tree(page_size * TOKEN_BYTES)
        self._tables: dict[str, Table] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._in_tree = bytearray(num_pages)
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
        return found

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """See `KVCache.allocate`."""
        pages = self._table(request_id).pages
        missing = -(-num_tokens // self.page_size) - len(pages)
        if missing > self.available():
            return False
        if missing > len(self._free):
            self._evicted += self._reclaim(missing - len(self._free))
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def block_table(self, request_id: str) -> list[int]:
        """See `KVCache.block_table`."""
        return self._table(request_id).pages

    def commit(self, request_id: str, tokens: Sequence[int], num_computed: int) -> None:
        """See `KVCache.commit`. Pages that the tree has already stay private to the request."""
        table = self._table(request_id)
        done, full = table.committed, num_computed // self.page_size
        if full <= done:
            return
        run = self._pack(tokens[done * self.page_size : full * self.page_size])
        for node, agree in self._tree.walk(table.node, run):
            table.node = self._tree.step(node, agree)
            done += agree
        if done < full:
            fresh = table.pages[done:full]
            table.node = self._tree.grow(table.node, run[(done - table.committed) * self._tree.stride :], fresh)
            for page in fresh:
                self._in_tree[page] = True
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
        return self._reclaim(self._tree.idle_pages)

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
        )

    def check(self) -> None:
        """See `KVCache.check`."""
        in_tree = audit(self._tree, [(table.root, table.node, table.committed) for table in self._tables.values()])
        assert self._in_tree == bytearray(page in in_tree for page in range(self.num_pages)), (
            "tree and its marks disagree"
        )
        private = [page for table in self._tables.values() for page in table.pages if page not in in_tree]
        owned = Counter([*self._free, *in_tree, *private])
        assert owned == Counter(range(self.num_pages)), "a page is lost, or owned twice"
        for name, table in self._tables.items():
            assert table.committed <= len(table.pages), f"request {name!r} committed more pages than it has"

    def _matchable(self, tokens: Sequence[int]) -> bytes:
        """The whole pages of `tokens`, but for one token at least."""
        return self._pack(tokens[: max(0, len(tokens) - 1) // self.page_size * self.page_size])

    def _pack(self, tokens: Sequence[int]) -> bytes:
        return array("q", tokens).tobytes()

    def _shorten(self, table: Table, count: int) -> None:
        """Give back the pages from `count` on; the tree keeps its own."""
        self._free += [page for page in reversed(table.pages[count:]) if not self._in_tree[page]]
        del table.pages[count:]
        if table.committed > count:
            table.node = self._tree.rise(table.node, table.committed, count)
            table.committed = count

    def _reclaim(self, count: int) -> int:
        pages = self._tree.reclaim(count)
        for page in pages:
            self._in_tree[page] = False
        self._free += pages
        return len(pages)

    def _table(self, request_id: str) -> Table:
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} is not open in the KV cache") from None


__all__ = ["RadixKVCache"]
