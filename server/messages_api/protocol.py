"""What clients may send to /v1/messages, as msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.sampling_params import Speculation


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn; its blocks are checked where they are translated."""

    role: str
    content: str | list[dict[str, Any]]


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether and what the model must call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model may think; how long is not enforced."""

    type: str


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the answer, and how much the model should think."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """What the model reads; all there is to POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
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
    kv_transfer_params: dict[str, Any] | None = None
    kv_transfer_action: str | None = None
    kv_transfer_token: str | None = None
    speculation: Speculation | None = None
    chat_template_kwargs: dict[str, Any] | None = None


__all__ = ["Conversation", "InputMessage", "MessagesRequest", "OutputConfig", "Thinking", "Tool", "ToolChoice"]
