"""What one router consists of."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx

from engine.config.model import ListenSection
from engine.server.router.config import RouterConfig
from engine.server.router.dispatch import Dispatcher
from engine.server.router.metrics import RouterMetrics
from engine.server.router.planner import Planner
from engine.server.router.prefixes import Seen
from engine.server.router.upstream import Upstream
from engine.server.router.worker import Worker


@dataclass(slots=True, eq=False)
class RouterState:
    """One router. Belongs to the event loop's thread.

    Args:
        http: how engines are reached; belongs to the caller.
    """

    config: RouterConfig
    http: httpx.AsyncClient
    draining: bool = False
    stopping: bool = False
    started: bool = False  # whether an engine ever took requests
    active: set[asyncio.Future[None]] = field(default_factory=set)  # answers under way
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    workers: list[Worker] = field(init=False)
    planner: Planner = field(init=False)
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.workers = [
            *(Worker(url=url, role="prefill", seen=Seen(config.prefix.remembered)) for url in config.prefill),
            *(Worker(url=url, role="decode", seen=Seen(config.prefix.remembered)) for url in config.decode),
        ]
        self.planner = Planner(config.handover)
        self.dispatcher = Dispatcher(
            self.workers, Upstream(self.http), self.planner, self.metrics, config.prefix, config.retry
        )

    @property
    def listening(self) -> ListenSection:
        """Where the router listens, and how it ends."""
        return self.config.server

    @property
    def serving(self) -> bool:
        """Whether a request would be taken now: any engine will do."""
        found = not self.draining and any(worker.usable for worker in self.workers)
        self.started |= found
        return found

    def stop_active(self) -> None:
        """Cut off the answers that are still under way."""
        for answer in list(self.active):
            answer.cancel()


def open_http(config: RouterConfig) -> httpx.AsyncClient:
    """The client for all engines; to be closed by the caller. Reads no environment variable."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=config.retry.connect_seconds),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        follow_redirects=False,
        trust_env=False,
    )


__all__ = ["RouterState", "open_http"]
