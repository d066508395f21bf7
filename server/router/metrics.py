"""Prometheus metrics of one router."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from engine.server.router.worker import Worker


class RouterMetrics:
    """Counts answers and retries, and shows how the engines stand when it is scraped."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._answers = Counter(
            "engine_router_responses", "Answers to clients, by status.", ("status",), registry=self._registry
        )
        self._retries = Counter(
            "engine_router_retries", "Requests that an engine failed on.", ("worker",), registry=self._registry
        )
        self._decided = Gauge(
            "engine_router_prompts", "Prompts, by where they were computed and why.", ("why",), registry=self._registry
        )
        self._usable = Gauge(
            "engine_router_usable", "1 if an engine takes requests.", ("worker", "role"), registry=self._registry
        )
        self._active = Gauge("engine_router_active", "Requests under way.", ("worker", "role"), registry=self._registry)

    def answered(self, status: int) -> None:
        """A client has its answer, or has left (499)."""
        self._answers.labels(str(status)).inc()

    def retried(self, worker: Worker) -> None:
        """A request goes elsewhere because of this engine."""
        self._retries.labels(worker.url).inc()

    def expose(self, workers: Sequence[Worker], decided: dict[str, int]) -> bytes:
        """The text format of Prometheus."""
        for worker in workers:
            self._usable.labels(worker.url, worker.role).set(worker.usable)
            self._active.labels(worker.url, worker.role).set(worker.active)
        for why, count in decided.items():
            self._decided.labels(why).set(count)
        return generate_latest(self._registry)


__all__ = ["RouterMetrics"]
