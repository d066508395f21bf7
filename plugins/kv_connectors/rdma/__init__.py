"""KV read out of another engine's memory by the network card (or whatever UCX finds), through NIXL."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, Offer
from engine.transport.options import NetworkOptions

if TYPE_CHECKING:
    import torch

    from engine.specs.kv_connector import KVConnector, KVSchema, Role
    from engine.transport.link import Links

PACKAGES = ("nixl_cu13", "nixl_cu12")


def available(device: DeviceProfile) -> str | None:
    """NIXL is an extra."""
    if not device.here or any(find_spec(name) for name in PACKAGES):
        return None
    return "needs NIXL: pip install --no-deps nixl-cu13"


def build(options: NetworkOptions, *, role: Role, schema: KVSchema, engine_id: str) -> KVConnector:
    """Make one end; nothing is opened before `start`."""
    from engine.plugins.kv_connectors.rdma.transport import RdmaTransport
    from engine.transport.connector import PeerConnector
    from engine.transport.link_transport import LinkTransport

    return PeerConnector(
        RdmaTransport(options, role),
        on_device=LinkTransport("rdma", options, make_links),
        role=role,
        schema=schema,
        engine_id=engine_id,
        options=options,
    )


def make_links(device: torch.device, block_bytes: int) -> Links:
    """What moves the bytes of pools on a GPU."""
    from engine.plugins.kv_connectors.rdma.links import NixlLinks

    return NixlLinks(device, block_bytes)


@hookimpl
def kv_connectors() -> list[Offer[KVConnector]]:
    """The one offer of this module."""
    return [
        Offer(
            name="rdma",
            summary="one-sided transfers through NIXL (InfiniBand, RoCE, NVLink, shared memory, whatever UCX finds)",
            build=build,
            options=NetworkOptions,
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}), flags=frozenset({Flag.PRODUCER, Flag.CONSUMER})
            ),
            available=available,
        )
    ]


__all__ = ["available", "build", "kv_connectors"]
