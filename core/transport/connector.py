"""A KV connector made of a transport: its two ends, and which of them a role has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.specs.kv_connector import KVConnector, KVSchema, Role, TransferEvent
from engine.transport.consumer import Consumer
from engine.transport.options import PeerOptions
from engine.transport.outbox import Outbox
from engine.transport.producer import Producer
from engine.transport.wire import Transport

if TYPE_CHECKING:
    from torch import Tensor


class PeerConnector(KVConnector):
    """See `KVConnector`."""

    def __init__(
        self,
        transport: Transport[Any],
        *,
        role: Role,
        schema: KVSchema,
        engine_id: str,
        options: PeerOptions,
        on_device: Transport[Any] | None = None,
    ) -> None:
        """`on_device` takes the place of `transport` when the pool turns out not to lie in host memory."""
        self._transport, self._on_device, self._options = transport, on_device, options
        self._role, self._schema, self._engine_id = Role(role), schema, engine_id
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._outbox = Outbox(lambda: None)

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Memory as the transport wants it; an engine that only consumes needs none."""
        return None if self._role is Role.CONSUMER else self._transport.allocate(num_bytes)

    def start(self, pool: Sequence[tuple[Tensor, ...]], wake: Callable[[], None]) -> None:
        """Start the threads.

        Raises:
            ValueError: the pool isn't what the schema says, or the transport can't use it.
        """
        if self._on_device is not None and pool[0][0].device.type != "cpu":
            self._transport = self._on_device
        grid = self._transport.grid(pool)
        if len(pool) != self._schema.layers or grid.num_pages != self._schema.num_pages:
            raise ValueError(
                f"the KV pool has {len(pool)} layers of {grid.num_pages} pages, "
                f"its schema {self._schema.layers} of {self._schema.num_pages}"
            )
        self._outbox = Outbox(wake)
        self._transport.attach(pool, grid, self._look)
        common = (self._transport, self._engine_id, self._schema, grid, self._outbox)
        if self._role is not Role.CONSUMER:
            self._producer = Producer(*common, self._options.peer_timeout)
        if self._role is not Role.PRODUCER:
            self._consumer = Consumer(*common, self._options)

    def _look(self) -> None:
        if (consumer := self._consumer) is not None:
            consumer.wake()

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
        self._transport.close()


__all__ = ["PeerConnector"]
