"""The connector: shared memory under the core's two ends."""

from __future__ import annotations

from engine.plugins.kv_connectors.local.transport import LocalTransport
from engine.specs.kv_connector import KVSchema, Role
from engine.transport.connector import PeerConnector
from engine.transport.options import PeerOptions


class LocalConnector(PeerConnector):
    """See `KVConnector`. A producer's pool must lie in the memory that `allocate` returned."""

    def __init__(self, role: Role, schema: KVSchema, engine_id: str, options: PeerOptions) -> None:
        super().__init__(LocalTransport(), role=role, schema=schema, engine_id=engine_id, options=options)


__all__ = ["LocalConnector"]
