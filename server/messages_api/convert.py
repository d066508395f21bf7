"""From a request of the Messages API to the chat request that computes it."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.server.errors import bad_request
from engine.server.messages_api.protocol import Conversation, MessagesRequest
from engine.server.protocol import ChatRequest

_SAME = sorted(
    set(MessagesRequest.__struct_fields__)
    & set(ChatRequest.__struct_fields__) - {"messages", "tools", "tool_choice", "stream", "chat_template_kwargs"}
)


def chat_request(body: Conversation) -> ChatRequest:
    """The same request for chat.

    Raises:
        ApiError: 400, naming the field that is malformed or asks for what doesn't exist here.
    """
    shared = {name: getattr(body, name) for name in _SAME if hasattr(body, name)}
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    choice = body.tool_choice or {}
    made = ChatRequest(messages=_messages(body), tools=tools or None, tool_choice=_choice(choice), **shared)
    if choice.get("disable_parallel_tool_use"):
        made.parallel_tool_calls = False
    if isinstance(body, MessagesRequest):
        made.stop = body.stop_sequences
        made.chat_template_kwargs = body.chat_template_kwargs
        _continue(made)
    output = body.output_config or {}
    if output.get("effort") is not None:
        made.reasoning_effort = output["effort"]
    made.response_format = _format(output.get("format") or body.output_format)
    if (thinking := _thinking(body.thinking)) is not None:
        made.chat_template_kwargs = {"enable_thinking": thinking, **(made.chat_template_kwargs or {})}
    return made


def _continue(made: ChatRequest) -> None:
    """Words of the assistant at the end are the beginning of its answer."""
    last = made.messages[-1]
    if last["role"] == "assistant" and last["content"] is not None and "tool_calls" not in last:
        made.continue_final_message = True


def _messages(body: Conversation) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.system:
        made.append({"role": "system", "content": body.system})
    names: dict[str, str] = {}  # of tools by the id of the call
    for i, message in enumerate(body.messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}]"
        if role == "assistant":
            made.append(_assistant(content, where, names))
        elif role in ("user", "system"):
            made += _user(role, content, where, names)
        else:
            raise bad_request(f"{where}.role must be 'user' or 'assistant', not {role!r}", f"{where}.role")
    if not body.messages:
        raise bad_request("messages must hold at least one message", "messages")
    return made


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{where}.content must be a string or a list of blocks", f"{where}.content")
    return content


def _assistant(content: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(_blocks(content, where)):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", place))
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                continue  # made elsewhere, and unreadable here
            case "tool_use":
                call_id, name = _string(block, "id", place), _string(block, "name", place)
                names[call_id] = name
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case kind:
                raise bad_request(f"{place}.type must be text, thinking or tool_use, not {kind!r}", f"{place}.type")
    if texts:
        made["content"] = "".join(texts)
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(role: str, content: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The results of tools, each a message of its own for chat, then what the user says."""
    results, parts = [], []
    for i, block in enumerate(_blocks(content, where)):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": _string(block, "text", place)})
            case "tool_result":
                call_id = _string(block, "tool_use_id", place)
                result = {"role": "tool", "tool_call_id": call_id, "content": block.get("content") or ""}
                results.append({**result, "name": names[call_id]} if call_id in names else result)
            case "image" | "document":
                raise bad_request(f"{place} is of type {block['type']!r}, but this model reads text only", place)
            case kind:
                raise bad_request(f"{place}.type must be text or tool_result, not {kind!r}", f"{place}.type")
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", f"{where}.{name}")
    return value


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{where} is of type {tool['type']!r}, but tools that a server runs do not exist here", where)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    more = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, **more}}


def _choice(choice: dict[str, Any]) -> str | dict[str, Any] | None:
    match choice.get("type"):
        case None if not choice:
            return None
        case "auto" | "none" as same:
            return str(same)
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            raise bad_request(f"tool_choice.type must be auto, any, tool or none, not {kind!r}", "tool_choice.type")


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise bad_request("output_config.format must have type 'json_schema' and an object `schema`", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}


def _thinking(thinking: dict[str, Any] | None) -> bool | None:
    """Whether the template should let the model think; None leaves it to the template."""
    if thinking is None:
        return None
    if thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise bad_request("thinking.type must be enabled, disabled or adaptive", "thinking.type")
    return {"enabled": True, "disabled": False}.get(thinking["type"])


__all__ = ["chat_request"]
