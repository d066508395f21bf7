"""KV over plain sockets: works between any two hosts, and is what the others are measured against."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, Offer
from engine.transport.options import NetworkOptions

if TYPE_CHECKING:
    from engine.specs.kv_connector import KVConnector, KVSchema, Role


def available(device: DeviceProfile) -> str | None:
    """The loops wait on eventfd, which is Linux's."""
    return None if not device.here or sys.platform == "linux" else f"needs Linux, this is {sys.platform}"


def build(options: NetworkOptions, *, role: Role, schema: KVSchema, engine_id: str) -> KVConnector:
    """Make one end; nothing is opened before `start`."""
    from engine.plugins.kv_connectors.tcp.transport import TcpTransport
    from engine.transport.connector import PeerConnector

    return PeerConnector(TcpTransport(options), role=role, schema=schema, engine_id=engine_id, options=options)


@hookimpl
def kv_connectors() -> list[Offer[KVConnector]]:
    """The one offer of this module."""
    return [
        Offer(
            name="tcp",
            summary="plain sockets between engine processes, on one host or several",
            build=build,
            options=NetworkOptions,
            capabilities=Capabilities(devices=frozenset({"cpu"}), flags=frozenset({Flag.PRODUCER, Flag.CONSUMER})),
            available=available,
        )
    ]


__all__ = ["available", "build", "kv_connectors"]
