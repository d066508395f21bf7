"""The routes. Each reads the body itself: a request costs one decode and no model of the framework."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import engine
from engine.server import chat, completions
from engine.server.admin import add_admin, add_requests
from engine.server.errors import bad_request
from engine.server.health import add_health
from engine.server.kv_release import add_kv_release
from engine.server.limits import check_messages
from engine.server.messages_api.routes import add_messages
from engine.server.prompts import chat_text, encode
from engine.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from engine.server.responses import Answer, ignored_header, json_response
from engine.server.responses_api.routes import add_responses
from engine.server.state import ServerState
from engine.server.tools import tool_use


def build_router(state: ServerState) -> APIRouter:
    """All built-in routes over one server's state."""
    router = APIRouter()
    _add_generation(router, state)
    add_responses(router, state)
    add_messages(router, state)
    _add_models(router, state)
    _add_tokens(router, state)
    add_kv_release(router, state)
    add_health(router, state)
    add_requests(router, state)
    add_admin(router, state)
    return router


def _add_generation(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, ignored = parse(await request.body(), ChatRequest, state.config.server.strict)
        chunks = await chat.answer(state, body)
        return Answer(state, chunks, stream=bool(body.stream), headers=ignored_header(ignored))

    @router.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        body, ignored = parse(await request.body(), CompletionRequest, state.config.server.strict)
        chunks = await completions.answer(state, body)
        return Answer(state, chunks, stream=bool(body.stream), headers=ignored_header(ignored))


def _add_models(router: APIRouter, state: ServerState) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": state.model,
            "object": "model",
            "created": state.created,
            "owned_by": "engine",
            "root": state.config.model.source,
            "parent": None,
            "max_model_len": state.client.ready.max_context if state.client.ready else None,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        state.check_model(name)
        return json_response(card())

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": engine.__version__})


def _add_tokens(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body, ignored = parse(await request.body(), TokenizeRequest, state.config.server.strict)
        ready, tokenizer = state.admit(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("send either prompt or messages", "prompt")
        check_messages(body.messages, state.config.server.max_messages)
        if body.messages is not None:
            tools = tool_use(body.tools, None).shown
            text = chat_text(tokenizer, body.messages, tools, body, state.config.model.chat_template)
            special = bool(body.add_special_tokens)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        (tokens,) = await encode(tokenizer, [text], special)
        found = {"count": len(tokens), "max_model_len": ready.max_context, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [tokenizer.token_text(token) for token in tokens]
        return json_response(found, headers=ignored_header(ignored))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body, ignored = parse(await request.body(), DetokenizeRequest, state.config.server.strict)
        _, tokenizer = state.admit(body.model)
        for token in body.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise bad_request(f"tokens has {token}, but ids go from 0 to {tokenizer.vocab_size - 1}", "tokens")
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text}, headers=ignored_header(ignored))


__all__ = ["build_router"]
