"""Answers `fetch` only when the producer has answered."""

import time

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector

CAUGHT_BY = "test_calls_return_while_the_producer_is_stopped"


class Connector(LocalConnector):
    def fetch(self, request_id, handle, pages, first_page):
        super().fetch(request_id, handle, pages, first_page)
        while request_id in self._consumer._fetches and self._consumer._fetches[request_id].grant is None:
            time.sleep(0.01)


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
