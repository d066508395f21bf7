"""Takes what arrives for what was published."""

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector
from engine.plugins.kv_connectors.local.grid import Grid

CAUGHT_BY = "test_damage_is_noticed"


class Connector(LocalConnector):
    def start(self, pool, wake):
        super().start(pool, wake)
        if self._consumer is not None:
            self._consumer._copy = self._copy_unchecked

    def _copy_unchecked(self, fetch):
        consumer, grant = self._consumer, fetch.grant
        theirs = Grid.of_mapping(fetch.mapping, grant.layout, consumer._grid, grant.schema.num_pages)
        consumer._grid.copy(fetch.pages, theirs, grant.pages)
        del theirs
        fetch.copied = len(fetch.pages)
        consumer._confirm(fetch)


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
