"""Never ends a fetch whose producer went away."""

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector

CAUGHT_BY = "test_killed_producer_fails_its_fetches"


class Connector(LocalConnector):
    def poll(self):
        return [event for event in super().poll() if "engine-r" not in event.reason]


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
