"""The socket connector against the suite."""

from __future__ import annotations

import pytest

from engine.plugins.kv_connectors import tcp
from engine.testing.kv_connector import KVConnectorConformance
from engine.testing.offer import CPU


class TestTcp(KVConnectorConformance):
    (offer,) = tcp.kv_connectors()
    module = "engine.plugins.kv_connectors.tcp"


def test_only_linux_has_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (offer,) = tcp.kv_connectors()
    assert offer.available(CPU) is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert offer.available(CPU) == "needs Linux, this is darwin"
