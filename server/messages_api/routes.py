"""The routes under /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.server import chat
from engine.server.messages_api.convert import chat_request
from engine.server.messages_api.protocol import Conversation, MessagesRequest
from engine.server.messages_api.reply import MessageReply
from engine.server.prompts import chat_prompt
from engine.server.protocol import parse
from engine.server.responses import Answer, ignored_header, json_response
from engine.server.state import ServerState
from engine.server.tools import tool_use


def add_messages(router: APIRouter, state: ServerState) -> None:
    """Add the routes."""

    @router.post("/v1/messages")
    async def create(request: Request) -> Response:
        body, ignored = parse(await request.body(), MessagesRequest, state.config.server.strict)
        reply = MessageReply(await chat.begin(state, chat_request(body)), state.model)
        stream = bool(body.stream)
        chunks = reply.stream() if stream else reply.whole()
        return Answer(state, chunks, stream=stream, headers=ignored_header(ignored), failure=reply.failure)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body, ignored = parse(await request.body(), Conversation, state.config.server.strict)
        ready, tokenizer = state.admit(body.model)
        asked = chat_request(body)
        tools = tool_use(asked.tools, asked.tool_choice)
        _, prompt = await chat_prompt(tokenizer, asked, tools, state.config, ready.max_context)
        return json_response({"input_tokens": len(prompt)}, headers=ignored_header(ignored))


__all__ = ["add_messages"]
