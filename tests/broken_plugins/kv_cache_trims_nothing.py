"""Keeps the pages of tokens that were taken back."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_random_traffic"
SUITE = {"examples": 60}  # the number that a plugin's author has: the verdict must come soon


class Cache(PagedKVCache):
    def trim(self, request_id, num_tokens):
        pass


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
