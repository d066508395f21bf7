"""The radix KV cache: a tree of token runs, reclaimed from its least recently used leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, Offer, Options

if TYPE_CHECKING:
    from engine.specs.kv_cache import KVCache


class RadixOptions(Options):
    """Settings of the radix cache."""

    bypass: bool = Field(
        True, description="Keep only one request in eight while pages are short and hardly a prefix is found again."
    )


def build(options: RadixOptions, *, num_pages: int, page_size: int) -> KVCache:
    """Make the cache; every page starts free."""
    from engine.plugins.kv_caches.radix.cache import RadixKVCache

    return RadixKVCache(num_pages, page_size, bypass=options.bypass)


@hookimpl
def kv_caches() -> list[Offer[KVCache]]:
    """The radix cache."""
    return [
        Offer(
            name="radix",
            summary="A tree of token runs; what is asked for again is kept longest, leaves are reclaimed first.",
            build=build,
            options=RadixOptions,
            capabilities=Capabilities(flags=frozenset({Flag.PREFIX_REUSE})),
        )
    ]
