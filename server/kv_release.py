"""KV that was published for another engine and that nobody will fetch: freed at once, not when its lease expires."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.server.admin import ask_core
from engine.server.protocol import parse
from engine.server.responses import json_response
from engine.server.state import ServerState


class KVRelease(msgspec.Struct, kw_only=True):
    """What an answer returned. Whoever has it may read the KV, so it may also let go of it."""

    kv_transfer_params: dict[str, Any]


def add_kv_release(router: APIRouter, state: ServerState) -> None:
    """The route a router calls when a client leaves between the two legs."""

    @router.post("/v1/kv_transfer/release")
    async def release(request: Request) -> Response:
        body, _ = parse(await request.body(), KVRelease, state.config.server.strict)
        return json_response(await ask_core(state, "release_kv", params=body.kv_transfer_params))


__all__ = ["KVRelease", "add_kv_release"]
