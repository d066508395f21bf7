"""The paged KV cache: pages found by a chain of hashes, reclaimed in the order of their last use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, Offer, Options

if TYPE_CHECKING:
    from engine.specs.kv_cache import KVCache


class PagedOptions(Options):
    """Settings of the paged cache."""

    prefix_caching: bool = Field(True, description="Keep the pages of finished requests for others with their prefix.")


def build(options: PagedOptions, *, num_pages: int, page_size: int) -> KVCache:
    """Make the cache; every page starts free."""
    from engine.plugins.kv_caches.paged.cache import PagedKVCache

    return PagedKVCache(num_pages, page_size, prefix_caching=options.prefix_caching)


@hookimpl
def kv_caches() -> list[Offer[KVCache]]:
    """The paged cache."""
    return [
        Offer(
            name="paged",
            summary="Pages found by hash, least recently used reclaimed first; constant cost a page.",
            build=build,
            options=PagedOptions,
            capabilities=Capabilities(flags=frozenset({Flag.PREFIX_REUSE})),
        )
    ]
