"""The NIXL connector against the suite, where NIXL is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from engine.plugins.kv_connectors import rdma
from engine.testing.kv_connector import KVConnectorConformance
from engine.testing.offer import CPU


@pytest.mark.skipif(not any(find_spec(name) for name in rdma.PACKAGES), reason="NIXL is not installed")
class TestRdma(KVConnectorConformance):
    (offer,) = rdma.kv_connectors()
    module = "engine.plugins.kv_connectors.rdma"


def test_without_nixl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (offer,) = rdma.kv_connectors()
    monkeypatch.setattr(rdma, "find_spec", lambda name: None)
    assert offer.available(CPU) == "needs NIXL: pip install --no-deps nixl-cu13"
