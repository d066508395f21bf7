"""Extension point: KV connectors, which move a request's KV between engines.

The core owns the life of a transfer: leases, deadlines, retries, the fall-back to recomputing. A connector only moves
bytes and says what happened. All methods but `poll` return at once and are called on the scheduler's thread; the moving
happens on the connector's own threads, which may touch only the pages they were told of.

Threads: the core calls every method on the scheduler's thread: `allocate`, then `start`, once; the others in any order,
`close` last. `wake` may be called from any thread.

Errors: `publish` and `fetch` may raise ValueError, which is told to the request alone. Everything that goes wrong
later is an event, never an exception: whatever `poll` raises ends the engine core.

`build(options, *, role: Role, schema: KVSchema, engine_id: str) -> KVConnector`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    from torch import Tensor

API: Final = 1
HOOK: Final = "kv_connectors"

TOKENS: Final = "token"
"""The name, among the axes of a page, of the one that counts its tokens."""


class Role(StrEnum):
    """What an engine does with a connector."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSchema:
    """What must agree between two engines for a page of one to mean the same in the other."""

    weights: str  # digest that names the weights
    layers: int
    page_size: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    num_pages: int  # of this engine; may differ
    axes: tuple[tuple[str, ...], ...] = ()  # as `KVLayout.axes`: with them, engines may differ in page_size


class EventKind(StrEnum):
    """What a connector reports."""

    DELIVERED = "delivered"  # producer: the consumer has read a publication
    RENEWED = "renewed"  # producer: the consumer still wants it
    PEER_LOST = "peer_lost"  # producer: the consumer of a publication is gone
    FETCHED = "fetched"  # consumer: the pages hold the KV, and its digests agree
    FETCH_FAILED = "fetch_failed"  # consumer: nothing usable arrived; `reason` says why


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """Something that happened to one transfer."""

    kind: EventKind
    request_id: str  # the id that `publish` or `fetch` was called with
    reason: str = ""
    corrupt: bool = False  # FETCH_FAILED: what arrived is not what was published


class KVConnector(ABC):
    """One end of a transport."""

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Memory for the KV pool, uint8 [num_bytes], if peers are to read it in place; None leaves it to the core."""
        return None

    @abstractmethod
    def start(self, pool: Sequence[tuple[Tensor, ...]], wake: Callable[[], None]) -> None:
        """Begin. `pool[layer]` holds that layer's parts, each `[num_pages, ...]`. Call `wake` when `poll` has news."""

    @abstractmethod
    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        """Make pages readable by a peer and return the handle it needs: JSON values only, safe to pass through clients.

        The core keeps the pages pinned until it calls `withdraw`.
        """

    @abstractmethod
    def withdraw(self, request_id: str) -> None:
        """End a publication (delivered, expired or cancelled): no read of its pages may succeed from now on."""

    @abstractmethod
    def fetch(self, request_id: str, handle: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        """Start filling `pages` with the publication's pages `first_page, first_page + 1, …`; ends in one event.

        Raises:
            ValueError: the handle is malformed or of a foreign schema; the sentence names what differs.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Give up a fetch. The pages must not be written once its FETCH_FAILED event (always sent) was polled."""

    @abstractmethod
    def poll(self) -> list[TransferEvent]:
        """Events since the last call; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release every thread, socket, file and mapping."""


BUILDS: Final = KVConnector


@hookspec
def kv_connectors() -> Iterable[Offer[KVConnector]]:  # type: ignore[empty-body]
    """Offer KV connectors. Must not import torch."""


__all__ = [
    "API",
    "HOOK",
    "TOKENS",
    "EventKind",
    "KVConnector",
    "KVSchema",
    "Role",
    "TransferEvent",
    "kv_connectors",
]
