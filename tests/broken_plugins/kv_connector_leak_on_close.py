"""Leaves a pair of sockets open for each end that is closed."""

import socket

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector

KEPT = []
CAUGHT_BY = "test_close_leaves_nothing"


class Connector(LocalConnector):
    def start(self, pool, wake):
        super().start(pool, wake)
        self.pair = socket.socketpair()
        KEPT.append(self.pair)


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
