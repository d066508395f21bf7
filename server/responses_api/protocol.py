"""What clients may send to /v1/responses, as msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.sampling_params import Speculation


class TextOptions(msgspec.Struct, kw_only=True):
    """`text`: the form of the answer."""

    format: dict[str, Any] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`reasoning`: how much the model should think."""

    effort: str | None = None
    summary: str | None = None  # told back, though thoughts are shown as they are


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses: OpenAI's fields, then the extensions, which mean what they mean for chat."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    user: str | None = None

    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_transfer_action: str | None = None
    kv_transfer_token: str | None = None
    structured_outputs: dict[str, Any] | None = None
    speculation: Speculation | None = None
    chat_template_kwargs: dict[str, Any] | None = None


__all__ = ["ReasoningOptions", "ResponsesRequest", "TextOptions"]
