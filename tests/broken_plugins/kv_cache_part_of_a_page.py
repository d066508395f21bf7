"""Matches the tokens of a page that is not full."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache
from engine.specs.kv_cache import PrefixMatch

CAUGHT_BY = "test_a_match_leaves_a_token_to_compute"


class Cache(PagedKVCache):
    def match(self, tokens, salt=""):
        pages, count = super().match(tokens, salt)
        return PrefixMatch(pages, min(count + 1, len(tokens)) if pages else 0)


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
