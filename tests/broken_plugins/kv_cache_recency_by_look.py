"""Counts a look as a use, so that polling keeps a prefix alive."""

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_the_least_recently_used_goes_first"


class Cache(PagedKVCache):
    def match(self, tokens, salt=""):
        found = super().match(tokens, salt)
        for page in found.pages:
            if page in self._idle:
                self._idle.move_to_end(page)
        return found


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
