"""From a request of the Responses API to the chat request that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.errors import bad_request
from engine.server.protocol import ChatRequest
from engine.server.responses_api.items import messages
from engine.server.responses_api.protocol import ResponsesRequest

_SAME = sorted(
    set(ResponsesRequest.__struct_fields__)
    & set(ChatRequest.__struct_fields__) - {"stream", "stream_options", "tools", "tool_choice"}
)
"""Fields that mean the same in both; `user`, `metadata` and the like ride along if chat knows them."""

_LOGPROBS = "message.output_text.logprobs"


def chat_request(body: ResponsesRequest, items: Sequence[dict[str, Any]]) -> ChatRequest:
    """The same request for chat.

    Args:
        items: the whole conversation, that of the previous response included.

    Raises:
        ApiError: 400, naming the field that is malformed or asks for what doesn't exist here.
    """
    _refuse(body)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    made = ChatRequest(
        messages=messages(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body.text.format if body.text else None),
        **{name: getattr(body, name) for name in _SAME},
    )
    if wants_logprobs(body):
        made.logprobs, made.top_logprobs = True, body.top_logprobs
    if body.reasoning is not None and body.reasoning.effort is not None:
        made.reasoning_effort = body.reasoning.effort
    return made


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the text comes with log-probabilities."""
    return bool(body.top_logprobs) or _LOGPROBS in (body.include or ())


def input_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The request's own input as items; a string is a message of the user."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not body.input and body.previous_response_id is None:
        raise bad_request("input must hold at least one item", "input")
    return body.input


def _refuse(body: ResponsesRequest) -> None:
    if body.truncation not in (None, "disabled", "auto"):
        raise bad_request(f"truncation must be 'disabled' or 'auto', not {body.truncation!r}", "truncation")
    if body.truncation == "auto":
        raise bad_request("truncation 'auto' is not supported: send what should be kept", "truncation")
    if body.background and body.stream:
        raise bad_request("background and stream exclude each other here: fetch the response by its id", "stream")
    if body.background and body.store is False:
        raise bad_request("background needs store: the answer is fetched later", "background")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function, described flat here and in an object of its own for chat."""
    if tool.get("type") != "function":
        raise bad_request(
            f"{where}.type must be 'function', the only kind of tool here, not {tool.get('type')!r}", where
        )
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """A function is named flat here, and in an object of its own for chat."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    listed = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(listed, list):
        tools = [_choice(tool) if isinstance(tool, dict) else {} for tool in listed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    return choice


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as chat's `response_format`, which keeps the schema in an object of its own."""
    if given is None or given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("schema"), dict):
        raise bad_request("text.format.schema must be an object (a JSON schema)", "text.format.schema")
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


__all__ = ["chat_request", "input_items", "wants_logprobs"]
