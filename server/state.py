"""What the routes share: the engine's client, the tokenizer, the configuration, and whether requests are welcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.config.model import EngineConfig
from engine.messages import Output, Phase, Ready
from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError
from engine.server.metrics import Metrics

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_RETRY_LOADING = 2
_RETRY_DRAINING = 5


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
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: set[asyncio.Future[None]] = field(default_factory=set)  # answers under way

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
            raise ApiError(503, "this server is shutting down; ask another one", retry_after=_RETRY_DRAINING)
        ready, tokenizer = self.client.ready, self.tokenizer
        if ready is None or tokenizer is None:
            phase = self.client.phase
            message = f"the model is not ready yet ({phase.name}, {phase.progress:.0%}); try again in a moment"
            raise ApiError(503, message, retry_after=_RETRY_LOADING)
        self.check_model(model)
        return ready, tokenizer

    def check_model(self, model: str | None) -> None:
        """Raise a 404 unless `model` is the one that is served."""
        if model is not None and model != self.model:
            message = f"there is no model {model!r} here; this server serves {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def stop_active(self) -> None:
        """Cut off the answers that are still under way: their clients get an error."""
        for answer in tuple(self.active):
            answer.cancel()


__all__ = ["Client", "ServerState"]
