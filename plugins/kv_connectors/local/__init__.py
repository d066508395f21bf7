"""KV between engine processes of one host: the consumer copies pages straight out of the producer's pool."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, Offer
from engine.transport.options import PeerOptions

if TYPE_CHECKING:
    from engine.specs.kv_connector import KVConnector, KVSchema, Role


def available(device: DeviceProfile) -> str | None:
    """Sealed memory files, abstract sockets and eventfd are Linux's."""
    return None if not device.here or sys.platform == "linux" else f"needs Linux, this is {sys.platform}"


def build(options: PeerOptions, *, role: Role, schema: KVSchema, engine_id: str) -> KVConnector:
    """Make one end; nothing is opened before `allocate` and `start`."""
    from engine.plugins.kv_connectors.local.connector import LocalConnector

    return LocalConnector(role, schema, engine_id, options)


@hookimpl
def kv_connectors() -> list[Offer[KVConnector]]:
    """The one offer of this module."""
    return [
        Offer(
            name="local",
            summary="shared memory between engine processes of one host and user",
            build=build,
            options=PeerOptions,
            capabilities=Capabilities(devices=frozenset({"cpu"}), flags=frozenset({Flag.PRODUCER, Flag.CONSUMER})),
            available=available,
        )
    ]


__all__ = ["available", "build", "kv_connectors"]
