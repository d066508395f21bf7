"""Loses a request's last page when it is closed before it was full."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_a_closed_request_leaves_nothing"


class Cache(PagedKVCache):
    def close(self, request_id):
        table = self._table(request_id)
        if len(table.pages) > len(table.keys):
            table.pages.pop()
        super().close(request_id)


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
