"""The connector: its two ends, and which of them a role has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.plugins.kv_connectors.local.consumer import Consumer
from engine.plugins.kv_connectors.local.grid import Grid
from engine.plugins.kv_connectors.local.memory import SharedMemory
from engine.plugins.kv_connectors.local.outbox import Outbox
from engine.plugins.kv_connectors.local.producer import Producer
from engine.specs.kv_connector import KVConnector, KVSchema, Role, TransferEvent

if TYPE_CHECKING:
    from torch import Tensor


class LocalConnector(KVConnector):
    """See `KVConnector`. A producer's pool must lie in the memory that `allocate` returned."""

    def __init__(self, role: Role, schema: KVSchema, engine_id: str, peer_timeout: float) -> None:
        self._role, self._schema, self._engine_id, self._peer_timeout = Role(role), schema, engine_id, peer_timeout
        self._memory: SharedMemory | None = None
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._outbox = Outbox(lambda: None)

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Memory that consumers can map; None for an engine that only consumes."""
        if self._role is Role.CONSUMER:
            return None
        self._memory = SharedMemory(num_bytes)
        return self._memory.tensor

    def start(self, pool: Sequence[tuple[Tensor, ...]], wake: Callable[[], None]) -> None:
        """Start the threads.

        Raises:
            ValueError: the pool isn't what the schema says, or not in the memory that consumers can map.
        """
        grid = Grid.of_pool(pool)
        if len(pool) != self._schema.layers or grid.num_pages != self._schema.num_pages:
            raise ValueError(
                f"the KV pool has {len(pool)} layers of {grid.num_pages} pages, "
                f"its schema {self._schema.layers} of {self._schema.num_pages}"
            )
        self._outbox = Outbox(wake)
        common = (grid, self._outbox, self._peer_timeout)
        if self._role is not Role.CONSUMER:
            if self._memory is None:
                raise ValueError("a producer's KV pool must lie in the connector's memory; call allocate before start")
            self._producer = Producer(self._engine_id, self._schema, self._memory, *common)
        if self._role is not Role.PRODUCER:
            self._consumer = Consumer(self._engine_id, self._schema, *common)

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        """See `KVConnector.publish`."""
        assert self._producer is not None, "publish needs the role producer and start"
        return self._producer.publish(request_id, pages, num_tokens, lease_seconds)

    def withdraw(self, request_id: str) -> None:
        """See `KVConnector.withdraw`; unknown ids are no news."""
        assert self._producer is not None, "withdraw needs the role producer and start"
        self._producer.withdraw(request_id)

    def fetch(self, request_id: str, handle: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        """See `KVConnector.fetch`."""
        assert self._consumer is not None, "fetch needs the role consumer and start"
        self._consumer.fetch(request_id, handle, pages, first_page)

    def cancel(self, request_id: str) -> None:
        """See `KVConnector.cancel`; unknown ids are no news."""
        assert self._consumer is not None, "cancel needs the role consumer and start"
        self._consumer.cancel(request_id)

    def poll(self) -> list[TransferEvent]:
        """See `KVConnector.poll`."""
        return self._outbox.take()

    def close(self) -> None:
        """Release everything; harmless twice. The pool's memory goes with the last tensor over it."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        if self._producer is not None:
            self._producer.close()
            self._producer = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


__all__ = ["LocalConnector"]
