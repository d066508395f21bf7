"""Chat messages: checked, and brought into the shape that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.server.errors import bad_request

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "video", "file", "input_file")


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with content as text and the arguments of tool calls as objects.

    Raises:
        ApiError: 400, naming the message and what is wrong with it.
    """
    if not messages:
        raise bad_request("messages must hold at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        named = repr(role) if isinstance(role, str) else "missing or no text"
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}; it is {named}", f"{where}.role")
    calls = message.get("tool_calls")
    if message.get("content") is None and role != "assistant":
        raise bad_request(f"{where}.content is required for the role {role!r}", f"{where}.content")
    if message.get("content") is None and not (calls or message.get("function_call") or "content" in message):
        raise bad_request(f"{where} needs content or tool_calls", f"{where}.content")
    made = {**message, "content": _content(message.get("content"), f"{where}.content")}
    if "reasoning" in made:  # both names are in use among clients; templates know this one
        made.setdefault("reasoning_content", made["reasoning"])
    made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return made


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request(f"{where} must be an object with a type", where)
    kind = part.get("type")
    if kind in _MEDIA:
        raise bad_request(f"{where} is of type {kind!r}, but this model reads text only (it is not multimodal)", where)
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise bad_request(f"{where}.type must be 'text', not {kind!r}", where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text must be a string", where)
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list", where)
    made = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}[{i}] must have a function with a name", f"{where}[{i}]")
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return made


def _arguments(arguments: Any) -> Any:
    """Templates write arguments as JSON themselves, so they get the object; text that is no JSON stays text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return arguments


__all__ = ["template_messages"]
