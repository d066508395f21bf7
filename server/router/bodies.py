"""What a request becomes on its way: the half that the prefill engine computes, and the half that goes on from its KV.

The fields are those of vLLM, so that either engine may be driven by another router, or another engine by this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Fields that bound the answer, the one that is always understood first."""

_DROPPED: Final = frozenset(
    {"stream", "stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "return_token_ids", "stop"}
)
"""They shape an answer that nobody reads."""

_ASKING: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def generates(path: str) -> bool:
    """Whether a path has the model write."""
    return path in _LIMITS


def steers_itself(body: Mapping[str, Any]) -> str | None:
    """The pool that a request belongs to whose client hands over KV itself; None for all others."""
    params, action = body.get("kv_transfer_params"), body.get("kv_transfer_action")
    if action == "export" or (isinstance(params, dict) and params.get("do_remote_decode")):
        return "prefill"
    return "decode" if params is not None or action is not None else None


def divisible(body: Mapping[str, Any]) -> bool:
    """Whether prompt and answer can be computed by two engines: one prompt, one answer, nothing said of the prompt."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)
    many = any(body.get(name) not in (None, 1) for name in ("n", "best_of"))
    scored = bool(body.get("echo")) or body.get("prompt_logprobs") is not None
    kept = bool(body.get("background")) or body.get("previous_response_id") is not None
    return not (several or many or scored or kept)


def prefill_body(path: str, body: Mapping[str, Any]) -> bytes:
    """The request for the engine that computes the prompt and publishes its KV.

    Raises:
        ValueError: the body holds what JSON can't carry on, such as a number beyond 64 bits.
    """
    first, *others = _LIMITS[path]
    made = {name: value for name, value in body.items() if name not in _DROPPED}
    made |= {first: 1, **{name: 1 for name in others if body.get(name) is not None}}
    if path == "/v1/responses":
        made["store"] = False
    made |= {"stream": False, "kv_transfer_params": _ASKING}
    try:
        return msgspec.json.encode(made)
    except (OverflowError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


def decode_body(raw: bytes, body: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """The client's own bytes, with the parameters that the other engine returned in front.

    Args:
        raw: a JSON object that isn't empty.
        body: the same, decoded.
    """
    if "kv_transfer_params" in body:  # as null
        return msgspec.json.encode({**body, "kv_transfer_params": params})
    return b'{"kv_transfer_params":' + msgspec.json.encode(params) + b"," + raw.lstrip()[1:]


def prompt_tokens(answer: Mapping[str, Any]) -> int:
    """How long a prompt was, from the usage in an answer; 0 if it doesn't say."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return 0
    cached = usage.get("cache_read_input_tokens")  # Anthropic counts these apart
    counted = usage.get("prompt_tokens", usage.get("input_tokens"))
    return sum(count for count in (counted, cached) if isinstance(count, int))


__all__ = ["decode_body", "divisible", "generates", "prefill_body", "prompt_tokens", "steers_itself"]
