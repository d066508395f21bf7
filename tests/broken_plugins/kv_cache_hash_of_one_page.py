"""The key of a page is that of its own tokens, whatever stands before it."""

from array import array
from hashlib import sha256

from broken_parts import kv_cache_offer

from engine.hooks import hookimpl
from engine.plugins.kv_caches.paged.cache import PagedKVCache

CAUGHT_BY = "test_equal_pages_after_other_prefixes_are_apart"
FAILS = {"flags:prefix_reuse"}


class Cache(PagedKVCache):
    def _chain(self, key, tokens, first, last):
        for page in range(first, last):
            own = tokens[page * self.page_size : (page + 1) * self.page_size]
            yield sha256(array("q", own).tobytes()).digest()


@hookimpl
def kv_caches():
    return [kv_cache_offer(Cache)]
