"""What clients may send to /v1/messages, as msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec


class Conversation(msgspec.Struct, kw_only=True):
    """What the model reads; all there is to POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # the older place of output_config.format


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages: Anthropic's fields, then the extensions, which mean what they mean for chat."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    min_tokens: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


__all__ = ["Conversation", "MessagesRequest"]
