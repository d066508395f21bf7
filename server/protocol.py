"""What clients may send, as msgspec structs: decoded straight from JSON, with the path of whatever is wrong.

A field that is null counts as not sent. Fields that nobody here knows are accepted and named to the client.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from engine.sampling_params import Speculation
from engine.server.errors import bad_request, describe


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of both completion routes."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # running usage in every chunk


class Generate(msgspec.Struct, kw_only=True):
    """What both completion routes share: OpenAI's fields and the extensions that other servers have made common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_transfer_action: str | None = None
    kv_transfer_token: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    speculation: Speculation | None = None


class ChatRequest(Generate, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None


class CompletionRequest(Generate, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages as for chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body], strict: bool = False) -> tuple[Body, list[str]]:
    """Decode a request body; returns it with the names of the fields that were not understood.

    Args:
        strict: refuse the body if there are such fields.

    Raises:
        ApiError: 400; the sentence names the field and what it should be.
    """
    if not raw:
        raise bad_request("the body is empty; it must be a JSON object")
    try:
        data = msgspec.json.decode(raw)
        body = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise describe(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON in UTF-8: {error}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    known = kind.__struct_fields__
    unknown = [name for name in data if name not in known]
    if unknown and strict:
        names = ", ".join(repr(name[:64]) for name in unknown[:8])
        raise bad_request(f"this server knows no field {names}; leave it out (server.strict is on)", unknown[0][:64])
    return body, unknown


__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Generate",
    "StreamOptions",
    "TokenizeRequest",
    "parse",
]
