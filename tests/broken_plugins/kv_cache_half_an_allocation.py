"""Keeps what it got when there is not enough."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_allocation_that_does_not_fit_changes_nothing"


class Cache(PagedKVCache):
    def allocate(self, request_id, num_tokens):
        if super().allocate(request_id, num_tokens):
            return True
        held = len(self.block_table(request_id))
        super().allocate(request_id, (held + self.available()) * self.page_size)
        return False


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
