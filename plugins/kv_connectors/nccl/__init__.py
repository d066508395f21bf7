"""KV from GPU to GPU of one host through NCCL; in host memory the same conversation goes over gloo."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, Offer
from engine.transport.options import NetworkOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.plugins.kv_connectors.nccl.link import Links
    from engine.specs.kv_connector import KVConnector, KVSchema, Role
    from engine.transport.blocks import BlockPool


def available(device: DeviceProfile) -> str | None:
    """The loops wait on eventfd, which is Linux's."""
    return None if not device.here or sys.platform == "linux" else f"needs Linux, this is {sys.platform}"


def build(options: NetworkOptions, *, role: Role, schema: KVSchema, engine_id: str) -> KVConnector:
    """Make one end; nothing is opened before `start`. Where the pool lies decides what moves it."""
    from engine.plugins.kv_connectors.nccl.transport import NcclTransport
    from engine.transport.connector import PeerConnector

    on_device: list[Tensor] = []

    def pool(tensors: Sequence[tuple[Tensor, ...]]) -> BlockPool:
        first = tensors[0][0]
        if first.device.type == "cpu":
            from engine.transport.grid import Grid

            return Grid.of_pool(tensors)
        from engine.transport.device_pool import DevicePool

        on_device.append(first)
        return DevicePool.of_pool(tensors)

    def links(block_bytes: int) -> Links:
        if not on_device:
            from engine.plugins.kv_connectors.nccl.host import GlooLinks

            return GlooLinks(options.peer_timeout)
        from engine.plugins.kv_connectors.nccl.device import NcclLinks

        return NcclLinks(on_device[0].device, block_bytes)

    transport = NcclTransport(options, pool, links)
    return PeerConnector(transport, role=role, schema=schema, engine_id=engine_id, options=options)


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


__all__ = ["available", "build", "kv_connectors"]
