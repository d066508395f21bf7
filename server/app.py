"""The FastAPI application over one server's state."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import engine
from engine.errors import ConfigError
from engine.server.errors import ApiError
from engine.server.exchange import current
from engine.server.messages_api.errors import AnthropicErrors, error_body, speaks_anthropic
from engine.server.middleware import Exchanges, LimitBody, RequireKey
from engine.server.openapi import with_bodies
from engine.server.responses import json_response
from engine.server.routes import build_router
from engine.server.state import ServerState

log = logging.getLogger(__name__)

_IGNORED_HEADER = "X-Engine-Ignored-Fields"
_RATE_HEADERS = [f"x-ratelimit-{n}-{what}" for n in ("limit", "remaining", "reset") for what in ("requests", "tokens")]


def create_app(state: ServerState, routers: Sequence[tuple[str, APIRouter]] = ()) -> FastAPI:
    """Wire routes, errors and middleware.

    Args:
        routers: further routes with the names of the components they come from.

    Raises:
        ConfigError: a router has a path that exists already.
    """
    app = FastAPI(title="engine", version=engine.__version__, middleware=_middleware(state))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    app.add_exception_handler(Exception, _server_error)
    own = build_router(state)
    taken = _paths(app.routes) | _paths(own.routes)
    app.include_router(own)
    for name, router in routers:
        if clashes := taken & _paths(router.routes):
            raise ConfigError(
                f"server.routes names {name!r}, whose path {min(clashes)} exists already; leave it out of server.routes"
            )
        taken |= _paths(router.routes)
        app.include_router(router)
    app.openapi = with_bodies(app)  # type: ignore[method-assign]
    return app


def _paths(routes: Sequence[BaseRoute]) -> set[str]:
    return {route.path for route in routes if isinstance(route, Route)}


def _middleware(state: ServerState) -> list[Middleware]:
    """Outermost first: an error of an inner one still gets its CORS headers."""
    section = state.config.server
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=section.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[_IGNORED_HEADER, "X-Request-Id", "Retry-After", *_RATE_HEADERS],
        ),
        Middleware(AnthropicErrors),
        Middleware(Exchanges, state=state),
        Middleware(RequireKey, state=state),
        Middleware(LimitBody, limit=section.max_body),
    ]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is no {request.url.path[:200]} here",
        405: f"{request.url.path[:200]} does not take {request.method}",
    }
    made = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).response()
    made.headers.update(error.headers or {})
    return made


async def _hung_up(request: Request, error: Exception) -> Response:
    """The client went away while it sent its request: nobody's fault, and nobody reads the answer."""
    return ApiError(400, "the request ended before its body did").response()


async def _server_error(request: Request, error: Exception) -> Response:
    """A fault of ours. The framework logs it with its traceback; the client learns no internals.

    Made above all middleware, so the shape of the errors is chosen here.
    """
    message = "the server failed on this request"
    anthropic = speaks_anthropic(request.url.path)
    response = json_response(error_body(500, message), 500) if anthropic else ApiError(500, message).response()
    response.headers["X-Request-Id"] = current().id
    return response


__all__ = ["create_app"]
