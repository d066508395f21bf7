"""Extension point: lifecycle observers, which receive what happened to requests, in batches and off the step.

Called on a thread of their own; a slow or raising observer delays nothing but itself (it is logged and dropped after
repeated failures).

Threads: `receive` and `close` run on one thread that all observers of an engine share, never on the step's.

Errors: what `receive` raises is logged; after several failures in a row the observer is dropped. Requests notice
nothing.

`build(options) -> Observer`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engine.hooks import hookspec
from engine.plugin import Offer

API: Final = 1
HOOK: Final = "observers"


class Stage(StrEnum):
    """Stations in the life of a request."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    RESUMED = "resumed"  # admitted again after a preemption
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One request reached a station."""

    stage: Stage
    request_id: str
    time: float  # seconds, time.monotonic
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reason: str = ""  # of the finish


class Observer(ABC):
    """Receives events."""

    @abstractmethod
    def receive(self, events: Sequence[RequestEvent]) -> None:
        """Take a batch of events, oldest first."""

    def close(self) -> None:  # noqa: B027
        """The engine stops."""


BUILDS: Final = Observer


@hookspec
def observers() -> Iterable[Offer[Observer]]:  # type: ignore[empty-body]
    """Offer lifecycle observers. Must not import torch."""


__all__ = ["API", "HOOK", "Observer", "RequestEvent", "Stage", "observers"]
