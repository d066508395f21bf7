"""What the routes share: the engine's client, the tokenizer, the configuration, and whether requests are welcome."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.config.explain import Row
from engine.config.model import EngineConfig, ListenSection
from engine.cost_model import Curve
from engine.errors import EngineError
from engine.messages import Output, Phase, Ready
from engine.parsing.choice import Parsers
from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError
from engine.server.exchange import Exchange
from engine.server.journal import Journal
from engine.server.keys import KeyRing
from engine.server.liveness import Liveness
from engine.server.metrics import Metrics
from engine.server.pace import Pace
from engine.server.startup import Startup
from engine.specs.rate_limit import RateLimiter
from engine.trace import Tracer

if TYPE_CHECKING:
    from engine.server.tracing import Tracing
    from engine.tokenizer import Tokenizer

_RETRY_LOADING = 2
_RETRY_DRAINING = 5
_LONGEST_RETRY = 120
_STATS_PATIENCE = 0.5
"""Seconds that a probe or a scrape waits for the core; one in a long step answers late, and they go without."""


class Client(Protocol):
    """What the server asks of `engine.client.EngineClient`."""

    phase: Phase
    ready: Ready | None
    failed: str | None
    running: int
    waiting: int

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        kv_transfer: dict[str, Any] | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> AsyncGenerator[Output]:
        """The outputs of one request; closing the iterator aborts it."""

    async def control(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask the core; see `engine.control`."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServerState:
    """One server. Belongs to the event loop's thread."""

    client: Client
    config: EngineConfig
    model: str  # what clients call the model
    metrics: Metrics
    tokenizer: Tokenizer | None = None  # None until it is loaded
    parsers: Parsers = field(default_factory=Parsers)  # come with the tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    stopping: bool = False  # draining for good
    active: dict[asyncio.Future[None], Exchange] = field(default_factory=dict)  # answers under way
    limiter: RateLimiter | None = None
    tracing: Tracing | None = None
    settings: Sequence[Row] = ()  # the configuration, each value with where it came from; secrets masked
    keys: KeyRing = field(init=False)
    journal: Journal = field(init=False)
    liveness: Liveness = field(init=False)
    startup: Startup = field(default_factory=Startup)
    pace: Pace = field(default_factory=Pace)
    tracer: Tracer = field(default_factory=Tracer)  # of this process; the core has one, too
    prefills: Curve = field(default_factory=Curve)  # seconds by tokens that were computed before the first of an answer

    def __post_init__(self) -> None:
        section = self.config.server
        self.keys = KeyRing(section.api_keys)
        self.journal = Journal(section.kept_requests, lines=self.config.logging.requests)
        self.liveness = Liveness(section.stall_seconds)

    @property
    def listening(self) -> ListenSection:
        """Where the server listens, and how it ends."""
        return self.config.server

    @property
    def serving(self) -> bool:
        """Whether a request would be taken now."""
        return not self.draining and self.loaded

    @property
    def loaded(self) -> bool:
        """Whether the model and its tokenizer are in, and the engine lives."""
        return self.client.failed is None and self.client.ready is not None and self.tokenizer is not None

    def health(self) -> dict[str, Any]:
        """How far the server is, for probes and people."""
        phase = self.client.phase
        if self.client.failed is not None:
            status = "failed"
        elif self.draining:
            status = "draining"
        else:
            status = "ready" if self.loaded else "loading"
        return {"status": status, "phase": phase.name, "progress": phase.progress, "detail": phase.detail}

    def admit(self, model: str | None) -> tuple[Ready, Tokenizer]:
        """What a request needs, if it is welcome.

        Args:
            model: the model that the request names; None is the one that is served.

        Raises:
            ApiError: 503 while loading, draining or dead, 404 for another model.
        """
        if self.client.failed is not None:
            raise ApiError(503, "the engine has stopped and this server is about to end")
        if self.draining:
            what = "is shutting down" if self.stopping else "is draining and takes no new requests"
            seconds = (
                max(_RETRY_DRAINING, math.ceil(self.config.server.drain_seconds)) if self.active else _RETRY_DRAINING
            )
            raise ApiError(503, f"this server {what}; ask another one", retry_after=seconds)
        ready, tokenizer = self.client.ready, self.tokenizer
        if ready is None or tokenizer is None:
            phase = self.client.phase
            message = f"the model is not ready yet ({phase.name}, {phase.progress:.0%}); try again in a moment"
            self.startup.observe(phase, ready=False)
            left = math.ceil(self.startup.remaining() or 0)
            raise ApiError(503, message, retry_after=min(_LONGEST_RETRY, max(_RETRY_LOADING, left)))
        self.check_model(model)
        return ready, tokenizer

    def check_model(self, model: str | None) -> None:
        """Raise a 404 unless `model` is the one that is served."""
        if model is not None and model != self.model:
            message = f"there is no model {model!r} here; this server serves {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def core_stats(self) -> dict[str, Any] | None:
        """The core's counters; None when it isn't there, or doesn't answer soon."""
        if self.client.ready is None or self.client.failed is not None:
            return None
        try:
            async with asyncio.timeout(_STATS_PATIENCE):
                return await self.client.control("stats")
        except (TimeoutError, EngineError):
            return None

    def stop_active(self) -> None:
        """Cut off the answers that are still under way: their clients get an error."""
        self.cut(lambda exchange: True, "this server is shutting down and cut the answer short")

    def cut(self, which: Callable[[Exchange], bool], why: str) -> int:
        """End answers under way with an error that says why; returns how many."""
        found = [(answer, exchange) for answer, exchange in self.active.items() if which(exchange)]
        for answer, exchange in found:
            exchange.cut = why
            answer.cancel()
        return len(found)


__all__ = ["Client", "ServerState"]
