"""The OpenAPI document. Routes read their bodies themselves; what they take is said here, for the framework to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from engine.server.admin import AbortRequest, Drain, LogLevel, Trace
from engine.server.kv_release import KVRelease
from engine.server.messages_api.protocol import Conversation, MessagesRequest
from engine.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from engine.server.responses_api.protocol import ResponsesRequest

BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Conversation,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/kv_transfer/release": KVRelease,
    "/engine/drain": Drain,
    "/engine/abort": AbortRequest,
    "/engine/log-level": LogLevel,
    "/engine/trace": Trace,
}
"""What is posted where."""

_OPTIONAL: Final = ("/engine/drain",)
_STREAMED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_REFUSAL: Final = {"description": "Why the request was refused or failed, in one sentence."}


def with_bodies(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A replacement for `app.openapi` that knows the bodies."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        made = plain()
        schemas, components = msgspec.json.schema_components(
            BODIES.values(), ref_template="#/components/schemas/{name}"
        )
        made.setdefault("components", {}).setdefault("schemas", {}).update(components)
        for path, schema in zip(BODIES, schemas, strict=True):
            content = {"application/json": {"schema": schema}}
            made["paths"][path]["post"]["requestBody"] = {"required": path not in _OPTIONAL, "content": content}
        for path in _STREAMED:
            made["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
        for operation in (one for path in made["paths"].values() for one in path.values()):
            operation["responses"] = {**operation["responses"], "default": _REFUSAL}
        return made

    return document


__all__ = ["BODIES", "with_bodies"]
