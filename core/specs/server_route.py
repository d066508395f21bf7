"""Extension point: routes of the HTTP server.

Threads: `build` runs once at start-up. Handlers run on the event loop of the HTTP process: what blocks or computes
belongs in a thread of its own.

Errors: what `build` raises ends the start-up. What a handler raises becomes an answer with status 500, or with the one
of an `HTTPException`.

`build(options, *, state: Any) -> fastapi.APIRouter`; `state` is the server's `ServerState` (client, tokenizer, config).
Routes stand behind the API keys like the built-in ones: a path under `/engine/` takes the scope admin, any other infer.
A path that exists already is refused at start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    import fastapi

API: Final = 1
HOOK: Final = "server_routes"


@hookspec
def server_routes() -> Iterable[Offer[fastapi.APIRouter]]:  # type: ignore[empty-body]
    """Offer routers; they are mounted when `server.routes` names them. Must not import torch."""


__all__ = ["API", "HOOK", "server_routes"]
