"""The shared-memory connector against the suite."""

from __future__ import annotations

from engine.plugins.kv_connectors import local
from engine.testing.kv_connector import KVConnectorConformance


class TestLocal(KVConnectorConformance):
    (offer,) = local.kv_connectors()
    module = "engine.plugins.kv_connectors.local"
