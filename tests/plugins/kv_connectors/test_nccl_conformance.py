"""The NCCL connector against the suite, over gloo in host memory."""

from __future__ import annotations

from engine.plugins.kv_connectors import nccl
from engine.testing.kv_connector import KVConnectorConformance


class TestNccl(KVConnectorConformance):
    (offer,) = nccl.kv_connectors()
    module = "engine.plugins.kv_connectors.nccl"
