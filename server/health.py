"""Routes for probes, load balancers and Prometheus."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from engine.server.responses import json_response
from engine.server.state import ServerState


def add_health(router: APIRouter, state: ServerState) -> None:
    """`/health`, `/health/live`, `/health/ready`, `/health/startup`, `/load` and `/metrics`."""

    @router.get("/health/live")
    async def live() -> Response:
        complaint = await _complaint(state)
        return json_response({"status": complaint or "live"}, 200 if complaint is None else 503)

    @router.get("/health")
    @router.get("/health/ready")
    async def ready() -> Response:
        return json_response(state.health(), 200 if state.serving else 503)

    @router.get("/health/startup")
    async def startup() -> Response:
        state.startup.observe(state.client.phase, state.loaded)
        return json_response({**state.health(), **state.startup.as_dict()}, 200 if state.loaded else 503)

    @router.get("/load")
    async def load() -> Response:
        return json_response(await _load(state))

    @router.get("/metrics")
    async def metrics() -> Response:
        text = state.metrics.expose(state.client.running, state.client.waiting, await state.core_stats())
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _complaint(state: ServerState) -> str | None:
    """Why this process should be replaced; None while it lives. A start takes as long as it takes."""
    if state.client.failed is not None:
        return "failed"
    if state.client.ready is None:
        return None
    stats = await state.core_stats()
    pending = state.client.running + state.client.waiting
    return state.liveness.complaint(None if stats is None else stats["steps"], pending, time.monotonic())


async def _load(state: ServerState) -> dict[str, Any]:
    """What a balancer weighs. `server_load` is vLLM's name for the answers under way."""
    ready, stats = state.client.ready, await state.core_stats()
    cache = None if stats is None else stats["kv_cache"]
    return {
        "server_load": len(state.active),
        "running": state.client.running,
        "waiting": state.client.waiting,
        "max_running": None if ready is None else ready.max_running,
        "max_waiting": None if ready is None else ready.max_waiting,
        "kv_cache_usage": None if cache is None else cache["held"] / cache["pages"],
        "requests_per_second": state.pace.per_second(time.monotonic()),
        "draining": state.draining,
        "prefill": state.prefills.as_dict(time.monotonic()),
        "fetch": None if stats is None else stats["fetch"],
    }


__all__ = ["add_health"]
