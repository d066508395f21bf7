"""The router's web application: its own routes for probes and operators; everything else goes to the engines."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import engine
from engine.server.errors import ApiError, bad_request
from engine.server.exchange import request_id
from engine.server.middleware import LimitBody
from engine.server.protocol import parse
from engine.server.responses import json_response
from engine.server.router.bodies import generates
from engine.server.router.relay import Relay
from engine.server.router.state import RouterState
from engine.server.router.upstream import Asked, Reply

log = logging.getLogger(__name__)

_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
_KEPT_SOMEWHERE: Final = ("/v1/responses/", "/requests/")
"""Paths of what one engine remembers and the others don't."""


class DrainWorker(msgspec.Struct, kw_only=True):
    """POST /engine/drain: no new requests for one engine, or for the router when none is named."""

    url: str | None = None
    drain: bool = True


def create_router_app(state: RouterState) -> FastAPI:
    """Wire the routes."""
    app = FastAPI(
        title="engine route",
        version=engine.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=[Middleware(LimitBody, limit=state.config.server.max_body)],
    )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    _add_health(app, state)
    _add_operator(app, state)
    _add_relay(app, state)
    return app


def _add_health(app: FastAPI, state: RouterState) -> None:
    def report(good: bool) -> Response:
        engines = {role: len(state.dispatcher.usable(role)) for role in ("prefill", "decode")}
        status = "draining" if state.draining else "ready" if good else "no engine takes requests"
        return json_response({"status": status, "engines": engines}, 200 if good else 503)

    @app.get("/health/live")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        return report(state.serving)

    @app.get("/health/startup")
    async def startup() -> Response:
        return report(state.serving or state.started)

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": len(state.active), "draining": state.draining})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = state.metrics.expose(state.workers, dict(state.planner.decided))
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_operator(app: FastAPI, state: RouterState) -> None:
    @app.get("/engine/transfer")
    async def transfer(request: Request) -> Response:
        _insist(state, request)
        return json_response({**state.planner.row(), "engines": [worker.row() for worker in state.workers]})

    @app.post("/engine/drain")
    async def drain(request: Request) -> Response:
        _insist(state, request)
        body, _ = parse(await request.body() or b"{}", DrainWorker)
        if body.url is None:
            if state.stopping and not body.drain:
                raise ApiError(409, "this router is shutting down; that can't be taken back")
            state.draining = body.drain
            return json_response({"draining": state.draining, "active": len(state.active)})
        worker = next((worker for worker in state.workers if worker.url == body.url.rstrip("/")), None)
        if worker is None:
            known = ", ".join(worker.url for worker in state.workers)
            raise ApiError(404, f"there is no engine at {body.url[:200]!r} here; there are {known}", param="url")
        worker.drained = body.drain
        log.info("an administrator turned draining of %s %s", worker.url, "on" if body.drain else "off")
        return json_response({"draining": worker.drained, "active": worker.active})

    @app.api_route("/engine/{path:path}", methods=_METHODS)
    async def others(path: str) -> Response:
        raise ApiError(404, "a router has /engine/transfer and /engine/drain; ask an engine for its own")


def _add_relay(app: FastAPI, state: RouterState) -> None:
    @app.api_route("/{path:path}", methods=_METHODS)
    async def relay(request: Request) -> Response:
        if state.draining:
            raise ApiError(503, "this router is draining and takes no new requests", retry_after=5)
        asked = await _read(request)

        async def make() -> Reply:
            if asked.method == "POST" and generates(asked.path) and asked.body:
                return await state.dispatcher.generate(asked)
            return await state.dispatcher.anywhere(asked, search=asked.path.startswith(_KEPT_SOMEWHERE))

        began = time.monotonic()

        def told(status: int) -> None:
            state.metrics.answered(status)
            if state.config.logging.requests:
                took = time.monotonic() - began
                log.info("%s %r %d in %.3f s, %s", asked.method, asked.path[:200], status, took, asked.id)

        return Relay(asked, make, state.active, told)


async def _read(request: Request) -> Asked:
    if {".", ".."} & set(request.url.path.split("/")):  # on the way they would become another path
        raise bad_request("a path must not have the segments . and ..")
    raw = await request.body()
    query = request.url.query
    return Asked(
        method=request.method,
        target=request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else ""),
        path=request.url.path,
        headers=dict(request.headers),
        raw=raw,
        body=_object(raw),
        id=request_id(request.headers.get("x-request-id")),
    )


def _object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. What is none is for the engine to judge."""
    try:
        found = msgspec.json.decode(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _insist(state: RouterState, request: Request) -> None:
    """Only who has the key of the administrator may go on."""
    key = state.config.admin_key
    _, _, given = request.headers.get("authorization", "").partition(" ")
    if key is None:
        raise ApiError(403, "/engine/… is closed: set admin_key in the router's configuration")
    if not hmac.compare_digest(given.strip().encode("latin-1"), key.get_secret_value().encode()):
        raise ApiError(401, "/engine/… takes the admin_key of this router: send it as `Authorization: Bearer KEY`")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for no other"
    return error.response()


async def _hung_up(request: Request, error: Exception) -> Response:
    """The client left while it was sending; nobody reads this."""
    return Response(status_code=499)


__all__ = ["create_router_app"]
