"""Routes of the operator, all under `/engine/` and behind a key with the scope admin; and the account of a request."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.cost_model import Measured
from engine.errors import EngineError
from engine.messages import Ready
from engine.server.errors import ApiError, bad_request
from engine.server.exchange import current
from engine.server.journal import account, goes_by, under_way
from engine.server.protocol import parse
from engine.server.responses import json_response
from engine.server.state import ServerState
from engine.trace import Span, busy, chrome_trace

log = logging.getLogger(__name__)


class Drain(msgspec.Struct, kw_only=True):
    """POST /engine/drain."""

    drain: bool = True  # false takes requests again


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /engine/abort: one request, or all."""

    request_id: str | None = None
    all: bool = False


class Trace(msgspec.Struct, kw_only=True):
    """POST /engine/trace."""

    on: bool  # true starts a trace, false ends it


class LogLevel(msgspec.Struct, kw_only=True):
    """POST /engine/log-level."""

    level: Literal["debug", "info", "warning", "error"]


def add_requests(router: APIRouter, state: ServerState) -> None:
    """`/requests/ID`: what the time of a finished request was made of. A key sees its own, an administrator all."""

    @router.get("/requests/{request_id}")
    async def request(request_id: str) -> Response:
        key = current().key
        found = state.journal.find(request_id)
        if found is None or not ("admin" in key.scopes or found.key.name == key.name):
            kept = state.config.server.kept_requests
            raise ApiError(404, f"there is no request {request_id!r} of yours among the last {kept} here")
        if under_way(found):
            raise ApiError(404, f"the request {request_id!r} is still running; ask when it has ended")
        return json_response(account(found))


def add_admin(router: APIRouter, state: ServerState) -> None:
    """The routes under `/engine/`."""
    _add_views(router, state)
    _add_levers(router, state)


def _add_views(router: APIRouter, state: ServerState) -> None:
    @router.get("/engine/composition")
    async def composition() -> Response:
        ready = _ready(state)
        sizes = {name: getattr(ready, name) for name in ("max_context", "num_pages", "page_size")}
        return json_response({**sizes, **ready.info})

    @router.get("/engine/config")
    async def config() -> Response:
        rows = {row.key: {"value": row.value, "origin": row.origin} for row in state.settings}
        return json_response({"config": rows})

    @router.get("/engine/leases")
    async def leases() -> Response:
        return json_response({"leases": (await ask_core(state, "stats"))["transfers"]})

    @router.get("/engine/speculation")
    async def speculation() -> Response:
        return json_response(await ask_core(state, "speculation"))

    @router.get("/engine/transfer")
    async def transfer() -> Response:
        stats = await ask_core(state, "stats")
        speed = Measured.of(stats["fetch"]).per_second
        return json_response(
            {
                "prefill": state.prefills.as_dict(time.monotonic()),
                "fetch": stats["fetch"],
                "bytes_per_second": None if speed is None else speed * stats["fetch"]["token_bytes"],
                "open": stats["transfers"],
                "ended": stats["transfers_ended"],
            }
        )

    @router.get("/engine/log-level")
    async def level() -> Response:
        return json_response({"level": logging.getLevelName(logging.getLogger("engine").level).lower()})


def _add_levers(router: APIRouter, state: ServerState) -> None:
    @router.post("/engine/flush")
    async def flush() -> Response:
        return json_response({"pages": (await ask_core(state, "reset_cache"))["pages"]})

    @router.post("/engine/drain")
    async def drain(request: Request) -> Response:
        body, _ = parse(await request.body() or b"{}", Drain)
        if state.stopping and not body.drain:
            raise ApiError(409, "this server is shutting down; that can't be taken back")
        state.draining = body.drain
        log.info("an administrator turned draining %s", "on" if body.drain else "off")
        return json_response({"draining": state.draining, "active": len(state.active)})

    @router.post("/engine/abort")
    async def abort(request: Request) -> Response:
        body, _ = parse(await request.body(), AbortRequest)
        if body.all == (body.request_id is not None):
            raise bad_request("send either request_id, or all: true", "request_id")
        wanted = body.request_id
        ended = state.cut(
            lambda exchange: wanted is None or goes_by(exchange, wanted), "an administrator ended this request"
        )
        if wanted is not None and not ended:
            raise ApiError(404, f"no request {wanted!r} is running", param="request_id")
        return json_response({"aborted": ended})

    @router.post("/engine/trace")
    async def trace(request: Request) -> Response:
        body, _ = parse(await request.body(), Trace)
        answer = await ask_core(state, "trace", on=body.on)
        if body.on:
            state.tracer.start()
            return json_response({"on": True})
        core = msgspec.convert(answer["spans"], list[Span])
        return json_response({**chrome_trace({"engine core": core, "HTTP": state.tracer.stop()}), **_sums(core)})

    @router.post("/engine/log-level")
    async def log_level(request: Request) -> Response:
        body, _ = parse(await request.body(), LogLevel)
        logging.getLogger("engine").setLevel(body.level.upper())
        await ask_core(state, "log_level", level=body.level)
        return json_response({"level": body.level})


def _sums(core: list[Span]) -> dict[str, object]:
    """What the device's lane amounts to. Viewers ignore such keys."""
    found = busy(core)
    return {} if found is None else {"otherData": {"device_busy": found[0], "steps": found[1]}}


def _ready(state: ServerState) -> Ready:
    if state.client.ready is None:
        raise ApiError(503, "the engine is not ready yet", retry_after=2)
    return state.client.ready


async def ask_core(state: ServerState, verb: str, **arguments: Any) -> dict[str, Any]:
    """The core's answer. It is not asked before it is ready, since loading can't listen."""
    _ready(state)
    try:
        return await state.client.control(verb, **arguments)
    except EngineError as error:
        raise ApiError(503, str(error)) from error


__all__ = ["add_admin", "add_requests", "ask_core"]
