"""Serves a withdrawn publication as long as somebody asks."""

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector

CAUGHT_BY = "test_withdrawn_publication_is_gone"


class Connector(LocalConnector):
    def withdraw(self, request_id):
        publication = self._producer._publications._by_id.pop(request_id, None)
        if publication is not None:
            publication.readers += 1


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
