"""Forgets every cancellation."""

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector

CAUGHT_BY = "test_cancelled_fetch_writes_no_more"


class Connector(LocalConnector):
    def cancel(self, request_id):
        pass


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
