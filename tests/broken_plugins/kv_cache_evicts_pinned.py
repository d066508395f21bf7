"""Takes pages of open requests when nothing else is left."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_pinned_pages_are_never_evicted"


class Cache(PagedKVCache):
    def allocate(self, request_id, num_tokens):
        missing = -(-num_tokens // self.page_size) - len(self.block_table(request_id))
        while missing > self.available() and len(self._tables) > 1:
            victim = next(name for name in self._tables if name != request_id)
            self._shorten(self._tables[victim], 0)
        return super().allocate(request_id, num_tokens)


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
