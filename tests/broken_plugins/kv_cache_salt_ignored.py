"""Lets requests of one tenant match the prefixes of another."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_salts_are_apart"
FAILS = {"flags:prefix_reuse"}


class Cache(PagedKVCache):
    def match(self, tokens, salt=""):
        return super().match(tokens)

    def open(self, request_id, tokens, salt=""):
        return super().open(request_id, tokens)


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
