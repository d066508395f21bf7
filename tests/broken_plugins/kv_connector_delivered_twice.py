"""Reports each fetch that succeeds twice."""

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector
from engine.specs.kv_connector import EventKind

CAUGHT_BY = "test_many_at_once_end_once_each"


class Connector(LocalConnector):
    def poll(self):
        events = super().poll()
        return events + [event for event in events if event.kind is EventKind.FETCHED]


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
