"""The routes under /v1/responses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.server import chat
from engine.server.errors import bad_request
from engine.server.exchange import current
from engine.server.protocol import parse
from engine.server.responses import Answer, ignored_header, json_response
from engine.server.responses_api.background import Background
from engine.server.responses_api.convert import chat_request, input_items
from engine.server.responses_api.protocol import ResponsesRequest
from engine.server.responses_api.reply import ResponseReply
from engine.server.responses_api.store import ResponseStore
from engine.server.state import ServerState


def add_responses(router: APIRouter, state: ServerState) -> None:
    """Add the routes. Each key sees the responses that it made itself."""
    store = ResponseStore(state.config.server.response_memory)
    background = Background(state)

    @router.post("/v1/responses")
    async def create(request: Request) -> Response:
        body, ignored = parse(await request.body(), ResponsesRequest, state.config.server.strict)
        reply = await _prepare(state, store, body)
        if body.background:
            reply.keep()
            background.start(reply)
            return _json(reply.encoded())
        stream = bool(body.stream)
        chunks = reply.stream() if stream else reply.whole()
        return Answer(state, chunks, stream=stream, headers=ignored_header(ignored), failure=reply.failure)

    @router.get("/v1/responses/{name}")
    async def retrieve(name: str) -> Response:
        return _json(store.response(current().key.name, name))

    @router.delete("/v1/responses/{name}")
    async def delete(name: str) -> Response:
        owner = current().key.name
        store.response(owner, name)
        await background.cancel(name)
        store.delete(owner, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    @router.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> Response:
        owner = current().key.name
        store.response(owner, name)
        if not await background.cancel(name):
            raise bad_request(
                "only a response that is being computed in the background can be cancelled", "response_id"
            )
        return _json(store.response(owner, name))


async def _prepare(state: ServerState, store: ResponseStore, body: ResponsesRequest) -> ResponseReply:
    owner = current().key.name
    own = input_items(body)
    before = store.items(owner, body.previous_response_id) if body.previous_response_id else []
    begun = await chat.begin(state, chat_request(body, [*before, *own]))

    def put(response: dict[str, Any]) -> None:
        if body.store is not False:
            store.put(owner, response, [*before, *own, *response["output"]])

    return ResponseReply(begun, body, state.model, put)


def _json(text: bytes) -> Response:
    return Response(text, media_type="application/json")


__all__ = ["add_responses"]
