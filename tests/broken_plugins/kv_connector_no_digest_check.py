"""Takes what arrives for what was published."""

from broken_parts import kv_connector_offer

from engine.hooks import hookimpl
from engine.plugins.kv_connectors.local.connector import LocalConnector

CAUGHT_BY = "test_damage_is_noticed"


class Connector(LocalConnector):
    def __init__(self, role, schema, engine_id, options):
        super().__init__(role, schema, engine_id, options.model_copy(update={"check": 0.0}))


@hookimpl
def kv_connectors():
    return [kv_connector_offer(Connector)]
