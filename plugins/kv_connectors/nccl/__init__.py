"""KV from GPU to GPU of one host through NCCL; in host memory the same conversation goes over gloo."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, Offer
from engine.transport.options import NetworkOptions

if TYPE_CHECKING:
    import torch

    from engine.specs.kv_connector import KVConnector, KVSchema, Role
    from engine.transport.link import Links


def available(device: DeviceProfile) -> str | None:
    """The loops wait on eventfd, which is Linux's."""
    return None if not device.here or sys.platform == "linux" else f"needs Linux, this is {sys.platform}"


def build(options: NetworkOptions, *, role: Role, schema: KVSchema, engine_id: str) -> KVConnector:
    """Make one end; nothing is opened before `start`. Where the pool lies decides what moves it."""
    from engine.transport.connector import PeerConnector
    from engine.transport.link_transport import LinkTransport

    transport = LinkTransport("nccl", options, partial(links, options))
    return PeerConnector(transport, role=role, schema=schema, engine_id=engine_id, options=options)


def links(options: NetworkOptions, device: torch.device, block_bytes: int) -> Links:
    """What moves the bytes of pools on a device."""
    if device.type == "cpu":
        from engine.plugins.kv_connectors.nccl.host import GlooLinks

        return GlooLinks(options.peer_timeout)
    from engine.plugins.kv_connectors.nccl.device import NcclLinks

    return NcclLinks(device, block_bytes)


@hookimpl
def kv_connectors() -> list[Offer[KVConnector]]:
    """The one offer of this module."""
    return [
        Offer(
            name="nccl",
            summary="from GPU to GPU of one host over NVLink, through NCCL; on the CPU over gloo",
            build=build,
            options=NetworkOptions,
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}), flags=frozenset({Flag.PRODUCER, Flag.CONSUMER})
            ),
            available=available,
        )
    ]


__all__ = ["available", "build", "kv_connectors", "links"]
