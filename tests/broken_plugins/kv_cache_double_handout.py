"""Hands out the page on top of the stack and leaves it there when it is the only one asked for."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_allocation_grows_by_whole_pages"


class Cache(PagedKVCache):
    def allocate(self, request_id, num_tokens):
        before = len(self.block_table(request_id))
        done = super().allocate(request_id, num_tokens)
        table = self.block_table(request_id)
        if done and len(table) == before + 1 > 1:
            table[-1] = table[0]
        return done


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
