"""What the faulty plugins of this folder share: sound offers for classes that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.capabilities import Flag, KVKind, Layout
from engine.plugin import Capabilities, Offer
from engine.plugins.attention import reference
from engine.plugins.kv_caches import paged
from engine.plugins.kv_connectors import local


def attention_offer(backend: type[Any], **claims: Any) -> Offer[Any]:
    """The reference's offer, for another backend; latent rows are no business of the classes here."""
    (offer,) = reference.attention_backends()
    can = offer.capabilities
    heads = {"kv_kinds": frozenset({KVKind.GQA}), "layouts": frozenset({Layout.SPLIT})}
    flags = can.flags - {Flag.PACKED_ROWS}
    return replace(
        offer,
        name="broken",
        build=lambda options, *, shape, page_size, device: backend(shape, page_size),
        capabilities=replace(can, **{**heads, "flags": flags, **claims}),
    )


def kv_cache_offer(cache: type[Any]) -> Offer[Any]:
    """The paged cache's offer, for another cache."""
    (offer,) = paged.kv_caches()
    return replace(offer, name="broken", build=lambda options, *, num_pages, page_size: cache(num_pages, page_size))


def kv_connector_offer(connector: type[Any]) -> Offer[Any]:
    """The shared-memory connector's offer, for another connector."""
    (offer,) = local.kv_connectors()
    return replace(
        offer,
        name="broken",
        build=lambda options, *, role, schema, engine_id: connector(role, schema, engine_id, options),
    )


def offer(build: Callable[..., Any], **claims: Any) -> Offer[Any]:
    """An offer of anything, without options."""
    return Offer(name="broken", summary="a fault on purpose", build=build, capabilities=Capabilities(**claims))


__all__ = ["attention_offer", "kv_cache_offer", "kv_connector_offer", "offer"]
