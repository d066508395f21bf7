"""Claims to reuse prefixes and forgets every page when its request ends."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_a_match_leaves_a_token_to_compute"
FAILS = {"flags:prefix_reuse"}


class Cache(PagedKVCache):
    def __init__(self, num_pages, page_size):
        super().__init__(num_pages, page_size, prefix_caching=False)


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
